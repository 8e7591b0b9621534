"""Which tensors of a model are stored in fewer bits, and along which dimension their groups run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from horst.export.sparse_linear import SparseLinear
from horst.parameters.kinds import clean_name, parameter_kinds
from horst.parameters.quantization import Grid, parse_values
from horst.sparsity.layers import expert_stacks, is_conv1d

View = tuple[int, int, int]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """What a tensor is stored in, and the shape (outer, n, inner) that it is seen in: groups run along n."""

    values: torch.dtype | Grid
    view: View


def choose_precisions(
    model: nn.Module | Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    values: str | None,
    head_values: str | None,
    group_size: int,
) -> dict[str, Precision]:
    """By name, the tensors that are not stored as they are.

    Args:
        model: The module, or its state dict.
        tensors: The tensors to store, by name without wrappers, tied ones once.
        values: Precision of the matrices; None keeps them.
        head_values: Precision of embeddings and heads; None keeps them.
        group_size: Inputs that share a scale.
    """
    body = parse_values(values, group_size)
    head = parse_values(head_values, group_size, "head_values")
    kinds: dict[str, str] = dict.fromkeys(tensors, "matrix")
    views: dict[str, View] = {}
    if isinstance(model, nn.Module):
        if (values or head_values) and any(isinstance(module, SparseLinear) for module in model.modules()):
            raise ValueError("the model's layers are in their sparse form. Store the dense model in fewer bits.")
        kinds = {clean_name(name): kind for name, kind in parameter_kinds(model).items()}
        names = {id(p): clean_name(name) for name, p in model.named_parameters()}
        views = {names[id(p)]: view for p, view in _views(model)}
    elif head_values is not None:
        raise ValueError("head_values needs the module: a state dict does not say which of its tensors are heads.")
    of_kind = {"matrix": body, "embedding": head, "head": head, "position": head}
    found = {}
    for name, tensor in tensors.items():
        chosen = of_kind.get(kinds.get(name, ""))
        is_vector = tensor.dim() < 2 or tensor.numel() == max(tensor.shape) or not tensor.numel()
        if chosen is not None and not is_vector and tensor.dtype in _DTYPES:
            rows = tensor.shape[0]
            found[name] = Precision(chosen, views.get(name, (rows, math.prod(tensor.shape[1:]), 1)))
    return found


def _views(model: nn.Module) -> list[tuple[Tensor, View]]:
    """The weights whose inputs are not all that follows their first dimension."""
    found: list[tuple[Tensor, View]] = []
    for module in model.modules():
        if is_conv1d(module):
            inputs, outputs = module.weight.shape  # type: ignore[union-attr,misc]
            found.append((module.weight, (1, inputs, outputs)))  # type: ignore[arg-type]
        for stack, input_dim in expert_stacks(module):
            experts, first, second = stack.shape
            found.append((stack, (experts, first, second) if input_dim == 1 else (experts * first, second, 1)))
    return found
