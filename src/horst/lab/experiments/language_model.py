"""Training a GPT-2 for an experiment: the paper's language recipe (Table 5) as defaults, every choice a field."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.baselines.spred import merge_factors
from horst.lab.data.token_batches import EvaluationBatch, TokenBatches, evaluation_batches
from horst.lab.experiments import identity
from horst.lab.experiments.whole import whole_model
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.lab.training import LoopConfig, OneCycle, Task, TrainResult, parallelize, perplexity, train
from horst.lab.training.config import Compile
from horst.lab.training.distributed import World
from horst.lab.training.evaluate import Precision

ORDER_SEED = 1337  # of the data in the paper's base code


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """How the language models of an experiment are trained.

    Args:
        data: Folder with ``train.bin``, ``val.bin`` and ``meta.json``, as ``horst data`` writes them.
        model: Its shape.
        optimization: The optimizers' settings.
        steps: Of the optimizer.
        batch_size: Sequences a step, over all processes.
        warmup_steps: Of the learning rate, which then falls along a cosine to a hundredth.
        clip_norm: Of the gradient. The paper does not say; 1.0 is its base code's default.
        precision: bf16 computes under autocast, weights stay float32.
        compile: Whether to compile the model; auto does on a GPU.
        parallel: With torchrun: whole copies (ddp) or shards (fsdp).
        accumulate: Split each process's batch into so many parts, one after the other: less memory, the same gradient.
        ema_decay: Of an average of the weights, evaluated beside them and not pruned; none keeps none.
        eval_batch_size: Sequences at a time when evaluating; with ``eval_batches``, over all processes.
        eval_batches: So many batches of the validation file are evaluated on, from its beginning; none is all of it.
        eval_every: Steps between evaluations; none evaluates at the end only.
        checkpoint_every: Steps between checkpoints; none writes one only when interrupted.
        keep_checkpoints: How many stay.
        log_every: Steps between two lines of ``metrics.jsonl``.
        tensorboard: Write to the folder ``tensorboard`` of each run too.
        wandb: Project of Weights & Biases to report to.
        deterministic: Deterministic algorithms only: a resumed run on one GPU is then the same bit for bit.
    """

    data: pathlib.Path = pathlib.Path("data/slimpajama")
    model: GPT2Config = GPT2Config()  # noqa: RUF009 - frozen
    optimization: Optimization = Optimization(betas=(0.9, 0.95))  # noqa: RUF009 - frozen
    steps: int = 25_000
    batch_size: int = 128
    warmup_steps: int = 3000
    clip_norm: float | None = 1.0
    precision: Precision = "bf16"
    compile: Compile = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    accumulate: int = 1
    ema_decay: float | None = None
    eval_batch_size: int = 64
    eval_batches: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = 1000
    keep_checkpoints: int = 2
    log_every: int = 50
    tensorboard: bool = False
    wandb: str | None = None
    deterministic: bool = False


def run_identity(config: LanguageConfig, optimizer: Name, seed: int) -> dict[str, Any]:
    """All that a run's outcome depends on."""
    return {
        "run": identity.settings(config, optimizer),
        "optimizer": optimizer,
        "seed": seed,
        "data": identity.token_data(config.data),
        "evaluated_windows": config.eval_batches and config.eval_batches * config.eval_batch_size,  # none is all
    }


def train_language_model(
    config: LanguageConfig, optimizer: Name, seed: int, directory: pathlib.Path, world: World
) -> tuple[GPT2, TrainResult]:
    """Train from the seed's weights and data order; the model returned is whole, on this process's device."""
    _validation(config, world)  # what cannot be evaluated is refused before the training, not after
    about = run_identity(config, optimizer, seed)
    torch.manual_seed(seed)
    model = GPT2(config.model)
    parallelize(model, config.parallel, world.device)
    source = TokenBatches(
        config.data / "train.bin",
        batch_size=config.batch_size,
        context=config.model.context,
        seed=ORDER_SEED + 10_000 * seed,  # an epoch adds 1
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        vocabulary=config.model.vocabulary,
    )
    task = Task(
        model=model,
        loss=_loss,
        train=source,
        evaluate=lambda model: evaluate_language_model(model, config, world),
        unit="tokens",
        units_per_row=config.model.context,
        identity={**about, "run": identity.deciding(about["run"])},
    )
    loop = LoopConfig(
        steps=config.steps,
        schedule=OneCycle(warmup_steps=config.warmup_steps),
        precision=config.precision,
        compile=config.compile,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        eval_every=config.eval_every,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        deterministic=config.deterministic,
    )
    result = train(task, config.optimization.make(model, optimizer), loop, directory=directory)
    merge_factors(model)
    return whole_model(model, GPT2(config.model), world.device), result


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model.loss(tokens, targets)
    return loss


def evaluate_language_model(model: nn.Module, config: LanguageConfig, world: World) -> Mapping[str, float]:
    """Perplexity over the validation file, or its beginning, in windows that do not overlap."""
    batches = itertools.islice(_validation(config, world), config.eval_batches)
    return perplexity(model, batches, precision=config.precision)


def _validation(config: LanguageConfig, world: World) -> Iterator[EvaluationBatch]:
    # A beginning of the file is the same text on any number of processes; the whole file is in any case.
    shares = world.size if config.eval_batches is None else 1
    return evaluation_batches(
        config.data / "val.bin",
        context=config.model.context,
        batch_size=config.eval_batch_size * shares,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        vocabulary=config.model.vocabulary,
    )
