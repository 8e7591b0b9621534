"""Training a GPT-2 for an experiment: the paper's language recipe (Table 5) as defaults, every choice a field."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horst.fields import option
from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.data.token_batches import TokenBatches, evaluation_batches
from horst.lab.experiments import identity
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.training import LoopConfig, OneCycle, Task, TrainResult, parallelize, perplexity, train
from horst.training.distributed import World, is_sharded, whole_tensor

ORDER_SEED = 1337  # of the data in the paper's base code


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """How the language models of an experiment are trained.

    Args:
        data: Folder with ``train.bin``, ``val.bin`` and ``meta.json``, as ``horst data`` writes them.
        model: Shape of the model.
        optimization: Settings of the optimizers.
        loop: Settings of the training loop. The paper does not state a gradient-norm limit; 1.0 is its base code's.
        steps: Optimizer steps.
        batch_size: Sequences per step, over all processes.
        warmup_steps: Steps in which the learning rate rises, before it falls along a cosine to a hundredth.
        parallel: With torchrun: whole copies (ddp) or shards (fsdp).
        eval_batch_size: Sequences at a time when evaluating; with ``eval_batches``, over all processes.
        eval_batches: Number of batches of the validation file, from its beginning, to evaluate on; None is all of it.
    """

    data: pathlib.Path = pathlib.Path("data/slimpajama")
    model: GPT2Config = GPT2Config()
    optimization: Optimization = Optimization(betas=(0.9, 0.95))
    loop: LoopConfig = LoopConfig(clip_norm=1.0, log_every=50)
    steps: int = 25_000
    batch_size: int = 128
    warmup_steps: int = 3000
    parallel: Literal["ddp", "fsdp"] = option("ddp", affects="nothing")
    eval_batch_size: int = option(64, affects="execution")
    eval_batches: int | None = option(None, affects="execution")  # the windows evaluated are in run_identity

    def __post_init__(self) -> None:
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ValueError(f"eval_batches must be at least 1, or None for the whole file, got {self.eval_batches}.")


def in_words(config: LanguageConfig) -> str:
    """What is trained on what, for a result file.

    Example:
        >>> in_words(LanguageConfig(steps=6000, data=pathlib.Path("data/wikipedia"))).split("; ")[0]
        'a GPT of 12 blocks of width 768 on wikipedia, 6,000 steps of 128 x 512 tokens (393,216,000 tokens)'
    """
    rows, context = config.batch_size, config.model.context
    return (
        f"a GPT of {config.model.layers} blocks of width {config.model.width} on {config.data.name}, {config.steps:,} "
        f"steps of {rows} x {context} tokens ({config.steps * rows * context:,} tokens); the paper: 12 blocks of width "
        "768, SlimPajama, 1,638,400,000 tokens"
    )


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
    contender = config.optimization.make(model, optimizer, steps=config.steps)
    with config.optimization.masks(model, contender, optimizer) or contextlib.nullcontext() as sparsifier:
        result = train(
            task,
            contender,
            config.loop,
            steps=config.steps,
            schedule=OneCycle(warmup_steps=config.warmup_steps),
            sparsifier=sparsifier,
            directory=directory,
        )
    cut: bool = is_sharded(model)
    if cut:  # pruning and counting need whole tensors
        weights = {name: whole_tensor(tensor) for name, tensor in model.state_dict().items()}
        model = GPT2(config.model).to(world.device)
        model.load_state_dict(weights)
    return model, result


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model.loss(tokens, targets)
    return loss


def evaluate_language_model(model: nn.Module, config: LanguageConfig, world: World) -> Mapping[str, float]:
    """Perplexity over the validation file, or its beginning, in windows that do not overlap."""
    batches = itertools.islice(_validation(config, world), config.eval_batches)
    return perplexity(model, batches, precision=config.loop.precision)


def _validation(config: LanguageConfig, world: World) -> Iterator[tuple[Tensor, Tensor]]:
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
