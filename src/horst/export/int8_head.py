"""The output head of a language model in int8, for inference on a CPU; with it the embedding, where the two are tied.

One token of generation reads every weight of the head once, so time goes with bytes. Each row of the weight has one
scale: ``weight[i] = scales[i] * codes[i]`` with codes from -127 to 127.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.user_warnings import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

# Inputs are two digits to the base 254, see _digits: the product of the second counts a 254th of that of the first.
_BASE = 254
# Digits are stored from 0 to 255, because oneDNN's products with signed inputs are slow.
_ZERO = 128
# Tokens at a time: the products of their digits take twice the bytes of their logits.
_TOKENS_AT_A_TIME = 64
# 255 * 127 times this stays below 2**31.
_LONGEST_ROW = 65536


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8 codes and one float32 scale per row.

    The error of a weight is at most half of its row's scale, which is the row's largest magnitude over 127, rounded up
    to 16 significant bits: codes times scale is then exact in float32, and quantizing it again changes nothing.

    Example:
        >>> codes, scales = quantize_rows(torch.tensor([[1.0, -127.0], [0.5, 31.75]]))
        >>> codes.tolist(), scales.tolist()
        ([[1, -127], [2, 127]], [1.0, 0.25])
    """
    if not bool(weight.isfinite().all()):
        raise ValueError("the head's weight has entries that are infinite or NaN: int8 has neither. Check the model.")
    smallest = torch.finfo(torch.float32).tiny * 2**24  # below, a row counts as zeros or nearly so
    largest = weight.detach().float().abs().amax(dim=1).clamp(min=127 * smallest)
    mantissa, exponent = torch.frexp(largest / 127)
    scales = torch.ldexp(torch.ceil(mantissa * 2**16) / 2**16, exponent)
    return torch.round(weight.detach().float() / scales[:, None]).to(torch.int8), scales


class Int8Rows(nn.Module):
    """A weight in int8 that a head, and an embedding tied to it, share.

    Args:
        weight: Matrix in float32 on a CPU, one row per token of the vocabulary.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        codes, scales = quantize_rows(weight)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self._packed: Tensor | None = None
        self._dense: weakref.ref[Tensor] | None = None

    def store(self, weight: Tensor) -> None:
        """Replace the weight by another of the same shape."""
        codes, scales = quantize_rows(weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        self._packed = self._dense = None

    @property
    def dense(self) -> Tensor:
        """The weight in float32; one tensor for all who hold it at the same time, so that a file has it once."""
        dense = None if self._dense is None else self._dense()
        if dense is None:
            dense = self.codes.float() * self.scales[:, None]
            self._dense = weakref.ref(dense)
        return dense

    @property
    def packed(self) -> Tensor:
        """The codes in oneDNN's own order: a second copy, made on first use."""
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return self._packed

    def nbytes_packed(self) -> int:
        """Size of the second copy: it is no buffer."""
        return 0 if self._packed is None else self.codes.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None, "_dense": None}  # no copy of these; made again on use

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._packed = self._dense = None
        return super()._apply(fn, recurse)


class _Quantized(nn.Module):
    """What :class:`Int8Linear` and :class:`Int8Embedding` share: ``weight`` and ``state_dict()`` are float32."""

    def __init__(self, rows: Int8Rows) -> None:
        super().__init__()
        self.rows = rows

    @property
    def weight(self) -> Tensor:
        """The weight in float32, ``scales * codes``: a new tensor, made on use."""
        return self.rows.dense

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)  # a bias

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key, shape = prefix + "weight", self.rows.codes.shape
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if key not in state_dict:
            missing_keys.extend([key] if strict else [])
        elif state_dict[key].shape != shape:
            given = tuple(state_dict[key].shape)
            error_msgs.append(f"size mismatch for {key}: the state's is {given}, the model's {tuple(shape)}.")
        else:
            self.rows.store(state_dict[key])


class Int8Linear(_Quantized):
    """``nn.Linear`` with an int8 weight, for inference in float32 on a CPU.

    Outputs are those of the quantized weight within 1/64516 of each token's largest input: inputs are split into two
    digits of eight bits, whose products with the codes are sums of integers. ``state_dict()`` gives the quantized
    weight in float32, and ``load_state_dict`` quantizes what it gets; loading what was saved changes nothing.

    Args:
        rows: The weight.
        bias: The bias, if there is one.

    Example:
        >>> layer = nn.Linear(64, 32)
        >>> quantized = Int8Linear(Int8Rows(layer.weight), layer.bias)
        >>> x = torch.randn(3, 64)
        >>> with torch.no_grad():
        ...     torch.allclose(quantized(x), layer(x), atol=0.02)
        True
    """

    bias: Tensor | None

    def __init__(self, rows: Int8Rows, bias: Tensor | None = None) -> None:
        super().__init__(rows)
        self.out_features, self.in_features = rows.codes.shape
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("Int8Linear is for inference and has no gradient. Call the model under torch.no_grad().")
        if x.dtype != torch.float32 or x.device.type != "cpu" or self.rows.scales.dtype != torch.float32:
            raise ValueError(
                f"Int8Linear computes in float32 on a CPU, got {x.dtype} on {x.device} (its scales are "
                f"{self.rows.scales.dtype} on {self.rows.scales.device})."
            )
        out = x.new_empty(*x.shape[:-1], self.out_features)
        product = _packed_product if has_int8_product() and self.in_features <= _LONGEST_ROW else _float_product
        tokens = x.reshape(-1, self.in_features).split(_TOKENS_AT_A_TIME)
        for part, into in zip(tokens, out.view(-1, self.out_features).split(_TOKENS_AT_A_TIME), strict=True):
            if part.numel():
                product(part, self.rows, into)
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        """Shape, as ``nn.Linear`` gives it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Embedding(_Quantized):
    """``nn.Embedding`` that looks rows up in an int8 weight and returns them in float32.

    Args:
        rows: The weight.

    Example:
        >>> Int8Embedding(Int8Rows(torch.tensor([[127.0, 1.0], [2.0, 254.0]])))(torch.tensor([1, 0])).tolist()
        [[2.0, 254.0], [127.0, 1.0]]
    """

    def __init__(self, rows: Int8Rows) -> None:
        super().__init__(rows)
        self.num_embeddings, self.embedding_dim = rows.codes.shape

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the weight."""
        return F.embedding(tokens, self.rows.codes).float() * self.rows.scales[tokens].unsqueeze(-1)

    def extra_repr(self) -> str:
        """Shape, as ``nn.Embedding`` gives it."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def quantize_head(model: nn.Module) -> nn.Module:
    """Replace, in place, the output head of a language model by an :class:`Int8Linear`.

    An embedding tied to the head becomes an :class:`Int8Embedding` of the same weight; one of its own stays float32:
    a token reads one row of it, so it takes no time. The model is put into ``eval()`` mode, without gradients. Beside
    the sparse layers of :func:`sparsify`, in either order, the head is most of the time that is left.

    Args:
        model: Language model of transformers (it has ``get_output_embeddings``), in float32 on a CPU.

    Example:
        >>> import transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0)
        >>> quantize_head(transformers.GPT2LMHeadModel(config)).lm_head
        Int8Linear(
          in_features=32, out_features=64, bias=False
          (rows): Int8Rows()
        )
    """
    head = _head(model)
    model.eval().requires_grad_(False)
    rows = Int8Rows(head.weight)
    for name, module in list(model.named_modules()):
        if module is head:
            model.set_submodule(name, Int8Linear(rows, head.bias).eval())
        elif getattr(module, "weight", None) is head.weight:
            if type(module) is nn.Embedding and module.max_norm is None:
                model.set_submodule(name, Int8Embedding(rows).eval())
            else:
                _log.warning("%s shares the head's weight and keeps it in float32: it is no plain nn.Embedding", name)
    if not has_int8_product():
        warn_user(
            "this build of torch has no exact int8 product for this CPU: the head is smaller now, and slower. If time "
            "matters, keep the float32 head."
        )
    return model


@functools.cache
def has_int8_product() -> bool:
    """Whether oneDNN's int8 product is there and exact: CPUs without int8 instructions may round large sums off."""
    inputs = torch.full((2, 512), 255, dtype=torch.uint8)
    inputs[1] = torch.arange(512) % 256
    codes = torch.full((32, 512), 127, dtype=torch.int8)
    codes[1::2] = -127
    try:
        found = _int8_product(inputs, 0, torch.ops.onednn.qlinear_prepack(codes, None), torch.ones(32))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found.long(), inputs.long() @ codes.long().t())


def _head(model: nn.Module) -> nn.Linear:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if isinstance(head, Int8Linear):
        raise ValueError("the head is in int8 already.")
    if type(head) is not nn.Linear:
        found = "no head" if head is None else f"a head of type {type(head).__name__}"
        raise TypeError(
            f"quantize_head takes a language model of transformers whose head is an nn.Linear, got {found} in "
            f"{type(model).__name__}."
        )
    if head.weight.dtype != torch.float32 or head.weight.device.type != "cpu":
        raise ValueError(
            f"the int8 head is for float32 on a CPU, the model's is {head.weight.dtype} on {head.weight.device}. "
            "Convert the model first: model.float().cpu()."
        )
    return head


def _packed_product(x: Tensor, rows: Int8Rows, out: Tensor) -> None:
    digits, step = _digits(x)
    first, second = _int8_product(digits, _ZERO, rows.packed, rows.scales).chunk(2)
    torch.add(first, second, alpha=1 / _BASE, out=out).mul_(step)


def _digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs as ``step * (first + second / 254)``, digits from -127 to 127: all first digits, then all second ones."""
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    first = torch.round(x / step)
    second = torch.round((x / step - first) * _BASE)
    return torch.cat((first, second)).add_(_ZERO).to(torch.uint8), step


def _int8_product(inputs: Tensor, zero: int, packed: Tensor, scales: Tensor) -> Tensor:
    """``(inputs - zero) @ codes.T * scales`` with sums of integers, in float32."""
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    # Arguments: input, its scale and zero, weight, its scales and zeros, bias, output's scale and zero, dtype, post-op.
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        inputs, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _float_product(x: Tensor, rows: Int8Rows, out: Tensor) -> None:
    """The same without int8 instructions: a few thousand rows of the weight in float32 at a time."""
    for codes, scales, into in zip(
        rows.codes.split(4096), rows.scales.split(4096), out.split(4096, dim=1), strict=True
    ):
        torch.mul(F.linear(x, codes.float()), scales, out=into)
