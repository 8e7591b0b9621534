"""Masks on a CUDA device: the same selection as on a CPU, little memory, and no waiting in a training step."""

import pytest
import torch
from torch import nn

from horst import HORST
from horst.parameters.sharding import Shard, random_scores
from horst.sparsity import ACDC, SET, SRSTE, AtInit, DropGrow, Phases, RigL, Static
from horst.sparsity.selection import exact_floor, smallest

pytestmark = pytest.mark.gpu


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("content", ["normal", "ties", "equal", "nan", "zeros"])
def test_selection_equals_the_cpus(dtype, content):
    n = (1 << 23) + 12_345  # more than one chunk
    weights = torch.randn(n, generator=torch.Generator().manual_seed(0))
    if content == "ties":
        weights = (weights * 2).round()
    elif content == "equal":
        weights = torch.full((n,), 0.5)
    elif content == "nan":
        weights[::1000] = torch.nan
    elif content == "zeros":
        weights[weights.abs() < 1.6] = 0.0
    weights = weights.to(dtype)
    k = exact_floor(0.9, n)
    assert torch.equal(smallest([weights.cuda()], k)[0].cpu(), smallest([weights], k)[0])


def test_selection_takes_little_memory():
    n = 200_000_000
    weights = torch.randn(n, device="cuda")
    smallest([weights[:1000]], 10)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = smallest([weights], exact_floor(0.9, n))[0]
    extra = torch.cuda.max_memory_allocated() - before - mask.nbytes
    # The chunks do not grow with the tensor: at 1e9 weights this is below 5 % of it.
    assert extra <= 0.05 * 4e9


def test_random_scores_equal_the_cpus():
    shard = Shard((300, 500), 0, 0, 300, None)
    on_gpu = random_scores(shard, 5, torch.device("cuda")).cpu()
    assert torch.equal(on_gpu, random_scores(shard, 5, torch.device("cpu")))


METHODS = {
    "acdc": lambda m, o: ACDC(m, o, sparsity=0.9, schedule=Phases((3, 6, 9), end=15), layers="all_linear"),
    "acdc-2:4": lambda m, o: ACDC(m, o, schedule=Phases((3, 6, 9), end=15), layers="all_linear", pattern="2:4"),
    "rigl": lambda m, o: RigL(m, o, sparsity=0.9, schedule=DropGrow(every=3, end=14), layers="all_linear"),
    "set": lambda m, o: SET(m, o, sparsity=0.9, schedule=DropGrow(every=3, end=14), layers="all_linear"),
    "random": lambda m, o: AtInit(m, o, sparsity=0.9, score="random", layers="all_linear"),
    "srste": lambda m, o: SRSTE(m, o, layers="all_linear"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, HORST])
def test_zeros_stay_zero_with_fused_optimizers_and_grad_scaler(name, optimizer_class):
    net = model().cuda()
    optimizer = optimizer_class(net.parameters(), lr=1e-2, fused=True)
    sparsifier = METHODS[name](net, optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(15):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        for layer in sparsifier.layers:
            assert not layer.param[~sparsifier.masks[layer.name]].any()
    assert sparsifier.is_sparse
    saved, expected = sparsifier.state_dict(), sparsifier.mask_hash()
    sparsifier.close()
    restored = METHODS[name](net, optimizer)
    restored.load_state_dict(saved)
    assert restored.mask_hash() == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_in_a_sparse_phase_never_waits_for_the_device():
    net = model().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    sparsifier = Static(net, optimizer, sparsity=0.9, layers="all_linear")
    x = torch.randn(8, 64, device="cuda")
    net(x).square().mean().backward()
    optimizer.step()
    sparsifier.step()
    optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
