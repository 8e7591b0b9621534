"""How a run shows itself: a bar in a terminal, lines in a log elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from horst.extras import load_extra

logger = logging.getLogger(__name__)


class ProgressBar:
    """Steps done, loss, tokens or images per second, time left.

    In a terminal (and with rich installed) a bar, else a line through ``logging`` at each update. A terminal that is
    closed is no error: the run has a checkpoint to save.

    Args:
        steps: Steps of the whole run.
        step: Steps done so far.
        unit: Unit of the rate: ``"tokens"``, ``"images"``.
        shown: Whether to show anything; False on all ranks but one.
        name: Name of the run, such as its optimizer's.
    """

    def __init__(self, steps: int, *, step: int = 0, unit: str = "rows", shown: bool = True, name: str = "") -> None:
        self.steps, self.unit, self.shown = steps, unit, shown
        self._name = f"{name}, " if name else ""
        self._bar = _make_bar() if shown and sys.stderr.isatty() else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=steps, completed=step, numbers="")

    def update(self, step: int, loss: float, rate: float, seconds_left: float) -> None:
        """Show the state after ``step`` steps."""
        numbers = f"loss {loss:.4f}, {compact(rate)} {self.unit}/s, {timedelta(seconds=round(seconds_left))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._name + numbers)
        elif self.shown:
            logger.info("%sstep %d of %d: %s", self._name, step, self.steps, numbers)

    def say(self, message: str) -> None:
        """A line above the bar, or in the log."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.console.print(message, highlight=False, markup=False)
        elif self.shown:
            logger.info(message)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()


class Stopwatch:
    """Units per second of training time, lap by lap; time inside ``paused`` does not count.

    Example:
        >>> watch = Stopwatch()
        >>> watch.count(100)
        >>> rate, seconds_per_step = watch.lap(steps=10)
        >>> watch.rate is None
        True
    """

    def __init__(self) -> None:
        self._began = self._lap_began = time.perf_counter()
        self._lap_units = 0
        self._laps, self._units, self._seconds = 0, 0, 0.0  # units and seconds without those of the first lap

    def start(self) -> None:
        """The first lap begins now."""
        self._lap_began = time.perf_counter()

    def add(self, seconds: float) -> None:
        """Count ``seconds`` of earlier processes, too."""
        self._began -= seconds

    @property
    def seconds(self) -> float:
        """Since this was made, with those added."""
        return time.perf_counter() - self._began

    @property
    def rate(self) -> float | None:
        """Over all laps but the first, which holds the compilation; None before the second."""
        return self._units / self._seconds if self._seconds > 0 else None

    def count(self, units: int) -> None:
        """Note ``units`` as done."""
        self._lap_units += units

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._lap_began += time.perf_counter() - began

    def lap(self, steps: int) -> tuple[float, float]:
        """End a lap of ``steps``: its units per second, its seconds per step."""
        now = time.perf_counter()
        seconds, units = max(now - self._lap_began, 1e-9), self._lap_units
        if self._laps:
            self._units, self._seconds = self._units + units, self._seconds + seconds
        self._laps += 1
        self._lap_began, self._lap_units = now, 0
        return units / seconds, seconds / max(steps, 1)


def _make_bar() -> Any:
    try:
        rich, console = load_extra("rich.progress"), load_extra("rich.console")
    except ModuleNotFoundError:  # a bar is no reason to refuse a run
        return None
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[numbers]}"))
    return rich.Progress(*columns, console=console.Console(stderr=True))


def compact(number: float) -> str:
    """Three digits and a letter.

    Example:
        >>> compact(612_345.0), compact(7.0)
        ('612 k', '7.00')
    """
    units = ((1e9, " G"), (1e6, " M"), (1e3, " k"))
    size, letter = next((unit for unit in units if number >= unit[0]), (1.0, ""))
    number /= size
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}{letter}"
