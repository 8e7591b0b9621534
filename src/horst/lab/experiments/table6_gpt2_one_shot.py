"""Table 6 and Figures 4 and 8: GPT-2 trained dense, then pruned in one shot by magnitude, without fine-tuning.

Every optimizer trains from the same weights on the same data in the same order. Pruned are the four linear weights of
all blocks but the first and the last, each tensor by itself: 57 % of the paper's model, so "50 %" is 28.5 % of all its
weights; rows have both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import Any, Literal

from torch import Tensor

from horst.fields import option
from horst.lab.baselines.contenders import Name
from horst.lab.data.token_batches import TokenBatches
from horst.lab.experiments import identity
from horst.lab.experiments.language_model import (
    LanguageConfig,
    evaluate_language_model,
    in_words,
    run_identity,
    train_language_model,
)
from horst.lab.experiments.outcomes import broken_down, load_or_run
from horst.lab.experiments.result import Found, Origin, Result, run_and_record
from horst.lab.experiments.weight_histogram import weight_histogram, weight_spread
from horst.pruning import sweep
from horst.sparsity import find_layers
from horst.sparsity.masks import check_sparsity
from horst.training import NonFiniteLoss, World, processes

CALIBRATION_SEED = 90_000  # far from the seeds of the training order
PruningMethod = Literal[
    "magnitude", "wanda", "sparsegpt", "magnitude-owl", "wanda-owl", "sparsegpt-owl", "magnitude-global",
    "sparsegpt-global",
]  # fmt: skip
#: By what stands behind the dash of a method.
DISTRIBUTIONS: dict[str, Literal["uniform", "owl", "global"]] = {"": "uniform", "owl": "owl", "global": "global"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Table 6.

    Args:
        run: How the models are trained.
        optimizers: Contenders.
        sparsities: Sparsities of the pruned tensors; the dense model is always there.
        methods: Ways to prune. The paper has magnitude; its outlook names SparseGPT. With ``-owl``, OWL distributes the
            sparsity over the blocks; with ``-global``, one threshold for all tensors does.
        prune_layers: Layers to prune: the paper's choice, or all blocks.
        calibration_samples: Number of training sequences that Wanda and SparseGPT look at.
        seeds: Seeds of weights and data order. The paper has one.
        directory: Folder of checkpoints and metrics; an interrupted table resumes from there.
    """

    run: LanguageConfig = LanguageConfig()
    optimizers: tuple[Name, ...] = option(("adamw", "ham", "horst"), affects="rows")
    sparsities: tuple[float, ...] = option((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), affects="rows")
    methods: tuple[PruningMethod, ...] = ("magnitude",)
    prune_layers: Literal["paper", "blocks"] = "paper"
    calibration_samples: int = 128
    seeds: tuple[int, ...] = option((0,), affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/table6"), affects="nothing")

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:  # now, and not after the first model is trained
            check_sparsity(sparsity)
        if self.calibration_samples < 1:
            raise ValueError(f"calibration_samples must be at least 1, got {self.calibration_samples}.")
        if self.prune_layers == "paper" and self.run.model.layers < 3:
            raise ValueError(
                f"prune_layers='paper' leaves out the first and the last block, and the model has layers="
                f"{self.run.model.layers}: nothing would be pruned. Use --prune-layers blocks, or at least 3 layers."
            )

    @property
    def calibrates(self) -> bool:
        """Whether one of the methods looks at training sequences."""
        return not set(self.methods) <= {"magnitude", "magnitude-global"}

    def without_effect(self) -> dict[str, str]:
        """Fields that none of the optimizers or methods reads, and why."""
        unread = identity.unread_strengths(self.optimizers)
        return unread if self.calibrates else {**unread, "calibration_samples": "magnitude needs no calibration."}


def run(config: Config, name: str = "table6_gpt2_one_shot") -> Result:
    """Train, prune, evaluate; rows by optimizer, seed and sparsity."""
    with processes() as world:
        origins: list[Origin] = []
        body = functools.partial(_body, config, world, origins)
        return run_and_record(name, config, body, str(world.device), origins, in_words(config.run))


def _body(config: Config, world: World, origins: list[Origin]) -> Found:
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {"training": [], "histograms": {}}
    for seed in config.seeds:
        for optimizer in config.optimizers:
            found = one_run(config, optimizer, seed, world)
            origins.append(found["origin"])
            rows += found["rows"]
            curves["training"].append(found["training"])
            if seed == config.seeds[0] and "histogram" in found:
                curves["histograms"][optimizer] = found["histogram"]
    return rows, curves, ["Perplexity is token-weighted; the paper's code averages batch losses."]


def one_run(
    config: Config, optimizer: Name, seed: int, world: World, directory: pathlib.Path | None = None
) -> dict[str, Any]:
    """Train one model and prune it at every level, unless that was done before; see :func:`train_and_prune`.

    One that breaks down has rows without numbers, no histogram and no spread. ``directory=None`` is a folder of
    ``config.directory``, named after the run.
    """
    optimization = config.run.optimization
    about = {**optimization.about(optimizer), "seed": seed}
    if directory is None:
        directory = config.directory / f"{optimizer}-{optimization.label(optimizer)}-lr{optimization.lr:g}-seed{seed}"
    settings = {
        **run_identity(config.run, optimizer, seed),
        "pruning": [config.sparsities, config.methods, config.prune_layers, config.calibration_samples],
    }

    def compute() -> dict[str, Any]:
        try:
            return train_and_prune(config, optimizer, seed, directory, world)
        except NonFiniteLoss as error:
            levels = [("dense", 0.0), *itertools.product(config.methods, config.sparsities)]
            why = {"loss": None, "perplexity": None, **broken_down(error)}
            return {
                "rows": [{**about, "method": method, "sparsity": level, **why} for method, level in levels],
                "training": {**about, "tokens_per_second": None, "seconds": None, "steps": None},
            }

    return load_or_run(directory / "outcome.json", settings, compute, str(world.device))


def train_and_prune(
    config: Config, optimizer: Name, seed: int, directory: pathlib.Path, world: World
) -> dict[str, Any]:
    """Train one model and prune it at every level.

    Returns:
        ``rows``, one for each level, the dense model's first; ``training``, its speed; ``histogram`` and ``spread`` of
        the dense model's weights in the blocks.
    """
    about = {**config.run.optimization.about(optimizer), "seed": seed}
    # before the training, so that data too short for it are refused now
    calibration = _calibration(config, seed, world) if config.calibrates else None
    model, trained = train_language_model(config.run, optimizer, seed, directory, world)
    average = {key: value for key, value in trained.metrics.items() if key.startswith("ema_")}
    levels: list[dict[str, Any]] = []
    for asked in config.methods:
        method, _, suffix = asked.partition("-")
        found = sweep(
            model,
            config.sparsities,
            evaluate=lambda model: evaluate_language_model(model, config.run, world),
            method=method,
            data=calibration,
            distribution=DISTRIBUTIONS[suffix],
            layers=config.prune_layers,
            samples=config.calibration_samples,
            sequential=False,  # one calibration for all levels, as in the recorded results
        )
        # the dense model comes first, once
        levels += [{**found[0], **average}] if not levels else []
        levels += [{**level, "method": asked} for level in found[1:]]
    weights = [layer.param for layer in find_layers(model, "blocks")]
    return {
        "rows": [{**about, **level} for level in levels],
        "training": {
            **about,
            "tokens_per_second": trained.units_per_second,
            "seconds": trained.seconds,
            "steps": trained.step,
        },
        "histogram": weight_histogram(weights),
        "spread": weight_spread(weights),
    }


def _calibration(config: Config, seed: int, world: World) -> list[Tensor]:
    """Training sequences, the same on every rank, so that every rank prunes alike."""
    source = TokenBatches(
        config.run.data / "train.bin",
        batch_size=min(16, config.calibration_samples),
        context=config.run.model.context,
        seed=CALIBRATION_SEED + seed,
        device=world.device,
    )
    count = -(-config.calibration_samples // source.batch_size)
    return [tokens for tokens, _ in itertools.islice(source.batches(0), count)]
