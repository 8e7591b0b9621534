"""Recipes: a full config for each table and figure at each scale. ``horst run NAME --scale SCALE`` takes one.

``paper`` is what the paper did, with its open choices as fields (Tables 2 and 5 are the defaults). ``gpu`` is the same
method at a size that one GPU finishes in minutes, and says what it is; ``cpu`` goes through every line of the code in
seconds or minutes on a laptop.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from horst.lab.baselines.contenders import Optimization
from horst.lab.experiments import (
    figure1_diagonal_network,
    figure1_weight_spread,
    figure2_dichotomy,
    figure3_composition_order,
    figure5_additive_vs_multiplicative,
    figure6_mirror_maps,
    figure7_loss_curves,
    frontier_compositions,
    frontier_language,
    frontier_vision,
    table1_deit_acdc,
    table3_ham,
    table4_long_run,
    table6_gpt2_one_shot,
    theorem4_7_implicit_bias,
    toy_suite,
)
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.result import Result
from horst.lab.experiments.vision_model import VisionConfig
from horst.lab.models.deit import DeiTConfig
from horst.lab.models.gpt2 import GPT2Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table or figure that can be run.

    Args:
        about: One line.
        run: From a config to a result.
        scales: By name, a function that returns a full config; the first is the default.
        sparsities_in_one_run: Whether one training serves all sparsities of the config.
    """

    about: str
    run: Callable[[Any], Result]
    scales: dict[str, Callable[[], Any]]
    sparsities_in_one_run: bool = False


def table6_gpu() -> table6_gpt2_one_shot.Config:
    """GPT-2 small on 98 M tokens (6000 steps of 32 x 512) instead of 1.6 billion.

    ``--mirror all`` gives norms the mirror step too, which in small runs helps the dense model.
    """
    return table6_gpt2_one_shot.Config(
        run=LanguageConfig(
            data=pathlib.Path("data/wikipedia"), steps=6000, batch_size=32, warmup_steps=600, checkpoint_every=2000
        ),
        sparsities=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        setting="GPT-2 small on 98 M tokens of English Wikipedia; the paper has 1.64 billion of SlimPajama",
    )


def table6_cpu() -> table6_gpt2_one_shot.Config:
    """A GPT of four blocks on bytes, for a laptop."""
    return table6_gpt2_one_shot.Config(
        run=LanguageConfig(
            data=pathlib.Path("data/text"),
            model=GPT2Config(layers=4, heads=4, width=64, context=64, vocabulary=257),
            optimization=Optimization(lr=2e-3, betas=(0.9, 0.95)),
            steps=400,
            batch_size=16,
            warmup_steps=40,
            precision="float32",
            checkpoint_every=None,
        ),
        sparsities=(0.5, 0.7),
        setting="a GPT of 4 blocks of width 64 on bytes",
    )


def one_shot_methods_cpu() -> table6_gpt2_one_shot.Config:
    """Magnitude, Wanda and SparseGPT on a GPT of four blocks on bytes, AdamW against HORST."""
    return dataclasses.replace(
        table6_cpu(),
        run=dataclasses.replace(table6_cpu().run, optimization=Optimization(lr=4e-3, betas=(0.9, 0.95)), steps=700),
        optimizers=("adamw", "horst"),
        sparsities=(0.5, 0.6, 0.7, 0.8),
        methods=("magnitude", "wanda", "sparsegpt"),
        prune_layers="blocks",
        seeds=(0, 1),
        directory=pathlib.Path("runs/one_shot_methods"),
    )


def one_shot_methods_gpu() -> table6_gpt2_one_shot.Config:
    """The models of Table 6 at one GPU's scale, pruned by all three methods."""
    return dataclasses.replace(
        table6_gpu(), methods=("magnitude", "wanda", "sparsegpt"), directory=pathlib.Path("runs/one_shot_methods")
    )


def _cifar(**changes: Any) -> VisionConfig:
    """DeiT-small on CIFAR-10 in patches of 4, with all that the paper says: rate 5e-3, triangle, mixing, no clipping.

    For speed: no class token (64 tokens instead of 65), bfloat16 between the blocks, the kernel for short attention.
    """
    settings: dict[str, Any] = {
        "dataset": "cifar10",
        "data": pathlib.Path("data/cifar10"),
        "model": DeiTConfig(
            image_size=32, patch_size=4, classes=10, class_token=False, residual="autocast", attention="short"
        ),
        "epochs": 60,
        "checkpoint_every": 20,
    }
    return VisionConfig(**{**settings, **changes})


def _healthy() -> dict[str, Any]:
    """DeiT's own rate, a cosine, decay groups and clipping."""
    return {"optimization": Optimization(lr=1e-3), "schedule": "cosine", "clip_norm": 1.0}


# Other than the paper's own setting, nobody has tuned a beta: one for all sparsities, and one of HAM's.
_ONE_BETA: dict[str, Any] = {"horst_betas": (), "ham_betas": ()}
CIFAR_SETTING = "DeiT-small on CIFAR-10 (32 x 32, patches of 4), 60 epochs; the paper has ImageNet, 300 epochs"


def _digits(**changes: Any) -> VisionConfig:
    """A small transformer on scikit-learn's digits, for a laptop."""
    return _cifar(
        **{
            "dataset": "digits",
            "data": pathlib.Path(),
            "model": DeiTConfig(image_size=8, patch_size=2, channels=1, classes=10, width=32, depth=3, heads=4),
            **_healthy(),
            "optimization": Optimization(lr=5e-3),
            "mixup": 0.0,
            "cutmix": 0.0,
            "smoothing": 0.0,
            "epochs": 40,
            "batch_size": 64,
            "padding": 1,
            "flip": False,
            "precision": "float32",
            "eval_every": None,
            "checkpoint_every": None,
            **changes,
        }
    )


DIGITS_SETTING = "a transformer of 3 blocks of width 32 on scikit-learn's digits, 40 epochs"


def table1_gpu() -> table1_deit_acdc.Config:
    """DeiT-small on CIFAR-10 with AC/DC."""
    return table1_deit_acdc.Config(
        **_ONE_BETA, run=_cifar(), sparsities=(0.9, 0.8, 0.7), seeds=(0,), setting=CIFAR_SETTING
    )


def table1_cpu() -> table1_deit_acdc.Config:
    """AC/DC on digits."""
    return table1_deit_acdc.Config(**_ONE_BETA, run=_digits(), sparsities=(0.9,), seeds=(0,), setting=DIGITS_SETTING)


def table1_gpu_healthy() -> table1_deit_acdc.Config:
    """DeiT-small on CIFAR-10 with AC/DC and DeiT's own rate."""
    setting = f"{CIFAR_SETTING}; DeiT's own learning rate, a fifth of the paper's"
    return table1_deit_acdc.Config(
        **_ONE_BETA, run=_cifar(**_healthy()), sparsities=(0.9, 0.8, 0.7), seeds=(0,), setting=setting
    )


def table1_base() -> table1_deit_acdc.Config:
    """The other half of the paper's table: DeiT-base, where it has no beta."""
    return table1_deit_acdc.Config(
        run=VisionConfig(model=DeiTConfig(width=768, heads=12)),
        horst_betas=(),
        directory=pathlib.Path("runs/table1_base"),
    )


def table1_healthy() -> table1_deit_acdc.Config:
    """The paper's table with DeiT's own rate of 1e-3, cosine and decay groups: five times below the paper's rate."""
    return table1_deit_acdc.Config(
        **_ONE_BETA,
        run=VisionConfig(**_healthy()),
        directory=pathlib.Path("runs/table1_healthy"),
        setting="ImageNet with DeiT's own learning rate and schedule",
    )


def table3_gpu() -> table3_ham.Config:
    """DeiT-small on CIFAR-10 at 90 %, with HAM."""
    return table3_ham.Config(**_ONE_BETA, run=_cifar(), seeds=(0,), setting=CIFAR_SETTING)


def table3_cpu() -> table3_ham.Config:
    """Digits at 90 %, with HAM."""
    return table3_ham.Config(**_ONE_BETA, run=_digits(), seeds=(0,), setting=DIGITS_SETTING)


def table4_gpu() -> table4_long_run.Config:
    """Twice the epochs on CIFAR-10 at 70 %."""
    return table4_long_run.Config(
        **_ONE_BETA, run=_cifar(epochs=120), setting=CIFAR_SETTING.replace("60 epochs", "120 epochs")
    )


def table4_cpu() -> table4_long_run.Config:
    """Twice the epochs on digits at 70 %."""
    return table4_long_run.Config(
        **_ONE_BETA, run=_digits(epochs=80), setting=DIGITS_SETTING.replace("40 epochs", "80 epochs")
    )


def frontier_language_cpu() -> frontier_language.Config:
    """Products of alpha and the learning rate on a GPT of four blocks on bytes."""
    return frontier_language.Config(run=_frontier_run(), device="cpu")


def frontier_compositions_cpu() -> frontier_compositions.Config:
    """Other compositions and other ways to prune on a GPT of four blocks on bytes."""
    return frontier_compositions.Config(run=_frontier_run(), device="cpu")


def _frontier_run() -> LanguageConfig:
    """Table 6's laptop model, evaluated on 32,768 tokens: on all of them, five levels take as long as the training."""
    return dataclasses.replace(table6_cpu().run, eval_batches=8)


def frontier_vision_cpu() -> frontier_vision.Config:
    """Products of alpha and the learning rate on digits."""
    return frontier_vision.Config(run=_digits(), device="cpu")


def frontier_vision_gpu() -> frontier_vision.Config:
    """DeiT-small on CIFAR-10 at DeiT's own rate: AdamW dense, and AdamW, HORST at 5 and auto with AC/DC."""
    return frontier_vision.Config(
        run=_cifar(**_healthy()),
        lrs=(1e-3,),
        alpha_lrs=(),
        weight_decays=(),
        widths=(384,),
        methods=(),
        seeds=(0,),
        setting=f"{CIFAR_SETTING}; DeiT's own learning rate, a fifth of the paper's",
    )


def _toy(module: Any) -> Recipe:
    about = str(module.__doc__).split("\n")[0].rstrip(".")
    return Recipe(about=about, run=module.run, scales={"paper": module.Config})


RECIPES: dict[str, Recipe] = {
    "table1": Recipe(
        about="Table 1 and Figure 3 (left): DeiT with AC/DC at 70, 80 and 90 %",
        run=table1_deit_acdc.run,
        scales={
            "paper": table1_deit_acdc.Config,
            "paper-base": table1_base,
            "healthy": table1_healthy,
            "gpu": table1_gpu,
            "gpu-healthy": table1_gpu_healthy,
            "cpu": table1_cpu,
        },
    ),
    "table3": Recipe(
        about="Table 3: HAM beside AdamW and HORST at 90 %",
        run=table3_ham.run,
        scales={"paper": table3_ham.Config, "gpu": table3_gpu, "cpu": table3_cpu},
    ),
    "table4": Recipe(
        about="Table 4: twice as long, at 70 %",
        run=table4_long_run.run,
        scales={"paper": table4_long_run.Config, "gpu": table4_gpu, "cpu": table4_cpu},
    ),
    "table6": Recipe(
        about="Table 6 and Figures 4 and 8: GPT-2 pruned in one shot",
        run=table6_gpt2_one_shot.run,
        scales={"paper": table6_gpt2_one_shot.Config, "gpu": table6_gpu, "cpu": table6_cpu},
        sparsities_in_one_run=True,
    ),
    "one_shot_methods": Recipe(
        about="Beyond the paper: the models of Table 6 pruned by magnitude, Wanda and SparseGPT",
        run=functools.partial(table6_gpt2_one_shot.run, name="one_shot_methods"),
        scales={"gpu": one_shot_methods_gpu, "cpu": one_shot_methods_cpu},
        sparsities_in_one_run=True,
    ),
    "frontier_language": Recipe(
        about="Beyond the paper: language models against alpha times the learning rate, AdamW tuned alike",
        run=frontier_language.run,
        scales={"cpu": frontier_language_cpu},
        sparsities_in_one_run=True,
    ),
    "frontier_vision": Recipe(
        about="Beyond the paper: sparse training of vision transformers against alpha times the learning rate",
        run=frontier_vision.run,
        scales={"cpu": frontier_vision_cpu, "gpu": frontier_vision_gpu},
    ),
    "frontier_compositions": Recipe(
        about="Beyond the paper: other compositions, other sparse optimizers, other ways to prune",
        run=frontier_compositions.run,
        scales={"cpu": frontier_compositions_cpu},
        sparsities_in_one_run=True,
    ),
    "figure1_left": _toy(figure1_weight_spread),
    "figure1_right": _toy(figure1_diagonal_network),
    "figure2": _toy(figure2_dichotomy),
    "figure3_right": _toy(figure3_composition_order),
    "figure5": _toy(figure5_additive_vs_multiplicative),
    "figure6": _toy(figure6_mirror_maps),
    "figure7": _toy(figure7_loss_curves),
    "theorem4_7": _toy(theorem4_7_implicit_bias),
    "toy_suite": _toy(toy_suite),
}
