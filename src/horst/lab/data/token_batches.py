"""Batches of token windows: a training order that a step number alone restores, and fixed windows for evaluation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from horst.extras import load_extra
from horst.lab.data.epoch_order import part_of_batch
from horst.lab.data.token_files import TokenFile, open_tokens
from horst.lab.kernels.cross_entropy import IGNORED

if TYPE_CHECKING:
    import numpy.typing as npt


class TokenBatches:
    """Windows of ``context`` tokens without replacement, in an order that depends on the seed alone.

    Epoch e cuts the file into windows that do not overlap, from a random offset below ``context`` on, and visits them
    in a random order; both are drawn by NumPy's ``default_rng(seed + e)``, as in the paper's base code. The epochs
    follow one another as one endless list, and global batch k is its entries ``k * batch_size`` and on: a batch at the
    end of an epoch is filled up with the first windows of the next. Rank r takes the r-th of ``world_size`` equal
    parts of each batch, so the batches are the same for any number of processes.

    Args:
        path: A ``.bin`` file with its ``meta.json``.
        batch_size: Windows in a global batch, over all ranks.
        context: Tokens in a window.
        seed: Seed of the order; epoch e uses ``seed + e``.
        rank, world_size: This process and the number of processes.
        device: Device of the batches; to a GPU they are copied without waiting.
        vocabulary: The model's, to refuse a file it cannot read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from horst.lab.data.tokenization import tokenize
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder) / "text.txt"
        ...     _ = text.write_text("to be or not to be " * 10)
        ...     tokens = tokenize(text, Path(folder) / "tokens", tokenizer="bytes", validation=0)
        ...     source = TokenBatches(tokens / "train.bin", batch_size=4, context=16)
        ...     x, y = next(source.batches(0))
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
        (torch.Size([4, 16]), True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int,
        context: int,
        seed: int = 1337,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        vocabulary: int | None = None,
    ) -> None:
        _check_sizes(batch_size=batch_size, context=context)
        self._rows = range(batch_size)[part_of_batch(batch_size, rank, world_size)]
        self.file = open_tokens(path, vocabulary=vocabulary)
        self.batch_size, self.context, self.seed, self.device = batch_size, context, seed, torch.device(device)
        # As many as the paper's base code takes: room for any offset and for the last window's last target.
        self.windows = (len(self.file.tokens) - context - 1) // context - 1
        if self.windows < 1:
            raise ValueError(
                f"{path} has {len(self.file.tokens):,} tokens; windows of context={context} need at least "
                f"{3 * context + 1:,}. Use a shorter context or more text."
            )
        self._epoch: tuple[int, npt.NDArray[Any]] | None = None

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of batch ``start``, ``start + 1``, ... without end: tokens and the tokens that follow them.

        Args:
            start: Number of batches taken so far: a run that stopped after step k resumes with ``batches(k)``.
        """
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}.")
        return (self._batch(step) for step in itertools.count(start))

    def _window_start(self, index: int) -> int:
        """Where entry ``index`` of the endless list begins in the file."""
        epoch, place = divmod(index, self.windows)
        if self._epoch is None or self._epoch[0] != epoch:
            random = load_extra("numpy").random.default_rng(self.seed + epoch)
            order = random.permutation(self.windows)
            offset = random.integers(self.context)
            self._epoch = epoch, order * self.context + offset
        return int(self._epoch[1][place])

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        host, numbers = _host_buffer(len(self._rows), self.context, self.device)
        for row, place in enumerate(self._rows):
            begin = self._window_start(step * self.batch_size + place)
            window = self.file.read(begin, begin + self.context + 1)
            numbers[0, row] = window[:-1]
            numbers[1, row] = window[1:]
        tokens, targets = host.to(self.device, non_blocking=True)
        return tokens, targets


def evaluation_batches(
    path: str | os.PathLike[str],
    *,
    context: int,
    batch_size: int,
    stride: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    vocabulary: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""A whole file in fixed windows, in order: tokens, and targets that score every token but the first exactly once.

    With the mean loss :math:`\ell_b` of batch b and the number :math:`n_b` of its targets that are not -100, perplexity
    is :math:`\exp(\sum_b n_b \ell_b / \sum_b n_b)`, whatever the batch size and the number of ranks.

    A window begins every ``stride`` tokens and scores what the one before it did not. The last one is filled up with
    end-of-text, the last batch with windows that score nothing: every batch has one shape, for a compiled model, and
    every rank as many batches.

    Args:
        path: A ``.bin`` file with its ``meta.json``.
        context: Tokens in a window.
        batch_size: Windows in a batch, over all ranks.
        stride: Tokens between two windows; None is ``context``: no overlap. A smaller stride gives each scored token
            more context, at more cost.
        rank, world_size: This process and the number of processes; rank r takes the r-th part of each batch.
        device: Device of the batches.
        vocabulary: The model's, to refuse a file it cannot read.
    """
    stride = context if stride is None else stride
    _check_sizes(batch_size=batch_size, context=context, stride=stride)
    if stride > context:
        raise ValueError(f"stride must be at most context={context}, got {stride}: tokens between would not be scored.")
    rows = range(batch_size)[part_of_batch(batch_size, rank, world_size)]
    file = open_tokens(path, vocabulary=vocabulary)
    if len(file.tokens) < 2:
        raise ValueError(f"{path} has {len(file.tokens)} tokens: there is nothing to predict.")
    return _evaluation_batches(file, context, stride, batch_size, rows, torch.device(device))


def _evaluation_batches(
    file: TokenFile, context: int, stride: int, batch_size: int, rows: range, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    targets = len(file.tokens) - 1
    windows = 1 + max(0, -(-(targets - context) // stride))
    for first in range(0, windows, batch_size):
        host, numbers = _host_buffer(len(rows), context, device)
        numbers[0], numbers[1] = file.end_of_text, IGNORED
        for row, place in enumerate(rows):
            window = first + place
            if window >= windows:
                break
            begin = window * stride
            read = file.read(begin, begin + context + 1)  # shorter at the end of the file
            length = len(read) - 1
            seen = 0 if window == 0 else context - stride  # targets that the window before has scored
            numbers[0, row, :length] = read[:-1]
            numbers[1, row, seen:length] = read[seen + 1 :]
        on_device = host.to(device, non_blocking=True)
        yield on_device[0], on_device[1]


def _host_buffer(rows: int, context: int, device: torch.device) -> tuple[Tensor, npt.NDArray[Any]]:
    """Memory for tokens and targets, as a tensor and as an array; pinned for a GPU, so that the copy does not wait."""
    host = torch.empty(2, rows, context, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host, host.numpy()


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
