"""Pruning by one process for all: rank 0 chooses, every rank gets the same weights; and whole weights of cut models.

Two GPUs may round differently, so every rank pruning for itself could end in different masks. Under FSDP2 no rank holds
whole weights: rank 0 keeps a copy of the model on the host, which is brought up to date before each pruning.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from horst.parameters.kinds import clean_name
from horst.parameters.sharding import local_shard, part_of
from horst.pruning import Report, prune
from horst.recovery.config import SparsifyConfig
from horst.recovery.data import Examples
from horst.training.distributed import on_rank_0, rank, reshard, whole_tensor, world_size
from horst.training.run_state import named_tensors

__all__ = ["Pruner", "gathered"]


class Pruner:
    """Prunes a model that one or many processes train.

    Args:
        model: The model, whole: before it is cut.
        config: Method, pattern, layers, samples.
        examples: Data to calibrate on.
    """

    def __init__(self, model: nn.Module, config: SparsifyConfig, examples: Examples) -> None:
        self.config = config
        self.batches = None if config.method == "magnitude" else examples.calibration(config.samples)
        self.device = next(model.parameters()).device
        self.exclude = (*config.exclude, *frozen_weights(model))
        self.copy: nn.Module | None = None
        self.is_cut = config.parallel == "fsdp" and world_size() > 1
        if self.is_cut and rank() == 0:
            self.copy = copy.deepcopy(model).cpu()

    def prune(self, model: nn.Module, sparsity: float) -> dict[str, Tensor]:
        """Prune ``model``, cut or not; this rank's part of the masks by layer, True where a weight is kept."""
        if self.is_cut:
            reshard(model)
            tensors = gathered(model)
            if self.copy is not None:
                with torch.no_grad():
                    for name, tensor in named_tensors(self.copy).items():
                        tensor.copy_(tensors[name])
        target = model if self.copy is None else self.copy
        report = on_rank_0(lambda: self._prune(target, sparsity))
        source, weights = named_parameters(target), named_parameters(model)
        masks = {}
        for name in (layer.name for layer in report.layers):
            part = part_of(weights[name], self._share(source[name]))
            if world_size() > 1:
                local_shard(weights[name]).copy_(part)
            masks[name] = part != 0
        return masks

    def _prune(self, model: nn.Module, sparsity: float) -> Report:
        config = self.config
        return prune(
            model, sparsity, method=config.method, pattern=config.pattern, layers=config.layers, include=config.include,
            exclude=self.exclude, samples=None, device=None if self.copy is None else self.device,
            data=self.batches, distribution=config.distribution,
        )  # fmt: skip

    @torch.no_grad()
    def _share(self, weight: Tensor) -> Tensor:
        """Rank 0's weight, whole, on every rank."""
        if world_size() == 1:
            return weight.detach()
        if rank() == 0:
            sent = weight.detach().to(self.device).contiguous()
        else:
            sent = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
        dist.broadcast(sent, src=0)
        return sent


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without wrappers."""
    return {clean_name(name): p for name, p in model.named_parameters()}


def frozen_weights(model: nn.Module) -> list[str]:
    """Names of the weights that are not trained: :func:`horst.pruning.prune` takes them, masks while training do not.

    Example:
        >>> frozen_weights(nn.Linear(2, 1).requires_grad_(False))
        ['weight']
    """
    return [name for name, p in named_parameters(model).items() if p.dim() > 1 and p.numel() and not p.requires_grad]


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, whole, on the host; all ranks must ask, and rank 0 gets them.

    A model that FSDP2 has cut is put together tensor by tensor, so that no GPU holds all of it. Tied weights are there
    once, under their first name: load them with ``strict=False``. On the other ranks the dictionary is empty.

    Example:
        >>> gathered(nn.Linear(2, 1, bias=False).requires_grad_(False)).keys()
        dict_keys(['weight'])
    """
    found = {}
    for name, tensor in named_tensors(model).items():
        whole = whole_tensor(tensor.detach())
        if rank() == 0:
            found[name] = whole.cpu()
    return found
