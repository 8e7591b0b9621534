"""When the masks change, counted in optimizer steps, and the presets of the methods' papers.

An event *at step k* acts when ``k`` optimizer steps are done, so before the (k+1)-th forward pass: the "beginning of an
epoch" that AC/DC's reference implementation speaks of. Schedules are plain frozen data; :meth:`table` prints one.

References: AC/DC, Peste et al. 2021. GMP, Zhu and Gupta 2017. RigL, Evci et al. 2020. Rewinding, Frankle et al. 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from types import FunctionType
from typing import Literal


@dataclass(frozen=True)
class Phases:
    """Alternating phases: dense up to ``changes[0]``, sparse up to ``changes[1]``, dense again, and so on.

    Args:
        changes: The steps at which phases change; the first and the last begin a sparse phase.
        end: Steps of the whole run; the last sparse phase ends there.
        steps_per_epoch: Length of an epoch, in which the table is printed; nothing else reads it.

    Example:
        >>> print(Phases((10, 15, 30), end=50).table())
        phase   from  to   length
        dense      0   10      10
        sparse    10   15       5
        dense     15   30      15
        sparse    30   50      20
    """

    changes: tuple[int, ...]
    end: int
    steps_per_epoch: int = 1

    def __post_init__(self) -> None:
        bounds = (*self.changes, self.end)
        for bound in bounds:
            _check_whole(step=bound)
        if len(self.changes) % 2 == 0:
            raise ValueError(
                f"a run must end in a sparse phase, so the phase changes an odd number of times, "
                f"got {len(self.changes)} changes: {self.changes}."
            )
        if self.changes[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"phases must start at 0 or later, in order and before the end, got {bounds}.")
        if self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch}.")

    def change(self, step: int) -> Literal["prune", "restore"] | None:
        """What happens at ``step``."""
        if step not in self.changes:
            return None
        return "prune" if self.changes.index(step) % 2 == 0 else "restore"

    @property
    def prune_at(self) -> tuple[int, ...]:
        """Steps that begin a sparse phase."""
        return self.changes[::2]

    @property
    def restore_at(self) -> tuple[int, ...]:
        """Steps that begin a dense phase, after the first."""
        return self.changes[1::2]

    def table(self) -> str:
        """The phases, one per line, in epochs (in steps where ``steps_per_epoch`` is 1)."""
        lines = ["phase   from  to   length"]
        for i, (start, stop) in enumerate(pairwise((0, *self.changes, self.end))):
            a, b, length = (f"{x / self.steps_per_epoch:g}" for x in (start, stop, stop - start))
            if stop > 0:  # there is no dense phase before a change at step 0
                lines.append(f"{'sparse' if i % 2 else 'dense':6} {a:>5}{b:>5}{length:>8}")
        return "\n".join(lines)


def acdc_epochs(
    epochs: int,
    steps_per_epoch: int = 1,
    *,
    warmup: int = 10,
    sparse: int = 5,
    dense: int = 5,
    last_dense: int = 10,
    last_sparse: int = 15,
) -> Phases:
    """AC/DC's reference schedule: 10 epochs dense, 5 sparse / 5 dense, the last dense phase 10, the last sparse 15.

    For 100 epochs: prune at 10, 20, ..., 70 and 85, restore at 15, 25, ..., 65 and 75. The same rule gives the paper's
    300 epochs. Where the middle does not come out even, the last sparse phase takes the rest. The reference's CIFAR
    variant is ``acdc_epochs(200, sparse=20, dense=20, last_dense=20, last_sparse=30)``.

    Args:
        epochs: Epochs of the whole run.
        steps_per_epoch: Optimizer steps in an epoch.
        warmup: Epochs of the first dense phase; the others are named likewise.

    Example:
        >>> acdc_epochs(100).prune_at, acdc_epochs(100).restore_at
        ((10, 20, 30, 40, 50, 60, 70, 85), (15, 25, 35, 45, 55, 65, 75))
    """
    _check_whole(epochs=epochs, steps_per_epoch=steps_per_epoch)
    if min(sparse, dense, last_dense, last_sparse, steps_per_epoch) < 1 or warmup < 0:
        raise ValueError("every phase must last at least one epoch, and an epoch at least one step.")
    shortest = warmup + sparse + last_dense + last_sparse
    if epochs < shortest:
        raise ValueError(
            f"AC/DC's phases need at least {shortest} epochs ({warmup} dense, {sparse} sparse, {last_dense} dense, "
            f"{last_sparse} sparse), got {epochs}. Shorten the phases, or use acdc_steps, which scales them."
        )
    changes = [warmup, warmup + sparse]
    while changes[-1] + dense + sparse + last_dense + last_sparse <= epochs:
        changes += [changes[-1] + dense, changes[-1] + dense + sparse]
    changes.append(changes[-1] + last_dense)
    return Phases(tuple(c * steps_per_epoch for c in changes), epochs * steps_per_epoch, steps_per_epoch)


def acdc_steps(total_steps: int) -> Phases:
    """The 100-epoch schedule of :func:`acdc_epochs` stretched or shrunk to ``total_steps``.

    Example:
        >>> acdc_steps(50).prune_at
        (5, 10, 15, 20, 25, 30, 35, 42)
    """
    if total_steps < 20:
        raise ValueError(f"AC/DC's sixteen phases need at least 20 steps, got {total_steps}.")
    return Phases(tuple(c * total_steps // 100 for c in acdc_epochs(100).changes), total_steps)


@dataclass(frozen=True)
class Cubic:
    r"""Gradual magnitude pruning: fast at first, slow towards the end.

    .. math:: s_t = s_f + (s_i - s_f) (1 - \mathrm{progress})^3

    where :math:`s_i` is ``initial``, :math:`s_f` the method's sparsity, and progress runs from 0 at ``begin`` to 1 at
    ``end``.

    Args:
        begin: Step of the first pruning.
        end: Step of the last, which reaches the final sparsity; masks are fixed afterwards.
        every: Steps between prunings.
        initial: Sparsity at ``begin``.

    Example:
        >>> schedule = Cubic(begin=0, end=100, every=50)
        >>> [round(schedule.sparsity(step, 0.8), 6) for step in (0, 50, 100)]
        [0.0, 0.7, 0.8]
    """

    begin: int
    end: int
    every: int = 100
    initial: float = 0.0

    def __post_init__(self) -> None:
        _check_whole(begin=self.begin, end=self.end, every=self.every)
        if not 0 <= self.begin < self.end:
            raise ValueError(f"pruning must end after it begins, got begin={self.begin}, end={self.end}.")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}.")
        if not 0.0 <= self.initial < 1.0:
            raise ValueError(f"initial sparsity must lie in [0, 1), got {self.initial}. Give a fraction: 0.5, not 50.")

    def is_due(self, step: int) -> bool:
        """Whether the masks grow at ``step``."""
        return step == self.end or (self.begin <= step < self.end and (step - self.begin) % self.every == 0)

    def sparsity(self, step: int, final: float) -> float:
        """The target at ``step``."""
        # In fractions of the decimals as written: half of 0.936 is 0.468, of which floating point would make less, and
        # one weight of a thousand too few would go.
        left = 1 - min(max(Fraction(step - self.begin) / Fraction(self.end - self.begin), Fraction(0)), Fraction(1))
        s_f, s_i = _as_written(final), _as_written(self.initial)
        return float(s_f + (s_i - s_f) * left**3)

    def table(self, final: float = 1.0) -> str:
        """The step and target of every pruning, as a share of ``final``."""
        due = [step for step in range(self.begin, self.end + 1) if self.is_due(step)]
        return "\n".join(["    step  sparsity", *(f"{step:>8}  {self.sparsity(step, final):.6f}" for step in due)])


@dataclass(frozen=True)
class DropGrow:
    """When RigL and SET exchange weights, and how many.

    Args:
        every: Steps between exchanges; the first is at step ``every``.
        end: Step from which on nothing is exchanged.
        fraction: Share of a layer's kept weights exchanged at the start.
        decay: Decay of ``fraction``: ``"cosine"`` to zero at ``end`` (the paper) or ``"constant"`` (the published
            code's default).

    Example:
        >>> schedule = DropGrow(every=100, end=300)
        >>> [step for step in range(400) if schedule.is_due(step)], round(schedule.drop_fraction(150), 3)
        ([100, 200], 0.15)
    """

    every: int = 100
    end: int = 25_000
    fraction: float = 0.3
    decay: Literal["cosine", "constant"] = "cosine"

    def __post_init__(self) -> None:
        _check_whole(every=self.every, end=self.end)
        if self.every < 1 or self.end <= self.every:
            raise ValueError(
                f"the first exchange, at step every={self.every}, must come before end={self.end}; every at least 1."
            )
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must lie in (0, 1], got {self.fraction}.")
        if self.decay not in ("cosine", "constant"):
            raise ValueError(f"decay must be 'cosine' or 'constant', got {self.decay!r}.")

    def is_due(self, step: int) -> bool:
        """Whether weights are exchanged at ``step``."""
        return 0 < step < self.end and step % self.every == 0

    def drop_fraction(self, step: int) -> float:
        """Share of the kept weights exchanged at ``step``."""
        if self.decay == "constant":
            return self.fraction
        return self.fraction / 2 * (1.0 + math.cos(math.pi * min(step / self.end, 1.0)))

    def table(self) -> str:
        """The step and share of every exchange."""
        due = range(self.every, self.end, self.every)
        return "\n".join(["    step  exchanged", *(f"{step:>8}  {self.drop_fraction(step):.6f}" for step in due)])


def rigl_steps(total_steps: int, *, every: int = 100, fraction: float = 0.3, until: float = 0.75) -> DropGrow:
    """RigL's defaults: every 100 steps, a cosine from 0.3, until 75 % of training.

    Example:
        >>> rigl_steps(32_000).end
        24000
    """
    if not 0.0 < until <= 1.0:
        raise ValueError(f"until is a share of training in (0, 1], got {until}.")
    end = int(total_steps * until)
    if every >= end:
        raise ValueError(
            f"{total_steps} steps are too few for an exchange every {every} steps, the last before step {end} "
            f"(until={until}). Pass every=, as in rigl_steps({total_steps}, every=5); in a trainer's callback "
            "schedule=lambda steps: rigl_steps(steps, every=5)."
        )
    return DropGrow(every=every, end=end, fraction=fraction)


@dataclass(frozen=True)
class Rounds:
    """Lottery-ticket rounds: train, prune, rewind to an early step, train again.

    After round 0 trains ``steps_per_round`` steps, each of the ``rounds`` prunings rewinds the weights to what they
    were after ``rewind_to`` steps and trains the ``steps_per_round - rewind_to`` steps from there.

    Example:
        >>> rounds = Rounds(rounds=2, steps_per_round=100, rewind_to=10)
        >>> print(rounds.table())
        round  from step  to step  density
            0          0      100  1
            1        100      190  d^(1/2)
            2        190      280  d
        >>> rounds.training_step(100), rounds.training_step(189)
        (10, 99)
    """

    rounds: int
    steps_per_round: int
    rewind_to: int = 0

    def __post_init__(self) -> None:
        _check_whole(rounds=self.rounds, steps_per_round=self.steps_per_round, rewind_to=self.rewind_to)
        if self.rounds < 1:
            raise ValueError(f"at least one round of pruning is needed, got rounds={self.rounds}.")
        if not 0 <= self.rewind_to < self.steps_per_round:
            raise ValueError(
                f"rewind_to must lie in a round, [0, {self.steps_per_round}), got {self.rewind_to}. "
                "It is the early step whose weights every round starts from."
            )

    def round_at(self, step: int) -> int:
        """The round that the forward pass after ``step`` steps belongs to."""
        done = step - self.steps_per_round
        return 0 if done < 0 else min(1 + done // (self.steps_per_round - self.rewind_to), self.rounds)

    def starts_round(self, step: int) -> bool:
        """Whether ``step`` prunes and rewinds."""
        return step > 0 and self.round_at(step) != self.round_at(step - 1)

    def training_step(self, step: int) -> int:
        """The step within the run of one network: what a learning-rate schedule should be given."""
        if (r := self.round_at(step)) == 0:
            return step
        return self.rewind_to + step - self.steps_per_round - (r - 1) * (self.steps_per_round - self.rewind_to)

    def sparsity(self, round_: int, final: float) -> float:
        """The sparsity of round ``round_``: every pruning removes the same share of what is left."""
        return final if round_ == self.rounds else 1.0 - float(1 - _as_written(final)) ** (round_ / self.rounds)

    @property
    def end(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_round + self.rounds * (self.steps_per_round - self.rewind_to)

    def table(self) -> str:
        """The rounds, with the density of each as a power of the final density d."""
        lines = ["round  from step  to step  density"]
        start = 0
        for r in range(self.rounds + 1):
            stop = self.steps_per_round + r * (self.steps_per_round - self.rewind_to)
            density = "1" if r == 0 else "d" if r == self.rounds else f"d^({r}/{self.rounds})"
            lines.append(f"{r:>5}{start:>11}{stop:>9}  {density}")
            start = stop
        return "\n".join(lines)


@dataclass(frozen=True)
class Refresh:
    """A mask that is chosen anew every ``every`` steps, for the last time at step ``end``, and fixed from then on.

    Example:
        >>> [step for step in range(30) if Refresh(every=10, end=24).is_due(step)]
        [0, 10, 20, 24]
    """

    every: int
    end: int

    def __post_init__(self) -> None:
        _check_whole(every=self.every, steps=self.end)
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}.")
        if self.end < 1:
            raise ValueError(f"steps must be at least 1, got {self.end}. Give the number of steps of the whole run.")

    def is_due(self, step: int) -> bool:
        """Whether the mask is chosen at ``step``."""
        return step == self.end or (step < self.end and step % self.every == 0)


# How a schedule of each kind is made, for those who gave something else.
_MADE_BY = {
    Phases: "acdc_steps(total_steps) or acdc_epochs(epochs, steps_per_epoch)",
    Cubic: "Cubic(begin, end)",
    DropGrow: "rigl_steps(total_steps) or DropGrow(every, end)",
    Rounds: "Rounds(rounds, steps_per_round)",
}


def check_schedule(method: object, schedule: object, kind: type) -> None:
    """Refuse a ``schedule`` that is not of the ``kind`` that ``method`` follows."""
    if not isinstance(schedule, kind):
        given = f"the function {schedule.__name__}" if isinstance(schedule, FunctionType) else repr(schedule)
        hint = " A function is called for you by the trainers' callbacks only." if callable(schedule) else ""
        raise TypeError(
            f"the schedule of {type(method).__name__} must be a {kind.__name__}, got {given}. "
            f"Make it with {_MADE_BY[kind]}.{hint}"
        )


def _check_whole(**numbers: float) -> None:
    """Refuse fractions of steps: no step is ever equal to one, and what is due then would not happen."""
    for name, number in numbers.items():
        if number % 1 != 0:  # this form refuses infinity and NaN too
            raise ValueError(f"{name} must be a whole number, got {number}. Divide with //, or round.")


def _as_written(x: float) -> Fraction:
    """0.9 as nine tenths, which the binary number is not."""
    return Fraction(repr(float(x)))
