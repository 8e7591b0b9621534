"""HORST, the paper's Algorithm 2."""

from __future__ import annotations

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

    With an ``l1`` above 0, a soft threshold ends the step. It makes models that survive pruning:

    .. math:: \theta_{k+1} \leftarrow \mathrm{sign}(\theta_{k+1}) \max(|\theta_{k+1}| - \eta \lambda_1, 0)

    where :math:`\lambda_1` is ``l1``. Give it to the matrices that will be pruned, not to norms, biases and embeddings:
    ``horst.param_groups(model, l1=0.015)`` does.

    ``alpha=0, beta=0`` is AdamW. The mirror step keeps a zero weight at zero, the AdamW step does not: apply masks
    after ``step``. The class treats all its tensors alike; :func:`horst.param_groups` makes groups that differ.

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer. Each option may differ by group.
        lr: Learning rate. A tensor can be changed by a schedule under ``torch.compile`` and in CUDA graphs.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Constant added to the denominator.
        weight_decay: Decoupled decay, as in AdamW.
        alpha: Strength of the mirror step relative to ``lr``. The paper uses 5; its runs with 200 crashed. ``"auto"``
            chooses it from ``lr`` (give the peak of the schedule), ``betas`` and the present size of the weights, and
            clips learning rates that are large beside the weights: :mod:`horst.optimizers.auto_alpha`.
        beta: Decay inside the mirror step; its effect is that of ``weight_decay``.
        l1: Strength of the soft threshold: each weight shrinks by ``lr * l1`` per step and reaches exactly zero. Start
            from ``1.2 / sqrt(steps)``, 0.015 for 6000 steps; more prunes further and costs dense quality. 0 disables
            it, as in the paper. In bfloat16 use ``stochastic_rounding``: rounding to the nearest loses the threshold on
            all but the smallest weights.
        maximize: Whether to ascend instead of descend.
        foreach: True asks for ``torch._foreach_*`` calls, which stochastic rounding does without; None chooses the
            fastest backend available.
        fused: True insists on the fused kernel (one launch per group, no temporaries). It needs CUDA and raises
            elsewhere, where AdamW has one for CPUs too. None chooses.
        capturable: Whether the step counter lives on the device, so that a CUDA graph can capture the step.
        stochastic_rounding: Whether bfloat16 weights are rounded up or down at random. Their resolution is coarser than
            a usual step, which rounding to the nearest would lose. Other dtypes ignore it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = HORST(model.parameters(), lr=1e-3, alpha=5.0)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> HORST([torch.nn.Parameter(torch.full((4, 4), 0.02))], lr=1e-3, alpha="auto").param_groups[0]["alpha"]
        6.32...

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
        l1: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "beta": beta,
            "l1": l1,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults)
