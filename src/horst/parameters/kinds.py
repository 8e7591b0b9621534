"""What a model's parameters are for, read off its modules: pure functions of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

__all__ = ["Kind", "block_prefixes", "clean_name", "parameter_kinds", "refuse_flat_shards"]

Kind = Literal["matrix", "embedding", "position", "head", "norm", "bias", "vector"]

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_POSITION = re.compile(
    r"(^|\.)(wpe|(\w+_)?pos(_\w*)?|posemb\w*|\w*position\w*|"
    r"(cls|class|dist|distillation|reg|register|mask)_(tokens?|embedding|emb)(_?\d+)?)(\.|$)"
)
_MULTIPLIERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
_HEAD = re.compile(r"(^|\.)(lm_head|head|head_dist|classifier|score|out_proj_head|embed_out|output_projection)(\.|$)")


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of DDP, ``torch.compile`` and activation checkpointing.

    Example:
        >>> clean_name("module._orig_mod.blocks.0.fc.weight")
        'blocks.0.fc.weight'
    """
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace("." + wrapper, ".")
    return name


def block_prefixes(model: nn.Module) -> list[str]:
    """The name prefixes of a model's repeated blocks, as ``named_modules`` spells them.

    Blocks are the items of a ``ModuleList`` or ``Sequential`` that are all of one class and have submodules of their
    own: ``blocks.`` in timm, ``transformer.h.`` in Hugging Face's GPT-2, ``encoder.layer.`` in BERT.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> block_prefixes(nn.ModuleDict({"embed": nn.Embedding(5, 8), "blocks": nn.ModuleList([layer(), layer()])}))
        ['blocks.']
    """
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            items = list(module.children())
            if len({type(item) for item in items}) == 1 and any(True for _ in items[0].children()):
                prefixes.append(f"{name}." if name else "")
    return prefixes


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """What each parameter is, by its name in ``named_parameters`` (a tied one appears once, under its first name).

    - ``norm``, ``bias``, ``vector``: parameters of norm layers, those called bias, other tensors of one dimension. A
      tensor with one dimension that is not of size 1, such as a scale for each channel, counts as having only that.
    - ``embedding``: the table of an embedding layer, also where it is tied to the head.
    - ``position``: position embeddings and special tokens (class token and the like).
    - ``head``: the output layer, where it is not tied.
    - ``matrix``: every other tensor of two or more dimensions, the stacked experts of mixture models included.

    The weight of a linear layer or convolution is never a norm, a position or a vector, whatever its name and shape.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(5, 8), "fc": nn.Linear(8, 8), "head": nn.Linear(8, 5)})
        >>> parameter_kinds(model)["head.weight"]
        'head'
    """
    kinds = {}
    embedding_tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.EmbeddingBag | nn.Embedding) or type(module).__name__.endswith("Embedding")
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    in_norm, in_multiplier = set(), set()
    for module in model.modules():
        own = map(id, module.parameters(recurse=False))
        if isinstance(module, _MULTIPLIERS) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
            in_multiplier |= {*own}
        elif "norm" in type(module).__name__.lower():
            in_norm |= {*own}
    for raw_name, p in model.named_parameters():
        name = clean_name(raw_name)
        kind: Kind
        if id(p) in in_norm:
            kind = "norm"
        elif name.endswith(("bias", "bias_k", "bias_v")):
            kind = "bias"
        elif _POSITION.search(name) and id(p) not in in_multiplier:
            kind = "position"
        elif p.ndim < 2 or (p.numel() <= max(p.shape) and id(p) not in in_multiplier | embedding_tables):
            kind = "vector"
        elif id(p) in embedding_tables:
            kind = "embedding"
        elif _HEAD.search(name):
            kind = "head"
        else:
            kind = "matrix"
        kinds[raw_name] = kind
    return kinds


def refuse_flat_shards(tensors: Iterable[Tensor], why: str) -> None:
    """Refuse weights that FSDP1 has flattened: their shapes, and so which were matrices, are lost."""
    if any(hasattr(t, "_fsdp_flattened") for t in tensors):
        raise ValueError(
            f"{why}, and FullyShardedDataParallel (FSDP1) has flattened these. Use FSDP2 (fully_shard; in accelerate "
            "fsdp_version: 2), or horst.HORST with alpha as a number, whose mirror step is then taken on everything."
        )
