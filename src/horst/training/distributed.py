"""Many processes: ``torchrun`` on any number of hosts, with DDP or FSDP2, gloo or NCCL.

Every function here also works in one process without a process group, where it does next to nothing.
Under DDP the model stays as it is, and the loop wraps the computation of its loss: gradients are averaged, so equal
weights stay equal. FSDP2 cuts every parameter over the ranks, in place; the optimizer is made after that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from horst.parameters.kinds import block_prefixes
from horst.training.evaluate import loss_method

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all: its ``rank`` below ``size``, and its ``device``."""

    rank: int
    size: int
    device: torch.device


@contextlib.contextmanager
def processes(device: Literal["auto", "cuda", "cpu"] = "auto") -> Iterator[World]:
    """Join the processes that ``torchrun`` started, and leave them at the end; alone without it.

    Args:
        device: ``"auto"`` is this process's GPU where there is one. GPUs talk through NCCL, CPUs through gloo.

    Example:
        >>> with processes("cpu") as world:
        ...     print(world.rank, world.size, world.device)
        0 1 cpu
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device='cuda' was asked for, but torch sees no GPU. Use 'auto' or 'cpu'.")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    here = torch.device("cpu")
    if use_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"this is local process {local_rank}, but the host has {torch.cuda.device_count()} GPUs. Start as many "
                "processes per host as it has GPUs (torchrun --nproc-per-node), or use device='cpu'."
            )
        here = torch.device("cuda", local_rank)
        torch.cuda.set_device(here)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield World(rank(), world_size(), here)
        return
    # Objects and flags travel over gloo beside NCCL: they need no GPU memory and do not wait for its queue.
    if use_cuda:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=here)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(rank(), world_size(), here)
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def parallelize(model: nn.Module, kind: Literal["ddp", "fsdp"], device: torch.device | str) -> nn.Module:
    """``model`` on ``device``, with rank 0's weights on all ranks; under ``"fsdp"`` cut over them, block by block.

    Random numbers drawn from here on differ between ranks: two ranks should not drop out the same units.

    Args:
        model: Model, built alike on every rank. Changed in place.
        kind: ``"ddp"`` keeps whole copies; ``"fsdp"`` (``fully_shard``) fits models that one device cannot hold.
        device: Device of this rank.
    """
    model.to(device)
    if rank() > 0:
        torch.manual_seed(torch.initial_seed() + rank())
    if world_size() == 1:
        return model
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)
    if kind == "fsdp":
        _shard(model)
    return model


@torch.no_grad()
def take_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Write rank 0's values into tensors that every rank has whole; one broadcast for each data type."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if world_size() > 1 else ():
        alike.setdefault(tensor.dtype, []).append(tensor)
    for group in alike.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, src=0)
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _shard(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (world_size(),))
    prefixes = tuple(block_prefixes(model))
    blocks = [module for name, module in model.named_modules() if _is_block(name, prefixes)]
    for block in reversed(blocks):  # inner ones first, where blocks hold blocks
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if loss_method(model) is not None:  # as with forward, parameters are gathered around it
        register_fsdp_forward_method(model, "loss")


def _is_block(name: str, prefixes: tuple[str, ...]) -> bool:
    parent, _, last = name.rpartition(".")
    return last.isdigit() and (f"{parent}." if parent else "") in prefixes


def is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 has cut the module's parameters."""
    # Where nobody has imported FSDP2, no module can be one, and importing it takes seconds.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def whole_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or all parts of one that is cut over the ranks; every rank must ask."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters that FSDP2 keeps after a forward pass without a backward one.

    Whoever changes weights between two evaluations would otherwise see the old ones in the second.
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """Run ``action`` here while the other ranks run theirs; the results of all, or on all ranks an error.

    Without this an error on one rank would leave the others waiting for it forever.

    Example:
        >>> on_every_rank(lambda: "ready")
        ['ready']
    """
    if world_size() == 1:
        return [action()]
    outcome: tuple[Any, str | None]
    mine: Exception | None = None
    try:
        outcome = action(), None
    except Exception as error:
        mine, outcome = error, (None, f"{type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, outcome)
    if mine is not None:
        raise mine
    for number, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise RuntimeError(f"rank {number} failed: {failure}")
    return [value for value, _ in outcomes]


def on_rank_0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone; every rank gets what it returns, or its error."""
    found: T = on_every_rank(lambda: action() if rank() == 0 else None)[0]  # type: ignore[assignment]
    return found
