"""Two gloo processes against one: the same run under DDP and FSDP2, with equal masks and exact zeros."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recovery_runs import run_job

HERE = Path(__file__).parent
STAGES = {"sparsity": 0.75, "stages": [0.5], "steps": 12}
RUNS = {
    "llama": {"model": "llama", **STAGES},
    "gpt2-2to4": {"model": "gpt2", "pattern": "2:4", "method": "wanda"},
    "bert": {"model": "bert", "sparsity": 0.5},  # its pooler gets no gradient, which DDP would wait for
    "vit-squarehead": {"model": "vit", "sparsity": 0.5, "distill": "squarehead"},
    "plain-refresh": {"model": "plain", "sparsity": 0.5, "train": "refresh", "refresh_every": 3, "steps": 9},
    "plain-checkpointing": {"model": "plain", "sparsity": 0.5, "gradient_checkpointing": True},
    "plain-admm": {"model": "plain", "sparsity": 0.5, "train": "admm", "steps": 9},
    "plain-ast": {"model": "plain", "pattern": "2:4", "train": "ast", "steps": 9},
    "plain-cast": {"model": "plain", "sparsity": 0.5, "train": "cast", "optimizer": "adams", "steps": 9},
    "plain-stopped": {"model": "plain", **STAGES, "stop": 10},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    jobs = {}
    for name, options in RUNS.items():
        (root / f"{name}-1").mkdir()
        # A mean of ratios, as SquareHead's, is that of the parts: one process computes the parts of two.
        run_job(root / f"{name}-1", {**options, "accumulate": 2} | ({"stop": -1} if "stop" in options else {}))
        for kind in ("ddp", "fsdp"):
            (root / f"{name}-{kind}").mkdir()
            jobs[str(root / f"{name}-{kind}")] = {**options, "parallel": kind}
    (root / "lora-1").mkdir()
    (root / "lora-ddp").mkdir()
    lora = {"model": "plain", **STAGES, "lora": 2}
    run_job(root / "lora-1", lora)
    jobs[str(root / "lora-ddp")] = lora
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [str(HERE / "distributed_worker.py"), str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def without_keys(name, tensor):
    """A bias of the keys moves no attention: its gradient is rounding alone, which Adam makes as large as any."""
    if name.endswith(("c_attn.bias", "qkv.bias")):
        query, _, value = tensor.chunk(3)
        return torch.cat([query, value])
    return tensor[:0] if name.endswith(("key.bias", "k_proj.bias")) else tensor


def assert_same_to_rounding(one, other):
    a, b = (torch.load(folder / "final.pt", weights_only=True) for folder in (one, other))
    assert a["weights"].keys() == b["weights"].keys()
    assert a["kept"] == b["kept"]
    for name in a["kept"]:
        assert torch.equal(a["weights"][name] == 0, b["weights"][name] == 0), name  # the masks agree exactly
    for name in a["weights"]:
        mine, theirs = (without_keys(name, x["weights"][name]) for x in (a, b))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_model_of_one(name, kind, runs):
    assert_same_to_rounding(runs / f"{name}-{kind}", runs / f"{name}-1")


def test_two_processes_train_the_adapters_of_one(runs):
    assert_same_to_rounding(runs / "lora-ddp", runs / "lora-1")
