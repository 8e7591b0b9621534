"""Less memory for activations: the blocks compute theirs again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from horst.pruning.chains import block_sequences

__all__ = ["checkpointed_blocks"]


@contextlib.contextmanager
def checkpointed_blocks(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Around training: each of the outermost repeated blocks keeps its inputs alone.

    It works on any model, inside FSDP2's blocks too, and is undone on leaving.

    Args:
        model: Model with repeated blocks.
        enabled: False does nothing.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
        >>> with checkpointed_blocks(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model[0][0].weight.grad is not None
        True
    """
    blocks = [block for sequence in block_sequences(model).values() for block in sequence.values()] if enabled else []
    if enabled and not blocks:
        raise ValueError(
            f"gradient_checkpointing=True found no repeated blocks in {type(model).__name__} (items of one class in a "
            "ModuleList or Sequential). Leave it out."
        )

    def wrapped(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if block.training and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return forward(*args, **kwargs)

        return run

    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = wrapped(block, block.forward)
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
