"""Beyond the paper: dense and pruned quality of a language model against alpha times the learning rate.

The paper fixes alpha at 5. Here AdamW, HORST at 5, HORST at given products of alpha and the peak learning rate, and
HORST's own rule (``auto``) train the same small models at several learning rates, widths and lengths; AdamW's learning
rate and weight decay are tuned with the same care. In the longer runs both are tried with a soft threshold after their
step too. Each model is pruned in one shot at several levels.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from horst.lab.baselines.contenders import Name
from horst.lab.experiments import identity
from horst.lab.experiments import table6_gpt2_one_shot as one_shot
from horst.lab.experiments.frontier import Device, about_optimizer, alphas, device_name, folder_name, side_by_side
from horst.lab.experiments.language_model import LanguageConfig, run_identity
from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.result import Origin, Result, run_and_record
from horst.lab.training import NonFiniteLoss, World, processes

NAME = "frontier_language"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The study.

    Args:
        run: What all runs share; learning rate, strength, width and length vary from run to run.
        lrs: Peak learning rates at the first width.
        alpha_lrs: Products of HORST's alpha and the peak learning rate, beside alpha 5 and auto.
        weight_decays: AdamW's, each at every one of ``lrs`` and ``tuning_lrs``.
        tuning_lrs: More learning rates for AdamW.
        widths: The first has every run; the others have ``wide_lrs`` and ``wide_alpha_lrs``.
        wide_lrs: Peak learning rates at the other widths.
        wide_alpha_lrs: Products at the other widths.
        wide_weight_decays: AdamW's there, at ``wide_lrs`` and ``tuning_lrs``.
        long_steps: Steps of longer runs at the first width; none has none.
        long_lrs: Their peak learning rates.
        long_alpha_lrs: Their products.
        long_weight_decays: AdamW's there, at ``long_lrs`` and ``long_tuning_lrs``.
        long_tuning_lrs: More learning rates for AdamW there.
        l1s: Values of ``l1`` of AdamW and of HORST with its own rule, in the longer runs.
        l1_lrs: Their peak learning rates.
        sparsities: Of the pruned tensors; the dense model is always there.
        seeds: Of weights and data order.
        rule_seeds: Those of HORST at 5 and with its own rule, which are compared cell by cell.
        directory: Where the runs leave their files; a study that was interrupted goes on from there.
        workers: Processes, one run and one core each.
        device: Where the models train; auto is the GPU where there is one.
        setting: What is trained on what, in words.
    """

    run: LanguageConfig = LanguageConfig()
    lrs: tuple[float, ...] = (5e-4, 2e-3, 8e-3, 1.6e-2)
    alpha_lrs: tuple[float, ...] = (0.005, 0.02, 0.05, 0.1, 0.2)
    weight_decays: tuple[float, ...] = (0.0, 0.01, 0.1, 0.3, 1.0)
    tuning_lrs: tuple[float, ...] = (4e-3,)
    widths: tuple[int, ...] = (64, 128)
    wide_lrs: tuple[float, ...] = (5e-4, 2e-3, 8e-3)
    wide_alpha_lrs: tuple[float, ...] = (0.02, 0.1)
    wide_weight_decays: tuple[float, ...] = (0.1, 0.3, 1.0)
    long_steps: int | None = 1600
    long_lrs: tuple[float, ...] = (5e-4, 2e-3, 8e-3)
    long_alpha_lrs: tuple[float, ...] = (0.02, 0.1)
    long_weight_decays: tuple[float, ...] = (0.1, 0.3, 1.0)
    long_tuning_lrs: tuple[float, ...] = (4e-3, 1.6e-2)
    l1s: tuple[float, ...] = (0.02, 0.05, 0.1)
    l1_lrs: tuple[float, ...] = (2e-3, 8e-3)
    sparsities: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)
    seeds: tuple[int, ...] = (0, 1)
    rule_seeds: tuple[int, ...] = (0, 1, 2, 3)
    directory: pathlib.Path = pathlib.Path("runs/frontier_language")
    workers: int = 1
    device: Device = "auto"
    setting: str = "a GPT of 4 blocks on bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a study.

    Args:
        study: What it is for.
        optimizer: The contender.
        run: How it trains.
        seed: Of weights and data order.
        methods: How the model is pruned.
    """

    study: str
    optimizer: Name
    run: LanguageConfig
    seed: int
    methods: tuple[one_shot.PruningMethod, ...] = ("magnitude",)

    @property
    def name(self) -> str:
        """A folder's name, different for different runs."""
        details = f"width{self.run.model.width}-steps{self.run.steps}-seed{self.seed}"
        settings = [identity.settings(self.run, self.optimizer), self.methods]
        return folder_name(self.optimizer, self.run.optimization, details, settings)


def run(config: Config) -> Result:
    """Train, prune, evaluate; rows by run and level."""
    return run_study(NAME, config, points(config))


def run_study(name: str, config: Any, points: Sequence[Point]) -> Result:
    """The runs of a language study as its result.

    Args:
        name: The experiment's.
        config: With ``run``, ``sparsities``, ``directory``, ``workers`` and ``device``.
        points: Its runs.
    """
    origins: list[Origin] = []

    def body() -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
        found = run_points(points, config.sparsities, config.directory, config.workers, config.device)
        origins.extend(each["origin"] for each in found)
        return [row for each in found for row in each["rows"]], {}, notes(config.run)

    return run_and_record(name, config, body, device_name(config.device), origins)


def notes(run: LanguageConfig) -> list[str]:
    """What a reader of either language study must know."""
    evaluated = "the whole validation file"
    if run.eval_batches is not None:
        evaluated = f"the first {run.eval_batches * run.eval_batch_size * run.model.context:,} tokens of validation"
    return [
        f"Perplexity a token over {evaluated}; batches of {run.batch_size} x {run.model.context} tokens.",
        "largest, std and kurtosis are those of the dense model's weights in the blocks, which are what is pruned.",
    ]


def points(config: Config) -> list[Point]:
    """The runs of the study, those that take longest first."""
    found: list[Point] = []
    long = config.long_steps
    if long is not None:
        warmup = round(config.run.warmup_steps * long / config.run.steps)
        longer = dataclasses.replace(config.run, steps=long, warmup_steps=warmup)
        found += _contenders(config, "length", longer, config.widths[0], config.long_lrs, config.long_alpha_lrs)
        lrs = {*config.long_lrs, *config.long_tuning_lrs}
        found += _tuned_adamw(config, longer, config.widths[0], lrs, config.long_weight_decays)
        found += _l1(config, longer, config.widths[0])
    for width in config.widths[1:]:
        found += _contenders(config, "width", config.run, width, config.wide_lrs, config.wide_alpha_lrs)
        lrs = {*config.wide_lrs, *config.tuning_lrs}
        found += _tuned_adamw(config, config.run, width, lrs, config.wide_weight_decays)
    found += _contenders(config, "alpha", config.run, config.widths[0], config.lrs, config.alpha_lrs)
    lrs = {*config.lrs, *config.tuning_lrs}
    return found + _tuned_adamw(config, config.run, config.widths[0], lrs, config.weight_decays)


def _contenders(
    config: Config, study: str, run: LanguageConfig, width: int, lrs: Iterable[float], alpha_lrs: Sequence[float]
) -> list[Point]:
    """AdamW; HORST at 5, at given products, and with auto."""
    found = []
    names: tuple[Name, ...] = ("adamw",)
    for lr in lrs:
        for name in names:
            for seed in config.seeds:
                found.append(Point(study=study, optimizer=name, run=changed(run, width=width, lr=lr), seed=seed))
        for alpha in alphas(lr, alpha_lrs):
            settings = changed(run, width=width, lr=lr, alpha=alpha)
            for seed in config.rule_seeds if alpha in (5.0, "auto") else config.seeds:
                found.append(Point(study=study, optimizer="horst", run=settings, seed=seed))
    return found


def _tuned_adamw(
    config: Config, run: LanguageConfig, width: int, lrs: Iterable[float], decays: Iterable[float]
) -> list[Point]:
    """AdamW at every learning rate with every weight decay."""
    return [
        Point(study="decay", optimizer="adamw", run=changed(run, width=width, lr=lr, weight_decay=decay), seed=seed)
        for lr in sorted(lrs)
        for decay in decays
        for seed in config.seeds
    ]


def _l1(config: Config, run: LanguageConfig, width: int) -> list[Point]:
    """AdamW and HORST with its own rule, each with a soft threshold after its step."""
    names: tuple[Name, ...] = ("adamw-l1", "horst-l1")
    return [
        Point(
            study="l1",
            optimizer=name,
            run=changed(run, width=width, lr=lr, l1=l1, **({} if name == names[0] else {"alpha": "auto"})),
            seed=seed,
        )
        for lr in config.l1_lrs
        for l1 in config.l1s
        for name in names
        for seed in config.seeds
    ]


def changed(run: LanguageConfig, *, width: int, **optimization: Any) -> LanguageConfig:
    """``run`` with another width and other settings of the optimizer."""
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, width=width),
        optimization=dataclasses.replace(run.optimization, **optimization),
    )


def run_points(
    points: Sequence[Point], sparsities: tuple[float, ...], directory: pathlib.Path, workers: int, device: Device
) -> list[dict[str, Any]]:
    """Every run once, though two studies may ask for it: rows under the first that asks, and their origin."""
    calls: dict[str, tuple[Any, ...]] = {}
    for point in points:
        calls.setdefault(point.name, (point, sparsities, directory, device))
    return side_by_side(run_point, calls, workers)


def run_point(
    point: Point, sparsities: tuple[float, ...], directory: pathlib.Path, device: Device = "auto"
) -> dict[str, Any]:
    """One run: its rows and their origin, from its file if it was done before.

    A run that breaks down has rows without perplexity.
    """
    config = one_shot.Config(run=point.run, sparsities=sparsities, methods=point.methods, prune_layers="blocks")
    where = directory / point.name

    def compute(world: World) -> dict[str, Any]:
        try:
            found = one_shot.train_and_prune(config, point.optimizer, point.seed, where, world)
        except NonFiniteLoss as error:
            return {"rows": one_shot.broken_levels(config, error)}
        return {"rows": [{**row, **found["spread"], "seconds": found["training"]["seconds"]} for row in found["rows"]]}

    settings = {
        **run_identity(point.run, point.optimizer, point.seed),
        "pruning": [sparsities, point.methods, config.prune_layers, config.calibration_samples],
    }
    with processes(device) as world:
        outcome = load_or_run(where / "outcome.json", settings, lambda: compute(world), str(world.device))
    run = {"width": point.run.model.width, "steps": point.run.steps, "seed": point.seed}
    about = {"study": point.study, **about_optimizer(point.optimizer, point.run.optimization), **run}
    rows = [{**about, **{key: row[key] for key in row if key not in about}} for row in outcome["rows"]]
    return {"rows": rows, "origin": outcome["origin"]}
