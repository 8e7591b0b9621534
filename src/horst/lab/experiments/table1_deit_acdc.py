"""Table 1 and Figure 3 (left): a DeiT trained with AC/DC to high sparsity, AdamW against HORST.

The weight distributions of Figure 3 are those of the weights that the final masks keep. Beyond the paper, each run
tells its phases: how much of a sparse mask the next one keeps, and the accuracy over time.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from horst.lab.baselines.contenders import Name
from horst.lab.experiments.outcomes import broken_down, once
from horst.lab.experiments.result import Origin, Result, command_line, timed
from horst.lab.experiments.vision_model import VisionConfig, run_identity, train_sparse_vision_model
from horst.lab.experiments.weight_histogram import weight_histogram
from horst.lab.experiments.whole import whole_tensor
from horst.lab.training import NonFiniteLoss, World, processes
from horst.sparsity.masks import check_sparsity

NAME = "table1_deit_acdc"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Table 1.

    Args:
        run: How the models are trained.
        optimizers: The contenders.
        sparsities: Targets of AC/DC over all masked layers; 0 trains dense.
        horst_betas: Pairs of a sparsity and HORST's beta there, which the paper's footnote has for DeiT-small; at other
            sparsities it is that of ``run``.
        ham_betas: HAM's, a run each; none is that of ``run`` alone.
        seeds: Of weights, data order and augmentation. The paper's spread is over seeds it does not number.
        directory: Where checkpoints and metrics go; a table that was interrupted goes on from there.
        setting: What is trained on what, in words, and how it differs from the paper.
    """

    run: VisionConfig = VisionConfig()  # noqa: RUF009 - frozen
    optimizers: tuple[Name, ...] = ("adamw", "horst")
    sparsities: tuple[float, ...] = (0.7, 0.8, 0.9)
    horst_betas: tuple[tuple[float, float], ...] = ((0.8, 0.01), (0.9, 0.01))
    ham_betas: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    directory: pathlib.Path = pathlib.Path("runs/table1")
    setting: str = "as in the paper"

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:  # now, and not after the models of those before it are trained
            check_sparsity(sparsity)


def run(config: Config, name: str = NAME) -> Result:
    """Train and evaluate; rows by sparsity, seed and optimizer."""
    with processes() as world:
        origins: list[Origin] = []
        return timed(name, config, lambda: _body(config, world, origins), str(world.device), origins)


def _body(
    config: Config, world: World, origins: list[Origin]
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
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
    run = config.run
    notes = [
        f"{run.dataset}, {run.model.image_size} x {run.model.image_size} pixels in patches of {run.model.patch_size}, "
        f"width {run.model.width}, depth {run.model.depth}, {run.epochs} epochs of batches of {run.batch_size}. The "
        "paper: ImageNet, 224 x 224 in patches of 16, 300 epochs.",
    ]
    return rows, {"histograms": histograms, "phases": phases}, notes


def runs(config: Config, sparsity: float) -> Iterator[tuple[Name, VisionConfig]]:
    """The contenders at one sparsity, each with its betas."""
    given = config.run.optimization
    horst = dataclasses.replace(given, beta=dict(config.horst_betas).get(sparsity, given.beta))
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

    return once(
        directory / "outcome.json", run_identity(config.run, optimizer, sparsity, seed), compute, str(world.device)
    )


if __name__ == "__main__":
    command_line(Config, run, f"{NAME}: DeiT with AC/DC, AdamW against HORST.")
