"""How an existing model is made sparse: the settings of :func:`horst.sparsify`, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import nn

from horst.fields import option
from horst.optimizers.auto_alpha import Alpha
from horst.optimizers.hyperparameters import check_alpha, check_number
from horst.pruning.chains import outer_blocks
from horst.sparsity.layers import Preset
from horst.sparsity.masks import NM, Block, Pattern, check_sparsity, parse_pattern
from horst.training import LoopConfig, WarmupCosine
from horst.training.evaluate import usual_precision

Chooser = Literal["sparsegpt", "wanda", "magnitude"]
Training = Literal["fixed", "refresh", "admm", "ast", "cast"]
OptimizerName = Literal["horst", "adamw", "adams"]
Distillation = Literal["kl", "squarehead", "none"]
Parallel = Literal["ddp", "fsdp"]
Division = Literal["uniform", "global"]

AT_ONCE = 0.6  # up to this sparsity one pruning is enough
_WEIGHTS = {"kl": (0.33, 0.67), "squarehead": (1.0, 1.0), "none": (1.0, 0.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsifyConfig:
    """Settings of :func:`horst.sparsify`.

    Args:
        sparsity: Share of zeros in the pruned layers, in [0, 1); None where the pattern is N:M, which fixes it.
        pattern: Pattern of the zeros: None (single weights), ``"2:4"`` or any N:M, or ``(rows, columns)`` of a block.
        method: Method that chooses the masks: ``"sparsegpt"``, ``"wanda"`` or ``"magnitude"``.
        distribution: Division of the zeros among the layers: ``"uniform"`` (the same share in each) or
            ``"global"`` (one threshold, for models trained with ``l1``).
        stages: Sparsities on the way to ``sparsity``, rising; the model is pruned and trained at each. None: none up to
            60 %, a cubic beyond. ``()``: none.
        train: Treatment of the masks while training. ``"fixed"``: the zeros stay where the method put them.
            ``"refresh"``: now and then all weights are trained for some steps, and the smallest are removed again.
            Three choose masks of their own, by magnitude, from the dense weights on: ``"admm"``
            (:class:`horst.sparsity.ADMM`), ``"ast"`` (:class:`horst.sparsity.AST`), ``"cast"``
            (:class:`horst.sparsity.CAST`, which needs ``optimizer="adams"``). With these ``method`` has no part.
        refresh_every: Steps from one refresh to the next; None is a tenth of a stage. A fifth of them are dense.
        sam_radius: Length of SAM's ascent step with ``train="admm"`` (SAFE, which has 2e-4 on text and 0.1 on images);
            0 for none. Each step then takes a second backward pass.
        optimizer: Optimizer: ``"horst"``, ``"adamw"`` or, for ``train="cast"``, ``"adams"``.
        lr: Peak of the learning rate.
        betas: Decay rates of Adam's averages.
        weight_decay: Decoupled weight decay of the matrices.
        alpha: Strength of HORST's mirror step.
        l1: Strength of HORST's soft threshold on the matrices in the blocks.
        tokens: Tokens of text to train on, over all stages. Give this or ``steps``; neither is one pass over the data.
        steps: Optimizer steps of all stages together.
        batch_size: Rows per step, over all processes.
        warmup: Share of the steps in which the learning rate rises.
        distill: Term that pulls the model towards the dense one: ``"kl"`` (divergence of the predictions),
            ``"squarehead"`` (hidden states) or ``"none"``. None: hidden states for data given as a dictionary, ``"kl"``
            else.
        label_weight: Weight of the cross-entropy; None is 0.33 beside ``"kl"`` and 1 else.
        distill_weight: Weight of the distillation; None is 0.67 for ``"kl"`` and 1 for ``"squarehead"``.
        temperature: Temperature of ``"kl"``.
        layers, include, exclude: Weights to prune, see :mod:`horst.sparsity.layers`; layers may be ``"paper"`` too: all
            blocks but the first and the last.
        samples: Rows of the data that calibrate the choice of the masks.
        lora: Rank of adapters that are trained in place of the weights, and merged without filling a zero; None trains
            the weights.
        gradient_checkpointing: Whether the blocks' activations are computed again in the backward pass: less memory.
        parallel: Way to use several processes: ``"ddp"`` (a whole copy each) or ``"fsdp"`` (cut over all).
        seed: Seed of the order of the data, of dropout and of the adapters.
        loop: Precision, clipping, accumulation, compilation, intervals; those count the steps of one stage. None: the
            gradient norm is clipped at 1, and the precision is bf16 on a GPU and float32 on a CPU.

    Example:
        >>> SparsifyConfig(sparsity=0.7).targets
        (0.493, 0.674, 0.7)
        >>> SparsifyConfig(pattern="2:4").targets
        (0.5,)
    """

    sparsity: float | None = None
    pattern: Pattern = None
    method: Chooser = "sparsegpt"
    distribution: Division = "uniform"
    stages: tuple[float, ...] | None = None
    train: Training = "fixed"
    refresh_every: int | None = None
    sam_radius: float = 0.0
    optimizer: OptimizerName = "horst"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    alpha: Alpha = option(5.0, read_by=("horst",))
    l1: float = option(0.0, read_by=("horst",))
    tokens: int | None = None
    steps: int | None = None
    batch_size: int = 32
    warmup: float = 0.05
    distill: Distillation | None = None
    label_weight: float | None = None
    distill_weight: float | None = None
    temperature: float = 2.0
    layers: Preset | Literal["paper"] | None = "blocks"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    samples: int = 128
    lora: int | None = None
    gradient_checkpointing: bool = option(False, affects="execution")
    parallel: Parallel = option("ddp", affects="execution")
    seed: int = 0
    loop: LoopConfig | None = None

    def __post_init__(self) -> None:
        lists = {"include": "patterns", "exclude": "patterns", "stages": "sparsities", "betas": "two numbers"}
        for name, kind in lists.items():
            value = getattr(self, name)
            if isinstance(value, (str, int, float)):
                raise TypeError(f"{name} is a list of {kind}: write [{value!r}], not {value!r}.")
            if value is not None:
                object.__setattr__(self, name, tuple(value))  # a frozen config holds tuples
        check_sparsity(self.sparsity, self.units)
        self._check_choices()
        self._check_stages()
        self._check_numbers()
        self._check_combinations()

    @property
    def units(self) -> Block | NM:
        """The pattern, read."""
        return parse_pattern(self.pattern)

    def of_model(self, model: nn.Module) -> SparsifyConfig:
        """The same, with ``layers="paper"`` put as patterns of a model's names."""
        if self.layers != "paper":
            return self
        return dataclasses.replace(self, layers="blocks", exclude=(*self.exclude, *outer_blocks(model)))

    @property
    def final_sparsity(self) -> float:
        """The sparsity at the end, N:M's included."""
        if isinstance(self.units, NM):
            return self.units.sparsity
        assert self.sparsity is not None
        return self.sparsity

    @property
    def targets(self) -> tuple[float, ...]:
        """The sparsity of each stage, the final one last."""
        final = self.final_sparsity
        if self.stages is not None or isinstance(self.units, NM) or final <= AT_ONCE:
            return (*(self.stages or ()), final)
        count = 3 if final <= 0.8 else 4
        return (*(round(final * (1 - (1 - i / count) ** 3), 3) for i in range(1, count)), final)

    def steps_of_stages(self, steps: int) -> tuple[int, ...]:
        """``steps`` divided among the stages: the last gets twice as many as each other.

        Example:
            >>> SparsifyConfig(sparsity=0.7, stages=(0.5,)).steps_of_stages(90)
            (30, 60)
        """
        count = len(self.targets)
        each = steps // (count + 1) if count > 1 else 0
        if count > 1 and not each:
            raise ValueError(
                f"{steps} steps are too few for {count} stages ({', '.join(map(str, self.targets))}). Train longer, or "
                "give fewer stages: an empty list of stages prunes at once (stages=(), on the command line a bare "
                "--stages)."
            )
        return (*[each] * (count - 1), steps - each * (count - 1))

    def loop_on(self, device: torch.device) -> LoopConfig:
        """The loop, or its default on a device.

        Example:
            >>> SparsifyConfig(sparsity=0.5).loop_on(torch.device("cpu")).precision
            'float32'
        """
        return self.loop or LoopConfig(clip_norm=1.0, precision=usual_precision(device))

    def weights(self, distill: Distillation) -> tuple[float, float]:
        """The weights of cross-entropy and distillation."""
        label, teacher = _WEIGHTS[distill]
        return (
            label if self.label_weight is None else self.label_weight,
            teacher if self.distill_weight is None or distill == "none" else self.distill_weight,
        )

    def schedule(self, steps: int) -> WarmupCosine:
        """The learning rate over all ``steps``: up in a line, then a cosine to zero."""
        warmup = min(round(self.warmup * steps), steps - 1)
        return WarmupCosine(warmup_steps=warmup, start=1 / (warmup + 1), end=0.0)

    def _check_choices(self) -> None:
        choices = {
            "method": Chooser, "train": Training, "optimizer": OptimizerName, "distill": Distillation,
            "parallel": Parallel, "distribution": Division,
        }  # fmt: skip
        for name, kind in choices.items():
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed and not (name == "distill" and value is None):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")

        if self.layers not in (*get_args(Preset), "paper", None):
            raise ValueError(f"layers must be 'blocks', 'all_linear', 'all', 'paper' or None, got {self.layers!r}.")

    def _check_stages(self) -> None:
        if not self.stages:
            return
        if isinstance(self.units, NM):
            raise ValueError(
                f"a list of stages has no meaning with {self.units.n}:{self.units.m}, which fixes the sparsity, got "
                f"{_listed(self.stages)}. Leave stages out."
            )
        levels = (0.0, *self.stages, self.final_sparsity)
        if any(not low < high for low, high in pairwise(levels)):
            raise ValueError(
                f"stages must rise from above 0 to below the final sparsity {self.final_sparsity}, got "
                f"{_listed(self.stages)}. To reach 0.7 in two steps give the one stage 0.5."
            )

    def _check_numbers(self) -> None:
        for name in ("batch_size", "samples", "tokens", "steps", "lora", "refresh_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if not 0.0 < self.lr < float("inf"):
            raise ValueError(f"lr must be positive and finite, got {self.lr}.")
        if len(self.betas) != 2 or any(not 0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}.")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup must lie in [0, 1), got {self.warmup}. It is a share of the steps.")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}.")
        check_number("weight_decay", self.weight_decay, "use 0 for no decay")
        check_number("l1", self.l1, "use 0 to leave it out")
        check_number("sam_radius", self.sam_radius, "use 0 for no ascent step")
        check_alpha(self.alpha, "use 0 for AdamW")
        for name in ("label_weight", "distill_weight"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "use 0 to leave the term out")

    def _check_combinations(self) -> None:
        if self.tokens is not None and self.steps is not None:
            raise ValueError(f"tokens={self.tokens} and steps={self.steps} both say how long to train: give one.")
        if (self.train == "cast") != (self.optimizer == "adams"):
            raise ValueError(
                f"train='cast' and optimizer='adams' belong together, got train={self.train!r} and "
                f"optimizer={self.optimizer!r}. Give both or neither."
            )
        if self.distribution == "global" and isinstance(self.units, NM):
            raise ValueError(
                f"{self.units.n}:{self.units.m} fixes the sparsity of every layer: there is nothing for "
                "distribution='global' to divide. Leave one of them out."
            )
        if self.distribution == "global" and self.train == "ast":
            raise ValueError(
                "train='ast' gives every layer the same share of zeros, got distribution='global'. Use another train, "
                "or leave distribution out."
            )
        if self.optimizer != "horst":
            for name, default in (("alpha", SparsifyConfig.alpha), ("l1", SparsifyConfig.l1)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name} {value} is an option of HORST, and the optimizer is {self.optimizer}. Use the "
                        f"optimizer horst, or leave {name} out."
                    )
        if self.distill == "none" and self.label_weight == 0.0:
            raise ValueError("distill='none' and label_weight=0 leave no loss. Change one of them.")
        if self.distill == "none" and self.distill_weight is not None:
            raise ValueError(f"distill_weight={self.distill_weight} has no meaning with distill='none'. Leave it out.")
        if self.refresh_every is not None and self.train != "refresh":
            raise ValueError(f"refresh_every={self.refresh_every} is for train='refresh', got train={self.train!r}.")
        if self.sam_radius and self.train != "admm":
            raise ValueError(f"sam_radius={self.sam_radius} is for train='admm', got train={self.train!r}.")
        if self.method == "sparsegpt" and isinstance(self.units, Block) and not self.units.is_unstructured:
            raise ValueError(
                f"sparsegpt prunes single weights or N:M, got blocks of {self.units.rows} x {self.units.columns}. Use "
                "method='wanda' or 'magnitude' for blocks."
            )
        if self.lora is not None:
            if self.train != "fixed":
                raise ValueError(f"lora={self.lora} trains with fixed masks, got train={self.train!r}. Use 'fixed'.")
            if self.parallel == "fsdp":
                raise ValueError(f"lora={self.lora} works with parallel='ddp', got 'fsdp': adapters are small.")
            if self.l1:
                raise ValueError(f"l1={self.l1} shrinks weights, and lora={self.lora} trains none. Leave one out.")


def check_names(settings: Iterable[str]) -> None:
    """Refuse a name that is no setting, with the one that was meant."""
    known = [field.name for field in dataclasses.fields(SparsifyConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The settings are {', '.join(known)}."
            raise TypeError(f"horst.sparsify has no setting {name!r}. {hint}")


def _listed(stages: tuple[float, ...]) -> str:
    return " ".join(map(str, stages))
