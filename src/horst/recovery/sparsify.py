"""An existing model, made sparse: evaluate, choose masks, train with them, check, evaluate; in one or more stages."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from horst import fields
from horst.optimizers.adams import AdamS
from horst.optimizers.horst import HORST
from horst.optimizers.param_groups import param_groups
from horst.parameters.kinds import block_prefixes
from horst.parameters.modes import evaluating, without_cache
from horst.pruning import PrunedLayer, Report
from horst.recovery.adapters import attach, check_lora, check_no_adapters, merge
from horst.recovery.blocks import checkpointed_blocks, compiled_blocks
from horst.recovery.check import check_sparse, named_numbers, warn_if_sparser
from horst.recovery.config import Distillation, OptimizerName, SparsifyConfig, check_names
from horst.recovery.data import Data, Examples, fingerprint, read_examples
from horst.recovery.methods import METHODS, chosen_layers
from horst.recovery.progress import LaterBatches, Part, Progress
from horst.recovery.report import SparsifyReport, Stage
from horst.recovery.teacher import RecoveryLoss, copy_as_teacher, prepare_teacher
from horst.recovery.whole import Pruner
from horst.sparsity.layers import check_model
from horst.sparsity.masks import NM
from horst.training import Interrupted, LoopConfig, LRSchedule, Task, TrainResult, parallelize, train
from horst.training.distributed import is_sharded, on_rank_0, rank, reshard, world_size
from horst.training.task import AUTOTUNE

logger = logging.getLogger(__name__)

Evaluate = Callable[[nn.Module], Mapping[str, float]]


def sparsify(
    model: nn.Module,
    data: Data,
    *,
    evaluate: Evaluate | None = None,
    teacher: nn.Module | None = None,
    optimizer: OptimizerName | Callable[[nn.Module], Optimizer] | None = None,
    directory: str | os.PathLike[str] | None = None,
    config: SparsifyConfig | None = None,
    **settings: Any,
) -> SparsifyReport:
    """Prune an existing model in place and train it further, with the dense model as its teacher.

    Each stage prunes the model (:func:`horst.pruning.prune`) and trains it with the zeros kept, on the data's labels
    and on what the dense model says. Call it again with the same arguments and ``directory`` after anything that
    stopped it, and it goes on. On a CPU, and on one GPU with ``LoopConfig(deterministic=True)``, the result is that of
    a run that was never stopped, bit for bit.

    Weights are trained in float32 and given back in their own dtype. With several processes (``torchrun``), give every
    process the same whole model on its device; with ``parallel="fsdp"`` the model is cut over them on return, and
    :func:`horst.recovery.gathered` gives its whole weights.

    Args:
        model: Any model: of transformers (causal, or an encoder with or without a head), of timm, or of your own.
        data: Token windows for a causal language model, a tensor (windows, length) of integers. Or a pair
            ``(images, labels)``. Or a dictionary of tensors with the same rows that the model takes by name
            (``input_ids``, ``attention_mask``), and perhaps ``labels``. Or a source with ``batches(start)``
            (:class:`horst.training.BatchSource`).
        evaluate: Function of the model that gives named numbers, the same on every rank. It is called on the dense
            model, after each pruning and after each training.
        teacher: Model to learn from, on the model's device; it is frozen, and put in evaluation mode. None is a copy of
            the dense model.
        optimizer: Name of an optimizer, ``"horst"`` or ``"adamw"``, as in the settings; or a function that makes one
            for the model.
        directory: Folder for checkpoints and metrics; None uses a temporary one.
        config: Settings; None takes the defaults.
        settings: Fields of :class:`~horst.recovery.SparsifyConfig` that replace those of ``config``.

    Raises:
        NotSparse: A masked weight is not zero at the end, or there are too few zeros.
        Interrupted: SIGTERM or Ctrl-C came; the run has saved its state.
        CheckpointError: ``directory`` holds another run, or could not be written.

    Example:
        >>> from horst.training import LoopConfig
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        >>> model = nn.Sequential(nn.Embedding(20, 8), nn.Sequential(block(), block()), nn.Linear(8, 20))
        >>> windows = torch.randint(20, (32, 6))
        >>> loop = LoopConfig(precision="float32", compile="off")
        >>> report = sparsify(model, windows, sparsity=0.5, steps=4, batch_size=8, samples=8, loop=loop)
        >>> report.sparsity, int((model[1][0][0].weight == 0).sum())
        (0.5, 32)
    """
    if optimizer is not None and not callable(optimizer):
        settings["optimizer"] = optimizer
    check_names(settings)
    config = dataclasses.replace(config, **settings) if config is not None else SparsifyConfig(**settings)
    check_model(model)
    check_no_adapters(model)
    if is_sharded(model):
        raise ValueError("the model is cut over the ranks already. Give the whole model and parallel='fsdp'.")
    examples = read_examples(data, model, batch_size=config.batch_size, seed=config.seed)
    device = next(model.parameters()).device
    config = dataclasses.replace(config, loop=config.loop_on(device))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []))
        stack.enter_context(evaluating(model))
        stack.callback(model.eval)
        folder = stack.enter_context(_folder(directory))
        make = optimizer if callable(optimizer) else None
        run = _Recovery(model, examples, config, evaluate, teacher, make, folder, directory is not None)
        return run.run(stack)


class _Recovery:
    """A run: what it is made of, and its stages."""

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        config: SparsifyConfig,
        evaluate: Evaluate | None,
        teacher: nn.Module | None,
        make_optimizer: Callable[[nn.Module], Optimizer] | None,
        folder: pathlib.Path,
        keeps_checkpoints: bool,
    ) -> None:
        self.model, self.examples, self.make_optimizer = model, examples, make_optimizer
        self.config = config.of_model(model)
        self.evaluate_model = named_numbers(evaluate or (lambda model: {}))
        self.keeps_checkpoints = keeps_checkpoints
        self.method = METHODS[config.train]
        if self.method.starts_dense and config.stages:
            raise ValueError(f"train={config.train!r} goes from dense to sparse in one stage: leave stages out.")
        self.targets = (config.final_sparsity,) if self.method.starts_dense else config.targets
        self.steps = _steps(config, examples)
        self.parts = (self.steps,) if self.method.starts_dense else config.steps_of_stages(self.steps)
        for part in self.parts:
            self.method.check(config, part)
        distill: Distillation = config.distill or ("squarehead" if examples.keys else "kl")
        if distill == "none" and teacher is not None:
            raise ValueError("distill='none' uses no teacher, and one was given. Leave one of them out.")
        identity = {
            "settings": fields.settings(config, without=("execution", "nothing"), reader=config.optimizer),
            "steps": self.steps,
            "model": fingerprint(list(model.parameters())),
            "teacher": None if teacher is None else fingerprint(list(teacher.parameters())),
            **examples.identity,
        }
        self.progress = Progress(folder, identity, len(self.targets))
        self.teacher = teacher
        if distill != "none":
            self.teacher = copy_as_teacher(model) if teacher is None else prepare_teacher(teacher, model)
        self.loss = RecoveryLoss(model, self.teacher, examples, config, distill)

    def run(self, stack: contextlib.ExitStack) -> SparsifyReport:
        """Everything, from the dense model to the report."""
        model, config, progress = self.model, self.config, self.progress
        stack.callback(self.loss.close)
        stack.enter_context(without_cache(model, self.teacher))
        stack.enter_context(_float32(model))
        example = self.examples.calibration(1)[0]
        self.loss.check(example)
        self._refuse_layers_early()
        stack.enter_context(self._unused_frozen())
        self.pruner = Pruner(model, config, self.examples)
        if world_size() > 1:
            for one in (model, self.teacher):
                if one is not None:
                    parallelize(one, config.parallel, self.pruner.device)
        if progress.state["dense"] is None:
            progress.state["dense"] = self._evaluate()
            progress.save()
        if config.lora is None:
            self.optimizer = self._optimizer()
        begin = progress.begin()
        for stage in range(begin, len(self.targets)):
            layers = self._stage(stage)
            progress.save()
            if stage > 0:
                progress.forget_checkpoints(stage - 1)
        rows = [
            Stage(sparsity=target, steps=steps, units=self._units(steps), **state)
            for target, steps, state in zip(self.targets, self.parts, progress.state["stages"], strict=True)
        ]
        chooser = config.train if self.method.starts_dense else config.method
        return SparsifyReport(
            settings=progress.state["identity"]["settings"],
            unit=self.examples.unit,
            dense=progress.state["dense"],
            stages=rows,
            layers=Report(chooser, layers, sum(p.numel() for p in model.parameters())),
        )

    def _stage(self, stage: int) -> list[PrunedLayer]:
        """Prune, train, check; or go on with what a checkpoint holds."""
        target, steps, state = self.targets[stage], self.parts[stage], self.progress.state["stages"][stage]
        logger.info("stage %d of %d: sparsity %g, %d steps", stage + 1, len(self.targets), target, steps)
        masks: dict[str, Tensor] = {}
        if not self.progress.has_checkpoint(stage):
            state["pruned"] = {}
            if not self.method.starts_dense:
                masks = self.pruner.prune(self.model, target)
                state["pruned"] = self._evaluate()
            self.progress.save()
        # Dropout and adapters draw the same numbers however the run came here.
        torch.manual_seed((self.config.seed * 1_000_003 + stage) * 1_000_003 + rank())
        if self.config.lora is None:
            result, layers = self._train_weights(stage, masks)
        else:
            result, layers = self._train_adapters(stage, masks)
        state["loss"], state["metrics"] = self.progress.last_loss(stage), result.metrics
        state["seconds"] = result.seconds
        state["units_per_second"] = result.units_per_second or state.get("units_per_second")  # a resumed end has none
        return layers

    def _train_weights(self, stage: int, masks: dict[str, Tensor]) -> tuple[TrainResult, list[PrunedLayer]]:
        config = self.config
        target = self.targets[stage]
        this = dataclasses.replace(config, sparsity=None if isinstance(config.units, NM) else target, stages=())
        with self.method.build(self.model, self.optimizer, masks, this, self.parts[stage]) as sparsifier:
            masks.clear()  # the sparsifier has its own
            result = self._train(stage, self.optimizer, sparsifier)
            return result, check_sparse(sparsifier.layers, sparsifier.masks, config.units, target, config.distribution)

    def _train_adapters(self, stage: int, masks: dict[str, Tensor]) -> tuple[TrainResult, list[PrunedLayer]]:
        config = self.config
        assert config.lora is not None
        layers = chosen_layers(self.model, self.config)
        masks = masks or {layer.name: layer.param.detach() != 0 for layer in layers}  # then a checkpoint has them
        was_trained = {name: p.requires_grad for name, p in self.model.named_parameters()}
        try:
            attach(self.model, layers, masks, config.lora)
            masks.clear()
            result = self._train(stage, self._optimizer(), None)
        finally:
            masks = merge(self.model)
            for name, p in self.model.named_parameters():
                p.requires_grad_(was_trained[name])
        layers = chosen_layers(self.model, self.config)
        return result, check_sparse(layers, masks, config.units, self.targets[stage], config.distribution)

    def _train(self, stage: int, optimizer: Optimizer, sparsifier: Any) -> TrainResult:
        config, steps, offset = self.config, self.parts[stage], sum(self.parts[:stage])
        loop = config.loop_on(self.pruner.device)
        every = (loop.checkpoint_every or steps) if self.keeps_checkpoints else None
        task = Task(
            model=self.model,
            loss=self.loss,
            train=LaterBatches(self.examples.source, offset),
            evaluate=self.evaluate_model,
            count=self.loss.count,
            unit=self.examples.unit,
            units_per_row=self.examples.units_per_row,
            identity={**self.progress.state["identity"], "optimizer": config.optimizer, "stage": stage},
        )
        schedule = Part(config.schedule(self.steps), offset, self.steps)
        with self._compiled(loop) as loop, checkpointed_blocks(self.model, config.gradient_checkpointing):
            return train(
                task,
                optimizer,
                dataclasses.replace(loop, checkpoint_every=every),
                steps=steps,
                schedule=cast(LRSchedule, schedule),
                sparsifier=sparsifier,
                directory=self.progress.folder(stage),
            )

    @contextlib.contextmanager
    def _compiled(self, loop: LoopConfig) -> Iterator[LoopConfig]:
        """The blocks and the loss compiled by themselves, and a loop that compiles no more."""
        if loop.compile == "off" or (loop.compile == "auto" and self.pruner.device.type != "cuda"):
            yield loop
            return
        mode = AUTOTUNE if loop.compile == "max-autotune" else None
        with compiled_blocks(self.model, self.teacher, mode=mode) as has_blocks:
            self.loss.compiled = has_blocks
            yield dataclasses.replace(loop, compile="off") if has_blocks else loop

    def _optimizer(self) -> Optimizer:
        config = self.config
        if self.make_optimizer is not None:
            return self.make_optimizer(self.model)
        adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas}
        groups = param_groups(self.model, weight_decay=config.weight_decay, alpha=config.alpha, l1=config.l1)
        if config.optimizer == "horst":
            return HORST(groups, **adam)
        decaying = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
        return AdamW(decaying, **adam) if config.optimizer == "adamw" else AdamS(decaying, **adam, steps=self.steps)

    def _evaluate(self) -> dict[str, float]:
        try:
            with evaluating(self.model), torch.no_grad():
                return dict(self.evaluate_model(self.model))
        finally:
            reshard(self.model)

    def _units(self, steps: int) -> int:
        return steps * self.config.batch_size * self.examples.units_per_row

    def _refuse_layers_early(self) -> None:
        """Before the teacher's first word: layers that are not there, or that the pattern does not fit."""
        layers = chosen_layers(self.model, self.config)
        warn_if_sparser(layers, self.targets[-1])
        for layer in layers:
            for matrix in layer.matrices():
                rows = matrix.inputs_last
                self.config.units.check(matrix.name, (len(rows), rows[0].numel()), 1)
        if self.config.lora is not None:
            check_lora(self.model, layers, self.config.lora)

    @contextlib.contextmanager
    def _unused_frozen(self) -> Iterator[None]:
        """Freeze what the loss does not reach, such as the pooler of an encoder without a head: DDP would wait for it.

        Inside the blocks nothing is frozen: an expert may just have seen no token of the example.
        """
        model, prefixes = self.model, tuple(block_prefixes(self.model))
        device = next(model.parameters()).device
        batch = next(iter(self.examples.source.batches(0)))
        self.config.loop_on(device).check_rows(len(batch[0]))
        inputs, targets = (part[:1].to(device) for part in batch)
        with torch.enable_grad():
            self.loss(model, inputs, targets).sum().backward()
        unused = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and p.grad is None and not name.startswith(prefixes)
        ]
        model.zero_grad(set_to_none=True)
        if unused:
            logger.info("not reached by the loss, left as they are: %s", ", ".join(name for name, _ in unused))
        for _, p in unused:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for _, p in unused:
                p.requires_grad_(True)


def _steps(config: SparsifyConfig, examples: Examples) -> int:
    """The optimizer steps of all stages."""
    if config.steps is not None:
        return config.steps
    if config.tokens is not None:
        if examples.unit != "tokens":
            raise ValueError(
                f"tokens={config.tokens} counts tokens of text, and the data has {examples.unit}: use steps."
            )
        return max(1, math.ceil(config.tokens / (config.batch_size * examples.units_per_row)))
    if examples.rows is None:
        raise ValueError("a source of batches does not say how long to train: give steps or tokens.")
    return max(1, math.ceil(examples.rows / config.batch_size))


@contextlib.contextmanager
def _float32(model: nn.Module) -> Iterator[None]:
    """The model's weights and buffers in float32, or better where they are; back in their own dtypes on leaving."""
    tensors = (*model.parameters(), *model.buffers())  # batch normalisation takes its statistics as its weights
    narrow = [t for t in tensors if t.is_floating_point() and t.element_size() < 4]
    dtypes = [t.dtype for t in narrow]
    for t in narrow:
        t.data = t.data.float()
    try:
        yield
    finally:
        if not is_sharded(model):
            for t, dtype in zip(narrow, dtypes, strict=True):
                t.data = t.data.to(dtype)


@contextlib.contextmanager
def _folder(directory: str | os.PathLike[str] | None) -> Iterator[pathlib.Path]:
    """The directory, or a temporary one, which is left if the run was interrupted."""
    if directory is not None:
        yield pathlib.Path(directory)
        return
    folder = on_rank_0(lambda: tempfile.mkdtemp(prefix="sparsify-"))
    try:
        yield pathlib.Path(folder)
    except Interrupted:
        logger.warning("interrupted; the state is in %s: give directory= to go on from there.", folder)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
