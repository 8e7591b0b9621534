"""Calibration data as the user gives them, checked and held: a list of batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from horst.parameters.modes import Batch


def read_batches(data: Iterable[Batch], samples: int | None) -> list[Batch]:
    """The first batches, until they hold ``samples`` samples: they are gone through more than once.

    Example:
        >>> len(read_batches(iter([Tensor(8, 4)] * 3), samples=16))
        2
    """
    if isinstance(data, (Tensor, Mapping, str)):
        raise TypeError(f"data must be an iterable of batches, got one {type(data).__name__}: write [batch].")
    if samples is not None and not samples >= 1:
        raise ValueError(f"samples must be at least 1, or None to read all data, got {samples}.")
    batches, read = [], 0
    for batch in data:
        values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
        first = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
        if first is None:
            raise TypeError(
                f"a batch is a tensor, a tuple or list of arguments or a mapping of keyword arguments with tensors, "
                f"got {type(batch).__name__} without one."
            )
        if isinstance(batch, Mapping) and isinstance(rows := batch.get("input_ids"), Tensor) and rows.dim() == 1:
            raise ValueError(
                f"a batch's input_ids has one dimension, shape ({len(rows)},): that is a row, not a batch. Put the "
                "rows in a DataLoader, or stack them: {'input_ids': torch.stack(rows)}."
            )
        batches.append(batch)
        read += len(first)
        if samples is not None and read >= samples:
            break
    if not batches:
        raise ValueError("data holds no batch. If it is an iterator, it may have been used up: make a new one.")
    return batches
