"""Chains of blocks: how a model calls its blocks, caught once, and each block called so again on its own.

A chain is a sequence of blocks that are each called once, in order, with the hidden state that the one before returned.
To catch how, the model is run once for each batch with all blocks but the first replaced by stand-ins that only note
their arguments, whatever this model passes to this block: its own masks, positions or anything else.

That a sequence is a chain is checked, not assumed: block k + 1 must be given the very tensor that block k returned.
Which sequences of repeated blocks a model has, and which layers lie in them, is found here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horst.parameters.kinds import block_prefixes, clean_name
from horst.parameters.modes import Batch, Forward, as_call, forwards_replaced
from horst.sparsity.layers import Layer

_HOST = torch.device("cpu")


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


class NotAChain(BaseException):
    """The blocks are not called one after the other. No Exception: a model that catches those must not catch this."""


class _Done(BaseException):
    """The last block has been called: nothing more is to be learnt from this batch."""


class Chain:
    """A sequence of blocks, how each is called for each batch, and the hidden states on their way through.

    Args:
        blocks: Blocks by name.
        device: Device that blocks run on; None is where each is.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device | None) -> None:
        self.blocks, self.device = blocks, device
        self.calls: list[list[_Call]] = []  # by batch and block, on the host, without the hidden state
        self.hidden: list[Tensor] = []  # by batch, on the host: the input of the block that is next
        self.tails: list[tuple[Any, ...] | None] = []  # by batch: what the first block returned after the hidden state
        self.place: int | str = 0  # of the hidden state among the arguments

    def catch(self, model: nn.Module, batches: Sequence[Batch], done: Sequence[Chain]) -> None:
        """Run the model on each batch, with the chains that are ``done`` replaced by what they returned."""
        with self.on_device(next(iter(self.blocks))), replayed(done, 0):
            failed = self._why_it_fails(model, batches[0])
        if failed is not None:
            with replayed(done, 0), explained(batches[0]):
                run_model(model, batches[0])  # raises where the data is what is wrong
            raise NotAChain(f"the model fails on what the first block returns: {failed}") from failed
        with self.on_device(next(iter(self.blocks))):
            for i, batch in enumerate(batches):
                with replayed(done, i):
                    calls, tail = self._calls(model, batch, to_the_end=False)
                seen: dict[int, Tensor] = {}  # most arguments are the same tensors for all blocks
                self.hidden.append(move(calls[0].entries[self.place], _HOST))
                self.tails.append(move(tail, _HOST, seen))
                for call in calls:
                    call.entries[self.place] = None
                    call.entries = move(call.entries, _HOST, seen)
                self.calls.append(calls)

    def _why_it_fails(self, model: nn.Module, batch: Batch) -> Exception | None:
        """What the model raises with stand-ins that hand on what the first block returned, as where shapes change."""
        try:  # of one sample, since a head's outputs for a whole batch may be larger than the model
            self._calls(model, _first_sample(batch), to_the_end=True)
        except Exception:
            try:  # a batch that cannot be cut so
                self._calls(model, batch, to_the_end=True)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return error
        return None

    def _calls(self, model: nn.Module, batch: Batch, to_the_end: bool) -> tuple[list[_Call], tuple[Any, ...] | None]:
        """How each block is called, and what the first returns after the hidden state.

        Up to the last block, or to the end of the model, to see that no block is called again.
        """
        calls: list[_Call] = []
        handed_on: list[Tensor] = []
        tail: tuple[Any, ...] | None = None

        def stand_in(k: int, real: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal tail
                if k != len(calls):
                    raise NotAChain(f"block {k} is called after {len(calls)} calls of blocks")
                call = _Call(args, kwargs)
                calls.append(call)
                place = call.place_of(handed_on[-1] if k else None)
                given = call.entries[place]
                if k > 1 and place != self.place:
                    raise NotAChain(f"block {k} gets the hidden state as argument {place!r}, not {self.place!r}")
                self.place = place  # block 0 takes a guess, block 1 knows
                if k == 0:
                    # The one block that runs: the others may be given what it returns beside the hidden state.
                    returned = call.with_hidden(place, given, self.device or given.device).to(real)
                    try:
                        out, tail = move(_split(returned), given.device)
                    except TypeError as error:
                        raise NotAChain(str(error)) from error
                else:
                    out = given.view_as(given)  # a tensor of its own, so that the next block is seen to get this one
                handed_on.append(out)
                if k + 1 == len(self.blocks) and not to_the_end:
                    raise _Done
                return _join(out, tail)

            return forward

        with forwards_replaced(self.blocks.values(), stand_in), contextlib.suppress(_Done):
            run_model(model, batch)
        if len(calls) != len(self.blocks):
            raise NotAChain(f"{len(calls)} of {len(self.blocks)} blocks are called")
        return calls, tail

    @contextlib.contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        """A block on the device, and back where it came from."""
        block = self.blocks[name]
        home = home_of(block)
        if self.device is None or self.device == home:
            yield
            return
        block.to(self.device)
        try:
            yield
        finally:
            block.to(home)

    def forward(self, k: int, i: int) -> Tensor:
        """What block ``k``, which is on the device, makes of the hidden state of batch ``i``."""
        block = list(self.blocks.values())[k]
        call = self.calls[i][k].with_hidden(self.place, self.hidden[i], self.device or home_of(block))
        return _split(call.to(block))[0]

    def advance(self, k: int, i: int) -> None:
        """Replace the hidden state of batch ``i`` by what block ``k`` makes of it."""
        self.hidden[i] = self.forward(k, i).to(_HOST)

    def replay(self, i: int) -> contextlib.AbstractContextManager[None]:
        """The blocks replaced by what they returned for batch ``i``."""

        def stand_in(k: int, real: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                given = _Call(args, kwargs).entries[self.place]
                out = self.hidden[i].to(given.device) if k + 1 == len(self.blocks) else given
                return _join(out, move(self.tails[i], given.device))

            return forward

        return forwards_replaced(self.blocks.values(), stand_in)


class _Call:
    """The arguments of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entries: dict[int | str, Any] = dict(enumerate(args))
        self.entries.update(kwargs)

    def place_of(self, tensor: Tensor | None) -> int | str:
        """Where ``tensor`` itself, or with None the first tensor, stands."""
        for place, value in self.entries.items():
            if isinstance(value, Tensor) and (tensor is None or value is tensor):
                return place
        raise NotAChain("a block is not given what the one before it returned")

    def with_hidden(self, place: int | str, hidden: Tensor, device: torch.device) -> _Call:
        """The same call with another hidden state, all on ``device``."""
        call = _Call((), {})
        call.entries = move(self.entries, device)
        call.entries[place] = hidden.to(device, copy=True)  # a block may add to its input in place
        return call

    def to(self, function: Callable[..., Any]) -> Any:
        """Call ``function``."""
        args = [value for key, value in self.entries.items() if isinstance(key, int)]
        return function(*args, **{key: value for key, value in self.entries.items() if isinstance(key, str)})


@contextlib.contextmanager
def replayed(chains: Sequence[Chain], i: int) -> Iterator[None]:
    """All these chains replaced by what they returned for batch ``i``."""
    with contextlib.ExitStack() as stack:
        for chain in chains:
            stack.enter_context(chain.replay(i))
        yield


def run_model(model: nn.Module, batch: Batch) -> None:
    """Call the model with a batch, where the model is."""
    args, kwargs = move(as_call(batch), home_of(model))
    model(*args, **kwargs)


@contextlib.contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Say how several tensors are passed where the model fails on them: labels from a loader are a usual mistake."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        count = sum(isinstance(value, Tensor) for value in batch) if isinstance(batch, (tuple, list)) else 0
        if count < 2:
            raise
        kind = type(batch).__name__
        raise TypeError(
            f"the model raised {type(error).__name__} on the first calibration batch. The batch is a {kind} of {count} "
            f"tensors, and a {kind} is passed as positional arguments. Give the inputs alone, without labels, or a "
            "mapping of arguments by name."
        ) from error


def _first_sample(batch: Batch) -> Batch:
    """A batch of one, where all that has as many rows as the first tensor is cut."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(values, Tensor):
        return values[:1]
    size = next(len(value) for value in values if isinstance(value, Tensor) and value.dim())
    cut = [value[:1] if isinstance(value, Tensor) and value.dim() and len(value) == size else value for value in values]
    return dict(zip(batch, cut, strict=True)) if isinstance(batch, Mapping) else cut


def home_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter."""
    parameter = next(module.parameters(), None)
    return _HOST if parameter is None else parameter.device


def move(value: Any, device: torch.device, seen: dict[int, Tensor] | None = None) -> Any:
    """All tensors in nested containers on ``device``; with ``seen``, one that occurs often is copied once."""
    if isinstance(value, Tensor):
        if seen is None:
            return value.to(device)
        if id(value) not in seen:
            seen[id(value)] = value.to(device)
        return seen[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(entry, device, seen) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(move(entry, device, seen) for entry in value)
    if type(value) is dict:
        return {key: move(entry, device, seen) for key, entry in value.items()}
    return value


def _split(out: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """What a block returned: the hidden state, and the rest where it is a tuple."""
    if isinstance(out, Tensor):
        return out, None
    if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
        return out[0], tuple(out[1:])
    raise TypeError(f"a block returns {type(out).__name__}, not a tensor or a tuple that begins with one")


def _join(hidden: Tensor, tail: tuple[Any, ...] | None) -> Any:
    return hidden if tail is None else (hidden, *tail)
