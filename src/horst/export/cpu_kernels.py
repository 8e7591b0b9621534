"""Unstructured sparsity on a CPU: three ways to compute ``x @ W.T + b``, and which is fastest when.

- ``dense``: ``F.linear``, the zeros multiplied like the rest.
- ``csr``: torch's compressed sparse rows with 32-bit indices, multiplied by MKL. Best for a few tokens: for one token
  each weight is read once and used once, and 10 % of the weights with their indices are a fifth of the bytes.
- ``bag``: ``torch.embedding_bag`` with the transposed inputs as its table. Row i of the weight is a bag of inputs, to
  be summed with the row's values: sum_k values[k] * x.T[columns[k], :]. torch has fast code for it (FBGEMM on x86),
  made for recommendation models; one nonzero weight is broadcast and multiplied with 64 tokens at once, which stay in
  the cache. Best for many tokens, where ``csr`` falls back.

Which one wins depends on shape, sparsity, tokens, threads and machine, so it is measured, once for each.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.export.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Self

# Inputs of this many tokens at a time: the table of a layer with 4096 inputs is then 1 MiB, about the cache of a core.
# Measured best, or within a few per cent of it, among 16 to 256 on layers of 768 to 4096 inputs.
TOKENS_AT_A_TIME = 64
# The token counts at which kernels are compared: one token of generation up to a batch of prompts.
TOKENS = (1, 8, 32, 128, 512)


def to_csr(weight: Tensor) -> Tensor:
    """A matrix in compressed sparse rows with 32-bit indices, which halve what MKL reads beside the values."""
    if weight.numel() >= 1 << 31:
        raise ValueError(f"a matrix of {tuple(weight.shape)} has more entries than 32-bit indices can count.")
    mask = weight != 0
    rows = torch.zeros(len(weight) + 1, dtype=torch.int32)
    rows[1:] = mask.sum(dim=1).cumsum(0)
    return csr_tensor(rows, mask.nonzero()[:, 1].int(), weight[mask], weight.shape)


def csr_tensor(rows: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse tensor of its three parts, without torch's notices: of a beta feature, and that it checks nothing."""
    with warnings.catch_warnings():
        for notice in ("Sparse CSR tensor support is in beta state", "Sparse invariant checks are implicitly disabled"):
            warnings.filterwarnings("ignore", message=f".*{notice}", category=UserWarning)
        return torch.sparse_csr_tensor(rows, columns, values, tuple(shape), check_invariants=False)


def csr_linear(x: Tensor, csr: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ csr.T + bias`` for ``x`` of shape (tokens, inputs), by torch's sparse product."""
    if len(x) == 1:
        row = torch.mv(csr, x[0]) if bias is None else torch.addmv(bias, csr, x[0])
        return row.unsqueeze(0)
    product = (csr @ x.t().contiguous()).t()
    return product.contiguous() if bias is None else torch.add(product, bias, out=x.new_empty(product.shape))


def bag_linear(x: Tensor, csr: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ csr.T + bias`` for ``x`` of shape (tokens, inputs), by ``torch.embedding_bag``."""
    rows, columns, values = csr.crow_indices(), csr.col_indices(), csr.values()
    out = x.new_empty(len(x), csr.shape[0])
    # Equal parts: a last one of a token or two would be slow.
    parts = -(-len(x) // TOKENS_AT_A_TIME)
    for x_part, out_part in zip(x.chunk(parts), out.chunk(parts), strict=True):
        table = x_part.t().contiguous()
        # Positions: scale_grad_by_freq, mode (0 is sum), sparse, per_sample_weights, include_last_offset.
        product = torch.embedding_bag(table, columns, rows, False, 0, False, values, True)[0].t()
        if bias is None:
            out_part.copy_(product)
        else:
            torch.add(product, bias, out=out_part)
    return out


class CsrWeight(nn.Module):
    """A weight in compressed sparse rows, and its products on a CPU. Its parts are buffers and in no state dict."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        self._csr: Tensor | None = to_csr(weight)
        parts = (self._csr.crow_indices(), self._csr.col_indices(), self._csr.values())
        for name, part in zip(("rows", "columns", "values"), parts, strict=True):
            self.register_buffer(name, part, persistent=False)

    @property
    def csr(self) -> Tensor:
        """The weight as a sparse tensor that shares memory with the buffers."""
        if self._csr is None:
            self._csr = csr_tensor(self.rows, self.columns, self.values, self.shape)
        return self._csr

    @property
    def dtype(self) -> torch.dtype:
        """Type of inputs, values and outputs."""
        return self.values.dtype

    @property
    def kept(self) -> int:
        """Number of stored values."""
        return self.values.numel()

    def to_dense(self) -> Tensor:
        """The dense weight."""
        return self.csr.to_dense()

    def check(self, x: Tensor) -> None:
        """Raise where the kernels cannot take ``x``, or the weight where it is now."""
        if x.dtype != torch.float32 or self.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(
                f"this SparseLinear computes in float32 on a CPU, got {x.dtype} on {x.device} (its weight is "
                f"{self.dtype} on {self.values.device}). Move and convert the dense model, then make it sparse."
            )

    def linear(self, x: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """``x @ weight.T + bias``, by the kernel that the plan has for this number of tokens."""
        self.check(x)
        tokens = x.reshape(-1, self.shape[1])
        return KERNELS[plan.kernel(len(tokens))](tokens, self.csr, bias).view(*x.shape[:-1], self.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_csr": None}  # copy.deepcopy knows no sparse tensors; made again on use

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._csr = None  # the buffers are about to be replaced
        return super()._apply(fn, recurse)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "dense": F.linear,
    "csr": csr_linear,
    "bag": bag_linear,
}


def available_kernels() -> list[str]:
    """The kernels that this build of torch has: its sparse product needs MKL."""
    return [name for name in KERNELS if name != "csr" or torch.backends.mkl.is_available()]


@functools.cache
@torch.no_grad()
def measure(rows: int, columns: int, density_per_cent: int, tokens: tuple[int, ...], threads: int) -> Plan:
    """Seconds of each kernel on a random weight, at ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    weight.masked_fill_(torch.rand(rows, columns, generator=generator) >= density_per_cent / 100, 0)
    csr, bias = to_csr(weight), torch.randn(rows, generator=generator)
    seconds = {}
    for count in tokens:
        x = torch.randn(count, columns, generator=generator)
        calls = {
            name: functools.partial(KERNELS[name], x, weight if name == "dense" else csr, bias)
            for name in available_kernels()
        }
        # The shortest, not the median: other work on the machine can only add to what a kernel takes.
        times = interleaved_times(calls, seconds=0.03 * len(calls))
        seconds[count] = {name: min(taken) for name, taken in times.items()}
    return Plan(seconds)


def interleaved_times(
    calls: Mapping[str, Callable[[], object]], *, seconds: float, minimum: int = 5, maximum: int = 200
) -> dict[str, list[float]]:
    """Seconds of each call, again and again in turns: what slows the machine down for a while slows all of them.

    Args:
        calls: Functions to time, by name. Each runs once before the clock starts.
        seconds: Duration of all timing together, after ``minimum`` rounds and up to ``maximum``.

    Example:
        >>> sorted(interleaved_times({"a": lambda: 1, "b": lambda: 2}, seconds=0.001))
        ['a', 'b']
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, rounds = time.perf_counter(), 0
    while rounds < minimum or (rounds < maximum and time.perf_counter() - begin < seconds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times
