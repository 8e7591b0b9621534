"""``alpha="auto"``: the strength of the mirror step from the learning rate, the second beta and the weights' size.

``alpha * lr`` is the learning rate of the logarithms of the weights. The rule sets it, at the learning rate the
optimizer is built with (the peak of the usual schedules), to ``NOISE_IN_LOG * sqrt(1 - beta2)``: Adam divides by a mean
of squared gradients over about ``1 / (1 - beta2)`` steps, and in that time noise moves the logarithm of a weight by the
rate times the root of that number, so the weights are still those whose gradients were averaged. Learning rates above
``max_step``, which is ``MAX_STEP_PER_RMS`` times the weights' root mean square unless a group has its own, are clipped
to it. Alpha is at most ``MAX_MIRROR_PER_ADAM`` over the root mean square: on a weight of that size the mirror half of a
step is at most so many times Adam's half, which keeps the small learning rates of fine-tuning from making alpha huge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from horst.parameters.kinds import refuse_flat_shards
from horst.user_warnings import warn_user

Alpha = float | Literal["auto"]
AUTO = "auto"
NOISE_IN_LOG = 0.2
MAX_STEP_PER_RMS = 0.1
MAX_MIRROR_PER_ADAM = 2.0


def chosen_alpha(lr: float, beta2: float, size: float, max_step: float) -> float:
    """The rule: the rate over the learning rate, clipped where the mirror half would outweigh Adam's.

    Args:
        lr: Peak of the learning rate.
        beta2: Decay rate of Adam's average of squared gradients.
        size: Root mean square of the weights.
        max_step: Bound that learning rates are clipped to.

    Example:
        >>> [round(chosen_alpha(lr, 0.999, 0.02, 0.002), 3) for lr in (1e-3, 1.0, 1e-5)]
        [6.325, 3.162, 100.0]
    """
    rate = NOISE_IN_LOG * math.sqrt(1 - beta2)
    return min(rate / min(lr, max_step), MAX_MIRROR_PER_ADAM / size)


def at_most(lr: float | Tensor, max_step: float | None) -> float | Tensor:
    """The learning rate, or the bound if that is less. A tensor stays on its device, and the host does not wait.

    Example:
        >>> at_most(0.01, 0.002), at_most(0.001, 0.002), at_most(0.01, None)
        (0.002, 0.001, 0.01)
    """
    if max_step is None:
        return lr
    return lr.clamp(max=max_step) if isinstance(lr, Tensor) else min(lr, max_step)


class AutoAlpha:
    """``alpha="auto"`` in the groups of one optimizer: chosen once, and watched afterwards.

    Args:
        prefix: Prefix of the names ``alpha`` and ``max_step`` in the groups.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix, self._alpha, self._max_step = prefix, prefix + "alpha", prefix + "max_step"
        # by a group's first parameter: the alpha that was chosen, and the lr it was chosen for
        self._chosen: dict[int, tuple[float, float]] = {}

    def resolve(
        self,
        groups: Sequence[dict[str, Any]],
        mirrored: Callable[[dict[str, Any]], Iterable[Tensor]],
        everything: Iterable[Tensor],
    ) -> None:
        """Replace ``"auto"`` in groups by the rule's number, and a ``max_step`` of None by the rule's.

        Args:
            groups: Groups of an optimizer.
            mirrored: Function from a group to its tensors that get the mirror step. The size of those that train
                decides.
            everything: All tensors of the optimizer; the others decide where those are all zeros, as a new bias is.
        """
        waiting = [group for group in groups if group[self._alpha] == AUTO]
        if not waiting:
            return
        peaks = [_peak(group) for group in waiting]
        if not min(peaks) > 0:
            raise ValueError(
                f"alpha='auto' is a rate over the learning rate, and lr is {min(peaks):g}. Build the optimizer with "
                "the peak of the schedule as lr, or give alpha as a number."
            )
        own = [p for group in waiting for p in mirrored(group)]
        if not own:
            for group in waiting:
                group[self._alpha] = 0.0
            return
        refuse_flat_shards(own, "alpha='auto' looks at whole weights")
        chosen = [p for p in own if p.requires_grad] or own
        size = root_mean_square(chosen)
        if size == 0:
            zeros = set(map(id, own))
            size = root_mean_square(p for p in everything if id(p) not in zeros)
        if not 0 < size < math.inf:
            raise ValueError(
                f"alpha='auto' looks at the size of the weights, whose root mean square is {size}. Give them their "
                "starting values before the optimizer is built, or give alpha as a number."
            )
        max_step = MAX_STEP_PER_RMS * size
        clipped = 0.0  # the largest learning rate that is
        for group, lr in zip(waiting, peaks, strict=True):
            if group[self._max_step] is None:
                group[self._max_step] = max_step
                clipped = max(clipped, lr if lr > max_step else 0.0)
            _, beta2 = group.get("betas", (0.0, 0.95))
            group[self._alpha] = chosen_alpha(lr, float(beta2), size, group[self._max_step])
            self._chosen[_key(group)] = (group[self._alpha], lr)
        if clipped:
            warn_user(
                f"lr={clipped:.3g} is more than {MAX_STEP_PER_RMS:g} times the weights' root mean square of "
                f"{size:.3g}, and alpha='auto' clips it to {max_step:.3g}. Lower lr, or keep all of it with "
                f"group['max_step'] = {clipped:.3g} in each group before the optimizer is built."
            )

    def loadable(self, own: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups that are to be loaded, less an ``"auto"`` that another optimizer, such as AdamW, carried unread.

        Warns where a group's strength was chosen for a smaller learning rate than a loaded one without a strength has.
        """
        unread = (self._alpha, self._max_step)
        groups = [{k: v for k, v in g.items() if g.get(self._alpha) != AUTO or k not in unread} for g in loaded]
        if len(own) == len(groups):  # else the base class says what is wrong
            for group, new in zip(own, groups, strict=True):
                if self._alpha not in new:
                    self._warn_beyond(group, _peak(new), "the state that is loaded has")
        return groups

    def check_step(self, group: dict[str, Any]) -> None:
        """Warn, once per group, where its learning rate has risen above the one its strength was chosen for."""
        if _key(group) in self._chosen and not isinstance(group["lr"], Tensor):
            self._warn_beyond(group, group["lr"], "it now has")

    def _warn_beyond(self, group: dict[str, Any], lr: float, whose: str) -> None:
        alpha, built = self._chosen.get(_key(group), (None, 0.0))
        if alpha is None or group[self._alpha] != alpha or not lr > 1.01 * built:  # 1.01: a schedule's rounding
            return
        bound = group[self._max_step]
        if bound is not None and built > bound:  # it was clipped from the start: nothing changes
            return
        del self._chosen[_key(group)]
        used = at_most(lr, bound)
        clipped = "" if used == lr else f", clipped to {self._max_step}={bound:.3g}"
        product = f": alpha * lr is {alpha * used:.3g}, not {alpha * built:.3g}" if used > 1.01 * built else ""
        warn_user(
            f"alpha='auto' chose {self._alpha}={alpha:.3g} for lr={built:.3g}, and {whose} lr={lr:.3g}{clipped}"
            f"{product}. Build the optimizer with the peak of the schedule as lr"
            f"{f', or lower {self._alpha} in its groups' if product else ''}."
        )


def _key(group: dict[str, Any]) -> int:
    return id(next(iter(group["params"]), None))


def _peak(group: dict[str, Any]) -> float:
    """The largest learning rate in a group: in the middle of a schedule its peak stands beside ``lr``."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group)


@torch.no_grad()
def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """The root mean square of the entries of all tensors of two or more dimensions, or of all tensors without any.

    Example:
        >>> root_mean_square([torch.full((2, 2), 3.0), torch.ones(100)])
        3.0
    """
    tensors = [t for t in tensors if t.numel()]
    chosen = [t for t in tensors if t.dim() >= 2] or tensors
    if any(t.is_meta for t in chosen):
        raise ValueError(
            "alpha='auto' looks at the size of the weights, and some are on the meta device. Give them values before "
            "the optimizer is built, or give alpha as a number."
        )
    total, count = 0.0, 0
    for t in chosen:
        square = t.detach().to(torch.promote_types(t.dtype, torch.float32)).square().sum()
        total += float(square.full_tensor() if hasattr(square, "full_tensor") else square)  # a DTensor: over all ranks
        count += t.numel()
    return math.sqrt(total / count) if count else 0.0
