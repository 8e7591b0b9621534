"""Attention of one new token on a CUDA device: sizes of real models, captured graphs, a cache beyond 32-bit offsets."""

import pytest
import torch
import torch.nn.functional as F

from horst.kernels.decode_attention import decode_attention

pytestmark = pytest.mark.gpu


def inputs_of(batch, heads, kv_heads, size, length, used, dtype):
    """Inputs with NaN in the unused places."""
    query = torch.randn(batch, heads, 1, size, device="cuda").to(dtype)
    key, value = (torch.randn(batch, kv_heads, length, size, device="cuda").to(dtype) for _ in range(2))
    key[:, :, used:], value[:, :, used:] = torch.nan, torch.nan
    mask = (torch.arange(length, device="cuda") < used).view(1, 1, 1, length)
    return query, key, value, mask, size**-0.5


def by_torch(query, key, value, mask, scale, dtype):
    """Plain operations in a dtype, over the used places."""
    used, group = int(mask.sum()), query.shape[1] // key.shape[1]
    key, value = (x[:, :, :used].to(dtype).repeat_interleave(group, 1) for x in (key, value))
    return torch.softmax(scale * query.to(dtype) @ key.transpose(2, 3), dim=-1) @ value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (8, 1), (71, 1)], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 1024), (3, 5000)])
def test_sizes_of_models_agree_with_float64(batch, length, heads, size, dtype):
    for used in (1, 100, length):
        inputs = inputs_of(batch, *heads, size, length, used, dtype)
        found, exact = decode_attention(*inputs), by_torch(*inputs, torch.float64)
        plain_error = (by_torch(*inputs, dtype).double() - exact).abs().max()
        allowed = 2 * plain_error + torch.finfo(dtype).eps * exact.abs().max()
        assert float((found.double() - exact).abs().max()) <= float(allowed)
        assert torch.equal(found, decode_attention(*inputs)), "the same sums in the same order"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_call_follows_the_mask(compiled):
    query, key, value, mask, scale = inputs_of(2, 32, 8, 64, 2048, 2048, torch.bfloat16)
    call = torch.compile(decode_attention, fullgraph=True, dynamic=False) if compiled else decode_attention
    call(query, key, value, mask, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(query, key, value, mask, scale)
    for used in (1, 63, 64, 65, 1000, 2048):
        mask.copy_((torch.arange(2048, device="cuda") < used).view_as(mask))
        graph.replay()
        assert torch.equal(out, decode_attention(query, key, value, mask, scale))
        right = F.scaled_dot_product_attention(
            query.float(), *(x[:, :, :used].float().repeat_interleave(4, 1) for x in (key, value)), scale=scale
        )
        torch.testing.assert_close(out.float(), right, rtol=2e-2, atol=2e-2)
    torch.compiler.reset()


def test_a_cache_beyond_32_bit_offsets():
    length = 2**22 + 100
    cache = torch.zeros(1, 8, length, 64, dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    cache[:, :, -3:] = torch.randn(1, 8, 3, 64, device="cuda").bfloat16()
    mask = torch.zeros(1, 1, 1, length, dtype=torch.bool, device="cuda")
    mask[..., -3:] = True
    query = torch.randn(1, 32, 1, 64, device="cuda").bfloat16()
    small = decode_attention(query, *2 * [cache[:, :, -3:].contiguous()], mask[..., -3:], 0.125)
    torch.testing.assert_close(decode_attention(query, cache, cache, mask, 0.125), small)
