"""A sparsifier's hooks: code after each backward pass, before and after each update; one sparsifier per optimizer.

Under ``torch.compile(optimizer.step)`` the code runs outside of the graph: masks are changed by counting and selecting,
which reads numbers back.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horst.parameters.sharding import local_shard
from horst.sparsity.layers import Layer
from horst.user_warnings import warn_user

if TYPE_CHECKING:
    from horst.sparsity.controller import Sparsifier

_TOO_MANY = 3  # updates in a row without sparsifier.step() before the next backward pass

# Two at once on the same weights would silently zero what the other keeps: refuse_a_second looks here.
started: weakref.WeakSet[Sparsifier] = weakref.WeakSet()


def unwrapped(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers whose hooks run: accelerate's wrapper has none, the optimizer inside it has.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)])
        >>> unwrapped(sgd) == unwrapped([sgd]) == [sgd]
        True
    """
    return [_inside(opt) for opt in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]


def _inside(optimizer: Optimizer) -> Optimizer:
    while not _has_hooks(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _has_hooks(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def after_backward(layer: Layer, action: Callable[[Layer], None]) -> Any:
    """Run ``action(layer)`` when its gradient has been added to; otherwise as :func:`before_update`."""
    method = weakref.WeakMethod(action)

    def hook(_: Tensor) -> None:
        if (alive := method()) is not None:
            alive(layer)

    return layer.param.register_post_accumulate_grad_hook(hook)


def before_update(optimizer: Optimizer, action: Callable[[Optimizer], None]) -> Any:
    """Run ``action(optimizer)`` at each step when the gradients are there and the weights not yet updated.

    That is at the beginning of ``step()``, or, if it is given a closure that computes the gradients (Lightning's
    trainer always passes one), at the end of the closure. A step that only makes the state is no update.

    Args:
        action: A bound method. The optimizer does not keep its object alive: once that is gone, nothing runs.

    Returns:
        A handle whose ``remove()`` undoes it.
    """
    act = _while_alive(action, unless=_only_makes_state)

    def pre_hook(opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            act(opt)
            return None

        def closure_then_action() -> Any:
            loss = closure()
            act(opt)
            return loss

        return (args[0], closure_then_action), {k: v for k, v in kwargs.items() if k != "closure"}

    return optimizer.register_step_pre_hook(pre_hook)


def after_update(optimizer: Optimizer, action: Callable[[Optimizer], None]) -> Any:
    """Run ``action(optimizer)`` at the end of each step; otherwise as :func:`before_update`."""
    act = _while_alive(action)
    return optimizer.register_step_post_hook(lambda opt, args, kwargs: act(opt))


def _while_alive(
    action: Callable[[Optimizer], None], unless: Callable[[Optimizer], bool] = lambda opt: False
) -> Callable[[Optimizer], None]:
    method = weakref.WeakMethod(action)

    @torch.compiler.disable
    def act(opt: Optimizer) -> None:
        if (alive := method()) is not None and not unless(opt):
            alive(opt)

    return act


def _only_makes_state(optimizer: Optimizer) -> bool:
    """Whether this is the step, at rates and gradients of 0, by which ``torch.distributed.checkpoint`` loads a state.

    Gradients are read in a first step at rate 0 only, so that no other step waits for the device.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    if optimizer.state or any((isinstance(lr, Tensor) and not lr.is_cpu) or lr != 0 for lr in rates):
        return False
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not any(local_shard(grad).any() for grad in grads)


class StepOrder:
    """Notices that ``sparsifier.step()`` is missing, or comes before the optimizer's step.

    In both cases a gradient arrives after an update of the weights with no ``sparsifier.step()`` in between. An update
    that GradScaler skips is none. With several optimizers, all of them must have updated.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._count, self._updated, self._missed, self._steps = len(optimizers), set[int](), 0, 0
        self.handles: list[Any] = []
        for i, optimizer in enumerate(optimizers):
            if _has_hooks(optimizer):
                self.handles.append(optimizer.register_step_post_hook(functools.partial(self._on_update, i)))

    def on_step(self) -> None:
        """The sparsifier takes its step."""
        self._steps += 1
        if self._updated:
            self._missed = 0
            self._updated.clear()

    def on_gradient(self) -> None:
        """A backward pass reaches a masked weight."""
        if len(self._updated) == self._count:
            self._missed += 1
            self._updated.clear()

    def _on_update(self, index: int, *_: object) -> None:
        if torch.compiler.is_compiling():  # nothing is noticed there, and nothing breaks the graph
            return
        self._updated.add(index)
        if self._missed == _TOO_MANY:  # said here, in the user's thread: a backward pass may run in another
            self._missed += 1
            found = "does not follow optimizer.step()" if self._steps else "has never been called"
            warn_user(
                f"sparsifier.step() {found}: the optimizer has updated the weights {_TOO_MANY} times, and the next "
                "backward pass met weights that were not masked again. Call sparsifier.step() right after every "
                "optimizer.step(), or close() the sparsifier to train without masks."
            )


def find_owners(optimizers: Sequence[Optimizer], layers: Sequence[Layer]) -> dict[str, Optimizer]:
    """The optimizer of each layer, by the layer's name; a layer without one is refused."""
    owners: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners |= {layer.name: optimizer for layer in layers if id(layer.param) in ids}
    missing = [layer.name for layer in layers if layer.name not in owners]
    if missing:
        raise ValueError(
            f"{len(missing)} masked weights are in no optimizer: {', '.join(missing[:4])}. Make the optimizer from "
            "the model's present parameters (after moving and sharding it), pass every optimizer in a list, or "
            "exclude these layers."
        )
    return owners


def refuse_a_second(optimizers: Sequence[Optimizer], layers: Sequence[Layer]) -> None:
    """Refuse optimizers, and weights, on which a sparsifier is open."""
    if _shared(optimizers, layers) is not None:
        gc.collect()  # one that was dropped may wait in a cycle of references, where nobody can close it
    if (shared := _shared(optimizers, layers)) is not None:
        name, other = shared
        raise ValueError(
            f"{name} has an open sparsifier, {type(other).__name__} (sparsity {other.current_sparsity:.4f}): a second "
            "one would undo its masks. Call close() on the first before building the next; of keep_zeros, on what it "
            "returned."
        )


def release(handles: list[Any], owned: Sequence[tuple[weakref.ref[Optimizer], Sequence[Tensor]]]) -> None:
    """Remove all hooks, and the masks from the optimizers that were given them."""
    for handle in handles:
        handle.remove()
    handles.clear()
    for optimizer, params in owned:
        alive = optimizer()
        if alive is not None and hasattr(alive, "set_masks"):
            alive.set_masks(dict.fromkeys(params))


def _shared(optimizers: Sequence[Optimizer], layers: Sequence[Layer]) -> tuple[str, Sparsifier] | None:
    """An optimizer or else a weight on which a sparsifier is open, by name, and that sparsifier."""
    named: dict[int, str] = {id(optimizer): type(optimizer).__name__ for optimizer in optimizers}
    named |= {id(layer.param): layer.name for layer in layers}
    for other in started:
        if other._release.alive:
            for held in (*other.optimizers, *(layer.param for layer in other.layers)):
                if id(held) in named:
                    return named[id(held)], other
    return None
