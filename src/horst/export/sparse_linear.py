"""Linear layers with a sparse weight, for inference: fewer bytes, and faster where measured so."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.export import cpu_kernels, gpu_kernels
from horst.export.cpu_kernels import CsrWeight
from horst.export.gpu_kernels import RowsWeight, is_plan
from horst.export.plan import Plan
from horst.kernels.backends import runs_kernels
from horst.kernels.sparse_matvec import why_not_packed
from horst.sparsity.layers import check_model, expert_stacks, is_conv1d
from horst.user_warnings import warn_user

_log = logging.getLogger(__name__)

# Below this no kernel has come near dense: 70 % of the weights with their indices are 1.4 times the dense bytes.
_HOPELESS_SPARSITY = 0.3


class SparseLinear(nn.Module):
    """``nn.Linear`` or Hugging Face's ``Conv1D`` with a sparse weight, for inference.

    On a CPU, in float32, the weight is in compressed sparse rows. On a GPU, in bfloat16, float16 or float32, it is in
    words of value and column (:mod:`horst.kernels.sparse_matvec`).

    Outputs equal the dense layer's up to rounding. One difference: a zero weight ignores its input, also where that is
    infinite or NaN. ``weight`` and ``state_dict()`` give the dense weight back, made on use: right, but a model that
    reads ``weight`` in every forward pass (T5 does, for its dtype) gains nothing. ``load_state_dict`` takes such a
    dense weight, with zeros wherever they are; the plan stays the one made for the first weight.

    Args:
        layer: The dense layer, on the device it will run on.
        plan: Choice of kernel by number of tokens, see :func:`horst.export.plan_for`; measured if left out. The dense
            weight is kept too where the plan may choose the dense kernel.

    Example:
        >>> layer = nn.Linear(64, 32)
        >>> _ = layer.weight.data[:, 6:].zero_()
        >>> x = torch.randn(3, 64)
        >>> with torch.no_grad():
        ...     torch.allclose(SparseLinear(layer)(x), layer(x), atol=1e-6)
        True
    """

    stored: CsrWeight | RowsWeight
    bias: Tensor | None
    dense: Tensor | None

    def __init__(self, layer: nn.Module, plan: Plan | None = None) -> None:
        super().__init__()
        self._inputs_first = is_conv1d(layer)
        if not self._inputs_first and not isinstance(layer, nn.Linear):
            raise TypeError(f"SparseLinear takes nn.Linear or transformers' Conv1D, got {type(layer).__name__}.")
        weight = out_by_in(layer).detach()
        on_gpu = weight.is_cuda if plan is None else is_plan(plan)
        if (reason := why_not_packed(weight) if on_gpu else _why_not_csr(weight)) is not None:
            raise ValueError(f"{reason}. {'Keep the layer dense' if on_gpu else 'Convert it: model.float().cpu()'}.")
        self.plan = plan if plan is not None else plan_for(weight)
        self.out_features, self.in_features = weight.shape
        bias = getattr(layer, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("dense", None, persistent=False)
        self._store(weight)
        self.train(layer.training)

    def _store(self, weight: Tensor) -> None:
        self.stored = RowsWeight(weight, self.plan) if is_plan(self.plan) else CsrWeight(weight)
        self.dense = weight if "dense" in self.plan.choices() else None

    @property
    def weight(self) -> Tensor:
        """The dense weight in the layout of the layer it came from: a new tensor, made on use."""
        dense = self.stored.to_dense() if self.dense is None else self.dense
        return dense.t().contiguous() if self._inputs_first else dense.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``, by the kernel that the plan has for this number of tokens."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "SparseLinear is for inference and has no gradient. Call the model under torch.no_grad(), or train the "
                "dense model (horst.sparsity.keep_zeros keeps its zeros)."
            )
        stored: Any
        if torch.compiler.is_compiling():
            stored, dense, bias = self.stored, self.dense, self.bias
        else:  # past nn.Module.__getattr__: on a GPU it would be a third of a call's time
            buffers, stored = self._buffers, self._modules["stored"]
            dense = buffers["dense"]
            bias = buffers["bias"] if "bias" in buffers else self.bias  # noqa: SIM401 (set to a parameter)
        if not x.numel():
            stored.check(x)
            return x.new_zeros(*x.shape[:-1], self.out_features)
        if dense is not None and self.plan.kernel(x.numel() // self.in_features) == "dense":
            stored.check(x)
            return F.linear(x, dense, bias)
        return stored.linear(x, bias, self.plan)

    def extra_repr(self) -> str:
        """Shapes, and what is stored."""
        density = self.stored.kept / max(self.in_features * self.out_features, 1)
        kept = ", dense weight kept" if self.dense is not None else ""
        return f"{self.in_features}, {self.out_features}, sparsity={1 - density:.4f}{kept}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)  # the bias

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if key not in state_dict and strict:
            missing_keys.append(key)
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if key not in state_dict:
            return
        weight, shape = state_dict[key].detach(), (self.out_features, self.in_features)
        if weight.shape != (stored := shape[::-1] if self._inputs_first else shape):
            error_msgs.append(f"size mismatch for {key}: the state's is {tuple(weight.shape)}, the model's {stored}.")
            return
        weight = weight.to(self.stored.columns.device, self.stored.dtype, copy=True)
        self._store(weight.t() if self._inputs_first else weight)


def plan_for(weight: Tensor, tokens: Sequence[int] | None = None) -> Plan:
    """Measure, once on this machine for each shape, sparsity in per cent and number of threads, which kernel to use.

    Args:
        weight: Matrix of outputs x inputs, on the device to measure on.
        tokens: Numbers of tokens at which sparse kernels are compared with dense; None takes 1 to 512 on a CPU, and 1
            on a GPU.

    Example:
        >>> sorted(plan_for(torch.eye(64), tokens=(1, 16)).seconds)
        [1, 16]
    """
    per_cent = round(100 * int(weight.count_nonzero()) / max(weight.numel(), 1))
    rows, columns = weight.shape
    if weight.is_cuda:
        tokens = tuple(tokens or gpu_kernels.GPU_TOKENS)
        return gpu_kernels.measure(rows, columns, per_cent, tokens, weight.dtype, weight.device)
    tokens = tuple(tokens or cpu_kernels.TOKENS)
    return cpu_kernels.measure(rows, columns, per_cent, tokens, torch.get_num_threads())


def sparsify(model: nn.Module, *, tokens: Sequence[int] | None = None, keep_dense: bool = False) -> nn.Module:
    """Replace, in place, the linear layers that are faster sparse on this machine by :class:`SparseLinear`.

    Dense and sparse kernels are timed where the weights are, on the CPU or the GPU, once for each shape, sparsity and
    number of threads, so the first call takes a few seconds per shape. A layer is replaced if a sparse kernel is at
    least 10 % faster, at every number of tokens in ``tokens``; its dense weight is then let go. The model is put into
    ``eval()`` mode, without gradients.

    On a GPU the gain is for a few tokens: for generation. A call with many (a prompt) makes the weight dense for its
    duration, which costs a little time and no memory that stays.

    Left dense: weights shared with another module (a head tied to the embedding), subclasses of ``nn.Linear`` (their
    ``forward`` may differ), layers with hooks, layers inside ``nn.TransformerEncoderLayer`` (which reads their weights
    past their ``forward``), the stacked experts of mixture models, on a CPU all that is not float32, and on a GPU what
    has more than 65535 inputs. The log says how many, and why.

    Args:
        model: The pruned model. Zeros are what its weights say; no mask is needed.
        tokens: Numbers of tokens (batch times length) that the model will see per call: ``(1,)`` for generation alone.
            None takes 1 to 512 on a CPU, and 1 on a GPU.
        keep_dense: Whether to replace layers that are faster sparse at only some numbers of ``tokens`` too; they keep
            the dense weight beside the sparse one and use the faster of the two, at the price of more memory than dense
            alone.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> sparsify(model)[0]  # dense: no zeros, and a warning says so
        Linear(in_features=8, out_features=8, bias=True)
    """
    check_model(model)
    if tokens is not None:
        if not isinstance(tokens, Iterable):
            raise TypeError(f"tokens must be a list of counts, got {tokens!r}. For one count write ({tokens!r},).")
        tokens = tuple(tokens)
        if not tokens or not all(isinstance(count, int) and count > 0 for count in tokens):
            raise ValueError(f"tokens must be a list of counts of at least 1, got {tokens}. (1, 512) is one.")
    model.eval().requires_grad_(False)
    replaced, candidates, dense = 0, linear_layers(model), Counter[str]()
    kinds = sorted({f"{layer.weight.dtype} on {layer.weight.device}" for layer in candidates.values()})
    for name, layer in candidates.items():
        sparse = _sparse_form(layer, tokens, keep_dense)
        if isinstance(sparse, str):
            dense[sparse] += 1
            continue
        replaced += 1
        if not name:
            return sparse
        model.set_submodule(name, sparse)
    _log.info("%d of %d linear layers are now sparse", replaced, len(candidates))
    for reason, count in dense.items():
        level = logging.INFO if reason in (_FEW_ZEROS, _DENSE_IS_FASTER) else logging.WARNING
        _log.log(level, "%d linear layers stay dense: %s", count, reason)
    warn_of_experts(model)
    if not replaced:
        kinds_found = f", in {', '.join(kinds)}" if kinds else ""
        warn_user(
            f"sparsify() converted none of {len(candidates)} linear layers{kinds_found}: it needs weights in float32 on"
            " a CPU, or in bfloat16, float16 or float32 on a GPU, with enough zeros (about 80 %) that a sparse kernel "
            "is faster here. Prune further, or keep the dense model."
        )
    return model


def warn_of_experts(model: nn.Module) -> None:
    """Say how many weights are in stacks of experts, which no sparse form takes."""
    if stacks := [stack for module in model.modules() for stack, _ in expert_stacks(module)]:
        _log.warning(
            "%d stacks of experts (%d weights) stay dense: only linear layers have a sparse form",
            *(len(stacks), sum(stack.numel() for stack in stacks)),
        )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that :func:`sparsify` may replace, by name.

    Example:
        >>> list(linear_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        ['0']
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    bypassed = {
        id(layer)
        for encoder in model.modules()
        if isinstance(encoder, nn.TransformerEncoderLayer)
        for layer in encoder.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and is_conv1d(module)))
        and uses[id(module.weight)] == 1
        and id(module) not in bypassed
        and not (module._forward_hooks or module._forward_pre_hooks)
    }


def out_by_in(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as an out x in matrix."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if is_conv1d(layer) else weight


_FEW_ZEROS = "they have too few zeros for any sparse kernel"
_DENSE_IS_FASTER = "no sparse kernel was measured faster at all of the token counts"


def _sparse_form(layer: nn.Module, tokens: tuple[int, ...] | None, keep_dense: bool) -> SparseLinear | str:
    """The layer made sparse, or the reason why it stays dense."""
    weight = out_by_in(layer)
    if weight.numel() == 0:
        return "they have no weights"
    if (reason := _why_not_rows(weight) if weight.is_cuda else _why_not_csr(weight)) is not None:
        return reason
    if 1 - int(weight.count_nonzero()) / weight.numel() < _HOPELESS_SPARSITY:
        return _FEW_ZEROS
    plan = plan_for(weight, tokens)
    if plan.choices() == {"dense"} or ("dense" in plan.choices() and not keep_dense):
        return _DENSE_IS_FASTER
    return SparseLinear(layer, plan)


def _why_not_csr(weight: Tensor) -> str | None:
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return f"on a CPU the sparse form is for float32, the layer is {weight.dtype} on {weight.device}"
    return None


def _why_not_rows(weight: Tensor) -> str | None:
    return (
        why_not_packed(weight) if runs_kernels(weight) else "the kernel for a GPU needs Triton, which is not installed"
    )
