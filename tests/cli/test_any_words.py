"""Whatever stands on the command line, the answer is an exit code and a line, never a traceback."""

import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import shutil
import sys
import types
import typing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import horst.lab.experiments
from horst.cli import COMMANDS, _module, bench, doctor, main, sweep
from horst.cli.data import Slimpajama, Tokenize
from horst.lab.experiments.recipes import RECIPES, Recipe
from horst.lab.experiments.result import Result

HERE = ("nothing.txt", "broken", "half.json", "new", "new/deeper", "hub:owner/name", "digits", "tokenize", "slimpajama")
NUMBERS = ("0", "1", "-1", "0.5", "50", "nan", "inf", "1e400", "10000000000000000000000", "0x1f", "1_0", "²")
OTHERS = (
    "",
    " ",
    "-",
    "--",
    "---",
    "--=",
    "=",
    "-h",
    "--help",
    "-V",
    "--version",
    "--completion",
    "help",
    "None",
    "2:4",
)
UNNAMEABLE = (
    "\x00",
    "\udce9",
    "a\nb",
    "ü" * 300,
    "{}",
    "[bold]",
    "%s",
    "$HOME",
    "-9",
    "@file",
    "--json=1",
    "--out=new",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StubConfig:
    """A config of every kind of field."""

    seeds: tuple[int, ...] = (0, 1)
    optimizers: tuple[typing.Literal["adamw", "horst"], ...] = ("adamw",)
    sparsities: tuple[float, ...] = (0.5,)
    directory: pathlib.Path = pathlib.Path("runs/stub")
    steps: int | None = None
    flip: bool = True


def stub_run(config):
    rows = [{"seed": seed, "value": 0.5, "part": "none"} for seed in config.seeds]
    return Result(experiment="stub", config={}, rows=rows, curves={}, notes=[], environment={}, seconds=0.0)


def fields_of(command):
    module = _module(command)
    kinds = [Tokenize, Slimpajama] if command == "data" else [module.Options]
    fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    if command in ("run", "sweep", "quickstart"):
        fields += ["scale", *(field.name for field in dataclasses.fields(StubConfig))]
    return ["--" + name.replace("_", "-") for name in fields]


def choices_of(command):
    """The words that a field of the command allows."""
    kinds = [Tokenize, Slimpajama] if command == "data" else [_module(command).Options]
    hints = [hint for kind in kinds for hint in typing.get_type_hints(kind).values()]
    inner = [part for hint in hints for part in (hint, *typing.get_args(hint))]
    return [str(word) for hint in inner if typing.get_origin(hint) is typing.Literal for word in typing.get_args(hint)]


garbage = st.one_of(
    st.sampled_from(HERE + NUMBERS + OTHERS + UNNAMEABLE),
    st.text(st.characters(exclude_characters="/"), max_size=8),
    st.sampled_from(list(COMMANDS)),
)


def after(command):
    own = st.sampled_from([*fields_of(command), *choices_of(command), "stub", "paper"])
    first = st.sampled_from([["stub"], ["broken"], ["tokenize"], ["half.json"], []])
    rest = st.lists(st.one_of(own, own, garbage), max_size=7)
    return st.tuples(first, rest).map(lambda words: [command, *words[0], *words[1]])


words = st.one_of(st.lists(garbage, max_size=5), *map(after, COMMANDS))


@pytest.fixture(scope="module")
def _nothing_does_real_work():
    """Recipes, benchmarks, jobs and the Hub are stubs: there is nothing on disk that a command could work on."""

    def offline(*args, **kwargs):
        raise ConnectionError("there is no network here")

    examined = doctor.examine()
    quickstart = types.SimpleNamespace(Config=StubConfig, run=stub_run, is_partial=lambda result: False)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(RECIPES):
            patch.delitem(RECIPES, name)
        patch.setitem(RECIPES, "stub", Recipe(about="A stub", run=stub_run, scales={"paper": StubConfig}))
        patch.setattr(doctor, "examine", lambda: examined)
        patch.setattr("horst.lab.models.gpt2.GPT2", lambda config: __import__("torch").nn.Linear(2, 2))
        for name in bench.BENCHES:
            patch.setitem(bench.BENCHES, name, lambda model, options, device: [{"milliseconds": 1.0}])
        for launch in ("_here", "_on_slurm"):
            patch.setattr(sweep, launch, lambda options, cells: ((name, None) for name in cells))
        if importlib.util.find_spec("datasets"):
            patch.setattr("datasets.load_dataset", offline)
        patch.setattr(horst.lab.experiments, "quickstart", quickstart, raising=False)
        patch.setitem(sys.modules, "horst.lab.experiments.quickstart", quickstart)
        patch.setattr("horst.lab.report.html.build", lambda results, out, formats=(): out.write_text("a page"))
        yield


BROKEN = {
    "broken/config.json": '{"architectures": ["GPT2LMHeadModel"], "n_layer": "x"}',
    "half.json": '{"experiment": "table6", "rows": [',
}


def present():
    return {str(path): path.read_text() for path in pathlib.Path().rglob("*") if path.is_file()}


def make_the_broken_things():
    """A model whose config is broken, and a result that is half written; whatever else is here goes."""
    for path in pathlib.Path().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pathlib.Path("broken").mkdir()
    for name, content in BROKEN.items():
        pathlib.Path(name).write_text(content)


@pytest.mark.usefixtures("_nothing_does_real_work")
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(arguments=words)
@example(arguments=["run", "stub", "--seeds", "3", "--no-flip", "--json", "--out=new"])
@example(arguments=["report", "half.json", "--out", "broken", "--overwrite"])
def test_any_words_end_in_an_exit_code_and_at_most_one_line(arguments):
    if present() != BROKEN:
        make_the_broken_things()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    assert code in (0, 2), err.getvalue()
    if code == 2:
        (complaint,) = err.getvalue().splitlines()
        assert complaint.startswith("horst")
        assert len(complaint) > len("horst: ")
        assert out.getvalue() == ""
        assert present() == BROKEN, "a mistake left something behind"


@pytest.mark.usefixtures("_nothing_does_real_work")
def test_the_words_reach_the_commands(horst):
    """The test above says something only if some lists get through to a command's work."""
    assert horst("run", "stub", "--seeds", "3", "--no-flip", "--json", "--out=new").json[0]["seed"] == 3
    assert horst("sweep", "stub", "--on", "slurm").code == 0
    assert horst("quickstart", "--json", "--seeds", "1").json[0]["seed"] == 1
    assert horst("bench", "--only", "step", "--device", "cpu").code == 0
