"""The quickstart at toy size: fair, whole, and of use when it is interrupted."""

import math
import os
import signal
import statistics
import sysconfig

import pytest
import torch

from horst.lab.data.token_files import open_tokens
from horst.lab.experiments import quickstart
from horst.lab.experiments.quickstart import Config, is_partial, run
from horst.lab.experiments.result import Result
from horst.lab.models.gpt2 import GPT2
from horst.lab.report import html
from horst.lab.report import quickstart as quickstart_report
from horst.lab.report.runs import perplexity_changes
from horst.training import torch_settings
from horst.training.run import Run


def tiny(tmp_path, **changes):
    fields = {"seeds": (0,), "steps": 3, "epochs": 2, "vision_lrs": (5e-3,), "sparsities": (0.5, 0.9)}
    fields |= {"recovery_steps": 5, "recovery_width": 16}
    return Config(**{**fields, "directory": tmp_path / "quickstart", **changes})


def silent(line):
    pass


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of a toy run that nothing disturbed, its lines of progress, and the folder it ran in."""
    folder, lines = tmp_path_factory.mktemp("whole"), []
    result = run(tiny(folder), lines.append)
    return result, lines, folder


def test_both_optimizers_get_the_same_runs_and_the_zeros_are_exact(whole):
    result, _, _ = whole
    for part, keys in (("language", ("seed", "sparsity")), ("vision", ("seed", "sparsity", "lr"))):
        rows = [row for row in result.rows if row["part"] == part]
        adamw, *others = (
            [tuple(row[key] for key in keys) for row in rows if row["optimizer"] == name]
            for name in dict.fromkeys(row["optimizer"] for row in rows)
        )
        assert all(adamw == other != [] for other in others)
        assert len(others) == (3 if part == "language" else 1)
    for row in result.rows:
        assert row["alpha"] == {"adamw": 0.0, "horst": 5.0, "adamw-l1": 0.0, "horst-l1": "auto"}[row["optimizer"]]
        assert row.get("l1") == (0.1 if row["optimizer"].endswith("-l1") else None)
        if row["part"] == "vision":
            assert row["zeros"] == math.floor(0.9 * row["masked_weights"])
        elif row["part"] == "recovery":
            assert row["zeros"] == pytest.approx(0.9, abs=1e-3)
            assert math.isfinite(row["perplexity"])
        else:
            # a soft threshold makes zeros before anything is pruned
            least = row["optimizer"].endswith("-l1") and not row["sparsity"]
            assert row["sparsity_of_pruned_layers"] == pytest.approx(row["sparsity"], abs=0.05 if least else 1e-4)
            assert math.isfinite(row["perplexity"])


def test_adamw_and_horst_threshold_the_same_weights_as_strongly(tmp_path):
    def thresholds(name):
        given = tiny(tmp_path).language(tmp_path, name)
        model = GPT2(given.model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = given.optimization.groups(model, name)
        return {names[id(p)]: group["l1"] for group in groups for p in group["params"] if group.get("l1")}

    assert thresholds("adamw-l1") == thresholds("horst-l1") != {}
    assert thresholds("adamw") == thresholds("horst") == {}


def test_a_whole_run_shows_its_progress_leaves_no_files_and_makes_a_page(whole, tmp_path):
    result, lines, folder = whole
    assert [line for line in lines if line.startswith("[")] == [
        "[1/7] GPT with AdamW, seed 0",
        "[2/7] GPT with HORST, seed 0",
        "[3/7] GPT with AdamW with l1, seed 0",
        "[4/7] GPT with HORST with l1, seed 0",
        "[5/7] ViT with AC/DC and AdamW, learning rate 0.005, seed 0",
        "[6/7] ViT with AC/DC and HORST, learning rate 0.005, seed 0",
        "[7/7] larger GPT with AdamW, made sparse by horst.sparsify, seed 0",
    ]
    assert not is_partial(result)
    assert list(folder.iterdir()) == []
    path = result.save(tmp_path / "quickstart.json")
    assert Result.load(path).rows == result.rows
    page = html.build([path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "partial" not in page.partition("<body>")[2]
    assert quickstart_report.vision_words(result).startswith("HORST's mean accuracy less AdamW's")


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (64, quickstart.THREADS)])
def test_it_takes_half_of_the_cores_at_most_and_gives_the_threads_back(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(quickstart.THREADS + 3)
    try:
        with torch_settings.threads(quickstart._thread_count()):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == quickstart.THREADS + 3
    finally:
        torch.set_num_threads(before)


def interrupt_at(monkeypatch, run_number, step):
    """Ctrl-C in a step of the loop, as the terminal sends it."""
    train_step, state = Run.train_step, {"runs": 0}

    def stepping(self, *batch):
        state["runs"] += self.step == 0
        train_step(self, *batch)
        if (state["runs"], self.step) == (run_number, step):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "train_step", stepping)


def test_an_interrupted_run_reports_what_it_has_and_goes_on_where_it_stopped(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, run_number=5, step=2)
        lines = []
        result = run(tiny(tmp_path), lines.append)
    assert lines[-1] == "Interrupted after 4 of 7 runs. Run the same command again to resume."
    assert is_partial(result)
    assert result.notes[0] == "Partial: interrupted after 4 of 7 runs."
    assert {row["part"] for row in result.rows} == {"language"}
    page = html.build([result.save(tmp_path / "part.json")], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "This result is partial: 4 of 7 runs" in page

    steps = []
    train_step = Run.train_step
    monkeypatch.setattr(Run, "train_step", lambda self, *batch: (steps.append(self.step), train_step(self, *batch)))
    again = run(tiny(tmp_path), silent)
    assert steps[0] == 2  # of the fifth run; the first four are not made again
    assert not is_partial(again)
    assert without_times(again.rows) == without_times(whole[0].rows)


@pytest.fixture
def heeds_ctrl_c():
    """A shell's background job ignores SIGINT, and so would these tests if they were one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_between_the_runs_keeps_the_rows(tmp_path):
    def stop_before_the_second(line):
        if line.startswith("[2/"):
            os.kill(os.getpid(), signal.SIGINT)

    result = run(tiny(tmp_path), stop_before_the_second)
    assert result.curves["runs"] == {"done": 1, "planned": 7}
    assert {row["optimizer"] for row in result.rows} == {"adamw"}
    html.build([result.save(tmp_path / "part.json")], tmp_path / "report.html")


def test_ctrl_c_before_the_first_run_is_through_is_passed_on(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, run_number=1, step=1)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(tmp_path), silent)


def test_held_out_files_are_not_trained_on(tmp_path):
    quickstart._write_text(tmp_path / "text")
    train, held_out = (open_tokens(tmp_path / "text" / f"{split}.bin") for split in ("train", "val"))
    assert held_out.documents + train.documents == len(quickstart._source_files())
    assert 0 < held_out.documents < train.documents / 20
    assert len(held_out.tokens) <= held_out.documents * (4 * quickstart.SCORED + 1)  # bytes, up to four a character
    documents = bytes(token if token < 256 else 0 for token in train.tokens.tolist())
    for document in bytes(token if token < 256 else 0 for token in held_out.tokens.tolist()).split(b"\0"):
        assert len(document) < 1000 or document not in documents


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seeds", (), "seeds must be at least one value, none of them twice"),
        ("vision_lrs", (1e-3, 1e-3), "vision_lrs must be at least one value, none of them twice"),
        ("steps", 0, "steps must be at least 1"),
        ("epochs", 1, "epochs at least 2"),
        ("sparsities", (0.5, 90.0), "sparsities must lie in .* Give a fraction"),
        ("vision_sparsity", math.nan, "sparsities must lie in"),
        ("lr", -1.0, "learning rates must be positive"),
        ("l1", -0.1, "l1 must be at least 0"),
        ("vision_lrs", (math.inf,), "learning rates must be positive"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(field, value, message):
    with pytest.raises(ValueError, match=message):
        Config(**{field: value})


def test_a_python_without_its_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"has 0 source files of its standard library .* comes with its source"):
        run(tiny(tmp_path), silent)


@pytest.mark.slow
def test_at_full_size_horst_is_ahead_where_the_readme_says_so(tmp_path):
    result = run(Config(directory=tmp_path), silent)
    changes = perplexity_changes(quickstart_report.rows_of(result, "language"))
    assert all(changes[level] < 0 for level in (0.0, 0.5, 0.6, 0.7, 0.8))
    with_l1 = perplexity_changes(quickstart_report.rows_of(result, "language"), "horst-l1")
    assert all(with_l1[level] < changes[level] for level in with_l1)
    dense = [row["perplexity"] for row in result.rows if row["optimizer"] == "adamw" and row.get("sparsity") == 0.0]
    pruned = [r["perplexity"] for r in result.rows if r["optimizer"] == "horst-l1" and r["sparsity"] == 0.8]
    assert statistics.mean(pruned) < statistics.mean(dense)
    points = quickstart_report.vision_points(result)
    assert points[5e-3] > 5
    accuracies = [row["top1"] for row in result.rows if row["part"] == "vision" and row["lr"] == 2e-2]
    assert statistics.mean(accuracies) > 0.93
