"""The ways to train sparse that a recipe can name (``methods=``), each with the length and the zeros of the run.

Every method gets the same number of optimizer steps, however many rounds it divides them into. SAFE takes two backward
passes per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from horst.sparsity import ACDC, GMP, PRESETS, SET, AtInit, Cubic, RigL, Sparsifier, acdc_epochs, acdc_steps, rigl_steps
from horst.sparsity.layers import Preset

Method = Literal["acdc", "gmp", "rigl", "set", "svite", "sparse_opt", "lrr", "safe", "sparse_pretraining", "random"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseRun:
    """What a method needs to know of a run.

    Args:
        sparsity: Share of zeros in the masked layers at the end.
        epochs: Epochs of the whole run.
        steps_per_epoch: Optimizer steps in an epoch.
        layers: Layers that are masked.
        restore: Values with which AC/DC brings weights back.
    """

    sparsity: float
    epochs: int
    steps_per_epoch: int
    layers: Preset = "blocks"
    restore: Literal["zeros", "values"] = "zeros"

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of every method."""
        return {"sparsity": self.sparsity, "layers": self.layers}


def make_sparsifier(method: Method, model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    """The sparsifier of a run, by the name of its method.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 8)
        >>> run = SparseRun(sparsity=0.5, epochs=10, steps_per_epoch=20, layers="all_linear")
        >>> type(make_sparsifier("svite", model, torch.optim.AdamW(model.parameters()), run)).__name__
        'RigL'
    """
    if method not in get_args(Method):
        raise ValueError(f"methods must be among {', '.join(get_args(Method))}, got {method!r}.")
    if method in PRESETS:
        return PRESETS[method](model, optimizer, steps=run.steps, **run.common)
    return _OWN[method](model, optimizer, run)


def _acdc(model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    if run.epochs % 100 == 0:  # the reference's epochs, as the paper's runs have them
        phases = acdc_epochs(run.epochs, steps_per_epoch=run.steps_per_epoch)
    else:
        phases = dataclasses.replace(acdc_steps(run.steps), steps_per_epoch=run.steps_per_epoch)
    return ACDC(model, optimizer, schedule=phases, restore=run.restore, **run.common)


def _gmp(model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    """From a tenth to three quarters of the steps, in about fifty prunings."""
    schedule = Cubic(run.steps // 10, 3 * run.steps // 4, every=_every(run))
    return GMP(model, optimizer, schedule=schedule, distribution="global", **run.common)


def _rigl(model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    """Until three quarters of the steps, in about fifty exchanges."""
    return RigL(model, optimizer, schedule=rigl_steps(run.steps, every=_every(run)), **run.common)


def _set(model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    return SET(model, optimizer, schedule=rigl_steps(run.steps, every=_every(run)), **run.common)


def _random(model: nn.Module, optimizer: Optimizer, run: SparseRun) -> Sparsifier:
    """A random mask that never changes."""
    return AtInit(model, optimizer, score="random", **run.common)


def _every(run: SparseRun) -> int:
    return max(1, run.steps // 75)


_OWN: dict[str, Callable[[nn.Module, Optimizer, SparseRun], Sparsifier]] = {
    "acdc": _acdc,
    "gmp": _gmp,
    "rigl": _rigl,
    "set": _set,
    "random": _random,
}
