"""What each expert of a mixture is given: the inputs of stacked matrices, which no module of their own multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from horst.sparsity.layers import expert_stacks


def is_mixture(module: nn.Module) -> bool:
    """Whether :func:`expert_inputs` can follow a module: stacked experts and their activation, as in transformers."""
    return bool(expert_stacks(module)) and (hasattr(module, "_apply_gate") or hasattr(module, "act_fn"))


def expert_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """By expert, the inputs (rows x inputs) of its first matrix and of its second, of the tokens routed to it.

    The second are computed again from the first, so that it does not matter which of transformers' implementations
    (eager, batched, grouped) the module's own forward pass uses.

    Args:
        module: The module that holds the stacks.
        args: Arguments of its call: hidden states and, as the one integer tensor, the experts of each token. Without
            that (Llama 4), the hidden states of all experts one after the other, zero where a token is not routed.
        kwargs: Keyword arguments of its call.
        counts: Booleans over the positions of a batch, False for padding; None counts all.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    routing = next((tensor for tensor in tensors[1:] if not tensor.is_floating_point()), None)
    (first, dim), _ = expert_stacks(module)
    hidden = tensors[0].detach().reshape(1 if routing is not None else len(first), -1, first.shape[dim])
    bias = getattr(module, "gate_up_proj_bias", getattr(module, "up_proj_bias", None))
    for i in range(len(first)):
        tokens = hidden[i if routing is None else 0]
        is_routed = tokens.any(-1) if routing is None else (routing.reshape(len(tokens), -1) == i).any(-1)
        if counts is not None and counts.numel() == len(tokens):
            is_routed = is_routed & counts.reshape(-1).to(is_routed.device)
        X = tokens[is_routed]
        out = X @ (first[i].detach() if dim == 1 else first[i].detach().t())
        yield i, X, _activate(module, out if bias is None else out + bias[i].detach())


def _activate(module: nn.Module, out: Tensor) -> Tensor:
    """What lies between the two matrices of an expert."""
    if not hasattr(module, "gate_up_proj"):
        return cast(Tensor, module.act_fn(out))  # type: ignore[operator]
    if hasattr(module, "_apply_gate"):
        return cast(Tensor, module._apply_gate(out))  # type: ignore[operator]
    gate, up = out.chunk(2, dim=-1)
    return cast(Tensor, module.act_fn(gate) * up)  # type: ignore[operator]
