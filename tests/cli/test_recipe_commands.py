"""Recipes: run, sweep, and what they leave behind taken up by the other commands."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from horst.cli import main, sweep
from horst.lab.experiments.recipes import RECIPES, Recipe
from horst.lab.experiments.result import Result
from horst.training import checkpoint

TINY = [
    "--scale", "cpu", "--data", "tokens", "--steps", 4, "--batch-size", 2, "--warmup-steps", 1, "--layers", 3,
    "--heads", 2, "--width", 16, "--context", 16, "--checkpoint-every", 4, "--sparsities", 0.5, "--eval-batch-size", 8,
    "--json",
]  # fmt: skip


def without_clocks(rows):
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.fixture
def tokens(horst, texts):
    words = ["--tokenizer", "bytes", "--validation", "2", "--out", "tokens"]
    assert horst("data", "tokenize", texts / "text.jsonl", *words).code == 0


@pytest.mark.usefixtures("tokens")
def test_a_run_of_table_6_is_pruned_and_evaluated_to_the_same_numbers(horst):
    """The recipe prunes in memory; the commands read its checkpoint, prune that, and read what they wrote."""
    ran = horst("run", "table6", *TINY, "--optimizers", "horst", "--directory", "runs/mine", "--out", "mine.json")
    assert ran.code == 0
    dense, half = ran.json
    assert Result.load("mine.json").rows == ran.json
    (directory,) = pathlib.Path("runs/mine").iterdir()
    words = ["--data", "tokens", "--batch-size", "8", "--json"]
    assert horst("eval", directory, *words).json["loss"] == pytest.approx(dense["loss"], rel=1e-7)
    assert horst("prune", directory, "--sparsity", 0.5, "--layers", "paper", "--out", "pruned").code == 0
    pruned = horst("eval", "pruned", *words).json
    assert pruned["loss"] == pytest.approx(half["loss"], rel=1e-5)  # now in the class of transformers
    assert pruned["loss"] != pytest.approx(dense["loss"], rel=1e-5)


def test_a_run_of_table_1_is_evaluated_to_the_same_accuracy(horst):
    words = ["--epochs", 1, "--depth", 2, "--width", 8, "--heads", 2, "--checkpoint-every", 1, "--directory", "runs/t1"]
    ran = horst("run", "table1", "--scale", "cpu", *words, "--optimizers", "adamw", "--json")
    assert ran.code == 0
    assert json.loads(pathlib.Path("runs/table1_cpu.json").read_text())["rows"] == ran.json
    (directory,) = pathlib.Path("runs/t1").iterdir()
    found = horst("eval", directory, "--data", "digits", "--json").json
    assert found["top1"] == pytest.approx(ran.json[0]["top1"])
    assert found["zeros"] > 0.5
    assert horst("export", directory, "--out", "sparse").code == 0
    assert horst("eval", "sparse", "--data", "digits", "--json").json["top1"] == found["top1"]
    words = ["--sparsity", 0.95, "--method", "wanda", "--data", "digits", "--samples", 8]
    pruned = horst("prune", directory, *words, "--out", "pruned", "--json")
    assert pruned.code == 0
    assert pruned.json["sparsity_of_pruned_layers"] == pytest.approx(0.95, abs=0.01)
    assert horst("eval", "pruned", "--data", "digits", "--json").json["zeros"] > found["zeros"]


@pytest.fixture
def reported(monkeypatch):
    """What is reported to Weights & Biases."""
    found = types.SimpleNamespace(projects=[], numbers=[])

    def init(project, **_):
        found.projects.append(project)
        return types.SimpleNamespace(
            id="1", log=lambda numbers, step: found.numbers.append(numbers), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return found


LOOP = ["--accumulate", 2, "--ema-decay", 0.5, "--keep-checkpoints", 1, "--tensorboard", "--wandb", "mine"]


@pytest.mark.usefixtures("tokens")
def test_a_language_recipe_takes_what_the_loop_can_do(horst, reported):
    words = ["--optimizers", "horst", "--directory", "runs/mine", "--checkpoint-every", 2, "--log-every", 1]
    ran = horst("run", "table6", *TINY, *words, *LOOP)
    assert ran.code == 0, ran.err
    dense, half = ran.json
    assert dense["ema_perplexity"] != dense["perplexity"]
    assert "ema_perplexity" not in half
    _check_loop(reported, steps=4)


def test_a_vision_recipe_takes_what_the_loop_can_do(horst, reported):
    words = ["--epochs", 2, "--depth", 1, "--width", 8, "--heads", 2, "--directory", "runs/mine"]
    words += ["--checkpoint-every", 1, "--log-every", 1, "--optimizers", "adamw", "--sparsities", 0, "--json"]
    ran = horst("run", "table1", "--scale", "cpu", *words, *LOOP)
    assert ran.code == 0, ran.err
    assert ran.json[0]["ema_top1"] >= 0
    _check_loop(reported, steps=42)


def _check_loop(reported, steps):
    (directory,) = pathlib.Path("runs/mine").iterdir()
    assert len(checkpoint.complete(directory / "checkpoints")) == 1
    assert list((directory / "tensorboard").iterdir())
    assert reported.projects == ["mine"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in lines) == sum("loss" in line for line in reported.numbers) == steps


@pytest.mark.usefixtures("tokens")
def test_a_run_of_spred_is_read_from_the_factors_in_its_checkpoint(horst):
    ran = horst("run", "table6", *TINY, "--optimizers", "spred", "--directory", "runs/mine")
    assert ran.code == 0
    dense, half = ran.json
    (directory,) = pathlib.Path("runs/mine").iterdir()
    words = ["--data", "tokens", "--batch-size", "8", "--json"]
    assert horst("eval", directory, *words).json["loss"] == pytest.approx(dense["loss"], rel=1e-7)
    assert horst("prune", directory, "--sparsity", 0.5, "--layers", "paper", "--out", "pruned").code == 0
    assert horst("eval", "pruned", *words).json["loss"] == pytest.approx(half["loss"], rel=1e-5)


@pytest.mark.usefixtures("tokens")
def test_figure_1_is_drawn_from_runs_and_their_checkpoints(horst):
    assert horst("run", "table6", *TINY, "--optimizers", "horst", "spred", "--directory", "runs/mine").code == 0
    one, other = sorted(pathlib.Path("runs/mine").iterdir())
    (step,) = (one / "checkpoints").iterdir()
    found = horst("run", "figure1_left", "--models", one, step, other, "--json")
    assert found.code == 0, found.err
    assert [row["model"] for row in found.json] == [one.name, "step-00000004", other.name]
    run, same, factors = ({k: v for k, v in row.items() if k != "model"} for row in found.json)
    assert run == same != factors
    assert run["weights"] == factors["weights"]
    shutil.rmtree(one / "checkpoints")
    refused = horst("run", "figure1_left", "--models", one, "--overwrite")
    assert refused.code == 2
    assert f"{one} has no checkpoint. Run its recipe again with --checkpoint-every" in refused.err


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_to_a_sweep_stops_its_jobs_which_save_first(number, code):
    """To the sweep alone, as ``kill`` sends it: it must reach the jobs. A log that is a pipe tells when one trains."""
    words = [
        "sweep", "table6", *TINY, "--steps", 10**6, "--checkpoint-every", "None", "--log-every", 1, "--logs", "logs",
        "--directory", "runs/mine",
    ]  # fmt: skip
    command = [sys.executable, "-m", "horst.cli", *map(str, words), "--optimizers", "adamw", "horst"]
    pathlib.Path("logs").mkdir()
    os.mkfifo("logs/table6-seed0-adamw.log")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ThreadPoolExecutor() as readers, subprocess.Popen(command, **pipes, start_new_session=True) as sweeping:
        try:
            with open("logs/table6-seed0-adamw.log") as log:
                assert any(line.startswith("adamw, step 3") for line in log)
                # Read on: a job whose pipe is full waits for a reader and never comes to its checkpoint.
                reading = readers.submit(log.read)
                sweeping.send_signal(number)
                _, said = sweeping.communicate(timeout=120)  # until no process is left that could write
                logged = reading.result()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(sweeping.pid, signal.SIGKILL)
    assert "SIGTERM: the run saves and stops." in logged
    assert "Traceback" not in logged
    assert sweeping.returncode == code
    assert "horst sweep: stopped" in said
    assert "Traceback" not in said
    (directory,) = pathlib.Path("runs/mine").iterdir()
    assert checkpoint.complete(directory / "checkpoints")
    assert not (directory / "outcome.json").exists()
    assert [path.name for path in pathlib.Path("logs").iterdir()] == ["table6-seed0-adamw.log"], "another was begun"


class HungUp(io.StringIO):
    """A stderr whose terminal, or ``| tee`` in it, is gone after a line with ``words``; SIGHUP comes a line later."""

    def __init__(self, words, error):
        super().__init__()
        self.words, self.error, self.refused = words, error, 0

    def write(self, text):
        if self.words not in self.getvalue():
            return super().write(text)
        self.refused += 1
        if self.refused == 2:
            os.kill(os.getpid(), signal.SIGHUP)
        raise self.error


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, os.strerror(errno.EIO))])
def test_a_run_whose_terminal_is_closed_saves_and_ends_with_the_signals_code(error):
    words = ["run", "table6", *TINY, "--steps", 8, "--checkpoint-every", "None", "--log-every", 1]
    words += ["--optimizers", "adamw", "--directory", "runs/mine"]
    handler = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("the run had no handler of its own"))
    try:
        with contextlib.redirect_stderr(HungUp("step 3 of", error)) as stderr:
            assert main(list(map(str, words))) == 129
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert stderr.refused > 2
    (directory,) = pathlib.Path("runs/mine").iterdir()
    (saved,) = checkpoint.complete(directory / "checkpoints")
    assert saved.name == "step-00000005"


@pytest.mark.usefixtures("tokens")
def test_a_job_that_fails_or_is_killed_is_named_and_the_others_go_on(horst, monkeypatch):
    pathlib.Path("logs/table6-seed0-adamw.log").mkdir(parents=True)  # so its log cannot be written
    start = sweep._start

    def started(name, place, arguments):
        job = start(name, place, arguments)
        if name.endswith("ham"):
            job.process.kill()
        return job

    monkeypatch.setattr(sweep, "_start", started)
    words = ["sweep", "table6", *TINY, "--directory", "runs/mine", "--logs", "logs"]
    found = horst(*words, "--optimizers", "adamw", "ham", "horst")
    assert found.code == 1
    assert "seed0-adamw failed: IsADirectoryError" in found.err
    assert "seed0-ham failed: its process was killed" in found.err
    assert "seed0-horst done" in found.err
    assert len(list(pathlib.Path("runs/mine").rglob("outcome.json"))) == 1


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_in_processes_finds_what_a_run_finds(horst, jobs):
    words = ["table6", *TINY, "--optimizers", "adamw", "horst"]
    ran = horst("run", *words, "--directory", "runs/one", "--out", "one.json")
    swept = horst("sweep", *words, "--directory", "runs/many", "--out", "many.json", "--jobs", jobs, "--logs", "logs")
    assert swept.code == 0
    assert without_clocks(swept.json) == without_clocks(ran.json)
    assert sorted(p.name for p in pathlib.Path("logs").iterdir()) == [
        "table6-seed0-adamw.log",
        "table6-seed0-horst.log",
    ]
    assert "step 4" in pathlib.Path("logs/table6-seed0-horst.log").read_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StubConfig:
    """A stub.

    Args:
        seeds: Seeds.
        optimizers: Optimizers.
        sparsities: Sparsities.
        directory: Where to.
        breaks: A seed that fails.
    """

    seeds: tuple[int, ...] = (0, 1)
    optimizers: tuple[str, ...] = ("adamw", "horst")
    sparsities: tuple[float, ...] = (0.5, 0.9)
    directory: pathlib.Path = pathlib.Path("runs/stub")
    breaks: int | None = None


def stub_run(config):
    if config.breaks in config.seeds:
        raise RuntimeError(f"seed {config.breaks}\nbroke")
    cells = [(s, o, p) for s in config.seeds for o in config.optimizers for p in config.sparsities]
    config.directory.mkdir(parents=True, exist_ok=True)
    for seed, optimizer, sparsity in cells:
        (config.directory / f"{seed}-{optimizer}-{sparsity}").touch()
    rows = [{"seed": s, "optimizer": o, "sparsity": p} for s, o, p in cells]
    return Result(experiment="stub", config={}, rows=rows, curves={}, notes=[], environment={}, seconds=0.0)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setitem(RECIPES, "stub", Recipe(about="A stub", run=stub_run, scales={"paper": StubConfig}))


@pytest.mark.usefixtures("stub")
def test_a_sweep_on_slurm_submits_one_job_a_cell(horst, monkeypatch):
    import submitit

    asked, real = {}, submitit.AutoExecutor
    update = real.update_parameters

    def auto_executor(folder, cluster):
        asked["cluster"] = cluster
        return real(folder, cluster="debug")  # the same calls, in this process

    monkeypatch.setattr(submitit, "AutoExecutor", auto_executor)

    monkeypatch.setattr(real, "update_parameters", lambda self, **given: asked.update(given) or update(self, **given))
    words = ["--on", "slurm", "--partition", "gpu", "--minutes", 30, "--gpus", 2, "--jobs", 4, "--json"]
    swept = horst("sweep", "stub", *words)
    assert swept.code == 0
    assert len(swept.json) == len(list(pathlib.Path("runs/stub").iterdir())) == 8
    assert swept.err.count("is job") == 8
    assert asked["cluster"] == "slurm"
    assert (asked["timeout_min"], asked["gpus_per_node"], asked["slurm_partition"]) == (30, 2, "gpu")
    assert asked["slurm_array_parallelism"] == 4


@pytest.mark.usefixtures("stub")
def test_a_failed_job_is_named_and_nothing_is_put_together(horst, monkeypatch):
    import submitit

    real = submitit.AutoExecutor
    monkeypatch.setattr(submitit, "AutoExecutor", lambda folder, cluster: real(folder, cluster="debug"))
    found = horst("sweep", "stub", "--on", "slurm", "--breaks", 1)
    assert found.code == 1
    assert "stub-seed1-adamw-sparsity0.5 failed" in found.err
    assert "RuntimeError" in found.err
    assert "Traceback" not in found.err
    assert not pathlib.Path("runs/stub_paper.json").exists()
    assert len(list(pathlib.Path("runs/stub").iterdir())) == 4  # the other seed's are kept


@pytest.mark.usefixtures("stub")
def test_the_cells_of_a_sweep():
    cells = sweep.split("stub", StubConfig(seeds=(3,)))
    assert list(cells) == [
        "stub-seed3-adamw-sparsity0.5",
        "stub-seed3-adamw-sparsity0.9",
        "stub-seed3-horst-sparsity0.5",
        "stub-seed3-horst-sparsity0.9",
    ]
    assert cells["stub-seed3-horst-sparsity0.9"] == StubConfig(seeds=(3,), optimizers=("horst",), sparsities=(0.9,))
    once = sweep.split("table6", StubConfig())
    assert [cell.sparsities for cell in once.values()] == [(0.5, 0.9)] * 4
    with pytest.raises(ValueError, match="use horst run figure2"):
        sweep.split("figure2", types.SimpleNamespace(directory="runs"))


@pytest.mark.usefixtures("stub")
def test_run_prints_a_table_and_asks_before_it_replaces(horst):
    found = horst("run", "stub", "--seeds", 7, "--optimizers", "adamw")
    assert found.code == 0
    assert found.out.splitlines()[1:3] == ["seed  optimizer  sparsity", "   7  adamw           0.5"]
    assert horst("run", "stub").code == 2
    assert horst("run", "stub", "--overwrite").code == 0
    assert len(Result.load("runs/stub_paper.json").rows) == 8


def drawn_run(config):
    """Stands for Figure 1 (left), from a result that is there."""
    return Result.load(pathlib.Path(__file__).parents[2] / "results" / "transformers" / "figure1_weight_spread.json")


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.setitem(RECIPES, "drawn", Recipe(about="A figure", run=drawn_run, scales={"paper": StubConfig}))
    return pathlib.Path("runs/drawn_paper_figures/figure-1-how-weights-are-spread.png")


def test_run_draws_the_figures_of_the_report_beside_the_result(horst, drawn):
    ran = horst("run", "drawn")
    assert ran.code == 0
    assert ran.out.splitlines()[-2:] == ["-> runs/drawn_paper.json", f"-> {drawn}"]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert horst("report", "runs", "--formats", "png").code == 0
    assert drawn.read_bytes() == (pathlib.Path("report_figures") / drawn.name).read_bytes()
    again = horst("run", "drawn", "--overwrite", "--json")
    assert again.json == drawn_run(None).rows
    assert again.err == f"-> {drawn}\n"


def test_run_draws_nothing_if_told_so(horst, drawn):
    assert horst("run", "drawn", "--no-figures").code == 0
    assert not drawn.parent.exists()


def test_a_sweep_draws_them_too_unless_told_not_to(horst, drawn, monkeypatch):
    monkeypatch.setattr(sweep, "_here", lambda options, cells: ((name, None) for name in cells))
    assert horst("sweep", "drawn", "--no-figures").code == 0
    assert not drawn.parent.exists()
    assert horst("sweep", "drawn", "--overwrite").code == 0
    assert drawn.exists()


def test_without_matplotlib_a_run_says_how_to_get_it(horst, drawn, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = horst("run", "drawn")
    assert ran.code == 0
    assert ran.err.startswith("the figures could not be drawn: matplotlib is needed here and not installed.")
    assert 'from a checkout of horst: pip install ".[lab]"' in ran.err
    assert Result.load("runs/drawn_paper.json").rows
    assert not drawn.parent.exists()


def test_a_figure_that_fails_does_not_lose_the_result(horst, drawn, monkeypatch):
    monkeypatch.setattr("horst.lab.report.html.save_figure", lambda *_: 1 / 0)
    ran = horst("run", "drawn")
    assert ran.code == 0
    assert "kurtosis" in ran.out
    assert "the figures could not be drawn: runs/drawn_paper.json cannot be shown" in ran.err
    assert Result.load("runs/drawn_paper.json").rows


def test_every_recipe_shows_its_options(horst):
    for name, recipe in RECIPES.items():
        for scale in recipe.scales:
            shown = horst("run", name, "--scale", scale, "--help")
            assert shown.code == 0
            assert "--overwrite" in shown.out
    assert "--partition" in horst("sweep", "table1", "--help").out


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [pathlib.Path(__file__).parents[1] / "leave_at_once.py", "horst.cli", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_under_torchrun_the_first_process_alone_writes_and_all_have_its_outcome():
    words = ["--scale", "cpu", "--epochs", 1, "--depth", 1, "--width", 8, "--heads", 2, "--eval-every", 1]
    words += ["--optimizers", "adamw", "--directory", "runs/t1", "--json"]
    ran = torchrun("run", "table1", *words, "--out", "a.json")
    (row,) = json.loads(ran.stdout)  # one table, not one a rank
    result = Result.load("a.json")
    assert result.rows == [row]
    (phases,) = result.curves["phases"]
    assert [point["epoch"] for point in phases["accuracy"]] == [1.0], "the metrics are those of rank 0"
    # rank 1 has no file of its own to look into, on another host perhaps
    again = torchrun("run", "table1", *words, "--out", "b.json")
    assert json.loads(again.stdout) == [row]
    assert Result.load("b.json").curves == result.curves
