"""The product outside the compiler: past torch's dispatcher, with all that does not change between calls found once."""

from __future__ import annotations

import torch
from torch import Tensor

from horst.kernels.sparse_matvec import staged
from horst.kernels.sparse_matvec.driver import Launcher
from horst.kernels.sparse_matvec.layout import SparseRows
from horst.kernels.sparse_matvec.operator import launch_for, multiply
from horst.kernels.sparse_matvec.tuning import MOST_TOKENS


def is_plain(x: Tensor) -> bool:
    """Whether a call with ``x`` is nobody's but the device's: not the compiler's, a tracer's, or a mode's.

    Example:
        >>> is_plain(torch.ones(2))
        True
    """
    return not (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class Product:
    """Products with one matrix.

    It holds no address: tensors whose memory is replaced are read where they are then. Its owner makes a new one where
    the tensors themselves are replaced.

    Args:
        matrix: Matrix of outputs x inputs.
        form: Its shape, dtype and launches, from :func:`horst.kernels.sparse_matvec.operator.encode`.

    Example:
        >>> from horst.kernels.sparse_matvec import Launch, pack
        >>> from horst.kernels.sparse_matvec.operator import encode
        >>> matrix = pack(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
        >>> Product(matrix, encode(matrix, {16: Launch(4, 128, 4)}))(torch.tensor([1.0, 10.0, 100.0]), None)
        tensor([ 20., 301.])
    """

    def __init__(self, matrix: SparseRows, form: str) -> None:
        self.matrix = matrix
        self._form, (self._rows, self._width) = form, matrix.shape
        self._dtype, self._device = matrix.dtype, matrix.columns.get_device()
        self._launchers: dict[tuple[int, bool], Launcher | None] = {}

    def takes(self, x: Tensor) -> bool:
        """Whether inputs are in the dtype and on the device of the matrix, and as wide."""
        return x.dtype is self._dtype and x.get_device() == self._device and x.shape[-1:] == (self._width,)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias`` for inputs of any leading shape that :meth:`takes` is True for."""
        tokens = x.numel() // self._width if self._width else 0
        if not 0 < tokens <= MOST_TOKENS:
            return multiply(x, self.matrix, bias, self._form)
        key = (tokens, bias is not None)
        if key not in self._launchers:
            self._launchers[key] = self._launcher(*key)
        launcher = self._launchers[key]
        if launcher is None:
            return multiply(x, self.matrix, bias, self._form)
        y = x.new_empty((*x.shape[:-1], self._rows))
        staged.run(launcher, x if x.is_contiguous() else x.contiguous(), self.matrix, bias, y)
        return y

    def _launcher(self, tokens: int, has_bias: bool) -> Launcher | None:
        """The staged kernel, where the plan has it for this number of tokens and one launch takes them all."""
        matrix, launch = self.matrix, launch_for(tokens, self._form)
        if launch is None or not launch.staged or not self._rows or not staged.can_stage(matrix):
            return None
        device = matrix.columns.device
        if staged.tokens_at_a_time(self._width, device, tokens) < tokens:
            return None
        return staged.launcher(matrix.shape, tokens, has_bias, launch, matrix.dtype, device)
