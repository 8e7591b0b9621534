"""Unstructured sparsity on a GPU: which way to compute ``x @ W.T + b`` is fastest when.

- ``dense``: cuBLAS, the zeros multiplied like the rest.
- a launch of :mod:`horst.kernels.sparse_matvec`: each kept weight is read once for up to 16 tokens. For a few tokens
  a dense layer takes as long as its weights take to be read, and 10 % of them with their columns are a fifth of the
  bytes.
- ``expanded``: the sparse weight made dense for one call, then cuBLAS. For many tokens, where the product itself is
  most of the time; no dense weight is kept between calls.

Which one wins depends on shape, sparsity, tokens and GPU, so it is measured, once for each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.export.plan import Plan
from horst.kernels.sparse_matvec import Launch, SparseRows, expand, pack, sparse_matvec
from horst.kernels.sparse_matvec.direct import Product, is_plain
from horst.kernels.sparse_matvec.layout import settle
from horst.kernels.sparse_matvec.operator import check_inputs, encode, sparse_linear
from horst.kernels.sparse_matvec.staged import can_stage
from horst.kernels.sparse_matvec.timing import copies_beyond_cache, graph_seconds
from horst.kernels.trial import gives

if TYPE_CHECKING:
    from typing_extensions import Self

# The number of tokens at which sparse must be faster than dense, unless a user says otherwise: generation of one text.
GPU_TOKENS = (1,)
# Where a launch and an expanded weight are compared besides.
_OTHER_TOKENS = (1, 4, 16, 64)
# Launches for layers of a Llama at some sparsity and number of tokens. For each usual number of rows, one has about as
# many blocks as an H200 has multiprocessors (132), with room for the next launch beside them.
LAUNCHES = {
    str(launch): launch
    for launch in (
        *(
            Launch(rows, block, warps, overlap=True, staged=True)
            for rows, block, warps in (
                *((16, 512, 16), (32, 512, 16), (64, 512, 32), (112, 512, 16)),
                *((4, 256, 4), (16, 256, 16), (32, 256, 32), (64, 256, 16)),
            )
        ),
        Launch(32, 512, 16, staged=True),
        *(Launch(4, 128, 4, overlap=True), Launch(16, 32, 4, overlap=True), Launch(1, 512, 1, overlap=True)),
    )
}
# A launch that is slower than the best by more than this is not tried at more tokens.
_HOPELESS = 1.3


class RowsWeight(nn.Module):
    """A weight as :class:`~horst.kernels.sparse_matvec.SparseRows`, and its products. In no state dict."""

    columns: Tensor
    values: Tensor | None
    starts: Tensor
    order: Tensor

    def __init__(self, weight: Tensor, plan: Plan) -> None:
        super().__init__()
        stored = pack(weight)
        self.shape, self.dtype, self.kept = stored.shape, stored.dtype, int(weight.count_nonzero())
        self._form = encode(stored, launches_of(plan))
        self._product: Product | None = None
        for name in ("columns", "values", "starts", "order"):
            self.register_buffer(name, getattr(stored, name), persistent=False)

    @property
    def matrix(self) -> SparseRows:
        """The weight as the kernel takes it."""
        return SparseRows(self.columns, self.values, self.starts, self.order, None, self.shape, self.dtype)

    def to_dense(self) -> Tensor:
        """The dense weight."""
        return expand(self.matrix)

    def check(self, x: Tensor) -> None:
        """Raise where the kernels cannot take ``x``."""
        check_inputs(x, self.shape, self.dtype, self.columns.device)

    def linear(self, x: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """``x @ weight.T + bias``, by the launch that the plan had for this number of tokens."""
        if not is_plain(x):
            # not self.matrix: the compiler would then compare its shape and dtype before every call
            return sparse_linear(x, self.columns, self.values, self.starts, self.order, None, bias, self._form)
        product = self._product
        # tools that offload models replace buffers one by one, without _apply
        if product is None or product.matrix.columns is not self._buffers["columns"]:
            product = self._product = Product(self.matrix, self._form)
        if not product.takes(x):
            self.check(x)  # says why
        return product(x, bias)

    def _buffers_moved(self) -> None:
        self._product = None
        settle(self.columns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._buffers_moved()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_product": None}  # a launch is of one process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers_moved()


def launches_of(plan: Plan) -> dict[int, Launch]:
    """The launches of a plan, each with the largest number of tokens that it is for.

    Example:
        >>> launches_of(Plan({1: {"4 x 128, 4 warps, overlapping": 1.0}, 16: {"expanded": 1.0}}))
        {4: Launch(rows=4, block=128, warps=4, overlap=True, staged=False)}
    """
    counts = sorted(plan.seconds)
    # As far as Plan.kernel takes the nearer number, by ratio.
    reach = [math.isqrt(a * b) for a, b in itertools.pairwise(counts)] + [1 << 31]
    sparse = [_fastest_sparse(plan.seconds[count]) for count in counts]
    if "expanded" in sparse:  # from there on: launches gain nothing with more tokens
        cut = sparse.index("expanded")
        counts, reach, sparse = counts[:cut], reach[:cut], sparse[:cut]
    return {most: LAUNCHES[name] for most, name in zip(reach, sparse, strict=True)}


def _fastest_sparse(seconds: dict[str, float]) -> str:
    return min((name for name in seconds if name != "dense"), key=seconds.__getitem__)


def is_plan(plan: Plan) -> bool:
    """Whether a plan is one for a GPU: it names launches."""
    return any(name in LAUNCHES or name == "expanded" for seconds in plan.seconds.values() for name in seconds)


@functools.cache
@torch.no_grad()
def measure(
    rows: int, columns: int, density_per_cent: int, tokens: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Plan:
    """Seconds of each kernel on a random weight, at ``tokens`` beside dense, and at some more without it."""
    with torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(rows, columns, device=device, dtype=dtype, generator=generator)
        keep = torch.rand(rows, columns, device=device, generator=generator) < density_per_cent / 100
        weight.masked_fill_(~keep, 0)
        bias, matrix = torch.randn(rows, device=device, dtype=dtype, generator=generator), pack(weight)
        dense = [weight.clone() for _ in range(copies_beyond_cache(weight.nbytes, device))]
        sparse = [matrix.map(torch.clone) for _ in range(copies_beyond_cache(matrix.nbytes, device))]
        seconds: dict[int, dict[str, float]] = {}
        names: Iterable[str] = LAUNCHES
        for count in sorted({*tokens, *_OTHER_TOKENS}):
            x = torch.randn(count, columns, device=device, dtype=dtype, generator=generator)
            launches = _working(names, x, matrix, bias)
            calls: dict[str, list[Callable[[], Tensor]]] = {
                name: [functools.partial(sparse_matvec, x, copy, bias, launch) for copy in sparse]
                for name, launch in launches.items()
            }
            if count > 1 or not launches:
                calls["expanded"] = [functools.partial(_expanded, x, copy, bias) for copy in sparse]
            if count in tokens:
                calls["dense"] = [functools.partial(F.linear, x, copy, bias) for copy in dense]
            taken = seconds[count] = {name: graph_seconds(copies) for name, copies in calls.items()}
            best = min((taken[name] for name in launches), default=math.inf)
            names = [name for name in launches if taken[name] <= _HOPELESS * best]
    return Plan(seconds)


def _working(names: Iterable[str], x: Tensor, matrix: SparseRows, bias: Tensor) -> dict[str, Launch]:
    """The launches to measure. Triton's are slower, on the host too: only for what the staged kernel cannot take."""
    for staged in (True, False):
        launches = {name: LAUNCHES[name] for name in names if LAUNCHES[name].staged == staged}
        if found := {name: launch for name, launch in launches.items() if _works(launch, x, matrix, bias)}:
            return found
    return {}


def _works(launch: Launch, x: Tensor, matrix: SparseRows, bias: Tensor) -> bool:
    """Whether a launch runs here and gives the product of the expanded weight, up to rounding."""
    return (not launch.staged or can_stage(matrix)) and gives(
        f"the launch {launch}",
        lambda: sparse_matvec(x, matrix, bias, launch),
        lambda: F.linear(x.float(), expand(matrix).float(), bias.float()),
    )


def _expanded(x: Tensor, matrix: SparseRows, bias: Tensor | None) -> Tensor:
    return F.linear(x, expand(matrix), bias)
