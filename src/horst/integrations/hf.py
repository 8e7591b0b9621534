"""Hugging Face: HORST in the Trainer, and a callback for any method of :mod:`horst.sparsity`.

:func:`horst.export.load_pretrained` loads sparse models back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from horst.extras import how_to_install
from horst.integrations import resolve_schedule
from horst.integrations.matrices import MatrixHORST
from horst.optimizers.horst import HORST
from horst.recovery.check import zeros_of
from horst.sparsity import Sparsifier
from horst.user_warnings import warn_user

try:
    import transformers.trainer
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"horst.integrations.hf needs transformers; {how_to_install('hf')}") from error


def horst(
    args: TrainingArguments, *, groups: Callable[[nn.Module], ParamsT] | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """HORST for ``Trainer(..., optimizer_cls_and_kwargs=...)``, with the rates of the training arguments.

    The Trainer then builds the optimizer itself, which ``model_init`` and FSDP need. Without ``groups``, as with its
    AdamW, every parameter except norms and biases decays at ``args.weight_decay``, embeddings included, and the mirror
    step and ``l1`` are for tensors of two or more dimensions.

    Args:
        args: Training arguments, of which ``learning_rate``, ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` are
            used, ``weight_decay`` without ``groups``, and ``optim`` never.
        groups: Function of the model that returns its parameter groups, such as one that calls
            :func:`horst.param_groups`. It needs transformers 5.2 or newer.
        options: Options of :class:`horst.HORST`: ``alpha``, ``beta``, ``l1`` and so on.

    Example:
        >>> args = TrainingArguments("output", learning_rate=1e-3, weight_decay=0.1)
        >>> optimizer_cls_and_kwargs = horst(args, alpha=5.0)  # an argument of Trainer
        >>> optimizer_cls_and_kwargs[1]
        {'lr': 0.001, 'betas': (0.9, 0.999), 'eps': 1e-08, 'alpha': 5.0}
    """
    ours = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if twice := sorted(options.keys() & {*ours, "weight_decay"}):
        raise TypeError(
            f"{', '.join(twice)} comes from the training arguments. Set TrainingArguments(learning_rate=..., "
            "weight_decay=..., adam_beta1=..., adam_beta2=..., adam_epsilon=...) instead."
        )
    if groups is None:
        return MatrixHORST, {**ours, **options}
    if not hasattr(transformers.trainer, "is_optimizer_factory"):
        raise ImportError(
            f"groups= needs transformers 5.2 or newer, found {transformers.__version__}. Upgrade it, or build the "
            "optimizer yourself: Trainer(..., optimizers=(HORST(groups(model), lr=args.learning_rate), None))."
        )

    def from_model(model: nn.Module, **options: Any) -> HORST:
        return HORST(groups(model), **options)

    return lambda: from_model, {**ours, **options}  # the Trainer calls the first without arguments


class SparsityCallback(TrainerCallback):
    """Builds the sparsifier when training starts, steps it, and saves and restores it with the checkpoints.

    Its state lies in each checkpoint folder as ``sparsifier.pt`` (``sparsifier-<rank>.pt`` under FSDP2). On resuming,
    it is read from ``output_dir/checkpoint-<step>``, or from ``resume_from``.

    Args:
        method: A class of :mod:`horst.sparsity`, such as ``ACDC`` or ``Static``; ``Static`` without further arguments
            keeps the zeros of an already pruned model at zero while it is fine-tuned.
        metric: Name of an evaluation metric (``"eval_loss"``); the best dense and the best sparse model by it are kept
            in ``callback.sparsifier.best``.
        higher_is_better: Whether a higher ``metric`` is better.
        resume_from: The checkpoint folder, where it is not in ``output_dir``.
        arguments: The method's arguments. ``schedule`` may be a function of the total number of steps, such as
            ``acdc_steps`` or ``rigl_steps``.

    Example:
        >>> from horst.sparsity import ACDC, acdc_steps
        >>> callback = SparsityCallback(ACDC, sparsity=0.9, schedule=acdc_steps)
    """

    def __init__(
        self,
        method: type[Sparsifier],
        *,
        metric: str | None = None,
        higher_is_better: bool = True,
        resume_from: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        self.method, self.metric, self.higher_is_better, self.arguments = method, metric, higher_is_better, arguments
        self.resume_from = resume_from
        self.sparsifier: Sparsifier | None = None
        self._evaluated: set[str] = set()  # metrics of this training; several datasets are evaluated one by one

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Model and optimizer are in place, and loaded if a checkpoint is resumed."""
        if self.sparsifier is not None:  # an earlier run that was broken off: its hooks are still on
            self.sparsifier.close()
        self._evaluated = set()
        arguments = resolve_schedule(self.arguments, lambda: state.max_steps)
        restored = self._load(args, state.global_step) if state.global_step > 0 else None
        self.sparsifier = self.method(kwargs["model"], kwargs["optimizer"], state_dict=restored, **arguments)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a metric that no evaluation has had."""
        if self.metric is not None and self._evaluated and self.metric not in self._evaluated:
            raise KeyError(f"metric={self.metric!r} is not among the evaluation's: {sorted(self._evaluated)}.")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the optimizer's step, before saving and evaluation."""
        if self.sparsifier is not None:
            self.sparsifier.step()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the best models."""
        if self.sparsifier is None or self.metric is None:
            return
        metrics = kwargs["metrics"]
        self._evaluated |= metrics.keys()
        if self.metric in metrics:
            self.sparsifier.record(float(metrics[self.metric]), higher_is_better=self.higher_is_better)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the sparsifier's state beside the model's."""
        if self.sparsifier is not None and (state.is_world_process_zero or self.sparsifier.is_sharded):
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"sparsifier-{args.process_index}.pt" if self.sparsifier.is_sharded else "sparsifier.pt"
            torch.save(self.sparsifier.state_dict(), folder / name)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks; the sparsifier still has its summary and its best models."""
        if self.sparsifier is not None:
            self.sparsifier.close()
            self._look_for_zeros(self.sparsifier)
        self.on_step_begin(args, state, control)

    def _look_for_zeros(self, sparsifier: Sparsifier) -> None:
        """Warn where a trained model has fewer zeros than it was to have."""
        share, wanted = zeros_of(sparsifier.layers), sparsifier.current_sparsity
        if not isinstance(sparsifier._chooser.distribution, Mapping):  # else each layer has a sparsity of its own
            wanted = max(wanted, sparsifier.sparsity)
        if share < wanted - 0.01:  # counts are rounded down for each layer
            warn_user(
                f"the trained model has {share:.1%} zeros in its masked layers, and {type(sparsifier).__name__} was to "
                f"reach {wanted:.1%}. Training ended before the schedule did, after {sparsifier.steps} steps, or an "
                "earlier model was put in place (load_best_model_at_end). SparsityCallback(..., metric=...) keeps the "
                "best sparse model in callback.sparsifier.best."
            )

    def folder(self, args: TrainingArguments, step: int) -> Path:
        """The checkpoint that is resumed."""
        return Path(self.resume_from or Path(args.output_dir or ".") / f"checkpoint-{step}")

    def _load(self, args: TrainingArguments, step: int) -> dict[str, Any]:
        folder = self.folder(args, step)
        for name in (f"sparsifier-{args.process_index}.pt", "sparsifier.pt"):
            if (folder / name).exists():
                loaded: dict[str, Any] = torch.load(folder / name, map_location="cpu", weights_only=True)
                return loaded
        raise FileNotFoundError(
            f"the run resumes at step {step}, but {folder} holds no sparsifier.pt. Give the checkpoint's folder: "
            "SparsityCallback(..., resume_from=...)."
        )
