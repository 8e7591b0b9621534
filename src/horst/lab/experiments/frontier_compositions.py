"""Beyond the paper: other compositions, other ways to sparse weights and other ways to prune, under one protocol.

The models, data and budget of :mod:`~horst.lab.experiments.frontier_language`, at one width. Contenders: HORST, the
hyperbolic map in one step, Muon alone and under HORST's mirror step (the paper's open question on spectral descent),
AdamW with an L1 penalty, the proximal step of that penalty after AdamW's and after HORST's, and spred. HORST and AdamW
are pruned by Wanda, SparseGPT and OWL as well (its other open question), and HORST's mirror step is given to different
tensors.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from horst.lab.baselines.contenders import Name
from horst.lab.experiments.frontier import Device, alphas
from horst.lab.experiments.frontier_language import Point, changed, run_study
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.result import Result
from horst.lab.experiments.table6_gpt2_one_shot import PruningMethod

NAME = "frontier_compositions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The study.

    Args:
        run: What all runs share; learning rate and what makes a contender vary from run to run.
        lrs: Peak learning rates.
        alpha_lrs: Products of alpha and the learning rate for HORST, the hyperbolic map and HORST over Muon.
        mirror_alpha_lr: The product at which HORST's mirror step is given to other tensors.
        muon_lr_ratios: Muon's learning rates over ``lrs``.
        penalties: Strengths of AdamW's L1 penalty.
        l1s: Values of ``l1`` of AdamW, and of HORST with its own rule.
        spred_decays: Of spred.
        methods: How the models of AdamW and of HORST (at 5, ``mirror_alpha_lr`` and auto) are pruned; all others are by
            magnitude.
        sparsities: Of the pruned tensors; the dense model is always there.
        seeds: Of weights and data order.
        directory: Where the runs leave their files; a study that was interrupted goes on from there.
        workers: Processes, one run and one core each.
        device: Where the models train; auto is the GPU where there is one.
        setting: What is trained on what, in words.
    """

    run: LanguageConfig = LanguageConfig()
    lrs: tuple[float, ...] = (2e-3, 8e-3)
    alpha_lrs: tuple[float, ...] = (0.02, 0.05, 0.1)
    mirror_alpha_lr: float = 0.05
    muon_lr_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    penalties: tuple[float, ...] = (1e-5, 3e-5, 1e-4)
    l1s: tuple[float, ...] = (0.02, 0.1, 0.3)
    spred_decays: tuple[float, ...] = (0.1, 0.5, 2.0)
    methods: tuple[PruningMethod, ...] = (
        "magnitude", "wanda", "sparsegpt", "magnitude-owl", "wanda-owl", "sparsegpt-owl",
    )  # fmt: skip
    sparsities: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)
    seeds: tuple[int, ...] = (0, 1)
    directory: pathlib.Path = pathlib.Path("runs/frontier_compositions")
    workers: int = 1
    device: Device = "auto"
    setting: str = "a GPT of 4 blocks on bytes"


def run(config: Config) -> Result:
    """Train, prune, evaluate; rows by run, method and level."""
    return run_study(NAME, config, points(config))


def points(config: Config) -> list[Point]:
    """The runs of the study, those that take longest first."""
    return [
        Point(study=study, optimizer=name, run=run, seed=seed, methods=config.methods if everything else ("magnitude",))
        for seed in config.seeds
        for lr in config.lrs
        for study, name, run, everything in _contenders(config, lr)
    ]


def _contenders(config: Config, lr: float) -> Iterator[tuple[str, Name, LanguageConfig, bool]]:
    """What is compared at a learning rate: study, optimizer, settings, and whether all methods prune it."""

    def settings(**optimization: Any) -> LanguageConfig:
        return changed(config.run, width=config.run.model.width, lr=lr, **optimization)

    chosen = alphas(lr, [config.mirror_alpha_lr])[1]
    yield "contender", "adamw", settings(), True
    for alpha in alphas(lr, config.alpha_lrs):
        yield "contender", "horst", settings(alpha=alpha), alpha in (5.0, chosen, "auto")
        if alpha != 5.0:
            yield "contender", "horst-muon", settings(alpha=alpha), False
        if alpha not in (5.0, "auto"):
            yield "contender", "hyperbolic", settings(alpha=alpha), False
    strengths: dict[Name, tuple[str, tuple[float, ...]]] = {
        "muon": ("muon_lr_ratio", config.muon_lr_ratios),
        "adamw-penalty": ("penalty", config.penalties),
        "adamw-l1": ("l1", config.l1s),
        "spred": ("spred_decay", config.spred_decays),
    }
    for name, (field, values) in strengths.items():
        for value in values:
            yield "contender", name, settings(**{field: value}), False
    for value in config.l1s:
        yield "contender", "horst-l1", settings(alpha="auto", l1=value), False
    # The head is tied to the embedding, so "blocks" is all matrices without embeddings; the last has these alone.
    for other in ({"mirror": "blocks"}, {"mirror": "all"}, {"no_mirror": ("matrix",)}):
        yield "mirror", "horst", settings(alpha=chosen, **other), False
