"""The attention of transformers' models during decoding, by the kernel that reads only the used part of the cache."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from horst.extras import load_extra
from horst.kernels.backends import runs_kernels
from horst.kernels.decode_attention import KERNEL_DTYPES, decode_attention, runs_right, why_not_decoded

NAME = "horst_decode_attention"
_DEVICES = ("cuda",)  # in Triton's interpreter, on a CPU, the kernel is for tests alone
_LARGEST_HEAD = 256  # wider blocks do not fit into the shared memory of every device
# What models say of a step beside the mask, which holds it already. Anything else asks for another attention.
_SAID_BY_THE_MASK = ("position_ids", "cache_position", "use_cache", "is_causal")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: the kernel for one new token, sdpa for all else.

    Prompts, training, masks that are not boolean, and whatever ``options`` ask for (a soft cap, sinks, sliding windows,
    a position bias) are sdpa's.

    Args:
        module: Attention layer.
        query: Queries, texts x heads x tokens x size.
        key: Keys, texts x key heads x length x size.
        value: Values, texts x key heads x length x size.
        attention_mask: Which places each token sees.
        scaling: Factor of the scores; None for one over the root of the size.
        dropout: Share of weights that are dropped.
        options: Further options of the model's attention.

    Returns:
        Outputs, texts x tokens x heads x size, and None for the weights.
    """
    special = any(x is not None and x is not False for name, x in options.items() if name not in _SAID_BY_THE_MASK)
    if (
        special
        or dropout
        or attention_mask is None
        or query.requires_grad
        or query.dtype not in KERNEL_DTYPES
        or query.shape[-1] > _LARGEST_HEAD
        or not runs_kernels(query)
        or why_not_decoded(query, key, value, attention_mask) is not None
    ):
        return _sdpa()(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale).transpose(1, 2), None


def configs_to_switch(model: Any) -> list[Any]:
    """The configurations of a model's layers that may name :func:`attention_forward` instead of sdpa.

    None of them on a CPU or without Triton, where the version of transformers has no registry of attention functions,
    where the model's code does not use it or does something of its own for the name ``sdpa``, and where the kernel, for
    heads of the model's size, does not run on the device or gives other numbers than the formula.

    Args:
        model: Model of transformers.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> configs_to_switch(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2)))  # on a CPU
        []
    """
    weight = next(model.parameters())
    if weight.device.type not in _DEVICES or not runs_kernels(weight) or not _uses_registry(model):
        return []
    configs = {id(layer.config): layer.config for layer in _configured(model)}.values()
    found = [config for config in configs if getattr(config, "_attn_implementation_internal", None) == "sdpa"]
    heads = _heads(model.config)
    return found if heads is not None and runs_right(*heads, weight.dtype, weight.device) else []


@contextlib.contextmanager
def switched(configs: Sequence[Any]) -> Iterator[None]:
    """Within it, the layers of ``configs`` use :func:`attention_forward` where they had sdpa.

    Args:
        configs: What :func:`configs_to_switch` returned.
    """
    # not the property without "internal": it writes to all configurations below, which may differ
    changed = [config for config in configs if config._attn_implementation_internal == "sdpa"]
    for config in changed:
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = "sdpa"


def _heads(config: Any) -> tuple[int, int] | None:
    """How many queries share a key head, and the size of a head; None where it is too large, or not known."""
    text = config.get_text_config()
    try:
        heads = text.num_attention_heads
        group = max(1, heads // (getattr(text, "num_key_value_heads", None) or heads))
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
    except (AttributeError, RuntimeError):  # the second where layers differ
        return None
    return (group, size) if size <= _LARGEST_HEAD else None


def _configured(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "config", None) is not None]


def _uses_registry(model: Any) -> bool:
    """Whether the layers of a model look their attention up by its name, and do nothing else with the name."""
    sources = {type(layer).__module__ for layer in _configured(model)}
    supported = getattr(model, "_supports_attention_backend", False)
    return supported and not any(map(_asks_for_sdpa, sources)) and _register()


@functools.cache
def _register() -> bool:
    """Make the name known to transformers; False where this version has no place for it."""
    transformers = load_extra("transformers")
    if not hasattr(transformers, "AttentionInterface") or not hasattr(transformers, "AttentionMaskInterface"):
        return False
    transformers.AttentionInterface.register(NAME, attention_forward)
    # for layers whose mask the model makes by itself: unknown names get none
    transformers.AttentionMaskInterface.register(NAME, load_extra("transformers.masking_utils").sdpa_mask)
    return True


def _sdpa() -> Any:
    return load_extra("transformers.integrations.sdpa_attention").sdpa_attention_forward


@functools.cache
def _asks_for_sdpa(module: str) -> bool:
    """Whether the source of a module compares the name of the attention with sdpa, or cannot be read."""
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError, ImportError):
        return True
    return re.search(r"_attn_implementation\s*(==|!=|in|not in)\s[^\n]*sdpa", source) is not None
