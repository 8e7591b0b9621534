"""The sequences of repeated blocks that a model is made of, and which layers lie in which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from horst.parameters.kinds import block_prefixes, clean_name
from horst.sparsity.layers import Layer


@dataclass(frozen=True, eq=False)
class BlockSequence:
    """Blocks of one class, side by side in a ``ModuleList`` or ``Sequential``.

    Args:
        name: Prefix of the blocks' names, such as ``"transformer.h."``.
        blocks: By name without wrappers, such as ``"transformer.h.0"``.
    """

    name: str
    blocks: dict[str, nn.Module]


def block_sequences(model: nn.Module) -> list[BlockSequence]:
    """The outermost sequences of repeated blocks, in the order of the model.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> [list(s.blocks) for s in block_sequences(nn.ModuleDict({"h": nn.ModuleList([layer(), layer()])}))]
        [['h.0', 'h.1']]
    """
    prefixes = block_prefixes(model)
    found: list[BlockSequence] = []
    for prefix in prefixes:
        items = dict(model.get_submodule(prefix.rstrip(".")).named_children())
        # A container of one item that holds the blocks is a wrapper.
        is_wrapper = len(items) == 1 and any(p.startswith(prefix) and p != prefix for p in prefixes)
        name = clean_name(prefix)
        if not is_wrapper and not any(name.startswith(outer.name) for outer in found):
            found.append(BlockSequence(name, {clean_name(prefix + key): block for key, block in items.items()}))
    return found


def layers_by_block(layers: Sequence[Layer], sequence: BlockSequence) -> dict[str, list[Layer]]:
    """Of each block the layers that lie in it; every block has an entry."""
    return {block: [layer for layer in layers if layer.name.startswith(block + ".")] for block in sequence.blocks}


def outer_blocks(model: nn.Module) -> list[str]:
    """Patterns of the parameters in the first and last block of each sequence: what the paper leaves dense.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2))
        >>> outer_blocks(nn.ModuleDict({"h": nn.ModuleList([block(), block(), block()])}))
        ['h.0.*', 'h.2.*']
    """
    patterns = []
    for sequence in block_sequences(model):
        names = list(sequence.blocks)
        if len(names) < 3:
            raise ValueError(
                f"layers='paper' prunes the blocks between the first and the last, but {sequence.name} has "
                f"{len(names)}. Use layers='blocks'."
            )
        patterns += [f"{names[0]}.*", f"{names[-1]}.*"]
    if not patterns:
        raise ValueError(
            "layers='paper' needs a model with repeated blocks, and none were found. Use layers='all_linear'."
        )
    return patterns
