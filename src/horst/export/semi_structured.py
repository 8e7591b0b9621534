"""2:4 weights as torch's semi-structured sparse tensors: half the multiplications on a GPU that has sparse cores.

Two of each four neighbouring weights of a row are kept, with two bits each to say which: in 16 bits, 0.5625 of the
bytes.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn

from horst.export.sparse_linear import out_by_in, warn_of_experts
from horst.sparsity.layers import is_conv1d

_log = logging.getLogger(__name__)


def is_two_four(weight: Tensor) -> bool:
    """Whether each four neighbours along the last dimension hold at most two values that are not zero.

    Example:
        >>> is_two_four(torch.tensor([[1.0, 0.0, 0.0, 2.0]])), is_two_four(torch.tensor([[1.0, 2.0, 3.0, 0.0]]))
        (True, False)
    """
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight != 0).reshape(-1, 4).sum(dim=1) <= 2).all())


@torch.no_grad()
def to_semi_structured(model: nn.Module) -> list[str]:
    """Turn, in place, the 2:4 weights of a model's linear layers into torch's semi-structured form, for inference.

    Layers of Hugging Face's ``Conv1D`` become ``nn.Linear``. Layers that are not 2:4 stay as they are, as do those
    whose shape torch cannot take and the stacked experts of mixture models; the latter two are logged. Whether it is
    faster depends on the shapes and the number of tokens: measure with :func:`horst.export.compare`. torch calls its
    semi-structured tensors a prototype.

    Args:
        model: The model, on a CUDA device, in float16 or bfloat16.

    Returns:
        The names of the layers that were converted.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_conv1d(module)) and is_two_four(out_by_in(module))
    }
    if not layers:
        raise ValueError(
            "no linear layer of the model is 2:4: no two of each four neighbours along the inputs are zero everywhere. "
            "Prune with the pattern 2:4 first."
        )
    unfit = {(str(module.weight.dtype), module.weight.device.type) for module in layers.values()}
    if unfit - {("torch.float16", "cuda"), ("torch.bfloat16", "cuda")}:
        raise ValueError(
            f"semi-structured weights need float16 or bfloat16 on a CUDA device, got {sorted(unfit)}. On a CPU use "
            "sparsify; on a GPU call model.to('cuda', torch.bfloat16) first."
        )
    converted = []
    for name, module in layers.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*prototype stage", category=UserWarning)
                weight = torch.sparse.to_sparse_semi_structured(out_by_in(module).detach().contiguous())
        except RuntimeError as error:  # shapes that are no multiples of the sparse cores' tiles
            _log.warning("%s stays dense: %s", name, error)
            continue
        linear = module if isinstance(module, nn.Linear) else _as_linear(model, name, module)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        converted.append(name)
    warn_of_experts(model)
    return converted


def _as_linear(model: nn.Module, name: str, conv1d: nn.Module) -> nn.Linear:
    """Put an ``nn.Linear`` without a weight yet in the place of a ``Conv1D``."""
    outputs, inputs = out_by_in(conv1d).shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.register_parameter("bias", conv1d.get_parameter("bias"))
    linear.train(conv1d.training)
    model.set_submodule(name, linear)
    return linear
