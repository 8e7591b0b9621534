"""Table 1 and Figure 3 (left): a DeiT trained with AC/DC to high sparsity, AdamW against HORST.

The weight distributions of Figure 3 are those of the weights that the final masks keep. Beyond the paper, each run
tells its phases: how much of a sparse mask the next one keeps, and the accuracy over time.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from horst.fields import option
from horst.lab.baselines.contenders import Name
from horst.lab.experiments import identity
from horst.lab.experiments.outcomes import broken_down, load_or_run
from horst.lab.experiments.result import Found, Origin, Result, run_and_record
from horst.lab.experiments.vision_model import VisionConfig, in_words, run_identity, train_sparse_vision_model
from horst.lab.experiments.weight_histogram import weight_histogram
from horst.sparsity.masks import check_sparsity
from horst.training import NonFiniteLoss, World, processes
from horst.training.distributed import whole_tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Table 1; Tables 3 and 4 are the same with other settings.

    Args:
        run: How the models are trained.
        optimizers: Contenders.
        sparsities: Targets of AC/DC over all masked layers; 0 trains dense.
        betas_by_sparsity: Pairs of a sparsity and HORST's beta there, which the paper's footnote has for DeiT-small; at
            other sparsities it is that of ``run``.
        ham_betas: HAM's betas, one run each; empty for that of ``run`` alone.
        seeds: Seeds of weights, data order and augmentation. The paper does not number its seeds.
        directory: Folder of checkpoints and metrics; an interrupted table resumes from there.
    """

    run: VisionConfig = VisionConfig()
    optimizers: tuple[Name, ...] = option(("adamw", "horst"), affects="rows")
    sparsities: tuple[float, ...] = option((0.7, 0.8, 0.9), affects="rows")
    betas_by_sparsity: tuple[tuple[float, float], ...] = ((0.8, 0.01), (0.9, 0.01))
    ham_betas: tuple[float, ...] = ()
    seeds: tuple[int, ...] = option((0, 1, 2), affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/table1"), affects="nothing")

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:  # now, and not after the models of those before it are trained
            check_sparsity(sparsity)

    def without_effect(self) -> dict[str, str]:
        """Fields that none of the optimizers reads, and why."""
        own = {"betas_by_sparsity": "horst", "ham_betas": "ham"}
        absent = {field: f"optimizers has no {name}." for field, name in own.items() if name not in self.optimizers}
        return {**identity.unread_strengths(self.optimizers), **absent}


def run(config: Config, name: str = "table1_deit_acdc") -> Result:
    """Train and evaluate; rows by sparsity, seed and optimizer."""
    with processes() as world:
        origins: list[Origin] = []
        body = functools.partial(_body, config, world, origins)
        return run_and_record(name, config, body, str(world.device), origins, in_words(config.run))


def _body(config: Config, world: World, origins: list[Origin]) -> Found:
    rows: list[dict[str, Any]] = []
    histograms: dict[str, dict[str, Any]] = {}
    phases: list[dict[str, Any]] = []
    for sparsity in config.sparsities:
        for seed in config.seeds:
            for optimizer, run in runs(config, sparsity):
                found = one_run(dataclasses.replace(config, run=run), optimizer, sparsity, seed, world)
                origins.append(found["origin"])
                rows.append(found["row"])
                if "phases" in found:  # an outcome that an earlier version left has none, nor has one that broke down
                    phases.append(found["phases"])
                if seed == config.seeds[0] and "histogram" in found:
                    histograms.setdefault(f"{sparsity:g}", {}).setdefault(optimizer, found["histogram"])
    return rows, {"histograms": histograms, "phases": phases}, []


def runs(config: Config, sparsity: float) -> Iterator[tuple[Name, VisionConfig]]:
    """The contenders at one sparsity, each with its betas."""
    given = config.run.optimization
    horst = dataclasses.replace(given, beta=dict(config.betas_by_sparsity).get(sparsity, given.beta))
    ham = [dataclasses.replace(given, ham_beta=beta) for beta in config.ham_betas or (given.ham_beta,)]
    for optimizer in config.optimizers:
        for optimization in {"horst": [horst], "ham": ham}.get(optimizer, [given]):
            yield optimizer, dataclasses.replace(config.run, optimization=optimization)


def one_run(config: Config, optimizer: Name, sparsity: float, seed: int, world: World) -> dict[str, Any]:
    """Train one model to one sparsity; one that breaks down has a row without numbers, and nothing else."""
    lr, label = config.run.optimization.lr, config.run.optimization.label(optimizer)
    about = {**config.run.optimization.about(optimizer), "lr": lr, "sparsity": sparsity, "seed": seed}
    directory = config.directory / f"{optimizer}-{label}-lr{lr:g}-sparsity{sparsity:g}-seed{seed}"

    def compute() -> dict[str, Any]:
        try:
            model, trained, masks = train_sparse_vision_model(config.run, optimizer, sparsity, seed, directory, world)
        except NonFiniteLoss as error:
            nothing = dict.fromkeys(("top1", "top5", "images_per_second", "seconds"))
            return {"row": {**about, **nothing, **broken_down(error)}}
        parameters = dict(model.named_parameters())
        phases = masks.pop("phases")
        names = masks.pop("masked_layers", [name for name in parameters if name.startswith("blocks.")])
        weights = [whole_tensor(parameters[name]) for name in names if parameters[name].dim() > 1]
        return {
            "row": {
                **about,
                "top1": trained.metrics["top1"],
                "top5": trained.metrics["top5"],
                **{key: value for key, value in trained.metrics.items() if key.startswith("ema_")},
                **masks,
                "images_per_second": trained.units_per_second,
                "seconds": trained.seconds,
            },
            "histogram": weight_histogram(weights, nonzero=True),
            "phases": {**about, **phases},
        }

    return load_or_run(
        directory / "outcome.json", run_identity(config.run, optimizer, sparsity, seed), compute, str(world.device)
    )
