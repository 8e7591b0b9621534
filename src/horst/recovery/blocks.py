"""A model's blocks while it is trained: compiled one by one, or with less memory for their activations.

Both put another ``forward`` into each of the outermost repeated blocks and take it out on leaving. Hooks, FSDP2's among
them, stay outside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from horst.parameters.modes import Forward, forwards_replaced
from horst.pruning.chains import block_sequences

__all__ = ["checkpointed_blocks", "compiled_blocks"]


@contextlib.contextmanager
def compiled_blocks(*models: nn.Module | None, mode: str | None = None) -> Iterator[bool]:
    """Around training: each block is compiled on its own, and blocks of one class share the compiled code.

    A model of 30 blocks then compiles as fast as one block, and once for all stages: as a whole it would be compiled
    again for every stage. Gives whether there are blocks to compile.

    Args:
        models: Models with repeated blocks; those without are left as they are.
        mode: Mode of :func:`torch.compile`.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
        >>> with compiled_blocks(model) as compiled:
        ...     compiled, "forward" in vars(model[0])
        (True, True)
        >>> "forward" in vars(model[0])
        False
    """
    blocks = [block for model in models if model is not None for block in _blocks(model)]
    with forwards_replaced(blocks, lambda k, forward: torch.compile(forward, mode=mode)):
        yield bool(blocks)


@contextlib.contextmanager
def checkpointed_blocks(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Around training: each block keeps its inputs alone, and computes the rest again in the backward pass.

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
    blocks = _blocks(model) if enabled else []
    if enabled and not blocks:
        raise ValueError(
            f"gradient_checkpointing=True found no repeated blocks in {type(model).__name__} (items of one class in a "
            "ModuleList or Sequential). Leave it out."
        )

    def wrapped(k: int, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if blocks[k].training and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return forward(*args, **kwargs)

        return run

    with forwards_replaced(blocks, wrapped):
        yield


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for sequence in block_sequences(model).values() for block in sequence.values()]
