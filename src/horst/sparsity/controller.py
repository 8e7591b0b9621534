"""The one engine: masks around any optimizer. A method is a subclass that says when and which weights go.

Each training step reads::

    loss.backward()          # hooks zero the gradients of pruned weights, so clipping counts kept weights only
    optimizer.step()         # momentum, AdamW or HORST's first half may revive a pruned weight ...
    sparsifier.step()        # ... and here it is zero again; on scheduled steps the masks change first

Gradients are masked by a post-accumulate hook on each parameter: it runs after every backward (so accumulation and
``GradScaler`` need nothing), before DDP's reduction (masks are equal on all ranks, so the mean of masked gradients is
the masked mean) and after FSDP2's. The sparsifier is the one thing here that writes ``p.grad``; optimizers never do.

No step waits for the device. Only the events, which count and select, read numbers back.

An optimizer that can mask inside its own update exposes ``set_masks(masks)``, where ``masks`` maps parameters to a
boolean tensor shaped like the local weight, True where kept, or to None for dense. It is called at every change of
masks, and the engine then leaves the zeroing of those weights to the optimizer.
"""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horst.parameters.kinds import clean_name
from horst.parameters.sharding import as_shard_of, local_shard, part_of, random_scores
from horst.sparsity import model_copies, optimizer_hooks, saved_state
from horst.sparsity.choice import Chooser
from horst.sparsity.distributions import Distribution
from horst.sparsity.layers import Layer, Preset, find_layers, summary_table
from horst.sparsity.masks import NM, Pattern, check_replicas, mask_hash, parse_pattern
from horst.sparsity.model_copies import BestModels
from horst.sparsity.selection import warn_of_non_finite
from horst.sparsity.state_policy import StatePolicy

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A change of masks: after ``step`` optimizer steps, of what ``kind``, and the sparsity that resulted."""

    step: int
    kind: Literal["prune", "restore", "update", "rewind"]
    sparsity: float


class Options(TypedDict, total=False):
    """Options that every method takes; see :class:`Sparsifier`."""

    layers: Preset | None
    include: Sequence[str]
    exclude: Sequence[str]
    pattern: Pattern
    seed: int
    state_dict: Mapping[str, Any] | None


class Sparsifier(abc.ABC):
    """Masks around any optimizer; abstract: use a method such as :class:`~horst.sparsity.acdc.ACDC`.

    Args:
        model: The model, already loaded, moved, wrapped (DDP, ``torch.compile``) and sharded (``fully_shard``).
        optimizer: The optimizer, or a list of those that share the model's parameters. Where it or a weight has an open
            sparsifier, a second one is refused: :meth:`close` the first.
        sparsity: Share of zeros in the masked layers, in [0, 1). None where the pattern fixes it (N:M). With a mapping
            as ``distribution`` each layer has its own, and this number only tells a gradual schedule where it ends.
        distribution: Division of the zeros among the layers, see :mod:`horst.sparsity.distributions`.
        policy: Effect of a change of masks on the optimizer's state.
        layers: Preset of layers: ``"blocks"``, ``"all_linear"``, ``"all"`` or None, see :mod:`horst.sparsity.layers`.
        include: Name patterns of weights to mask as well.
        exclude: Name patterns of weights to leave dense.
        pattern: Pattern of the masks: None (single weights), ``"2:4"`` or any N:M, or ``(rows, columns)`` of a block.
        seed: Seed of the random scores, which are equal on every rank and device.
        state_dict: State of a run to resume. Pass it here, not to :meth:`load_state_dict`, where the weights are those
            of the checkpoint already: the method's first mask would spoil them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None,
        distribution: Distribution,
        policy: StatePolicy,
        layers: Preset | None = "blocks",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pattern: Pattern = None,
        seed: int = 0,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizer_hooks.unwrapped(optimizer)
        self.layers: list[Layer] = find_layers(model, layers, include=include, exclude=exclude)
        optimizer_hooks.refuse_a_second(self.optimizers, self.layers)
        self._chooser = Chooser(self.layers, parse_pattern(pattern), distribution, sparsity)
        self.pattern, self.sparsity = self._chooser.pattern, self._chooser.sparsity
        self.policy = policy
        self.seed = seed
        self.steps = 0
        self.best = BestModels()
        self.observers: list[Callable[[Sparsifier, Event], None]] = []
        self._unclaimed: list[Any] = []  # states of observers that are not there yet
        self._owner = optimizer_hooks.find_owners(self.optimizers, self.layers)
        self._names = model_copies.names_of(self.layers, model)
        # By name, and taken now: FSDP2 puts gathered parameters in their place from a forward pass on.
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        self._whole: dict[str, Tensor] = {clean_name(name): tensor for name, tensor in named}
        self._pruned: dict[str, Tensor] = {}  # by layer, True where a weight is zero; a layer not in it is dense
        self._removed = {layer.name: 0 for layer in self.layers}  # how many, over all ranks
        self._draws, self._warned = 0, False  # the second: of weights that are not finite
        self._resume_from = state_dict

    def _start(self) -> None:
        """End of a method's constructor, after its checks: hooks, and the first masks, made or from the given state."""
        # What close() does, also for a sparsifier that is dropped. It holds the optimizers weakly: the hooks of
        # keep_zeros hold the sparsifier, and the two would never be freed.
        owned = [(weakref.ref(opt), [layer.param for layer in self._layers_of(opt)]) for opt in self.optimizers]
        self._handles: list[Any] = []
        self._release = weakref.finalize(self, optimizer_hooks.release, self._handles, owned)
        self._release.atexit = False
        try:
            self._tell_optimizers()  # masks may have been set by hand
            self._add_hooks()
            if self._resume_from is None:
                with torch.no_grad():
                    self._begin()
                    check_replicas(self.model, self.mask_hash)
            else:
                self.load_state_dict(self._resume_from)
                self._resume_from = None
        except BaseException:
            self.close()  # an exception keeps the unfinished sparsifier alive, and nobody else could close it
            raise
        optimizer_hooks.started.add(self)

    # --- what a method says -------------------------------------------------------------------------------------

    def _add_hooks(self) -> None:
        """Whatever is to run in backward passes and updates; a method adds its own to ``self._handles``."""
        self._order = optimizer_hooks.StepOrder(self.optimizers)
        self._handles += self._order.handles
        self._handles += (optimizer_hooks.after_backward(layer, self._mask_gradient) for layer in self.layers)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Before the first training step."""

    def _on_step(self) -> Event | None:
        """After optimizer step number ``self.steps``, before pruned weights are zeroed."""
        return None

    def _wants_dense_gradient(self, layer: Layer) -> bool:
        """Whether the gradients of pruned weights are left in ``p.grad`` in the coming step."""
        return False

    def _extra_state(self) -> dict[str, Any]:
        """What the method itself remembers."""
        return {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most methods remember nothing
        """Take back what :meth:`_extra_state` gave."""

    # --- training -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> Event | None:
        """Once after every optimizer step: change the masks if it is time, then zero what is pruned.

        Returns:
            The event, if there was one.
        """
        self.steps += 1
        self._order.on_step()
        if self.steps == 1:
            self.policy.check(self.optimizers)
        event = self._on_step()
        self._zero_weights()
        if event is not None:
            self._after_event(event)
        return event

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights. Only for code that fills ``p.grad`` without a backward pass."""
        for layer in self.layers:
            self._mask_gradient(layer)

    @property
    def is_sparse(self) -> bool:
        """Whether any weight is masked now."""
        return any(self._removed.values())

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of the masks (FSDP2): :meth:`state_dict` then holds DTensors."""
        return any(shard.group is not None for shard in self._chooser.shards.values())

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks by layer name, True where a weight is kept; of a sharded weight, this rank's part."""
        return {
            layer.name: ~self._pruned[layer.name]
            if layer.name in self._pruned
            else torch.ones_like(local_shard(layer.param), dtype=torch.bool)
            for layer in self.layers
        }

    @property
    def current_sparsity(self) -> float:
        """Share of zeros that the masks hold now, over all masked layers and ranks."""
        return sum(self._removed.values()) / sum(shard.numel for shard in self._chooser.shards.values())

    def mask_hash(self) -> int:
        """A hash of all masks: equal on all ranks, and for sharded weights equal to that of the unsharded run."""
        return mask_hash(list(self.masks.values()), list(self._chooser.shards.values()))

    def summary(self) -> str:
        """A table of the layers with their weights, zeros and share of zeros, and of the whole model."""
        rows = [(layer.name, tuple(layer.param.shape), self._removed[layer.name]) for layer in self.layers]
        return summary_table(rows, sum(p.numel() for p in self.model.parameters()))

    # --- evaluation and saving ----------------------------------------------------------------------------------

    def evaluate(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """``model``, an average (EMA) of the trained one, with the present masks; put back on leaving.

        The average of a pruned weight fades but is not zero. Masking it here costs one pass at each evaluation
        instead of one at each training step.
        """
        return model_copies.masked(model, self._pruned, self._names)

    @torch.no_grad()
    def apply_to(self, model: nn.Module) -> None:
        """Zero the pruned weights of another copy of the model for good, as for saving an EMA."""
        for weight, zeros in model_copies.matched(model, self._pruned, self._names):
            weight.masked_fill_(zeros, 0)

    def masked_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a model's ``state_dict`` with the pruned weights zero; tensors that are not masked are shared."""
        return model_copies.masked_state_dict(state_dict, self._pruned, self._names)

    def record(self, metric: float, model: nn.Module | None = None, *, higher_is_better: bool = True) -> bool:
        """Keep ``model`` (by default the trained one) if it is the best yet of its kind, dense or sparse.

        Returns:
            Whether it is. ``sparsifier.best["sparse"]`` holds metric, step and weights.
        """
        kind = "sparse" if self.is_sparse else "dense"
        model = self.model if model is None else model
        return self.best.record(kind, metric, self.steps, self.masked_state_dict(model.state_dict()), higher_is_better)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: masks (eight weights per byte), step, random draws, best models, observers.

        Under FSDP2 masks and other tensors are DTensors, as in the model's own state: save them with
        ``torch.distributed.checkpoint``, and resume on any number of ranks.
        """
        return saved_state.state_of(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Weights are not touched: load the model's and optimizer's as well.

        Its tensors may be whole or DTensors, whatever the number of ranks that saved them.
        """
        saved_state.restore(self, state_dict)

    __reduce__ = saved_state.refuse_to_copy

    def close(self) -> None:
        """Remove all hooks: training continues without masks. Close one sparsifier before building the next."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- what methods are made of -------------------------------------------------------------------------------

    def _select(
        self, sparsity: float, scores: Mapping[str, Tensor] | None = None, *, nested: bool = False
    ) -> dict[str, Tensor]:
        """The weights to be pruned at ``sparsity``, those of least score; by default the score is the magnitude.

        Args:
            nested: Whether what is pruned already stays pruned, and only the rest is chosen.
        """
        if scores is None:
            scores = {layer.name: local_shard(layer.param) for layer in self.layers}
        return self._chooser.choose(sparsity, scores, self._pruned if nested else None)

    def _set_pruned(self, new: Mapping[str, Tensor], kind: Literal["prune", "restore", "update"]) -> None:
        """Make ``new`` the pruned weights of the layers it names: zero them, and treat the state as the policy says."""
        removed: dict[Tensor, Tensor] = {}
        regrown: dict[Tensor, Tensor] = {}
        for layer in self.layers:
            if layer.name in new:
                old = self._pruned.get(layer.name, torch.zeros_like(new[layer.name]))
                removed[layer.param] = new[layer.name] & ~old
                regrown[layer.param] = old & ~new[layer.name]
        if kind in ("prune", "update"):
            self.policy.apply("prune", self.optimizers, removed)
        if kind in ("restore", "update"):
            self.policy.apply("restore", self.optimizers, regrown)
        self._pruned |= new
        if kind == "restore":
            for name in new:
                del self._pruned[name]
        self._masks_changed()
        self._zero_weights(always=True)

    def _as_saved(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For a checkpoint: this rank's parts of tensors that are named and shaped like the model's."""
        whole = self._whole
        return {name: as_shard_of(whole[name], part) if name in whole else part for name, part in parts.items()}

    def _from_saved(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From a checkpoint: this rank's parts of tensors that :meth:`_as_saved` gave on any number of ranks."""
        whole = self._whole
        return {name: part_of(whole[name], value) if name in whole else value for name, value in saved.items()}

    def _event(self, kind: Literal["prune", "restore", "update", "rewind"]) -> Event:
        return Event(self.steps, kind, self.current_sparsity)

    def _random(self, layer_index: int) -> Tensor:
        """Random scores of one layer, new at each draw; see :func:`~horst.parameters.sharding.random_scores`."""
        layer = self.layers[layer_index]
        key = ((self.seed * 1_000_003 + self._draws) * 1_000_003 + layer_index) % (1 << 62)
        return random_scores(self._chooser.shards[layer.name], key, local_shard(layer.param).device)

    def _layers_of(self, optimizer: Optimizer) -> list[Layer]:
        return [layer for layer in self.layers if self._owner[layer.name] is optimizer]

    def _require_units(self) -> None:
        """Refuse N:M in a method that changes how many weights a group keeps."""
        if isinstance(self.pattern, NM):
            raise ValueError(
                f"{type(self).__name__} needs an unstructured or block pattern, got {self.pattern.n}:{self.pattern.m}. "
                "For N:M use ACDC, Static or SRSTE."
            )

    # --- inside -------------------------------------------------------------------------------------------------

    def _mask_gradient(self, layer: Layer) -> None:
        self._order.on_gradient()
        pruned = self._pruned.get(layer.name)
        if pruned is not None and layer.param.grad is not None and not self._wants_dense_gradient(layer):
            local_shard(layer.param.grad).masked_fill_(pruned, 0)

    def _zero_weights(self, *, always: bool = False) -> None:
        for layer in self.layers:
            pruned = self._pruned.get(layer.name)
            if pruned is not None and (always or not self._optimizer_masks(self._owner[layer.name])):
                local_shard(layer.param).masked_fill_(pruned, 0)

    def _masks_changed(self) -> None:
        """Count what is pruned, over all ranks, and give the masks to optimizers that mask by themselves."""
        if not self._warned:
            self._warned = warn_of_non_finite({layer.name: layer.param for layer in self.layers})
        for layer in self.layers:
            pruned = self._pruned.get(layer.name)
            self._removed[layer.name] = 0 if pruned is None else self._chooser.count(layer.name, pruned)
        self._tell_optimizers()

    def _tell_optimizers(self) -> None:
        """Give the present masks to the optimizers that can take them."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "set_masks"):
                pruned = self._pruned if self._optimizer_masks(optimizer) else {}
                layers = self._layers_of(optimizer)
                optimizer.set_masks({l.param: ~pruned[l.name] if l.name in pruned else None for l in layers})

    def _optimizer_masks(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer zeroes pruned weights itself, inside its update."""
        return hasattr(optimizer, "set_masks")

    def _after_event(self, event: Event) -> None:
        logger.info("step %d: %s, sparsity %.6f", event.step, event.kind, event.sparsity)
        check_replicas(self.model, self.mask_hash)
        for observer in self.observers:
            observer(self, event)
