"""Two gloo processes against one: the same run under DDP and FSDP2, and checkpoints that go from one to the other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_runs import CONFIG, copy_run
from toy_runs import ToyData, equal, read_metrics, toy_run

HERE = Path(__file__).parent
# And where they are taken over.
OTHER_METHODS = {"acdc-values": 6, "rigl": 12, "srste": 12, "imp": 12, "admm": 12, "safe": 12, "ast": 12}


class Runs:
    """Runs in folders of their own, on one process or on two; those on two are collected and started at once."""

    def __init__(self, root):
        self.root, self.jobs = root, {}

    # AC/DC is sparse after step 6, and lottery tickets have been drawn after step 12.
    def alone(self, name, *, begin=None, at=6, **options):
        if begin is not None:
            copy_run(self.root / begin, at, self.root / name)
        weights, result = toy_run(self.root / name, CONFIG, dropout=0.0, **options)
        torch.save({"weights": weights, "metrics": result.metrics}, self.root / name / "final.pt")

    def together(self, name, *, begin=None, at=6, **options):
        begins = {} if begin is None else {"from": [str(self.root / begin), at]}
        self.jobs[str(self.root / name)] = {**options, **begins}

    def launch(self):
        file = self.root / "jobs.json"
        file.write_text(json.dumps(self.jobs))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += [str(HERE / "distributed_worker.py"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def there_and_back(self, method, at=6):
        self.alone(f"{method}-1", method=method)
        self.together(f"{method}-fsdp", method=method, kind="fsdp")
        self.together(f"{method}-1-then-fsdp", method=method, kind="fsdp", begin=f"{method}-1", at=at)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    runs.there_and_back("acdc")
    runs.alone("dense-1", method=None, optimizer="adamw")
    runs.together("dense-fsdp", method=None, optimizer="adamw", kind="fsdp")
    runs.alone("text-1", text=True)
    runs.together("text-ddp", text=True)
    runs.together("text-fsdp", text=True, kind="fsdp")
    for kind in ("ddp", "fsdp"):
        runs.together(f"statistics-{kind}", statistics=True, kind=kind)
        runs.together(f"statistics-{kind}-resumed", statistics=True, kind=kind, begin=f"statistics-{kind}")
    runs.together("acdc-ddp")
    runs.together("acdc-1-then-ddp", begin="acdc-1")
    runs.together("acdc-ddp-then-ddp", begin="acdc-ddp")
    runs.together("acdc-ddp-then-fsdp", kind="fsdp", begin="acdc-ddp")
    runs.together("acdc-fsdp-then-fsdp", kind="fsdp", begin="acdc-fsdp")
    runs.together("stopped", patch="signal_to_rank_1")
    runs.together("stopped-then-ddp", begin="stopped", at=8)
    runs.together("stopped-last", patch="signal_to_rank_1_in_the_last_evaluation")
    runs.together("full", begin="acdc-ddp", patch="full_disk_at_rank_1")
    runs.together("no-metrics", begin="acdc-ddp", patch="no_metrics_at_rank_0")
    runs.together("no-tensorboard", patch="no_tensorboard_at_rank_0")
    runs.launch()
    runs.alone("acdc-fsdp-then-1", begin="acdc-fsdp")
    runs.alone("acdc-ddp-then-1", begin="acdc-ddp")
    return runs.root


@pytest.fixture(scope="module")
def runs_of_other_methods(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("methods"))
    for method, at in OTHER_METHODS.items():
        runs.there_and_back(method, at)
    runs.launch()
    for method, at in OTHER_METHODS.items():
        runs.alone(f"{method}-fsdp-then-1", method=method, begin=f"{method}-fsdp", at=at)
    return runs.root


def final(folder):
    if (error := folder / "error0.json").exists():
        raise AssertionError(error.read_text())
    return torch.load(folder / "final.pt", weights_only=True)


def assert_same_to_rounding(one, other):
    a, b = final(one), final(other)
    assert a["weights"].keys() == b["weights"].keys()
    if "mask hash" in a["weights"]:
        assert a["weights"]["mask hash"] == b["weights"]["mask hash"]  # masks agree exactly
    for name, weight in a["weights"].items():
        torch.testing.assert_close(weight, b["weights"][name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-4)
    for line, expected in zip(read_metrics(one), read_metrics(other), strict=True):
        assert line.keys() == expected.keys()
        numbers = {k: v for k, v in expected.items() if k != "event"}
        assert {k: v for k, v in line.items() if k != "event"} == pytest.approx(numbers, rel=1e-3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_run_of_one(kind, runs):
    assert_same_to_rounding(runs / f"acdc-{kind}", runs / "acdc-1")


def test_two_processes_train_the_run_of_one_with_adamw_and_no_masks(runs):
    assert_same_to_rounding(runs / "dense-fsdp", runs / "dense-1")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loss_that_is_a_method_of_the_model_works_under_both(kind, runs):
    assert_same_to_rounding(runs / f"text-{kind}", runs / "text-1")


def test_a_run_changes_between_one_process_ddp_and_fsdp(runs):
    for name in ("1-then-ddp", "ddp-then-1", "1-then-fsdp", "fsdp-then-1", "ddp-then-fsdp"):
        assert_same_to_rounding(runs / f"acdc-{name}", runs / "acdc-1")


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_change_between_one_process_and_fsdp_too(method, runs_of_other_methods):
    for name in ("fsdp", "1-then-fsdp", "fsdp-then-1"):
        assert_same_to_rounding(runs_of_other_methods / f"{method}-{name}", runs_of_other_methods / f"{method}-1")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_as_many_processes_a_resumed_run_is_the_same_bit_for_bit(kind, runs):
    one, other = final(runs / f"acdc-{kind}"), final(runs / f"acdc-{kind}-then-{kind}")
    assert equal(one["weights"], other["weights"])
    assert read_metrics(runs / f"acdc-{kind}") == read_metrics(runs / f"acdc-{kind}-then-{kind}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_running_statistics_are_those_of_rank_0_and_resume(kind, runs):
    whole, resumed = (final(runs / name) for name in (f"statistics-{kind}", f"statistics-{kind}-resumed"))
    assert equal(whole["weights"], resumed["weights"])
    assert read_metrics(runs / f"statistics-{kind}") == read_metrics(runs / f"statistics-{kind}-resumed")
    mean = torch.zeros(6)
    for step in range(30):
        for rows in next(ToyData(8, 0, 2).batches(step))[0].chunk(CONFIG.accumulate):
            mean.lerp_(rows.mean(0), 0.1)
    assert torch.equal(whole["weights"]["mean"], mean)


def test_a_resumed_run_goes_on_with_the_sum_of_losses_of_each_rank(runs):
    for name in ("far-apart", "far-apart-resumed"):
        (loss,) = [line["loss"] for line in read_metrics(runs / name) if "loss" in line]
        assert loss == (2.0**24 + 0.0 + 1.0 + 1.0) / 4  # 0.5 less if the ranks went on with their mean


def test_a_signal_to_one_rank_stops_all_at_the_same_step(runs):
    errors = [json.loads((runs / "stopped" / f"error{rank}.json").read_text()) for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "Interrupted"
    # The ranks compare before step 1, after it, and then every two steps of two seconds; logs are every four.
    assert errors[0]["text"].startswith("stopped after step 7")
    for name, weight in final(runs / "stopped-then-ddp")["weights"].items():
        assert torch.equal(weight, final(runs / "acdc-ddp")["weights"][name])
    assert read_metrics(runs / "stopped-then-ddp") == read_metrics(runs / "acdc-ddp")


def test_a_signal_to_one_rank_in_the_last_evaluation_stops_all(runs):
    errors = [json.loads((runs / "stopped-last" / f"error{rank}.json").read_text()) for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "Interrupted"
    assert errors[0]["text"].startswith("stopped after step 30")
    assert read_metrics(runs / "stopped-last") == read_metrics(runs / "acdc-ddp")


def test_a_full_disk_at_one_rank_stops_all_and_leaves_the_last_good_checkpoint(runs):
    errors = [json.loads((runs / "full" / f"error{rank}.json").read_text()) for rank in (0, 1)]
    for error in errors:
        assert error["type"] == "CheckpointError"
        assert "No space left on device" in error["text"]
        assert "step-00000006, is untouched" in error["text"]
    assert sorted(p.name for p in (runs / "full" / "checkpoints").iterdir())[-1] == "step-00000006"


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("no-metrics", "CheckpointError", ["No space left on device. Make room", "step-00000006, is untouched"]),
        ("no-tensorboard", "ModuleNotFoundError", ["tensorboard is needed"]),
    ],
)
def test_metrics_that_rank_0_cannot_open_stop_all(name, kind, parts, runs):
    first, second = (json.loads((runs / name / f"error{rank}.json").read_text()) for rank in (0, 1))
    assert (first["type"], second["type"]) == (kind, "RuntimeError")
    assert all(part in first["text"] for part in parts)
    assert second["text"] == f"rank 0 failed: {kind}: {first['text']}"


def test_evaluation_sums_over_ranks(runs):
    found, alone = json.loads((runs / "accuracy.json").read_text())
    assert found["images"] == 20
    assert found["top1"] == alone
