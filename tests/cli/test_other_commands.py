"""The commands that need no model of yours, and what all commands share."""

import errno
import importlib.metadata
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import typing

import pytest
import rich.progress
import rich.status

import horst as package
from horst import cli
from horst.cli import COMMANDS, progress, prune
from horst.cli.destination import Stopped
from horst.cli.output import number, table
from horst.export.forms import FORMS
from horst.lab.baselines.contenders import Name
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, environment
from horst.pruning.one_shot import METHODS
from horst.sparsity import PRESETS
from horst.training.interruption import Interrupted


def test_help_needs_no_torch():
    """In a fresh interpreter, since here everything is loaded: the same for the help of each command but run."""
    quick = [name for name in COMMANDS if name not in ("run", "sweep", "quickstart")]
    code = (
        "import sys; from horst.cli import main; main(['--help']); print('tyro' in sys.modules);"
        f"[main([name, '--help']) for name in {quick}]; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert re.findall(r"^(True|False)$", out, re.MULTILINE) == ["False", "False"]


def test_every_command_is_there_and_explains_itself(horst):
    for name in COMMANDS:
        shown = horst(name, "--help")
        assert shown.code == 0
        assert "usage: horst" in shown.out
        assert "%%" not in shown.out


def test_version(horst):
    assert horst("--version").out == f"horst {package.__version__}\n"


def test_list_names_all_there_is(horst):
    found = horst("list", "--json").json
    assert [row["recipe"] for row in found["recipes"]] == list(RECIPES)
    classes = {"ACDC", "GMP", "RigL", "SET", "IMP", "SRSTE", "ADMM", "AST", "CAST"}
    assert classes | set(PRESETS) <= {row["method"] for row in found["sparsity methods"]}
    assert {row["method"] for row in found["pruning methods"]} >= set(METHODS)
    assert {row["optimizer"] for row in found["contenders"]} == set(typing.get_args(Name))
    assert all(row["about"] for rows in found.values() for row in rows)
    shown = horst("list").out
    assert all(row["form"] in shown for row in found["exports"])


def test_the_choices_of_prune_are_the_librarys():
    hints = typing.get_type_hints(prune.Options)
    choices, _ = typing.get_args(hints["method"])  # or none
    assert typing.get_args(choices) == tuple(METHODS)


def test_doctor(horst):
    found = horst("doctor", "--json")
    assert found.code == 0
    assert found.json["versions"]["horst"] == package.__version__
    assert horst("doctor").out.startswith("Versions\n")
    versions = {row["package"]: row["version"] for row in found.json["packages"]}
    assert versions["sklearn"] == importlib.metadata.version("scikit-learn")
    assert "unknown" not in versions.values()


def test_doctor_fails_where_the_optimizer_does(horst, monkeypatch):
    broken = [{"device": "cpu", "backend": "for-loop", "works": "no", "why not": "it is broken"}]
    monkeypatch.setattr("horst.cli.doctor.try_backends", lambda cuda: broken)
    assert horst("doctor").code == 1


def test_bench(horst):
    words = ["--layers", 2, "--width", 64, "--context", 16, "--samples", 4, "--seconds", 0.01, "--device", "cpu"]
    found = horst("bench", *words, "--json").json
    assert {row["optimizer"] for row in found["step"]} >= {"AdamW fused", "HORST (default)"}
    assert all(row["milliseconds"] > 0 for row in found["step"])
    assert [row["method"] for row in found["pruning"]] == list(METHODS)
    assert {row["zeros"] for row in found["pruning"]} == {12 * 64 * 64}  # half of two blocks
    assert {row["form"] for row in found["export"]} <= set(FORMS)
    assert "Pruning" not in horst("bench", *words, "--only", "step").out


def test_bench_gives_no_time_for_wrong_results(horst, monkeypatch):
    wrong = {"device": "cpu", "backend": "foreach", "works": "no", "why not": "its result differs from the for-loop's"}
    monkeypatch.setattr("horst.cli.doctor.try_backends", lambda cuda: [wrong])
    found = horst("bench", "--layers", 1, "--width", 64, "--only", "step", "--device", "cpu")
    assert found.code == 2
    assert "foreach" in found.err
    assert found.out == ""


@pytest.mark.parametrize("show", [lambda: progress.bar("batches", 3), lambda: progress.spinner("reading")])
def test_a_terminal_that_is_closed_does_not_hide_how_a_command_ended(show, monkeypatch):
    def fail_after(stop):
        def failing(self):
            stop(self)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return failing

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for display in (rich.progress.Progress, rich.status.Status):
        monkeypatch.setattr(display, "stop", fail_after(display.stop))
    with pytest.raises(Stopped), show():
        raise Stopped(signal.SIGHUP, "unfinished output is removed.")


def test_in_a_terminal_there_are_rules_and_bars(gpt2, texts, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["prune", str(gpt2), "--sparsity", "0.5", "--out", "pruned"]) == 0
    assert cli.main(["eval", "pruned", "--data", str(texts / "held_out.txt")]) == 0
    out, err = capsys.readouterr()
    assert "────" in out
    assert "\x1b[" in out
    assert "perplexity" in out
    assert "\x1b[" in err
    assert "perplexity" in err  # the bar's name


@pytest.fixture
def terminal(monkeypatch):
    """Tables as a terminal of so many columns shows them: their lines, without colours."""

    def shown(rows, columns, title=""):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", table(rows, title)).splitlines()
        assert max(map(len, lines)) <= columns
        return [line.rstrip() for line in lines]

    return shown


RUNS = [
    {"optimizer": name, "alpha": 5, "tokens": 438_836, "sparsity_of_pruned_layers": 0.1 * i, "perplexity": 45.86 + i}
    for i, name in enumerate(("horst", "adamw"))
]


def test_a_table_that_fits_is_shown_whole(terminal):
    assert terminal(RUNS, 80, "Runs") == [
        "",
        "Runs",
        "optimizer  alpha   tokens  sparsity of pruned layers  perplexity",
        "────────────────────────────────────────────────────────────────",
        "horst          5  438,836                          0       45.86",
        "adamw          5  438,836                        0.1       46.86",
    ]


def test_what_all_rows_share_goes_above_a_table_that_is_too_wide(terminal):
    assert terminal(RUNS, 50) == [
        "In all rows: alpha 5, tokens 438,836.",
        "optimizer  sparsity of pruned layers  perplexity",
        "────────────────────────────────────────────────",
        "horst                              0       45.86",
        "adamw                            0.1       46.86",
    ]


def test_then_headings_break_and_then_the_table_does(terminal):
    assert terminal(RUNS, 31) == [
        "In all rows: alpha 5, tokens",
        "438,836.",
        "           sparsity",
        "                 of",
        "             pruned",
        "optimizer    layers  perplexity",
        "───────────────────────────────",
        "horst             0       45.86",
        "adamw           0.1       46.86",
    ]
    assert terminal(RUNS, 30)[2:] == [
        "           sparsity",
        "                 of",
        "             pruned",
        "optimizer    layers",
        "───────────────────",
        "horst             0",
        "adamw           0.1",
        "",
        "optimizer  perplexity",
        "─────────────────────",
        "horst           45.86",
        "adamw           46.86",
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("name", ["table6_gpt2_wikipedia", "table1_cifar10_auto", "figure1_weight_spread"])
def test_no_number_of_a_result_is_cut(terminal, name, columns):
    rows = Result.load(pathlib.Path(__file__).parents[2] / "results" / "transformers" / f"{name}.json").rows
    words = " ".join(terminal(rows, columns)).split()
    assert not any("…" in word for word in words)
    for row in rows:
        values = [number(value) for value in row.values() if isinstance(value, (int, float))]
        assert [value for value in values if value not in {word.rstrip(".,") for word in words}] == []


def test_a_single_row_and_headings_without_a_word_are_shown(terminal):
    assert terminal([{"": "horst", "perplexity": 45.86, "zeros": 1}], 18) == [
        "       perplexity",
        "─────────────────",
        "horst       45.86",
        "",
        "       zeros",
        "────────────",
        "horst      1",
    ]
    assert terminal([{"name": "a text of many words"}] * 2, 12)[2:4] == ["a text of", "many words"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(horst, shell):
    found = horst("--completion", shell)
    assert found.code == 0
    assert all(name in found.out for name in COMMANDS)
    assert "--sparsity" in found.out


def test_bash_completes_commands_options_recipes_and_choices(horst):
    pathlib.Path("horst.bash").write_text(horst("--completion", "bash").out)
    script = """
        source horst.bash
        try() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
            $(complete -p horst | sed 's/.*-F \\([^ ]*\\).*/\\1/') "$1" "${!#}" "${COMP_WORDS[$# - 2]}"
            echo "${COMPREPLY[@]}"
        }
        try horst ev; try horst prune --meth; try horst run table; try horst prune x --method w
    """
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:4] == ["eval", "--method", "table1 table3 table4 table6", "wanda"]


def test_exit_codes_of_what_is_raised(horst, monkeypatch):
    def fails(error):
        def main(options):
            raise error

        monkeypatch.setattr("horst.cli.doctor.main", main)
        return horst("doctor")

    assert (fails(KeyboardInterrupt()).code, fails(KeyboardInterrupt()).err) == (130, "\nhorst doctor: interrupted.\n")
    stopped = fails(Interrupted(signal.SIGTERM, 7, pathlib.Path("runs/step-7")))
    assert stopped.code == 143
    assert "run again to go on" in stopped.err
    assert fails(KeyError("a key")).err == "horst doctor: a key\n"
    assert fails(ValueError("two\n  lines")).err == "horst doctor: two lines\n"
    assert fails(MemoryError()).err == "horst doctor: MemoryError\n"
    assert fails(ValueError()).code == 2
    with pytest.raises(AttributeError, match="a bug"):
        fails(AttributeError("a bug"))
    monkeypatch.setenv("HORST_TRACEBACK", "1")
    with pytest.raises(ValueError, match="shown"):
        fails(ValueError("shown"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("there", [False, True])
def test_a_signal_while_text_is_tokenized_leaves_what_was_there(horst, made_by_horst, monkeypatch, there, number):
    if there:
        made_by_horst("out", mine="keep me")

    def tokenize(sources, folder, **options):
        (folder / "train.bin").write_text("half")
        os.kill(os.getpid(), number)
        pytest.fail("it went on")

    monkeypatch.setattr("horst.lab.data.tokenization.tokenize", tokenize)
    handler = signal.signal(number, lambda *_: pytest.fail("the command had no handler of its own"))
    try:
        found = horst("data", "tokenize", "a.txt", "--out", "out", "--overwrite")
    finally:
        signal.signal(number, handler)
    assert (found.code, found.err) == (128 + number, "horst data: stopped; unfinished output is removed.\n")
    assert sorted(map(str, pathlib.Path().rglob("*"))) == (["out", "out/.horst.json", "out/mine"] if there else [])


def test_a_reader_that_leaves_is_no_error(monkeypatch):
    def main(options):
        raise BrokenPipeError

    monkeypatch.setattr("horst.cli.doctor.main", main)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert cli.main(["doctor"]) == 0
    sys.stdout.close()


def test_a_name_that_is_no_unicode_is_shown_escaped(horst):
    found = horst("eval", os.fsdecode(b"caf\xe9"), "--data", "x")
    assert found.code == 2
    assert "there is no model caf\\udce9" in found.err


def result(path, **changes):
    content = {
        "experiment": "mine", "config": {}, "rows": [{"seed": 7, "score": 1.25}], "curves": {}, "notes": [],
        "environment": environment(), "seconds": 1.0, "schema_version": 1, **changes,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_report_takes_files_and_folders(horst):
    result(pathlib.Path("a.json"))
    result(pathlib.Path("runs/deep/b.json"), rows=[{"seed": 8, "score": 9.75}])
    pathlib.Path("runs/outcome.json").write_text('{"config": {}, "outcome": {}}')
    words = ["report", "a.json", "runs", "a.json", "--out", "pages/all.html", "--formats", "markdown"]
    found = horst(*words, "--json")
    assert found.code == 0
    assert found.json == {"out": "pages/all.html", "results": ["a.json", "runs/deep/b.json"]}
    page = pathlib.Path("pages/all.html").read_text()
    assert "1.25" in page
    assert "9.75" in page
    assert "9.75" in pathlib.Path("pages/all.md").read_text()
    assert "pages/all.html exists" in horst(*words).err
    assert horst(*words, "--overwrite").out == "2 results -> pages/all.html\n"


def test_quickstart_shows_two_tables_and_goes_on_after_an_interruption(horst, monkeypatch):
    from horst.lab.experiments import quickstart

    about = {"alpha": 0.0, "beta": 0.0, "lr": 0.005, "seed": 0}
    rows = [
        {"part": "language", "optimizer": "adamw", **about, "sparsity": 0.5, "perplexity": 8.0},
        {"part": "language", "optimizer": "horst", **about, "alpha": 5.0, "sparsity": 0.5, "perplexity": 6.0},
        {"part": "vision", "optimizer": "adamw", **about, "sparsity": 0.9, "top1": 0.5},
        {"part": "vision", "optimizer": "horst", **about, "alpha": 5.0, "sparsity": 0.9, "top1": 0.75},
    ]

    def run(config):
        assert config.seeds == (0,)
        runs = {"done": done, "planned": 4}
        return Result(
            experiment="quickstart", config={}, rows=rows[:done], curves={"histograms": {}, "runs": runs}, notes=[],
            environment=environment(), seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setattr(
        "horst.lab.report.html.build", lambda results, out: out.write_text(results[0].read_text()) and out
    )
    done = 2
    found = horst("quickstart", "--seeds", 0)
    assert found.code == 130
    assert "-25.0%" in found.out
    assert "accuracy" not in found.out
    done = 4
    found = horst("quickstart", "--seeds", 0)
    assert found.code == 0
    assert "+25.0" in found.out
    assert (
        len(Result.load("runs/quickstart.json").rows)
        == len(json.loads(pathlib.Path("report.html").read_text())["rows"])
        == 4
    )
    assert "--overwrite" in horst("quickstart", "--seeds", 0).err
    assert horst("quickstart", "--seeds", 0, "--overwrite", "--json").json == rows
