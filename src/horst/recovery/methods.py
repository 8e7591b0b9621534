"""How the masks are treated while training: one table, from the name in the config to a sparsifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from horst.recovery.config import SparsifyConfig
from horst.sparsity import ACDC, ADMM, AST, CAST, Phases, Sparsifier, StatePolicy, Static, find_layers
from horst.sparsity.controller import Options
from horst.sparsity.layers import Layer, Preset

#: The sparsifier of a stage, from the model, its optimizer, the masks that were chosen (True where kept; of a cut
#: weight, this rank's part; empty where training starts dense, and when a run goes on, whose masks are loaded), the
#: settings with the sparsity of this stage, and its steps.
Build = Callable[[nn.Module, Optimizer, Mapping[str, Tensor], SparsifyConfig, int], Sparsifier]


@dataclass(frozen=True)
class TrainMethod:
    """A treatment of the masks.

    Args:
        build: Function that makes the sparsifier.
        starts_dense: Whether training starts from the dense weights and ends sparse by itself, in one stage; else the
            weights are pruned first.
        check: Function of the settings and the steps of a stage that refuses what ``build`` could not do, before
            anything is pruned.
    """

    build: Build
    starts_dense: bool = False
    check: Callable[[SparsifyConfig, int], object] = lambda config, steps: None


def options(config: SparsifyConfig) -> Options:
    """The options of every sparsifier: which layers, and the seed; of a config that ``of_model`` gave."""
    layers = cast("Preset | None", config.layers)  # no longer "paper"
    return {"layers": layers, "include": config.include, "exclude": config.exclude, "seed": config.seed}


def chosen_layers(model: nn.Module, config: SparsifyConfig) -> list[Layer]:
    """The layers that these options choose."""
    chosen = options(config)
    return find_layers(model, chosen["layers"], include=chosen["include"], exclude=chosen["exclude"])


def with_pattern(config: SparsifyConfig) -> Options:
    """The same, for a method that chooses masks by itself."""
    return {**options(config), "pattern": config.pattern}


def _fixed(
    model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor], config: SparsifyConfig, steps: int
) -> Sparsifier:
    return Static(model, optimizer, masks=masks or None, **options(config))


def _refresh(
    model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor], config: SparsifyConfig, steps: int
) -> Sparsifier:
    # At step 0 the smallest weights are the zeros that the method left: the masks are those that were chosen.
    return ACDC(
        model, optimizer, sparsity=config.sparsity, distribution=config.distribution,
        schedule=refreshes(steps, config.refresh_every), policy=StatePolicy(on_restore="reset-regrown"),
        **with_pattern(config),
    )  # fmt: skip


def _admm(
    model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor], config: SparsifyConfig, steps: int
) -> Sparsifier:
    every = max(1, min(32, steps // 8))  # 32 in a run of thousands
    return ADMM(
        model, optimizer, sparsity=config.sparsity, distribution=config.distribution, steps=steps, every=every,
        sam_radius=config.sam_radius, **with_pattern(config),
    )  # fmt: skip


def _ast(
    model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor], config: SparsifyConfig, steps: int
) -> Sparsifier:
    ramp = max(1, steps // 2)
    return AST(model, optimizer, sparsity=config.sparsity, ramp_steps=ramp, **with_pattern(config))


def _cast(
    model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor], config: SparsifyConfig, steps: int
) -> Sparsifier:
    return CAST(
        model, optimizer, sparsity=config.sparsity, distribution=config.distribution, steps=steps,
        **with_pattern(config),
    )  # fmt: skip


METHODS: dict[str, TrainMethod] = {
    "fixed": TrainMethod(_fixed),
    "refresh": TrainMethod(_refresh, check=lambda config, steps: refreshes(steps, config.refresh_every)),
    "admm": TrainMethod(_admm, starts_dense=True),
    "ast": TrainMethod(_ast, starts_dense=True),
    "cast": TrainMethod(_cast, starts_dense=True),
}


def refreshes(steps: int, every: int | None = None) -> Phases:
    """Sparse phases with short dense ones between: a fifth of each ``every`` steps is dense, until 3/4 of ``steps``.

    Example:
        >>> refreshes(100, 20).changes
        (0, 16, 20, 36, 40, 56, 60)
    """
    every = every or max(steps // 10, 5)
    dense = max(every // 5, 1)
    changes = [0]
    for end in range(every, 3 * steps // 4 + 1, every):
        changes += [end - dense, end]
    if len(changes) == 1 or every < 2:
        raise ValueError(
            f"a stage of {steps} steps has no room for a refresh every {every} steps in its first three quarters. "
            "Train longer, lower refresh_every (at least 2), or use train='fixed'."
        )
    return Phases(tuple(changes), end=steps)
