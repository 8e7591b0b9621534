"""HORST, the paper's Algorithm 2."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.optimizers.auto_alpha import Alpha
from horst.optimizers.mirrored_adam import MirroredAdam

__all__ = ["HORST"]


class HORST(MirroredAdam):
    r"""AdamW, then an entropy-mirror step along the same direction.

    With :math:`u_k = \eta\, \hat m_k / (\sqrt{\hat v_k} + \epsilon)`, Adam's step at rate ``lr``,

    .. math::
        \theta_{k+1/2} &= \theta_k - u_k - \eta \lambda\, \theta_k \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda, \epsilon, \alpha, \beta` are ``lr``, ``weight_decay``, ``eps``, ``alpha``, ``beta``, and
    ``betas`` are the decay rates of Adam's averages :math:`m` and :math:`v`.

    With an ``l1`` above 0 the proximal step of an L1 penalty follows, which makes models that survive pruning,

    .. math:: \theta_{k+1} \leftarrow \mathrm{sign}(\theta_{k+1}) \max(|\theta_{k+1}| - \eta \lambda_1, 0)

    where :math:`\lambda_1` is ``l1``. Give it to the matrices that will be pruned, and not to norms, biases and
    embeddings: ``horst.param_groups(model, ..., l1=0.03)`` does.

    ``alpha=0, beta=0`` is AdamW. The mirror step keeps a zero weight at zero, the AdamW step does not: apply masks
    after ``step``. The class treats every tensor it is given alike; :func:`horst.param_groups` decides which tensors go
    into a group with the mirror step.

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer. Each option may differ by group.
        lr: Learning rate. A tensor can be changed by a schedule under ``torch.compile`` and in CUDA graphs.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, as in AdamW.
        alpha: Strength of the mirror step relative to ``lr``. The paper uses 5; its runs with 200 crashed. ``"auto"``
            chooses it, and the bounds below that make it safe, from ``lr`` (give the peak of the schedule) and the size
            of the weights at that moment: :mod:`horst.optimizers.auto_alpha`.
        beta: Decay inside the mirror step; it does the same work as ``weight_decay``.
        max_exponent: Clamps the mirror step's exponent, so that one step scales a weight by at most
            ``exp(max_exponent)``. None: no limit, as in the paper.
        max_scale: Weights beyond this size take the mirror step of a weight of this size: they grow in a line and not
            exponentially (:mod:`horst.kernels.bounded_mirror`). None: no bound, as in the paper.
        max_step: A larger ``lr`` counts as this in every part of the step. None: no bound, as in the paper.
        l1: Every weight shrinks by ``lr * l1`` a step, to exactly zero in the end, apart from the gradient as with
            ``weight_decay``. GPT-2 small was trained with 0.03 at ``lr`` 1e-3 and 8e-3 for 6000 steps: a larger value
            prunes further and costs dense quality. 0: no penalty, as in the paper. In bfloat16 use
            ``stochastic_rounding``, which rounds this step too; rounding to the nearest loses it on all but the
            smallest weights.
        maximize: Ascend instead of descend.
        foreach: True insists on ``torch._foreach_*`` calls. None: choose the fastest backend available.
        fused: True insists on the fused kernel (one launch a group, no temporaries; CUDA). None: choose.
        capturable: Keep the step counter on the device, so that the step can be captured in a CUDA graph.
        stochastic_rounding: Round bfloat16 weights up or down at random. Their resolution is coarser than a usual step,
            which rounding to the nearest would lose. No effect on other dtypes.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = HORST(model.parameters(), lr=1e-3, alpha=5.0)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> HORST(model.parameters(), lr=1e-3, betas=(0.9, 0.95), alpha="auto").param_groups[0]["alpha"]
        100.0

    References: HORST, Algorithm 2 and Corollary 4.5.
    """

    _along_gradient = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        alpha: Alpha = 5.0,
        beta: float = 0.0,
        max_exponent: float | None = None,
        max_scale: float | None = None,
        max_step: float | None = None,
        l1: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            alpha=alpha,
            beta=beta,
            max_exponent=max_exponent,
            max_scale=max_scale,
            max_step=max_step,
            l1=l1,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            stochastic_rounding=stochastic_rounding,
        )

    def _choose_mirrored(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        return [True] * len(params)
