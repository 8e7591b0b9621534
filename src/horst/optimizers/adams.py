"""AdamS, the optimizer of CAST: Adam that draws the weights outside a mask towards zero.

References: Huang et al., *CAST: Continuous and Differentiable Semi-Structured Sparsity-Aware Training for Large
Language Models*, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from horst.kernels.horst_step import StepTensors
from horst.optimizers.hyperparameters import check_adamw_options, check_number, with_own_options
from horst.optimizers.masks import with_new_masks
from horst.optimizers.step_parts import local_shards

__all__ = ["AdamS"]


class AdamS(Optimizer):
    r"""AdamW whose first moment becomes, on weights outside a mask, more and more a pull towards zero.

    With Adam's average :math:`\hat m_t` of the gradient :math:`g_t`, corrected for its start, a weight outside the mask
    has

    .. math::
        \mu_t &= (1 - t/T)\, \hat m_t + (t/T)\, \lambda\, \mathrm{sign}(\theta_t) \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, \mu_t^2 \\
        \theta_{t+1} &= \theta_t - \eta\, \mu_t / (\sqrt{\hat v_t} + \epsilon) - \eta \lambda_w \theta_t

    where :math:`T, \lambda, \eta, \lambda_w, \epsilon` are ``steps``, ``pull``, ``lr``, ``weight_decay``, ``eps``.
    Inside the mask :math:`\mu_t = \hat m_t` and :math:`v_t` averages :math:`g_t^2`, as in AdamW; without a mask all
    weights do so. At the end :math:`v` is about :math:`\lambda^2`: each step moves a weight by ``lr`` towards zero,
    whatever ``pull`` is. What is left outside the mask then has the size of the last learning rates, so let them end
    near zero.

    :class:`horst.sparsity.CAST` chooses the masks, and zeroes what is outside at the end. Other methods of
    :mod:`horst.sparsity` work as with AdamW.

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer. Each option may differ by group.
            Weights must be float32 or float64: in half precision the pull is lost in rounding.
        lr: Learning rate.
        betas: Decay rates of the averages of the gradient and of the square.
        eps: Constant added to the denominator; well below ``pull``.
        weight_decay: Decoupled decay, as in AdamW.
        steps: Number of training steps, over which the pull takes the place of the gradient.
        pull: Size of the pull, to be compared with the gradient's; 4e-7 in the paper.
        maximize: Whether to ascend instead of descend. The pull is towards zero in both cases.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -0.01]))
        >>> optimizer = AdamS([weight], lr=0.001, weight_decay=0.0, steps=20)
        >>> optimizer.set_pull_masks({weight: torch.tensor([True, False])})
        >>> for _ in range(20):
        ...     weight.grad = torch.zeros(2)
        ...     optimizer.step()
        >>> weight[0].item(), abs(weight[1].item()) < 0.002
        (1.0, True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        steps: int,
        pull: float = 4e-7,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "steps": steps,
            "pull": pull,
            "maximize": maximize,
        }
        _check(defaults)
        self._masks: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own hyperparameters if given. An error changes nothing."""
        if isinstance(param_group, dict):  # else the base class says what is wrong
            _check({**self.defaults, **param_group})
            if isinstance(params := param_group.get("params", ()), Iterator):  # it is read twice
                params = param_group["params"] = list(params)
            for item in [params] if isinstance(params, Tensor) else params:
                p = item[1] if isinstance(item, tuple) else item
                if isinstance(p, Tensor) and p.requires_grad and p.dtype not in (torch.float32, torch.float64):
                    raise ValueError(
                        f"AdamS takes float32 or float64 weights, got one of {p.dtype} and shape {tuple(p.shape)}: a "
                        "pull as small as 4e-7 is lost in its rounding. Keep the weights in float32 and compute in "
                        "half precision by torch.autocast, or by FSDP2's MixedPrecisionPolicy."
                    )
        super().add_param_group(param_group)

    def set_pull_masks(self, masks: Mapping[Tensor, Tensor | None]) -> None:
        """Say which weights are drawn towards zero. :class:`horst.sparsity.CAST` calls this; ``state_dict`` lacks it.

        It is not the ``set_masks`` of HORST, which zeroes what is outside.

        Args:
            masks: For parameters of this optimizer, a boolean tensor shaped like the (local) weight, False where it is
                drawn towards zero; None ends that. Parameters that are not named keep their masks.
        """
        self._masks = with_new_masks(self, self._masks, masks)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of ``torch.optim.AdamW``; options that AdamW lacks keep their values."""
        super().load_state_dict(with_own_options(self, state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_masks", {})  # who set masks sets them again on a copy

    # torch.compile calls this method outside of its trace, by this name and with lists that it fills.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """Fill the lists with the group's parameters that have a gradient; missing states are created."""
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"AdamS needs dense gradients, got {p.grad.layout} for a parameter of shape {tuple(p.shape)}. Use "
                    "sparse=False in nn.Embedding, or torch.optim.SparseAdam for it."
                )
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            params.append(p)
            grads.append(p.grad)
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            steps.append(state["step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Function that evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors = StepTensors([], [], [], [], [])
            self._init_group(group, *tensors)
            masks = [self._masks.get(p) for p in tensors.params]
            for row, mask in zip(zip(*local_shards(tensors), strict=True), masks, strict=True):
                _single_tensor_adams(*row, mask, group)
        return loss


def _single_tensor_adams(
    theta: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, mask: Tensor | None, group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    lr, pull = group["lr"], group["pull"]
    step += 1
    t = step.double() if torch.compiler.is_compiling() else step.item()  # the compiler would compile for each number
    g = -g if group["maximize"] else g
    m.lerp_(g, 1 - beta1)
    mu = m / (1 - beta1**t)
    if mask is not None:
        share = t / group["steps"]
        share = share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)
        mu = torch.where(mask, mu, (1 - share) * mu + share * pull * theta.sign())
        g = torch.where(mask, g, mu)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    theta.mul_(1 - lr * group["weight_decay"])
    theta.sub_(lr * mu / ((v / (1 - beta2**t)).sqrt_().add_(group["eps"])))


def _check(group: dict[str, Any]) -> None:
    check_adamw_options(group)
    check_number("pull", group["pull"], "4e-7 is CAST's; 0 leaves it out")
    steps = group["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < math.inf:
        raise ValueError(f"steps must be the number of training steps, at least 1, got {steps!r}.")
    if not isinstance(group["maximize"], bool):
        raise TypeError(f"maximize must be True or False, got {group['maximize']!r}.")
