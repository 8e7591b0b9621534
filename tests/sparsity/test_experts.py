"""Stacked experts in sparse training: one matrix per expert, in either order of storage, whole or sharded."""

import pytest
import torch
from rank_scripts import run_script
from torch import nn

from horst import HORST
from horst.sparsity import ACDC, GMP, Cubic, RigL, Static, acdc_steps, find_layers, keep_zeros, rigl_steps
from horst.sparsity.layers import expert_stacks, left_dense


def stacks_of(model):
    return [layer for layer in find_layers(model) if layer.experts]


def pruned_by_expert(sparsifier):
    """By the name of each expert's matrix, how many of its weights the masks remove, and of how many."""
    stacks = [layer for layer in sparsifier.layers if layer.experts]
    parts = {m.name: sparsifier.masks[s.name][m.expert] for s in stacks for m in s.matrices()}
    return {name: (int((~mask).sum()), mask.numel()) for name, mask in parts.items()}


def train(model, optimizer, sparsifier, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(50, (2, 8)), labels=torch.randint(50, (2, 8))).loss.backward()
        optimizer.step()
        sparsifier.step()


def test_a_stack_is_one_matrix_per_expert_with_its_inputs_last(mixture):
    stacks = stacks_of(mixture)
    assert [s.name for s in stacks[:2]] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    ]
    up, down = stacks[0].matrices(), stacks[1].matrices()
    assert len(up) == len(down) == 4
    assert up[3].name == "model.layers.0.mlp.experts.gate_up_proj.3"
    width = down[0].inputs_last.shape[1]
    assert up[0].inputs_last.shape == (2 * width, 16)
    assert down[0].inputs_last.shape == (16, width)
    up[3].inputs_last.zero_()  # a view
    assert not stacks[0].param[3].any()
    assert stacks[0].param[2].all()


def test_other_modules_have_no_stacks_and_other_stacks_are_left_dense_and_named(caplog):
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1, 1, 4))
            self.weight = nn.Parameter(torch.ones(3, 4, 4))

    model = nn.ModuleList([Unknown(), Unknown()])
    assert not any(expert_stacks(module) for module in model.modules())
    layers = find_layers(model)
    assert [layer.name for layer in layers] == ["0.fc.weight", "1.fc.weight"]
    assert "2 weights of two or more dimensions inside the blocks (96 parameters) are left dense" in caplog.text
    assert left_dense(model, layers) == {"0.weight": 48, "1.weight": 48}
    assert left_dense(model, layers, exclude=["0.weight"]) == {"1.weight": 48}


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global", {"*.down_proj": 0.75, "*": 0.5}])
def test_masks_are_exact_for_each_expert(mixture, distribution):
    dense = {layer.name: layer.param.detach().clone() for layer in stacks_of(mixture)}
    sparsity = 0.6 if isinstance(distribution, dict) else 0.5
    sparsifier = Static(mixture, HORST(mixture.parameters(), lr=1e-3), sparsity=sparsity, distribution=distribution)
    if distribution == "global":
        kept = min(float(layer.param.detach()[layer.param != 0].abs().min()) for layer in find_layers(mixture))
        for layer in stacks_of(mixture):
            assert float(dense[layer.name][layer.param == 0].abs().max()) <= kept
    elif distribution != "erk":
        for name, (zeros, weights) in pruned_by_expert(sparsifier).items():
            assert zeros == weights * (0.75 if "down_proj" in name and distribution != "uniform" else 0.5), name
    for layer in stacks_of(mixture):
        assert torch.equal(sparsifier.masks[layer.name], layer.param != 0)


@pytest.mark.parametrize("pattern", ["2:4", (4, 4)])
def test_patterns_hold_in_each_expert(mixture, pattern):
    is_nm = pattern == "2:4"
    exclude = ["*.shared_expert_gate.weight"] if "Qwen2" in type(mixture).__name__ else []  # 1 x 16: no block fits
    optimizer = HORST(mixture.parameters(), lr=1e-3)
    Static(mixture, optimizer, sparsity=None if is_nm else 0.5, pattern=pattern, exclude=exclude)
    for stack in stacks_of(mixture):
        for matrix in stack.matrices():
            kept = matrix.inputs_last != 0
            if is_nm:
                assert bool((kept.reshape(-1, 4).sum(dim=1) == 2).all())
            else:
                rows, columns = kept.shape
                blocks = kept.reshape(rows // 4, 4, columns // 4, 4).sum(dim=(1, 3))
                assert set(blocks.unique().tolist()) <= {0, 16}
                assert int((blocks == 0).sum()) == blocks.numel() // 2


@pytest.mark.parametrize("method", ["acdc", "gmp", "rigl", "keep_zeros"])
def test_training_keeps_the_share_of_each_expert(mixture, method):
    optimizer = HORST(mixture.parameters(), lr=1e-2)
    if method == "acdc":
        sparsifier = ACDC(mixture, optimizer, sparsity=0.5, schedule=acdc_steps(20), distribution="uniform")
    elif method == "gmp":
        schedule = Cubic(begin=0, end=10, every=2)
        sparsifier = GMP(mixture, optimizer, sparsity=0.5, schedule=schedule, distribution="uniform")
    elif method == "rigl":
        schedule = rigl_steps(20, every=2)
        sparsifier = RigL(mixture, optimizer, sparsity=0.5, schedule=schedule, distribution="uniform")
    else:
        Static(mixture, optimizer, sparsity=0.5).close()
        sparsifier = keep_zeros(mixture, optimizer)
    before = sparsifier.masks
    train(mixture, optimizer, sparsifier, 20)
    assert all(zeros == weights // 2 for zeros, weights in pruned_by_expert(sparsifier).values())
    for layer in stacks_of(mixture):
        assert not layer.param[~sparsifier.masks[layer.name]].any()
        assert torch.equal(sparsifier.masks[layer.name], before[layer.name]) == (method == "keep_zeros")


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from horst.sparsity import RigL, Static, rigl_steps

class Experts(torch.nn.Module):
    is_transposed = False

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter((torch.randn(3, 16, 8) * 4).round() / 4)
        self.down_proj = torch.nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        up = torch.einsum("eoi,bi->beo", self.gate_up_proj, x)
        return torch.einsum("eoi,bei->bo", self.down_proj, up[..., :8] * up[..., 8:])

rank, world = int(sys.argv[1]), 2
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
for dim in (0, 1):
    for make in (
        lambda m, o: Static(m, o, sparsity=0.55, layers="all"),
        lambda m, o: Static(m, o, sparsity=0.55, layers="all", distribution="global"),
        lambda m, o: Static(m, o, sparsity=0.5, layers="all", pattern=(4, 4)),
        lambda m, o: Static(m, o, layers="all", pattern="1:4"),
        lambda m, o: RigL(m, o, sparsity=0.55, layers="all", schedule=rigl_steps(10, every=2)),
    ):
        torch.manual_seed(0)
        model = Experts()
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = make(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            sparsifier.step()
        print("hash", sparsifier.mask_hash(), sparsifier.current_sparsity)
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


def test_sharded_stacks_choose_what_one_process_chooses(tmp_path):
    """Three experts over two ranks, two and one; then each rank a part of every expert."""
    hashes = [[line for line in log.splitlines() if "hash" in line] for log in run_script(SHARDED, tmp_path, 2)]
    single = run_script(SHARDED.replace("int(sys.argv[1]), 2", "0, 1"), tmp_path, 1)[0]
    assert len(hashes[0]) == 10
    assert all(rank == [line for line in single.splitlines() if "hash" in line] for rank in hashes)
