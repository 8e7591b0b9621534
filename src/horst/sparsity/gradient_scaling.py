r"""SparseOpt's scaling of gradients: output neurons that keep more weights than others of their layer learn faster.

References: *SparseOpt*, 2026, for RigL and ResNets.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.optim import Optimizer

from horst.parameters.sharding import Shard, local_shard, sum_over_ranks
from horst.sparsity.controller import Sparsifier
from horst.sparsity.layers import Layer
from horst.sparsity.optimizer_hooks import after_update, before_update


class ScalesGradients(Sparsifier, abc.ABC):
    r"""What RigL, SET and fixed masks share: the option ``scale_gradients``, off by default.

    In each update, and nowhere else, the gradient of output neuron :math:`i` of a layer is multiplied by

    .. math:: f_i = \sqrt{1 - s_i} \,/\, \sqrt{1 - \bar s}

    where :math:`s_i` is the share of zeros among the neuron's weights and :math:`\bar s` that of the layer. The scores
    by which RigL grows weights are those of the true gradient, and ``p.grad`` is as it was when the step is done. It
    costs a copy of the masked layers' gradients during the step.

    **It is for optimizers whose step grows with the gradient, such as SGD.** Adam divides by the root of the averaged
    squared gradient, so a factor that is constant in time cancels: with AdamW, HORST and fixed masks nothing is left
    but the part of ``eps``, and with RigL the few steps after an exchange, in which the averages hold gradients that
    had another factor.
    """

    scale_gradients = False

    def _add_hooks(self) -> None:
        self._row_factors: dict[str, Tensor] = {}  # by layer, shaped to multiply its local gradient
        self._unscaled: dict[str, Tensor] = {}  # by layer, the gradient to put back after the update
        for optimizer in self.optimizers if self.scale_gradients else ():
            self._handles += [before_update(optimizer, self._scale), after_update(optimizer, self._unscale)]
        super()._add_hooks()

    def _masks_changed(self) -> None:
        super()._masks_changed()
        if self.scale_gradients:
            self._row_factors = {
                layer.name: row_factors(~self._pruned[layer.name], layer, self._chooser.shards[layer.name])
                for layer in self.layers
                if layer.name in self._pruned
            }

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer) -> None:
        for layer in self._layers_of(optimizer):
            factors = self._row_factors.get(layer.name)
            if factors is not None and layer.param.grad is not None:
                grad = local_shard(layer.param.grad)
                self._unscaled[layer.name] = grad.clone()  # dividing again would round
                grad.mul_(factors)

    @torch.no_grad()
    def _unscale(self, optimizer: Optimizer) -> None:
        for layer in self._layers_of(optimizer):
            if (before := self._unscaled.pop(layer.name, None)) is not None and layer.param.grad is not None:
                local_shard(layer.param.grad).copy_(before)


def row_factors(kept: Tensor, layer: Layer, shard: Shard) -> Tensor:
    r"""The factors :math:`f_i`, shaped to multiply the local gradient of ``layer``.

    All neurons of a layer have as many weights, so :math:`f_i = \sqrt{k_i / \bar k}`, where :math:`k_i` is the number
    that neuron i keeps. Each matrix of a stack is a layer of its own.

    Args:
        kept: Local mask, True where a weight is kept.
        layer: The layer.
        shard: Part of its weight that this rank holds.
    """
    inputs = [d for d in range(kept.dim()) if d != 0 or not layer.experts]  # less the dimension of the stack
    output = next(d for d in inputs if d != layer.input_dim)
    inputs.remove(output)
    counts = kept.sum(dim=inputs, keepdim=True, dtype=torch.promote_types(layer.param.dtype, torch.float32))
    if shard.dim in inputs:
        counts = sum_over_ranks(counts, shard.group)
    total = counts.sum(dim=output, keepdim=True)
    if shard.dim == output:
        total = sum_over_ranks(total, shard.group)
    mean = total / shard.shape[output]
    return (counts / mean.clamp_min(1e-9)).sqrt()  # a layer that keeps nothing has factors of 0
