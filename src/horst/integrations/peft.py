"""LoRA on a pruned model: adapters that leave the zeros of the base alone, while training and when merged.

An adapter adds ``scaling * B @ A`` to a weight. That product is dense whatever the optimizer does to its factors, so
merging an ordinary adapter fills every zero of the base. Here the model is trained with

    W + M * (scaling * B @ A),    M True where W is not zero,

so that what is merged is what was trained, and ``W`` keeps its zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from horst.extras import how_to_install

try:
    from peft import PeftModel
    from peft.tuners.lora import Linear as LoraLinear
except ImportError as error:
    raise ImportError(f"horst.integrations.peft needs peft; {how_to_install('peft')}") from error

__all__ = ["keep_zeros", "merge_and_unload"]


def keep_zeros(model: PeftModel) -> None:
    """Mask every LoRA update of ``model`` by the zeros of its base weight, from now on.

    Adapters are trained, saved and loaded as before; call this again after loading. Costs one more dense product with
    the weight in each forward pass. PEFT's own ways to merge keep the zeros too.

    Args:
        model: A model with LoRA on linear layers (``nn.Linear``, or the ``Conv1D`` of Hugging Face's GPT-2).

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(4, 2))
        >>> base[0].weight.data[0, :2] = 0
        >>> model = get_peft_model(base, LoraConfig(r=1, target_modules=["0"], init_lora_weights=False))
        >>> keep_zeros(model)
        >>> merge_and_unload(model)[0].weight[0, :2].tolist()
        [0.0, 0.0]
    """
    layers = _lora_layers(model)
    pruned = [layer for layer in layers if _has_zeros(layer)]
    if not pruned:
        raise ValueError(
            f"none of the {len(layers)} weights under a LoRA adapter has a zero. Prune the base model before "
            "get_peft_model, or leave keep_zeros out."
        )
    for layer in pruned:
        if "horst_kept" not in layer._buffers:
            # a buffer moves with the model; not persistent, so that saved adapters stay peft's own
            layer.register_buffer("horst_kept", layer.get_base_layer().weight != 0, persistent=False)
            layer.get_delta_weight = functools.partial(_masked_update, layer, layer.get_delta_weight)  # what is merged
            layer.forward = functools.partial(_forward, layer, layer.forward)


def merge_and_unload(model: PeftModel) -> nn.Module:
    """``model.merge_and_unload()``, refused where it would fill zeros, or no adapter is masked.

    Example: see :func:`keep_zeros`.
    """
    layers = _lora_layers(model)
    unmasked = [layer for layer in layers if "horst_kept" not in layer._buffers]
    if len(unmasked) == len(layers):
        raise ValueError("no adapter is masked. Call horst.integrations.peft.keep_zeros(model) before training it.")
    if filled := sum(map(_has_zeros, unmasked)):
        raise ValueError(
            f"{filled} of {len(layers)} adapters came after keep_zeros, and would fill the zeros of their weights. "
            "Call horst.integrations.peft.keep_zeros(model) again, before training them."
        )
    merged: nn.Module = model.merge_and_unload()
    return merged


def _lora_layers(model: nn.Module) -> list[Any]:
    """The LoRA layers of a model; one that is not a plain ``B @ A`` beside a linear layer is refused."""
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")}
    for name, layer in layers.items():
        extras = [getattr(layer, key, {}) for key in ("use_dora", "lora_bias", "lora_variant")]
        if not isinstance(layer, LoraLinear) or any(value for extra in extras for value in extra.values()):
            raise NotImplementedError(
                f"{name} ({type(layer).__name__}) is not plain LoRA on a linear layer: only that can be masked. "
                "Leave it out of target_modules; use_dora, lora_bias and other variants must be off."
            )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA layer. Make it with get_peft_model(base, LoraConfig()).")
    return list(layers.values())


def _has_zeros(layer: Any) -> bool:
    return bool((layer.get_base_layer().weight == 0).any())


def _masked_update(layer: Any, original: Callable[..., Tensor], adapter: str) -> Tensor:
    """What an adapter adds to the base weight, shaped like it."""
    return torch.where(layer.horst_kept, original(adapter), 0)


def _forward(layer: Any, original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The layer's forward pass with each active update masked."""
    if kwargs.get("adapter_names") is not None:
        raise NotImplementedError("adapter_names (several adapters in one batch) cannot be masked: use one at a time.")
    if layer.disable_adapters or layer.merged:
        return original(x, *args, **kwargs)
    result: Tensor = layer.base_layer(x)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight = layer.get_delta_weight(adapter)
            if not layer.fan_in_fan_out:
                weight = weight.T
            result = result + (layer.lora_dropout[adapter](x.to(weight.dtype)) @ weight).to(result.dtype)
    return result
