"""Beyond the paper: sparse training of a vision transformer against alpha times the learning rate.

AdamW and HORST, at alpha 5, at given products of alpha and the learning rate and with HORST's own rule (``auto``),
train dense and with AC/DC at several learning rates and widths; AdamW's weight decay is tuned with the same care. GMP
and RigL stand beside AC/DC at one learning rate.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from horst.lab.baselines.contenders import Name
from horst.lab.experiments import identity
from horst.lab.experiments.frontier import Device, about_optimizer, alphas, device_name, folder_name, side_by_side
from horst.lab.experiments.outcomes import broken_down, load_or_run
from horst.lab.experiments.result import Origin, Result, run_and_record
from horst.lab.experiments.vision_model import Method, VisionConfig, run_identity, train_sparse_vision_model
from horst.lab.experiments.weight_histogram import weight_spread
from horst.lab.training import NonFiniteLoss, World, processes
from horst.sparsity import find_layers

NAME = "frontier_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The study.

    Args:
        run: What all runs share; learning rate, strength and width vary from run to run.
        sparsity: Of the masked layers at the end of sparse training.
        lrs: Peak learning rates at the first width.
        alpha_lrs: Products of HORST's alpha and the peak learning rate, beside alpha 5 and auto.
        weight_decays: AdamW's, each at every one of ``lrs``.
        widths: The first has every run; the others have ``wide_lrs`` and ``wide_alpha_lrs``.
        wide_lrs: Peak learning rates at the other widths.
        wide_alpha_lrs: Products at the other widths.
        methods: Ways to train sparse beside AC/DC, for AdamW, HORST at 5 and auto, at ``method_lr``.
        method_lr: Their learning rate.
        seeds: Of weights, data order and augmentation.
        directory: Where the runs leave their files; a study that was interrupted goes on from there.
        run_workers: Processes, one run and one core each (``workers`` is taken: they decode images).
        device: Where the models train; auto is the GPU where there is one.
        setting: What is trained on what, in words.
    """

    run: VisionConfig = VisionConfig()
    sparsity: float = 0.9
    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    alpha_lrs: tuple[float, ...] = (0.02, 0.05, 0.1)
    weight_decays: tuple[float, ...] = (0.0, 0.1, 0.5)
    widths: tuple[int, ...] = (32, 64)
    wide_lrs: tuple[float, ...] = (3e-3, 1e-2)
    wide_alpha_lrs: tuple[float, ...] = (0.05, 0.1)
    methods: tuple[Literal["gmp", "rigl"], ...] = ("gmp", "rigl")
    method_lr: float = 1e-2
    seeds: tuple[int, ...] = (0, 1)
    directory: pathlib.Path = pathlib.Path("runs/frontier_vision")
    run_workers: int = 1
    device: Device = "auto"
    setting: str = "a transformer of 3 blocks on scikit-learn's digits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run of the study.

    Args:
        study: What it is for.
        optimizer: The contender.
        run: How it trains.
        sparsity: Of the masked layers; 0 trains dense.
        seed: Of weights, data order and augmentation.
        method: How it is made sparse.
    """

    study: str
    optimizer: Name
    run: VisionConfig
    sparsity: float
    seed: int
    method: Method = "acdc"

    @property
    def name(self) -> str:
        """A folder's name, different for different runs."""
        how = f"{self.method}{self.sparsity:g}" if self.sparsity else "dense"
        details = f"width{self.run.model.width}-{how}-seed{self.seed}"
        settings = identity.settings(self.run, self.optimizer)
        return folder_name(self.optimizer, self.run.optimization, details, settings)


def run(config: Config) -> Result:
    """Train and evaluate; one row a run."""
    origins: list[Origin] = []
    return run_and_record(NAME, config, lambda: _body(config, origins), device_name(config.device), origins)


def _body(config: Config, origins: list[Origin]) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    calls: dict[str, tuple[Any, ...]] = {}
    for point in points(config):
        calls.setdefault(point.name, (point, config.directory, config.device))
    found = side_by_side(run_point, calls, config.run_workers)
    origins += [each["origin"] for each in found]
    rows = [each["row"] for each in found]
    return rows, {}, ["largest, std and kurtosis are those of the weights in the blocks that are not zero."]


def points(config: Config) -> list[Point]:
    """The runs of the study, those that take longest first."""
    found: list[Point] = []
    for width in config.widths[1:]:
        found += _contenders(config, "width", width, config.wide_lrs, config.wide_alpha_lrs)
    found += _contenders(config, "alpha", config.widths[0], config.lrs, config.alpha_lrs)
    for seed in config.seeds:
        for lr in config.lrs:
            for decay in config.weight_decays:
                run = changed(config.run, width=config.widths[0], lr=lr, weight_decay=decay)
                for sparsity in (config.sparsity, 0.0):
                    found.append(Point(study="decay", optimizer="adamw", run=run, sparsity=sparsity, seed=seed))
        for method in config.methods:
            point = functools.partial(Point, study="method", sparsity=config.sparsity, seed=seed, method=method)
            run = changed(config.run, width=config.widths[0], lr=config.method_lr)
            found.append(point(optimizer="adamw", run=run))
            for alpha in alphas(config.method_lr, ()):
                found.append(point(optimizer="horst", run=changed(run, width=config.widths[0], alpha=alpha)))
    return found


def _contenders(
    config: Config, study: str, width: int, lrs: Iterable[float], alpha_lrs: Sequence[float]
) -> list[Point]:
    """AdamW and HORST with its own rule, dense and sparse; HORST at 5 and at given products, sparse."""
    found = []
    for seed in config.seeds:
        for lr in lrs:
            run = changed(config.run, width=width, lr=lr)
            for sparsity in (config.sparsity, 0.0):
                found.append(Point(study=study, optimizer="adamw", run=run, sparsity=sparsity, seed=seed))
            for alpha in alphas(lr, alpha_lrs):
                run = changed(config.run, width=width, lr=lr, alpha=alpha)
                for sparsity in (config.sparsity, 0.0) if alpha == "auto" else (config.sparsity,):
                    found.append(Point(study=study, optimizer="horst", run=run, sparsity=sparsity, seed=seed))
    return found


def changed(run: VisionConfig, *, width: int, **optimization: Any) -> VisionConfig:
    """``run`` with another width and other settings of the optimizer."""
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, width=width),
        optimization=dataclasses.replace(run.optimization, **optimization),
    )


def run_point(point: Point, directory: pathlib.Path, device: Device = "auto") -> dict[str, Any]:
    """One run: its row and its origin, from its file if it was done before. One that breaks down has no accuracy."""
    where = directory / point.name

    def compute(world: World) -> dict[str, Any]:
        try:
            return _train(point, where, world)
        except NonFiniteLoss as error:
            return {"top1": None, "loss": None, **broken_down(error)}

    settings = run_identity(point.run, point.optimizer, point.sparsity, point.seed, point.method)
    with processes(device) as world:
        outcome = load_or_run(where / "outcome.json", settings, lambda: compute(world), str(world.device))
    origin = outcome.pop("origin")
    return {
        "origin": origin,
        "row": {
            "study": point.study,
            **about_optimizer(point.optimizer, point.run.optimization),
            "width": point.run.model.width,
            "epochs": point.run.epochs,
            "seed": point.seed,
            "method": point.method if point.sparsity else "dense",
            "sparsity": point.sparsity,
            **outcome,
        },
    }


def _train(point: Point, directory: pathlib.Path, world: World) -> dict[str, Any]:
    model, trained, _ = train_sparse_vision_model(
        point.run, point.optimizer, point.sparsity, point.seed, directory, world, point.method
    )
    weights = [layer.param for layer in find_layers(model, "blocks")]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return {
        "top1": trained.metrics["top1"],
        "loss": trained.metrics["loss"],
        "zeros": zeros / sum(weight.numel() for weight in weights),
        **weight_spread(weights, nonzero=True),
        "seconds": trained.seconds,
    }
