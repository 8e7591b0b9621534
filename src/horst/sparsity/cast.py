"""CAST: dense training in which the optimizer itself draws the weights outside the mask to zero.

References: Huang et al., *CAST: Continuous and Differentiable Semi-Structured Sparsity-Aware Training for Large
Language Models*, 2025. Their learnt scales of the weights are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.sparsity.controller import Event, Options
from horst.sparsity.dense_until_end import DenseUntilEnd
from horst.sparsity.distributions import Distribution
from horst.sparsity.optimizer_hooks import unwrapped
from horst.sparsity.schedules import Refresh


class CAST(DenseUntilEnd):
    """The weights outside a magnitude mask fade to zero in the optimizer, AdamS, and are zeroed at the last step.

    Forward passes are dense. Every ``every`` steps the mask is chosen by magnitude and given to the optimizer. After
    ``steps`` steps what is outside becomes exactly zero, the mask is fixed, and training may go on with it. By then
    these weights have the size of the last learning rates: end the schedule near zero, and little is lost.

    Until then ``current_sparsity`` is 0 and evaluations see dense weights.

    Args:
        optimizer: :class:`horst.AdamS`, or a list of them. Others are refused: nothing would fade.
        sparsity: Share of zeros at the end, for masks other than N:M.
        pattern: Pattern of the mask: N:M, by default ``"2:4"``. With ``sparsity``: None (single weights) or a block.
        steps: Number of steps after which the weights are zeroed; by default, and at most, that of the optimizer.
        every: Number of steps from one mask to the next.
        distribution: Division of the zeros among the layers.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> import torch
        >>> from horst import AdamS
        >>> model = nn.Linear(8, 4)
        >>> optimizer = AdamS(model.parameters(), lr=1e-3, steps=20)
        >>> sparsifier = CAST(model, optimizer, layers="all_linear")
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     event = sparsifier.step()
        ...     optimizer.zero_grad()
        >>> event
        Event(step=20, kind='prune', sparsity=0.5)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        steps: int | None = None,
        every: int = 10,
        distribution: Distribution = "uniform",
        **options: Unpack[Options],
    ) -> None:
        optimizers = unwrapped(optimizer)
        schedule = Refresh(every, end=_steps_of(optimizers, steps))
        options.setdefault("pattern", "2:4" if sparsity is None else None)
        super().__init__(model, optimizers, sparsity=sparsity, schedule=schedule, distribution=distribution, **options)
        self._start()

    def _add_hooks(self) -> None:
        super()._add_hooks()
        self._handles += [_EndOfPull(opt, [layer.param for layer in self._layers_of(opt)]) for opt in self.optimizers]

    def _begin(self) -> None:
        self._choose_again()

    def _choose_again(self) -> None:
        self._outside = self._select(self.sparsity)
        self._set_pull()

    def _apply_mask(self) -> Event:
        event = super()._apply_mask()
        self._set_pull()
        return event

    def _set_pull(self) -> None:
        for optimizer in self.optimizers:
            layers, outside = self._layers_of(optimizer), self._outside
            masks = {l.param: ~outside[l.name] if l.name in outside else None for l in layers}
            optimizer.set_pull_masks(masks)  # type: ignore[attr-defined]

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        super()._load_extra_state(state)
        self._set_pull()


class _EndOfPull:
    """Takes the masks out of an optimizer when the sparsifier is closed, as the handle of a hook does."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer, self._params = weakref.ref(optimizer), params

    def remove(self) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.set_pull_masks(dict.fromkeys(self._params))  # type: ignore[attr-defined]


def _steps_of(optimizers: Sequence[Optimizer], steps: int | None) -> int:
    """The number of steps that is given, or that of the optimizers."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "set_pull_masks"):
            raise TypeError(
                f"CAST needs an optimizer that draws weights outside the mask to zero, and {type(optimizer).__name__} "
                "does not: use horst.AdamS(..., steps=...). For other optimizers there are ADMM and AST."
            )
    of_optimizers = {group["steps"] for optimizer in optimizers for group in optimizer.param_groups}
    if len(of_optimizers) != 1:
        raise ValueError(
            f"the groups of the optimizers differ in steps, {sorted(of_optimizers)}. Give them one number."
        )
    (total,) = of_optimizers
    if steps is not None and steps > total:
        raise ValueError(
            f"steps={steps} is more than the optimizer's steps={total}: its pull would be complete before the end. "
            "Leave steps out of CAST."
        )
    return total if steps is None else steps
