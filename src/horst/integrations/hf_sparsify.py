"""``horst.sparsify`` inside somebody's own Trainer: pruned at the start, zeros kept, the dense model as teacher.

:class:`SparsifyMixin` goes in front of any subclass of ``transformers.Trainer``, TRL's ``SFTTrainer`` among them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from horst.extras import how_to_install
from horst.files import read_json, write_json
from horst.integrations.hf import SparsityCallback, horst
from horst.pruning import prune
from horst.recovery import NotSparse, SparsifyConfig, check_sparse, kl_divergence, squarehead
from horst.recovery.adapters import check_no_adapters
from horst.recovery.check import zeros_of
from horst.recovery.data import is_causal, is_encoder_decoder
from horst.recovery.methods import chosen_layers, options
from horst.recovery.teacher import copy_as_teacher, narrow_autocast, prepare_teacher
from horst.recovery.whole import frozen_weights, named_parameters
from horst.sparsity import Sparsifier, Static
from horst.training.distributed import on_rank_0, world_size
from horst.training.evaluate import IGNORED

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"horst.integrations.hf_sparsify needs transformers; {how_to_install('hf')}") from error

logger = logging.getLogger(__name__)

_CALL = "call horst.sparsify"
_OPTIMIZER = "pass optimizer_cls_and_kwargs=horst.integrations.hf.horst(args, {}=...) or optimizers=(...)"
# Settings that the Trainer decides, or that need several runs of it, with what to use instead.
_NOT_HERE = {
    "stages": _CALL,
    "train": _CALL,
    "refresh_every": _CALL,
    "sam_radius": _CALL,
    "lora": _CALL,
    "steps": "use TrainingArguments.max_steps",
    "tokens": "use TrainingArguments.max_steps",
    "batch_size": "use TrainingArguments.per_device_train_batch_size",
    "lr": "use TrainingArguments.learning_rate",
    "betas": "use TrainingArguments.adam_beta1 and adam_beta2",
    "weight_decay": "use TrainingArguments.weight_decay",
    "alpha": _OPTIMIZER.format("alpha"),
    "l1": _OPTIMIZER.format("l1"),
    "warmup": "use TrainingArguments.warmup_steps",
    "seed": "use TrainingArguments.seed",
    "gradient_checkpointing": "use TrainingArguments.gradient_checkpointing",
    "loop": "use TrainingArguments",
    "parallel": "start the Trainer with torchrun or accelerate",
}
_RECORD = "sparsify.json"  # in every checkpoint: how sparse the model was asked to be
_SPARSE = 0.05  # share of zeros from which on a model counts as sparse already


class SparsifyMixin:
    """A Trainer that makes its model sparse: ``class SparseSFTTrainer(SparsifyMixin, SFTTrainer): pass``.

    ``train()`` prunes the model as it is then, calibrated on training batches, and keeps the zeros in every step. The
    loss is the Trainer's own times ``label_weight``, plus ``distill_weight`` times the distance to the dense model, of
    which a copy is made here (in bfloat16 on a GPU). Evaluation shows the Trainer's own loss. After the training the
    zeros are counted, and too few are an error. Schedule, batches and precision are the Trainer's. The optimizer is
    HORST, unless the Trainer is given one, or ``TrainingArguments.optim`` is set to another than its default; for AdamW
    give ``SparsifyConfig(optimizer="adamw")``. A Trainer whose model gives no logits while it trains, as TRL's with a
    fused head, costs one more forward pass. With several processes the first one prunes while the others wait: where
    that takes more than half an hour, raise ``TrainingArguments.ddp_timeout``.

    Args:
        sparsify: Settings: ``sparsity`` or ``pattern``, ``method``, ``layers``, ``optimizer``, ``distill`` and its
            weights. Those that the Trainer decides must have their defaults.
        teacher: Model to learn from; None is a copy of the dense model.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, bos_token_id=0,
        ...                                    eos_token_id=0, n_head=2))
        >>> rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 8))]
        >>> args = TrainingArguments("output", max_steps=2, use_cpu=True)
        >>> trainer = SparsifyTrainer(model, args, train_dataset=rows, sparsify=SparsifyConfig(sparsity=0.5))
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, sparsify: SparsifyConfig, teacher: nn.Module | None = None, **kwargs: Any) -> None:
        defaults = SparsifyConfig(sparsity=sparsify.sparsity, pattern=sparsify.pattern)
        if others := [name for name in _NOT_HERE if getattr(sparsify, name) != getattr(defaults, name)]:
            instead = "; ".join(f"{name}={getattr(sparsify, name)!r}: {_NOT_HERE[name]}" for name in others)
            raise ValueError(
                f"{', '.join(others)} of SparsifyConfig has no effect in a Trainer, which decides that. Leave it out, "
                f"and for {instead}."
            )
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.model_init is not None:
            raise ValueError(
                "model_init makes a new model in train(), after this one was pruned. Give model=model_init() instead."
            )
        model = trainer.model
        check_no_adapters(model)
        self.sparsify_config = sparsify = sparsify.of_model(model)
        self.distill = sparsify.distill or "kl"
        self.teacher = None
        if self.distill != "none":
            _check_comparable(trainer, self.distill)
            if teacher is None and (share := zeros_of(chosen_layers(model, sparsify))) >= _SPARSE:
                warnings.warn(
                    f"{share:.0%} of the weights to prune are zero already, and no teacher is given: the sparse model "
                    "itself becomes the teacher. Give teacher=, the dense model, or distill='none'.",
                    stacklevel=2,
                )
            self.teacher = copy_as_teacher(model) if teacher is None else prepare_teacher(teacher, model)
        elif teacher is not None:
            raise ValueError("distill='none' uses no teacher, and one was given. Leave one of them out.")
        self._kept = _Kept(sparsify)
        trainer.add_callback(self._kept)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Prune, unless a checkpoint is resumed, then train; see ``Trainer.train``."""
        config = self.sparsify_config
        if not resume_from_checkpoint:
            self._prune()
        else:  # True is the last one in output_dir, where the callback looks by itself
            is_path = isinstance(resume_from_checkpoint, (str, Path))
            self._kept.resume_from = resume_from_checkpoint if is_path else None
        try:
            found = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]
        finally:  # an error or Ctrl-C skips on_train_end, and the next Trainer of this model would be refused
            if self._kept.sparsifier is not None:
                self._kept.sparsifier.close()
        sparsifier = self._kept.sparsifier
        assert sparsifier is not None
        check_sparse(sparsifier.layers, sparsifier.masks, config.units, config.final_sparsity, config.distribution)
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """HORST at the Trainer's rates, where nothing else was asked for; see ``Trainer.create_optimizer``."""
        trainer: Any = self
        default = next(field.default for field in dataclasses.fields(trainer.args) if field.name == "optim")
        is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
        if self.sparsify_config.optimizer == "horst" and not is_given and trainer.args.optim == default:
            trainer.optimizer_cls_and_kwargs = horst(trainer.args)
            logger.info("the optimizer is HORST; for AdamW give SparsifyConfig(optimizer='adamw')")
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _prune(self) -> None:
        """Rank 0 prunes for all: calibrated on batches of their own, the ranks would end in different masks."""
        trainer: Any = self
        config = self.sparsify_config
        # On every rank, since a loader of accelerate waits for those of the others.
        data = None if config.method == "magnitude" else self._calibration()
        report = on_rank_0(lambda: prune(
            trainer.model, config.sparsity, method=config.method, pattern=config.pattern, layers=config.layers,
            include=config.include, exclude=(*config.exclude, *frozen_weights(trainer.model)), samples=None, data=data,
            distribution=config.distribution,
        ))  # fmt: skip
        weights = named_parameters(trainer.model)
        for layer in report.layers if world_size() > 1 else ():
            sent = weights[layer.name].detach().to(trainer.args.device)  # NCCL takes no tensor of the host
            dist.broadcast(sent, src=0)
            weights[layer.name].data.copy_(sent)

    def _calibration(self) -> list[dict[str, Tensor]]:
        """Training batches with about as many rows as asked for."""
        trainer: Any = self
        data = trainer.train_dataset
        # Each worker process reads a copy of its own.
        if isinstance(data, IterableDataset) and not trainer.args.dataloader_num_workers and iter(data) is iter(data):
            raise ValueError(
                "train_dataset can be read only once, and calibration would use it up. Let its __iter__ begin anew "
                "each time, or give SparsifyConfig(method='magnitude'), which reads no data."
            )
        rows, found = 0, []
        for batch in itertools.islice(trainer.get_train_dataloader(), self.sparsify_config.samples):
            tensors = {name: value for name, value in self._inputs(batch).items() if isinstance(value, Tensor)}
            found.append(tensors)
            rows += len(next(iter(tensors.values())))
            if rows >= self.sparsify_config.samples:
                break
        return found

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """The Trainer's own loss and, while training, what the teacher says."""
        own: Any = super()
        if not model.training or self.teacher is None:
            return own.compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        wants = {"output_hidden_states": True} if self.distill == "squarehead" else {}
        labels = inputs.get("labels")
        seen: list[Any] = []
        trainer: Any = self
        hook = trainer.model.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            found = own.compute_loss(model, {**inputs, **wants}, return_outputs, num_items_in_batch, **kwargs)
        finally:
            hook.remove()
        loss, outputs = found if return_outputs else (found, None)
        needed = "hidden_states" if self.distill == "squarehead" else "logits"
        student = next((o for o in seen if getattr(o, needed, None) is not None), None)
        if student is None:
            student = model(**self._inputs(inputs), **wants)
        label_weight, distill_weight = self.sparsify_config.weights(self.distill)
        distance = self._distance(student, inputs, labels, num_items_in_batch, wants)
        loss = label_weight * loss + distill_weight * distance
        return (loss, outputs) if return_outputs else loss

    def _distance(self, student: Any, inputs: Any, labels: Any, items: Any, wants: dict[str, bool]) -> Tensor:
        """How far the model is from the teacher, as a mean over what counts."""
        assert self.teacher is not None
        given = self._inputs(inputs)
        self.teacher.to(next(iter(given.values())).device)
        with torch.no_grad(), narrow_autocast(self.teacher):
            dense = self.teacher(**given, **wants)
        trainer: Any = self
        scored = None
        if self.distill == "squarehead":
            mask = inputs.get("attention_mask")
            distance = squarehead(student.hidden_states[1:], dense.hidden_states[1:], mask)
        else:
            scored = _scored(student.logits, labels, self.teacher)
            distance = kl_divergence(student.logits, dense.logits, self.sparsify_config.temperature, scored)
        if not _is_scaled(trainer, items):
            return distance  # the Trainer divides it
        if items is None or scored is None:  # items counts something else
            return distance / _parts(trainer)
        # items counts those of all parts and processes, over which the gradients are then averaged
        return distance * scored.sum() / items * _processes(trainer)

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """A batch without its labels; an encoder-decoder keeps them, to make its decoder's inputs of them."""
        trainer: Any = self
        left_out = () if is_encoder_decoder(trainer.model) else ("labels", "label", "label_ids")
        return {name: value for name, value in batch.items() if name not in left_out}


class _Kept(SparsityCallback):
    """Keeps the zeros; a checkpoint says how sparse it was asked to be, and goes on as nothing else."""

    def __init__(self, config: SparsifyConfig) -> None:
        super().__init__(Static, **options(config))
        self.config = config

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the checkpoint is loaded, before the first step."""
        super().on_train_begin(args, state, control, **kwargs)
        if state.global_step == 0:
            return
        assert self.sparsifier is not None
        record, config = self.folder(args, state.global_step) / _RECORD, self.config
        asked = _asked(config)
        if record.is_file() and (had := read_json(record)["asked"]) != asked:
            raise ValueError(
                f"the checkpoint {record.parent} was made with {had}, and SparsifyConfig asks for {asked}. Give {had} "
                "to go on, or train without resume_from_checkpoint to prune anew."
            )
        try:
            check_sparse(
                self.sparsifier.layers, self.sparsifier.masks, config.units, config.final_sparsity, config.distribution
            )
        except NotSparse as error:
            share = zeros_of(self.sparsifier.layers)
            raise ValueError(
                f"the checkpoint {record.parent} has {share:.1%} zeros in the pruned layers, and SparsifyConfig asks "
                f"for {asked}: {error} Give what it was made with, or train without resume_from_checkpoint to prune "
                "anew."
            ) from error

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was asked for, beside the masks."""
        super().on_save(args, state, control, **kwargs)
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            write_json(folder / _RECORD, {"asked": _asked(self.config)})

    def _look_for_zeros(self, sparsifier: Sparsifier) -> None:
        """The Trainer refuses a model that lacks some."""


def _check_comparable(trainer: Any, distill: str) -> None:
    """Refuse to compare a part of the model, or to compare it with an empty teacher."""
    if (gpus := trainer.args.n_gpu) > 1:
        raise ValueError(
            f"one process trains on {gpus} GPUs (DataParallel), and only the first one's outputs could be compared "
            f"with the teacher. Start one process per GPU (torchrun --nproc-per-node={gpus}), or give "
            "SparsifyConfig(distill='none')."
        )
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.cpu_ram_efficient_loading:
        raise ValueError(
            "with FSDP's cpu_ram_efficient_loading only rank 0 has loaded weights, and every rank needs a whole "
            "teacher. Switch it off, or give SparsifyConfig(distill='none')."
        )
    if distill == "squarehead" and is_encoder_decoder(trainer.model):
        raise ValueError(
            "distill='squarehead' compares the hidden states of one stack, and an encoder-decoder has two. Use 'kl'."
        )


def _asked(config: SparsifyConfig) -> str:
    """How sparse, in words that are also the argument.

    Example:
        >>> _asked(SparsifyConfig(sparsity=0.5)), _asked(SparsifyConfig(pattern="2:4"))
        ('sparsity=0.5', "pattern='2:4'")
    """
    given = {"sparsity": config.sparsity, "pattern": config.pattern}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


class SparsifyTrainer(SparsifyMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with :class:`SparsifyMixin`; see there."""


def _is_scaled(trainer: Any, items: Any) -> bool:
    """Whether the Trainer takes the loss of a part as its share of a step's; else it divides it by the parts."""
    given: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)  # from transformers 5.19 on
    if given is not None:
        return given
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def _parts(trainer: Any) -> int:
    """The parts of this step, whose losses the Trainer adds up where it gives ``num_items_in_batch``."""
    parts: int = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return parts


def _processes(trainer: Any) -> int:
    """How many processes see batches of their own, of those over which ``num_items_in_batch`` counts."""
    if not trainer.args.average_tokens_across_devices:
        return 1
    size: int = trainer.accelerator.num_processes // getattr(trainer, "get_tp_size", lambda: 1)()
    return size


def _scored(logits: Tensor, labels: Tensor | None, teacher: nn.Module) -> Tensor | None:
    """True where a prediction has a label, a causal model's that of the next token; None if labels are something else.

    With several labels per prediction, or none at all, every prediction counts.
    """
    if labels is None or labels.shape != logits.shape[:-1]:
        return None
    if is_causal(teacher):
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    return labels != IGNORED
