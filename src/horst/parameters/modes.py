"""How a model is called: the arguments that a batch stands for, and modes for a while: evaluation, caches, forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Any]
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def as_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a tensor is the only argument, a mapping gives names.

    Example:
        >>> as_call({"x": 1}), as_call([2, 3])
        (((), {'x': 1}), ((2, 3), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``eval()`` mode for the block; afterwards each module has the mode it had before.

    Example:
        >>> model = nn.Dropout()
        >>> with evaluating(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def without_cache(*models: nn.Module | None) -> Iterator[None]:
    """Hugging Face's models without the key-value caches that they would fill in each forward pass.

    Example:
        >>> with without_cache(nn.Linear(2, 2), None):  # nothing to do
        ...     pass
    """
    modules = [module for model in models if model is not None for module in model.modules()]
    configs: dict[int, Any] = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextlib.contextmanager
def forwards_replaced(modules: Iterable[nn.Module], replacement: Callable[[int, Forward], Forward]) -> Iterator[None]:
    """``modules[k].forward`` replaced by ``replacement(k, forward)`` for the block. Hooks stay outside of it.

    Example:
        >>> model = nn.Identity()
        >>> with forwards_replaced([model], lambda k, forward: lambda x: forward(x) + 1):
        ...     model(1)
        2
        >>> model(1)
        1
    """
    own = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        for k, (module, _) in enumerate(own):
            module.__dict__["forward"] = replacement(k, module.forward)
        yield
    finally:
        for module, forward in own:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
