"""Two gloo processes against one: the same run under DDP and FSDP2, and checkpoints that go from one to the other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_runs import CONFIG, copy_run
from toy_runs import equal, read_metrics, toy_run

HERE = Path(__file__).parent
METHODS = ["acdc", "acdc-values", "rigl", "srste", "imp"]


def save(folder, weights, result):
    torch.save({"weights": weights, "metrics": result.metrics}, folder / "final.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs on one process and on two, begun afresh or from a checkpoint of the other kind."""
    root = tmp_path_factory.mktemp("runs")
    jobs = {}

    def alone(name, **options):
        save(root / name, *toy_run(root / name, CONFIG, dropout=0.0, **options))

    def together(name, **options):
        jobs[str(root / name)] = options

    for method in METHODS:
        alone(f"{method}-1", method=method)
        together(f"{method}-fsdp", method=method, kind="fsdp")
        together(f"{method}-1-then-fsdp", **{"method": method, "kind": "fsdp", "from": [str(root / f"{method}-1"), 12]})
    alone("dense-1", method=None, optimizer="adamw")
    together("dense-fsdp", method=None, optimizer="adamw", kind="fsdp")
    alone("text-1", text=True, method="acdc")
    together("text-ddp", text=True, method="acdc")
    together("text-fsdp", text=True, method="acdc", kind="fsdp")
    together("acdc-ddp", method="acdc")
    together("acdc-1-then-ddp", **{"method": "acdc", "from": [str(root / "acdc-1"), 12]})
    together("acdc-ddp-then-ddp", **{"method": "acdc", "from": [str(root / "acdc-ddp"), 12]})
    together("acdc-ddp-then-fsdp", **{"method": "acdc", "kind": "fsdp", "from": [str(root / "acdc-ddp"), 12]})
    together("acdc-fsdp-then-fsdp", **{"method": "acdc", "kind": "fsdp", "from": [str(root / "acdc-fsdp"), 12]})
    together("stopped", method="acdc", patch="signal_to_rank_1")
    together("stopped-then-ddp", **{"method": "acdc", "from": [str(root / "stopped"), 8]})
    together("full", **{"method": "acdc", "from": [str(root / "acdc-ddp"), 12], "patch": "full_disk_at_rank_1"})
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += [
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        str(HERE / "distributed_worker.py"),
        str(root / "jobs.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in METHODS:
        copy_run(root / f"{method}-fsdp", 12, root / f"{method}-fsdp-then-1")
        alone(f"{method}-fsdp-then-1", method=method)
    copy_run(root / "acdc-ddp", 12, root / "acdc-ddp-then-1")
    alone("acdc-ddp-then-1", method="acdc")
    return root


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


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_sharded_as_it_does_alone(method, runs):
    assert_same_to_rounding(runs / f"{method}-fsdp", runs / f"{method}-1")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_saved_on_one_process_resumes_sharded_over_two(method, runs):
    assert_same_to_rounding(runs / f"{method}-1-then-fsdp", runs / f"{method}-1")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_saved_sharded_over_two_processes_resumes_on_one(method, runs):
    assert_same_to_rounding(runs / f"{method}-fsdp-then-1", runs / f"{method}-1")


def test_a_run_changes_between_one_process_ddp_and_fsdp(runs):
    for name in ("acdc-1-then-ddp", "acdc-ddp-then-1", "acdc-ddp-then-fsdp"):
        assert_same_to_rounding(runs / name, runs / "acdc-1")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_as_many_processes_a_resumed_run_is_the_same_bit_for_bit(kind, runs):
    one, other = final(runs / f"acdc-{kind}"), final(runs / f"acdc-{kind}-then-{kind}")
    assert equal(one["weights"], other["weights"])
    assert read_metrics(runs / f"acdc-{kind}") == read_metrics(runs / f"acdc-{kind}-then-{kind}")


def test_a_signal_to_one_rank_stops_all_at_the_same_step(runs):
    errors = [json.loads((runs / "stopped" / f"error{rank}.json").read_text()) for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "Interrupted"
    assert errors[0]["text"].startswith("stopped after step 8")  # in step 6, and logs are every 4
    for name, weight in final(runs / "stopped-then-ddp")["weights"].items():
        assert torch.equal(weight, final(runs / "acdc-ddp")["weights"][name])


def test_a_full_disk_at_one_rank_stops_all_and_leaves_the_last_good_checkpoint(runs):
    errors = [json.loads((runs / "full" / f"error{rank}.json").read_text()) for rank in (0, 1)]
    for error in errors:
        assert error["type"] == "CheckpointError"
        assert "No space left on device" in error["text"]
        assert "step-00000012, is untouched" in error["text"]
    assert sorted(p.name for p in (runs / "full" / "checkpoints").iterdir())[-1] == "step-00000012"


def test_evaluation_sums_over_ranks(runs):
    found, alone = json.loads((runs / "accuracy.json").read_text())
    assert found["images"] == 20
    assert found["top1"] == alone
