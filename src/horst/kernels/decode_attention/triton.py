"""Attention of one new token as two Triton launches: parts of the cache side by side, then their sum.

A program has one part of the places of one key head, for up to 16 queries that share the head: for them each key and
value is read once. It reads its part of the mask first, and of the cache only used places, so that a long cache costs
what is used of it. Each part has a softmax of its own; the second kernel weights the parts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from horst.kernels.triton_primitives import cast_nearest

_PROGRAMS = 264  # at most twice the multiprocessors of an H200, where the part is not at its limits
_BLOCK_BYTES = 8192  # of keys, and as many of values: three of each in flight fit into shared memory
_MOST_PLACES = 4096  # of a part, whose mask is held in registers
_PARTS_AT_ONCE = 16
_QUERIES = 16  # the least that tensor cores take; more of them would need more registers than there are


@triton.jit
def _dot(a, b, INTERPRETED: tl.constexpr):
    """A product of matrices with sums in float32. Triton's interpreter takes the bits of a bfloat16 for an integer."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _parts_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, largest_ptr, total_ptr,
    query_text, query_head, key_text, key_head, key_place, value_text, value_head, value_place, mask_text, mask_place,
    length, kv_heads, group, parts, scale,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, QUERIES: tl.constexpr,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Softmax and sum over one part of the places, for queries of one key head. ``scale`` is for powers of two."""
    # int64: offsets into a large cache overflow int32
    text = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    part = tl.program_id(1)

    begin = part * PLACES
    all_places = begin + tl.arange(0, PLACES)
    mask_ptr += text * mask_text
    all_used = tl.load(mask_ptr + all_places.to(tl.int64) * mask_place, mask=all_places < length, other=0) != 0
    first = tl.min(tl.where(all_used, all_places, begin + PLACES), 0)
    end = tl.max(tl.where(all_used, all_places + 1, begin), 0)

    feature = tl.arange(0, SIZE_PADDED)
    member = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    exists = member < group
    within = feature < SIZE
    query_row = head * group + member
    query_place = text * query_text + query_row[:, None] * query_head + feature[None, :]
    query = tl.load(query_ptr + query_place, mask=exists[:, None] & within[None, :], other=0.0)
    key_ptr += text * key_text + head * key_head
    value_ptr += text * value_text + head * value_head

    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, SIZE_PADDED), tl.float32)
    for start in range(begin + (first - begin) // BLOCK * BLOCK, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        used = tl.load(mask_ptr + place.to(tl.int64) * mask_place, mask=place < end, other=0) != 0
        read = used[:, None] & within[None, :]
        key = tl.load(key_ptr + place.to(tl.int64)[:, None] * key_place + feature[None, :], mask=read, other=0.0)
        value = tl.load(value_ptr + place.to(tl.int64)[:, None] * value_place + feature[None, :], mask=read, other=0.0)
        scores = scale * _dot(query, tl.trans(key), INTERPRETED)
        scores = tl.where(used[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no used place so far
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        out = out * kept[:, None] + _dot(cast_nearest(weights, value.dtype), value, INTERPRETED)
        largest = new_largest

    row = (text * kv_heads * group + query_row) * parts + part
    tl.store(largest_ptr + row, largest, mask=exists)
    tl.store(total_ptr + row, total, mask=exists)
    if end > begin:  # of a part without a used place nothing more is read
        tl.store(out_ptr + row[:, None] * SIZE + feature[None, :], out, mask=exists[:, None] & within[None, :])


@triton.jit
def _merge_kernel(
    parts_ptr, largest_ptr, total_ptr, out_ptr, parts,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, PARTS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The parts of one query, each weighted by its share of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    all_parts = tl.arange(0, PARTS_PADDED)
    all_largest = tl.load(largest_ptr + row * parts + all_parts, mask=all_parts < parts, other=float("-inf"))
    all_totals = tl.load(total_ptr + row * parts + all_parts, mask=all_parts < parts, other=0.0)
    highest = tl.max(all_largest, 0)
    total = tl.sum(all_totals * tl.exp2(all_largest - highest), 0)

    feature = tl.arange(0, SIZE_PADDED)
    within = feature < SIZE
    out = tl.zeros((SIZE_PADDED,), tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        largest = tl.load(largest_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        read = (largest > float("-inf"))[:, None] & within[None, :]
        sums = tl.load(parts_ptr + (row * parts + part)[:, None] * SIZE + feature[None, :], mask=read, other=0.0)
        out += tl.sum(sums * tl.exp2(largest - highest)[:, None], 0)
    tl.store(out_ptr + row * SIZE + feature, cast_nearest(out / total, out_ptr.dtype.element_ty), mask=within)


def part_sizes(pairs: int, length: int, row_bytes: int) -> tuple[int, int]:
    """Places of a part, and of a block within it: powers of two that keep an H200 busy.

    Args:
        pairs: Texts times key heads, times the rounds of 16 queries that share a head.
        length: Places of the cache.
        row_bytes: Bytes of one key.

    Example:
        >>> part_sizes(pairs=8, length=1024, row_bytes=128)  # 16 parts of 8 heads: 128 programs
        (64, 64)
        >>> part_sizes(pairs=8, length=32768, row_bytes=128)  # 32 parts of 8 heads
        (1024, 64)
    """
    block = min(max(triton.next_power_of_2(_BLOCK_BYTES // row_bytes + 1) // 2, 16), 64)
    wanted = triton.next_power_of_2(triton.cdiv(length * pairs, _PROGRAMS))
    return min(max(wanted, block), _MOST_PLACES), block


def decode_attention_triton(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one query per head; see :func:`horst.kernels.decode_attention.decode_attention`."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, _, size = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    rounds = triton.cdiv(group, _QUERIES)
    places, block = part_sizes(batch * kv_heads * rounds, length, size * key.element_size())
    parts = triton.cdiv(length, places)
    mask = mask.expand(batch, 1, 1, length)
    sums = torch.empty(batch * heads, parts, size, dtype=torch.float32, device=query.device)
    largest = torch.empty(batch * heads, parts, dtype=torch.float32, device=query.device)
    total = torch.empty_like(largest)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    padded = max(triton.next_power_of_2(size), 16)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _parts_kernel[(batch * kv_heads, parts, rounds)](
            query, key, value, mask, sums, largest, total,
            query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
            length, kv_heads, group, parts, scale * math.log2(math.e),
            SIZE=size, SIZE_PADDED=padded, QUERIES=_QUERIES, PLACES=places, BLOCK=block, INTERPRETED=query.is_cpu,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        _merge_kernel[(batch * heads,)](
            sums, largest, total, out, parts,
            SIZE=size, SIZE_PADDED=padded, PARTS_PADDED=triton.next_power_of_2(parts), AT_ONCE=_PARTS_AT_ONCE,
            num_warps=1 if padded <= 64 else 4,
        )  # fmt: skip
    return out
