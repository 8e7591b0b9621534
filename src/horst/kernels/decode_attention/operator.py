"""The attention as one operator of torch: the compiler sees its shape and not what is inside."""

from __future__ import annotations

import torch
from torch import Tensor

from horst.kernels.backends import runs_kernels
from horst.kernels.decode_attention.reference import decode_attention_reference

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_library = torch.library.Library("horst", "FRAGMENT")
_library.define(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    if not runs_kernels(query) or query.dtype not in KERNEL_DTYPES or not query.numel():
        return decode_attention_reference(query, key, value, mask, scale)
    from horst.kernels.decode_attention.triton import decode_attention_triton

    return decode_attention_triton(query, key, value, mask, scale)


for _device in ("CPU", "CUDA"):
    _library.impl("decode_attention", _decode_attention, _device)


@torch.library.register_fake("horst::decode_attention", lib=_library)
def _decode_attention_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape)
