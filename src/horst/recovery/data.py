"""The data to recover on: token windows, images with labels, named tensors, or a source of batches.

A batch of the training loop is two tensors. Named tensors (``input_ids``, ``attention_mask``) therefore travel stacked
along dimension 1, and :meth:`Examples.arguments` takes them apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from horst.parameters.modes import Batch
from horst.parameters.sharding import mix
from horst.training import BatchSource
from horst.training.distributed import on_every_rank, rank, world_size
from horst.training.evaluate import IGNORED

__all__ = ["Examples", "RowBatches", "fingerprint", "read_examples"]

Data = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | BatchSource


class RowBatches:
    """Batches of rows, in another order in each epoch: batch k is a function of k, the seed and the rank alone.

    Epoch follows epoch without a gap: a batch may hold the end of one and the beginning of the next.

    Args:
        inputs: Tensor of all rows.
        targets: Tensor of as many rows; None: the token after each of the inputs, for token windows.
        batch_size: Rows per batch, over all ranks.
        seed: Seed of the order.

    Example:
        >>> batches = RowBatches(torch.arange(6), torch.arange(6), batch_size=4).batches(0)
        >>> seen = torch.cat([next(batches)[0] for _ in range(3)])  # two epochs
        >>> sorted(seen[:6].tolist()), sorted(seen[6:].tolist())
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """

    def __init__(self, inputs: Tensor, targets: Tensor | None, *, batch_size: int, seed: int = 0) -> None:
        if targets is not None and len(targets) != len(inputs):
            raise ValueError(f"there are {len(inputs)} rows of inputs and {len(targets)} of targets.")
        if not len(inputs):
            raise ValueError("the data is empty: it has no row.")
        if batch_size % world_size():
            raise ValueError(
                f"batch_size={batch_size} cannot be divided among {world_size()} processes. Choose a multiple."
            )
        self.inputs, self.targets, self.batch_size, self.seed = inputs, targets, batch_size, seed

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's rows of batch ``start``, ``start + 1``, ..."""
        rows, own = len(self.inputs), self.batch_size // world_size()
        orders: dict[int, Tensor] = {}
        while True:
            first = start * self.batch_size + rank() * own
            positions = range(first, first + own)
            epochs = {position // rows for position in positions}
            orders = {epoch: orders[epoch] if epoch in orders else self.order(epoch) for epoch in epochs}
            index = torch.stack([orders[position // rows][position % rows] for position in positions])
            yield self.take(index)
            start += 1

    def order(self, epoch: int) -> Tensor:
        """The order of the rows in an epoch."""
        key = int(mix(torch.tensor([self.seed * 1_000_003 + epoch]))) % (1 << 62)
        return torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(key))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some rows."""
        inputs = self.inputs[index]
        if inputs.is_floating_point() and inputs.element_size() < 4:
            inputs = inputs.float()  # as the weights are while they are trained
        if self.targets is not None:
            return inputs, self.targets[index]
        inputs = inputs.long()
        return inputs, torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], IGNORED)], 1)


@dataclass(frozen=True, eq=False)
class Examples:
    """Training data and how a model takes it.

    Args:
        source: Training batches.
        keys: Names of the inputs, stacked along dimension 1 of a batch; empty where the inputs are one tensor.
        has_labels: Whether the targets say anything.
        unit: Unit of the throughput, ``"tokens"``, ``"images"`` or ``"rows"``.
        units_per_row: Units per row.
        rows: Number of rows; None where a source does not say.
        identity: What tells this data from other data, as JSON.
    """

    source: BatchSource
    keys: tuple[str, ...] = ()
    has_labels: bool = True
    unit: str = "rows"
    units_per_row: int = 1
    rows: int | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, inputs: Tensor) -> Batch:
        """The inputs of a batch as the model takes them."""
        return {key: inputs[:, i] for i, key in enumerate(self.keys)} if self.keys else inputs

    def counts(self, inputs: Tensor) -> Tensor | None:
        """True at the positions of the inputs that are no padding; None where all count."""
        if "attention_mask" not in self.keys:
            return None
        return inputs[:, self.keys.index("attention_mask")].bool()

    def calibration(self, samples: int, rows: int = 8) -> list[Batch]:
        """Some examples as the model takes them, the same on every rank and for any number of ranks."""
        if isinstance(self.source, RowBatches):
            index = self.source.order(0)[:samples]
            return [self.arguments(self.source.take(part)[0]) for part in index.split(rows)]
        found, read = list[Tensor](), 0
        batches = iter(self.source.batches(0))
        while read < samples and (batch := next(batches, None)) is not None:
            whole = torch.cat(on_every_rank(lambda inputs=batch[0]: inputs.cpu()))  # type: ignore[misc]
            found.append(whole[: samples - read])
            read += len(whole)
        return [self.arguments(inputs) for inputs in found]


def read_examples(data: Data, model: nn.Module, *, batch_size: int, seed: int) -> Examples:
    """The data of :func:`horst.sparsify`, told apart by its kind; see there.

    Example:
        >>> read_examples(torch.randint(50, (10, 8)), nn.Identity(), batch_size=2, seed=0).unit
        'tokens'
    """
    if hasattr(data, "batches"):
        return _from_source(data)  # type: ignore[arg-type]
    if isinstance(data, Tensor):
        if data.dim() != 2 or data.is_floating_point() or data.dtype == torch.bool:
            raise TypeError(
                f"one tensor must hold token windows, (windows, length) of integers, got {_kind(data)}. Images come "
                "with their labels: (images, labels)."
            )
        if data.shape[1] < 2:
            raise ValueError(f"a window needs at least two tokens, got {_kind(data)}: the next one is predicted.")
        _check_vocabulary(data, model)
        _check_length(data, model)
        rows = RowBatches(data, None, batch_size=batch_size, seed=seed)
        return Examples(rows, (), True, "tokens", data.shape[1], len(data), {"data": fingerprint([data])})
    if isinstance(data, Mapping):
        return _from_mapping(data, model, batch_size, seed)
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        inputs, labels = data
        _check_labels(labels, "labels")
        rows = RowBatches(inputs, labels.long(), batch_size=batch_size, seed=seed)
        return Examples(rows, (), True, "images", 1, len(inputs), {"data": fingerprint(data)})
    raise TypeError(
        "data must be a tensor of token windows, a pair (images, labels), a dictionary of tensors, or an object with "
        f"batches(start), got {type(data).__name__}."
    )


def _from_mapping(data: Mapping[str, Tensor], model: nn.Module, batch_size: int, seed: int) -> Examples:
    keys = tuple(key for key in data if key != "labels")
    if not keys or not all(isinstance(value, Tensor) for value in data.values()):
        raise TypeError(f"a dictionary of data holds tensors, inputs and perhaps 'labels', got {list(data)}.")
    kinds = {key: _kind(data[key]) for key in keys}
    if len({(tuple(data[key].shape), data[key].is_floating_point()) for key in keys}) > 1:
        raise ValueError(
            f"the inputs of a dictionary must have one shape and one kind of number, got {kinds}. Give other inputs as "
            "an object with batches(start)."
        )
    if "input_ids" in data:
        _check_vocabulary(data["input_ids"], model)
        _check_length(data["input_ids"], model)
    inputs = torch.stack([data[key] if data[key].is_floating_point() else data[key].long() for key in keys], 1)
    targets = torch.full((len(inputs),), IGNORED)
    if "labels" in data:
        targets = _check_labels(data["labels"], "labels").long()
        if targets.dim() == 2 and is_causal(model):  # as in transformers: labels are the tokens themselves
            targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], 1)
    is_text = "input_ids" in data
    return Examples(
        RowBatches(inputs, targets, batch_size=batch_size, seed=seed),
        keys,
        "labels" in data,
        "tokens" if is_text else "rows",
        inputs.shape[2] if is_text else 1,
        len(inputs),
        {"data": fingerprint(list(data.values())), "keys": list(data)},
    )


def _from_source(source: BatchSource) -> Examples:
    inputs, targets = next(iter(source.batches(0)))
    _check_labels(targets, "the targets of a source of batches")
    is_text = inputs.dim() == 2 and targets.shape == inputs.shape
    identity = {"data": type(source).__name__, **getattr(source, "identity", {})}
    return Examples(
        source, (), True, "tokens" if is_text else "images", inputs.shape[1] if is_text else 1, None, identity
    )


def is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers predicts the next token, by the name of its class and its configuration."""
    names = ("CausalLM", "LMHead", "ForConditionalGeneration")  # the last: of text after images or sound
    found = any(name in kind.__name__ for kind in type(model).__mro__ for name in names)
    return found and not is_encoder_decoder(model)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a model of transformers makes its decoder's inputs of the labels, and predicts these unshifted."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def longest_text(model: nn.Module) -> int | None:
    """Largest number of tokens that a model of transformers takes; None where its config does not say.

    RoBERTa and its kin count positions from behind that of the padding, so they take fewer than they have positions.

    Example:
        >>> longest_text(nn.Linear(2, 2)) is None
        True
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    before = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if module.num_embeddings == positions and module.padding_idx is not None
    ]
    return positions - max(before, default=0)


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A hash of values and shapes, the same on every device; any change gives another one.

    Example:
        >>> fingerprint([torch.tensor([1.0, 2.0])]) == fingerprint([torch.tensor([2.0, 1.0])])
        False
    """
    total = torch.zeros(1, dtype=torch.int64)
    base = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, max(flat.numel(), 1), 1 << 22):
            part = flat[start : start + (1 << 22)]
            if part.is_floating_point():
                part = part.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(part.element_size(), torch.uint8))
            positions = torch.arange(len(part), device=part.device) + (base + start)
            total += mix(mix(positions) ^ part.to(torch.int64)).sum().cpu()
        for size in (tensor.dim(), *tensor.shape):
            base += 1
            total += mix(mix(torch.tensor([base])) ^ size)
        base += flat.numel()
    return int(mix(total))


def _check_labels(labels: Tensor, name: str) -> Tensor:
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.dim() not in (1, 2):
        raise TypeError(f"{name} must be classes or tokens, integers of one or two dimensions, got {_kind(labels)}.")
    if ((labels < 0) & (labels != IGNORED)).any():
        raise ValueError(f"{name} count from 0, and {IGNORED} is for none, got {int(labels[labels != IGNORED].min())}.")
    return labels


def _check_vocabulary(tokens: Tensor, model: nn.Module) -> None:
    """Refuse tokens that the model's embedding does not have: on a GPU they would end the process."""
    own: Any = getattr(model, "get_input_embeddings", None)
    embeddings = list(model.modules()) if own is None else [own()]
    # Of a model that does not say which table is the tokens', the largest: the others are of positions and the like.
    size = max((m.num_embeddings for m in embeddings if isinstance(m, nn.Embedding)), default=None)
    if size is not None and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ValueError(
            f"the data has tokens from {int(tokens.min())} to {int(tokens.max())}, the model knows {size}, from 0 to "
            f"{size - 1}. Make the data with the model's own tokenizer."
        )


def _check_length(tokens: Tensor, model: nn.Module) -> None:
    """Refuse rows that are longer than what a model of transformers takes."""
    longest = longest_text(model)
    if longest is not None and longest < tokens.shape[-1]:
        raise ValueError(
            f"the data has rows of {tokens.shape[-1]} tokens, and the model takes at most {longest}. Cut them into "
            f"shorter ones: data[:, :{longest}], or data.view(-1, length)."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
