"""What a change of masks does to the optimizer's memory, for any ``torch.optim.Optimizer``.

State tensors are found by shape: every floating-point entry of ``optimizer.state[p]`` shaped like ``p`` belongs to
``p``'s weights one by one (Adam's moments, SGD's momentum). Factored, quantised and scalar entries are left alone, and
so is ``step``, unless asked for.

Between events nothing is touched: the engine zeroes the gradients of pruned weights, so their moments fade by
themselves, and AdamW's decay of a zero weight is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from horst.parameters.sharding import local_shard

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "exp_avg_var")


@dataclass(frozen=True)
class StatePolicy:
    """Which entries of the optimizer's state are zeroed when masks change.

    Args:
        on_prune: Rule when weights are removed: ``"keep"``, ``"reset-pruned"`` (their entries) or ``"reset-all"``
            (every entry of every parameter).
        on_restore: Rule when weights come back: ``"keep"``, ``"reset-regrown"`` (their entries) or ``"reset-all"``.
        moments: Entries to reset. ``"both"``: every state tensor shaped like its parameter, whatever its name.
            ``"first"`` or ``"second"``: those whose names are known (:data:`FIRST_MOMENTS`, :data:`SECOND_MOMENTS`). Or
            a tuple of names. Optimizers that keep *weights* in their state (a float32 master copy, schedule-free's
            ``z``) need names with ``"reset-all"``.
        reset_step: Whether ``"reset-all"`` also sets ``step`` to 0, as bias correction needs when both moments restart.

    Example:
        >>> StatePolicy(on_restore="reset-all", moments="first")  # AC/DC's reference: momentum restarts
        StatePolicy(on_prune='keep', on_restore='reset-all', moments='first', reset_step=False)
    """

    on_prune: Literal["keep", "reset-pruned", "reset-all"] = "keep"
    on_restore: Literal["keep", "reset-regrown", "reset-all"] = "reset-regrown"
    moments: Literal["both", "first", "second"] | tuple[str, ...] = "both"
    reset_step: bool = False

    def __post_init__(self) -> None:
        for field, some in (("on_prune", "reset-pruned"), ("on_restore", "reset-regrown")):
            if getattr(self, field) not in (allowed := ("keep", some, "reset-all")):
                raise ValueError(f"{field} must be one of {allowed}, got {getattr(self, field)!r}.")
        if not isinstance(self.moments, tuple) and self.moments not in ("both", "first", "second"):
            raise ValueError(
                f"moments must be 'both', 'first', 'second' or a tuple of state names, got {self.moments!r}."
            )
        if self.reset_step and "reset-all" not in (self.on_prune, self.on_restore):
            raise ValueError("reset_step=True restarts the step count, which only 'reset-all' does: set one to it.")

    @property
    def names(self) -> tuple[str, ...] | None:
        """The state names that ``moments`` stands for; None for any."""
        known = {"both": None, "first": FIRST_MOMENTS, "second": SECOND_MOMENTS}
        return self.moments if isinstance(self.moments, tuple) else known[self.moments]

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse ``moments`` that no state tensor answers to; possible once the optimizers have taken a step."""
        if self.names is None or self.on_prune == self.on_restore == "keep":
            return
        for optimizer in optimizers:
            found = {key for _, key, _ in _entries(optimizer, None)}
            if found and not found & set(self.names):
                raise ValueError(
                    f"moments={self.moments!r} stands for {self.names}, but the state of {type(optimizer).__name__} "
                    f"has {sorted(found)}. Name the entries to reset: StatePolicy(..., moments={tuple(sorted(found))})."
                )

    def apply(
        self, event: Literal["prune", "restore"], optimizers: Iterable[Optimizer], changed: dict[Tensor, Tensor]
    ) -> None:
        """Zero what the policy says; ``changed`` holds a local mask of the removed or regrown weights by parameter."""
        rule = self.on_prune if event == "prune" else self.on_restore
        if rule == "keep":
            return
        optimizers = list(optimizers)
        self.check(optimizers)
        for optimizer in optimizers:
            for p, _, entry in _entries(optimizer, self.names):
                if rule == "reset-all":
                    entry.zero_()
                elif p in changed:
                    entry.masked_fill_(changed[p].to(entry.device), 0)  # state may be offloaded
            if rule == "reset-all" and self.reset_step:
                for state in optimizer.state.values():
                    if isinstance(state.get("step"), Tensor):
                        state["step"].zero_()
                    elif "step" in state:
                        state["step"] = 0


def _entries(optimizer: Optimizer, names: tuple[str, ...] | None) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Parameter, name and local part of every state tensor that belongs to the parameter's weights one by one."""
    found = [
        (p, key, value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    # A parameter with no dimensions has the shape of its step count, of NAdam's running product and the like. Their
    # names are those that are scalars for other parameters too.
    scalars = {"step"} | {key for p, key, value in found if value.dim() == 0 < p.dim()}
    for p, key, value in found:
        if key not in scalars and value.shape == p.shape and (names is None or key in names):
            yield p, key, local_shard(value)


# AC/DC's reference zeroes the momentum of all parameters at each restore and nothing when it prunes. It trains with
# SGD; under Adam only the first moment is momentum. The second is kept: zeroed under a running step count it would be
# far too small for a thousand steps and the updates too large.
ACDC_REFERENCE = StatePolicy(on_prune="keep", on_restore="reset-all", moments="first")
