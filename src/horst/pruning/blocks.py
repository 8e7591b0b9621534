"""The sequences of repeated blocks that a model is made of, and which layers lie in which block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from horst.parameters.kinds import block_prefixes, clean_name
from horst.sparsity.layers import Layer


def block_sequences(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """The outermost sequences of repeated blocks: by the prefix of their names, the blocks by name without wrappers.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> {name: list(s) for name, s in block_sequences(nn.Sequential(nn.Sequential(layer(), layer()))).items()}
        {'0.': ['0.0', '0.1']}
    """
    prefixes = block_prefixes(model)
    found: dict[str, dict[str, nn.Module]] = {}
    for prefix in prefixes:
        items = dict(model.get_submodule(prefix.rstrip(".")).named_children())
        # A container of one item that holds the blocks is a wrapper.
        is_wrapper = len(items) == 1 and any(p.startswith(prefix) and p != prefix for p in prefixes)
        name = clean_name(prefix)
        if not is_wrapper and not any(name.startswith(outer) for outer in found):
            found[name] = {clean_name(prefix + key): block for key, block in items.items()}
    return found


def layers_by_block(layers: Sequence[Layer], blocks: Iterable[str]) -> dict[str, list[Layer]]:
    """Of each block the layers that lie in it; every block has an entry."""
    return {block: [layer for layer in layers if layer.name.startswith(block + ".")] for block in blocks}


def outer_blocks(model: nn.Module) -> list[str]:
    """Patterns of the parameters in the first and last block of each sequence: what the paper leaves dense.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2))
        >>> outer_blocks(nn.ModuleDict({"h": nn.ModuleList([block(), block(), block()])}))
        ['h.0.*', 'h.2.*']
    """
    patterns = []
    for prefix, names in block_sequences(model).items():
        if len(names) < 3:
            raise ValueError(
                f"layers='paper' prunes the blocks between the first and the last, but {prefix} has {len(names)}. "
                "Use layers='blocks'."
            )
        first, *_, last = names
        patterns += [f"{first}.*", f"{last}.*"]
    if not patterns:
        raise ValueError(
            "layers='paper' needs a model with repeated blocks, and none were found. Use layers='all_linear'."
        )
    return patterns
