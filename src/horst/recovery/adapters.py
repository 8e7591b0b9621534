r"""Low-rank adapters on a pruned model that leave its zeros alone, in training and when they are merged.

.. math:: W' = W + s\, M \odot (B A)

with :math:`M` True where :math:`W` is kept. :math:`W` is frozen, :math:`A, B` are trained, and what is merged is what
was trained. They are a parametrization of the weight, so that any module that reads its weight works: ``nn.Linear``,
``Conv1D``, stacked experts, convolutions. Adapters of the library peft, on a model of one's own, are
:mod:`horst.integrations.peft`'s, which stands above this folder and needs that library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from horst.sparsity.layers import Layer

__all__ = ["MaskedAdapter", "attach", "merge"]

SCALE = 2.0  # as LoRA's alpha of twice the rank, a common choice


class MaskedAdapter(nn.Module):
    """A masked update of low rank, as a parametrization.

    Args:
        weight: The weight, of two or more dimensions; beyond two, as ``(first, all others)``, or for a stack of
            matrices one update per matrix.
        mask: True where a weight is kept.
        rank: Rank of the update.
        stacked: Whether dimension 0 counts matrices.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
        >>> adapter = MaskedAdapter(weight, weight != 0, rank=1)
        >>> nn.init.ones_(adapter.B).shape, adapter(weight)[0, 1].item()
        (torch.Size([2, 1]), 0.0)
    """

    def __init__(self, weight: Tensor, mask: Tensor, rank: int, *, stacked: bool = False) -> None:
        super().__init__()
        shape = weight.shape if stacked else (weight.shape[0], weight[0].numel())
        rows, columns = shape[-2:]
        lead = shape[:-2]
        bound = 1 / math.sqrt(columns)
        self.A = nn.Parameter(weight.new_empty(*lead, rank, columns).uniform_(-bound, bound))
        self.B = nn.Parameter(weight.new_zeros(*lead, rows, rank))  # the first forward pass is the pruned model's
        self.register_buffer("mask", mask.clone())
        self.order: list[str] = []  # of the module's parameters; torch puts the weight last when the adapter is gone

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with the update."""
        update = (SCALE * (self.B @ self.A)).view(weight.shape)
        mask: Tensor = self.get_buffer("mask")
        return weight + torch.where(mask, update, 0.0)


def check_lora(model: nn.Module, layers: Sequence[Layer], rank: int) -> None:
    """Refuse a rank that a matrix cannot have, and a weight that several modules share."""
    homes = _homes(model)
    for layer in layers:
        if len(homes[id(layer.param)]) > 1:
            raise ValueError(
                f"lora={rank} cannot train {layer.name}, which several modules share (tied weights). Leave it out with "
                f"exclude=[{layer.name!r}], or train the weights themselves (lora=None)."
            )
        for matrix in layer.matrices():
            shape = (len(matrix.inputs_last), matrix.inputs_last[0].numel())
            if rank > min(shape):
                raise ValueError(
                    f"lora={rank} is more than the smaller side of {matrix.name}, {shape}. Lower it, or train the "
                    "weights themselves (lora=None)."
                )


def check_no_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters of the library peft: their factors would be pruned as any other matrix."""
    name = next((name for name, module in model.named_modules() if hasattr(module, "adapter_layer_names")), None)
    if name is not None:
        raise ValueError(
            f"the model has PEFT adapters ({name}), and pruning would empty them. Merge them first "
            "(model.merge_and_unload()). To train adapters in place of the weights, use horst.sparsify(..., lora=16); "
            "on a pruned model, horst.integrations.peft.keep_zeros."
        )


def attach(model: nn.Module, layers: Sequence[Layer], masks: Mapping[str, Tensor], rank: int) -> list[nn.Parameter]:
    """Put an adapter on each layer and freeze all else; the parameters that are left to train.

    Args:
        model: The model.
        layers: Pruned layers.
        masks: Masks by layer name, True where a weight is kept.
        rank: Rank of the adapters.
    """
    found = _homes(model)
    homes = [(layer, *found[id(layer.param)][0]) for layer in layers]
    model.requires_grad_(False)
    trained = []
    for layer, module, name in homes:
        adapter = MaskedAdapter(layer.param.detach(), masks[layer.name], rank, stacked=bool(layer.experts))
        adapter.order = list(module._parameters)
        parametrize.register_parametrization(module, name, adapter)
        trained += [adapter.A, adapter.B]
    return trained


def _homes(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, with its name there, by its ``id``."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            homes.setdefault(id(p), []).append((module, name))
    return homes


@torch.no_grad()
def merge(model: nn.Module) -> dict[str, Tensor]:
    """Add the adapters to their weights and take them away; the masks by layer name."""
    masks = {}
    for prefix, module in list(model.named_modules()):
        if not parametrize.is_parametrized(module):
            continue
        for name in [n for n, p in module.parametrizations.items() if isinstance(p[0], MaskedAdapter)]:
            adapter = module.parametrizations[name][0]
            masks[f"{prefix}.{name}" if prefix else name] = adapter.get_buffer("mask")
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            ordered = {key: module._parameters.pop(key) for key in adapter.order if key in module._parameters}
            module._parameters.update(ordered)
    return masks
