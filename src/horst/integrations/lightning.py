"""Sparse training in Lightning's Trainer: one callback, any method of :mod:`horst.sparsity`."""

from __future__ import annotations

from typing import Any

from horst.extras import how_to_install
from horst.integrations import resolve_schedule
from horst.sparsity import Sparsifier

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(f"horst.integrations.lightning needs Lightning; {how_to_install('lightning')}") from error


class SparsityCallback(Callback):
    """Builds the sparsifier when training starts, steps it, saves and restores it, and masks averages at evaluation.

    Args:
        method: A class of :mod:`horst.sparsity`, such as ``ACDC``.
        metric: Name of a logged validation metric; the best dense and the best sparse model by it are kept in
            ``callback.sparsifier.best``.
        higher_is_better: Whether a higher ``metric`` is better.
        arguments: Arguments of the method. ``schedule`` may be a function of the total number of steps, such as
            ``acdc_steps`` or ``rigl_steps``.

    Where another callback swaps averaged weights in for validation (``EMAWeightAveraging``), list this one after it:
    then the average is masked in place at validation and at the end of the run. Checkpoints hold it as it is; to export
    it from one, use ``callback.sparsifier.masked_state_dict``.

    Example:
        >>> from horst.sparsity import ACDC, acdc_steps
        >>> callback = SparsityCallback(ACDC, sparsity=0.9, schedule=acdc_steps, layers="all_linear")
    """

    def __init__(
        self, method: type[Sparsifier], *, metric: str | None = None, higher_is_better: bool = True, **arguments: Any
    ) -> None:
        self.method, self.metric, self.higher_is_better, self.arguments = method, metric, higher_is_better, arguments
        self.sparsifier: Sparsifier | None = None
        self._restored: dict[str, Any] | None = None
        self._seen_steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Model and optimizers are in place, and loaded if a checkpoint is resumed."""
        if self.sparsifier is not None:  # an earlier fit that was broken off: its hooks are still on
            self.sparsifier.close()
        arguments = resolve_schedule(self.arguments, lambda: trainer.estimated_stepping_batches)
        self.sparsifier = self.method(pl_module, trainer.optimizers, state_dict=self._restored, **arguments)
        self._restored = None
        self._seen_steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Step, unless this batch only accumulated gradients."""
        if self.sparsifier is not None and trainer.global_step != self._seen_steps:
            self._seen_steps = trainer.global_step
            self.sparsifier.step()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The trained weights are masked already; an average swapped in by another callback is not."""
        if self.sparsifier is not None:
            self.sparsifier.apply_to(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the best models."""
        if self.sparsifier is None or self.metric is None or trainer.sanity_checking:
            return
        if self.metric not in trainer.callback_metrics:
            raise KeyError(f"metric={self.metric!r} was not logged; logged are: {list(trainer.callback_metrics)}.")
        self.sparsifier.record(float(trainer.callback_metrics[self.metric]), higher_is_better=self.higher_is_better)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mask an average that became the final model, and take the hooks off; summary and best models stay."""
        if self.sparsifier is not None:
            self.sparsifier.apply_to(pl_module)
            self.sparsifier.close()

    def state_dict(self) -> dict[str, Any]:
        """Part of Lightning's checkpoint, which rank 0 writes: what is sharded (FSDP2) is gathered by all ranks."""
        return {} if self.sparsifier is None else dict(_gathered(self.sparsifier.state_dict()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the optimizers are there."""
        self._restored = state_dict or None


def _gathered(state: Any) -> Any:
    """A nested state with whole tensors, on the CPU, in place of DTensors."""
    if isinstance(state, dict):
        return {key: _gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_gathered(value) for value in state]
    if not hasattr(state, "full_tensor"):
        return state
    # The best models lie on the CPU, where a GPU's processes cannot gather.
    return state.to(state.device_mesh.device_type).full_tensor().cpu()
