"""Methods of other papers as settings of those here: each takes the run's sparsity and steps, and returns a sparsifier.

A preset fixes what its paper fixes. Options of the method it is made of replace its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from horst.sparsity.admm import ADMM
from horst.sparsity.controller import Sparsifier
from horst.sparsity.gmp import GMP, gmp_steps
from horst.sparsity.imp import IMP, rounds_to
from horst.sparsity.rigl import RigL
from horst.sparsity.schedules import DropGrow, Rounds, rigl_steps

__all__ = ["PRESETS", "lrr", "safe", "sparse_opt", "sparse_pretraining", "svite"]


def svite(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sparsity: float = 0.5, steps: int, **options: Any
) -> RigL:
    """SViTE, for DeiT: RigL with ERK, in a hundred exchanges over all of training, from half of the weights on.

    Its code exchanges every 15,000 of the 1.5 million steps of DeiT-small, over a cosine from 0.5, and masks every
    matrix and convolution (``layers="all"``). Its sparsities are 0.4 to 0.6. Left out are its structured variant, which
    removes heads and neurons, and its choice of tokens.

    Args:
        steps: Optimizer steps of the whole run.
        options: Options of :class:`~horst.sparsity.rigl.RigL`; ``schedule`` replaces the hundred exchanges.

    Example:
        >>> import torch
        >>> model = nn.Linear(16, 16)
        >>> sparsifier = svite(model, torch.optim.AdamW(model.parameters()), steps=1_500_000)
        >>> sparsifier.schedule, sparsifier.current_sparsity
        (DropGrow(every=15000, end=1500000, fraction=0.5, decay='cosine'), 0.5)

    References: Chen et al., *Chasing Sparsity in Vision Transformers: An End-to-End Exploration*, 2021.
    """
    schedule = DropGrow(every=max(1, steps // 100), end=steps, fraction=0.5)
    return RigL(model, optimizer, sparsity=sparsity, **{"schedule": schedule, "layers": "all", **options})


def sparse_opt(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sparsity: float, steps: int, **options: Any
) -> RigL:
    """SparseOpt: RigL whose updates are scaled by the density of each output neuron. For SGD; Adam undoes it.

    Args:
        steps: Optimizer steps of the whole run. Weights are exchanged every 75th part of them, for three quarters.
        options: Options of :class:`~horst.sparsity.rigl.RigL`.

    Example:
        >>> import torch
        >>> model = nn.Linear(16, 16)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> sparse_opt(model, sgd, sparsity=0.9, steps=1000, layers="all_linear").scale_gradients
        True

    References: *SparseOpt*, 2026; see :class:`~horst.sparsity.gradient_scaling.ScalesGradients`.
    """
    schedule = rigl_steps(steps, every=max(1, steps // 75))
    return RigL(model, optimizer, sparsity=sparsity, **{"schedule": schedule, "scale_gradients": True, **options})


def lrr(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sparsity: float, steps: int, **options: Any
) -> IMP:
    """LRR: rounds that prune at most 20 % of what is left, keep the weights, and run the whole lr schedule again.

    Args:
        steps: Optimizer steps of all rounds together. They are equally long; steps that are left over follow the last.
        options: Options of :class:`~horst.sparsity.imp.IMP`; ``schedule`` replaces the rounds.

    Example:
        >>> import torch
        >>> model = nn.Linear(16, 16)
        >>> sparsifier = lrr(model, torch.optim.SGD(model.parameters()), sparsity=0.5, steps=100, layers="all_linear")
        >>> sparsifier.schedule
        Rounds(rounds=4, steps_per_round=20, rewind_to=0)

    References: Renda, Frankle, Carbin, *Comparing Rewinding and Fine-tuning in Neural Network Pruning*, 2020.
    """
    rounds = rounds_to(sparsity, 1).rounds
    if steps <= rounds:
        raise ValueError(
            f"{steps} steps are too few for {rounds + 1} rounds of training to sparsity {sparsity}. Train longer."
        )
    schedule = Rounds(rounds, steps_per_round=steps // (rounds + 1))
    return IMP(model, optimizer, sparsity=sparsity, **{"schedule": schedule, "rewind": "lr", **options})


def safe(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sparsity: float, steps: int, **options: Any
) -> ADMM:
    """SAFE: ADMM with SAM's ascent, for flat minima. The loop makes a second backward pass, see ``ADMM.ascended``.

    The pull is 1e-3, the radius 0.1, as in its runs on images; on text ``sam_radius=2e-4``.

    Args:
        steps: Optimizer steps of the whole run.
        options: Options of :class:`~horst.sparsity.admm.ADMM`.

    Example:
        >>> import torch
        >>> model = nn.Linear(16, 16)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> safe(model, sgd, sparsity=0.9, steps=1000, layers="all_linear").sam_radius
        0.1

    References: Lee et al., *SAFE: Finding Sparse and Flat Minima to Improve Pruning*, 2025.
    """
    return ADMM(model, optimizer, sparsity=sparsity, steps=steps, **{"penalty": 1e-3, "sam_radius": 0.1, **options})


def sparse_pretraining(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sparsity: float, steps: int, **options: Any
) -> GMP:
    """Sparse pretraining: GMP that begins after 25 % of training and ends after 75 %.

    Args:
        steps: Optimizer steps of the whole run.
        options: Options of :class:`~horst.sparsity.gmp.GMP`.

    Example:
        >>> import torch
        >>> model = nn.Linear(16, 16)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> sparse_pretraining(model, adamw, sparsity=0.5, steps=1000, layers="all_linear").schedule
        Cubic(begin=250, end=750, every=10, initial=0.0)
    """
    return GMP(model, optimizer, sparsity=sparsity, **{"schedule": gmp_steps(steps), **options})


PRESETS: dict[str, Callable[..., Sparsifier]] = {
    "svite": svite,
    "sparse_opt": sparse_opt,
    "lrr": lrr,
    "safe": safe,
    "sparse_pretraining": sparse_pretraining,
}
