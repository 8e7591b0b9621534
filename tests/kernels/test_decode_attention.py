"""Attention of one new token to a cache: the kernel beside float64, whatever lies in unused places."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horst.kernels import backends
from horst.kernels import decode_attention as package
from horst.kernels.decode_attention import decode_attention, decode_attention_reference, runs_right
from horst.kernels.decode_attention.triton import decode_attention_triton, part_sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def exact(query, key, value, mask, scale):
    """softmax(scale q K^T) V in float64, one text and head after the other, over the used places alone."""
    batch, heads, _, size = query.shape
    group = heads // key.shape[1]
    mask = mask.expand(batch, 1, 1, key.shape[2])
    out = torch.empty(batch, heads, 1, size, dtype=torch.float64, device=query.device)
    for text in range(batch):
        used = mask[text, 0, 0]
        for head in range(heads):
            q = query[text, head].double()
            K, V = (cache[text, head // group][used].double() for cache in (key, value))
            out[text, head] = torch.softmax(scale * q @ K.T, dim=-1) @ V
    return out


def plain(query, key, value, mask, scale):
    """The same by plain operations of torch, in the dtype of the query; unused places hold zeros."""
    group = query.shape[1] // key.shape[1]
    K, V = (cache.masked_fill(~mask.transpose(2, 3), 0).repeat_interleave(group, 1) for cache in (key, value))
    scores = (scale * query @ K.transpose(2, 3)).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ V


def assert_as_good_as_plain(found, *inputs):
    """Not more than twice the error of plain torch, and one rounding of the largest sum before its terms cancel."""
    right = exact(*inputs)
    query, key, value, mask, scale = inputs
    rounding = torch.finfo(found.dtype).eps * exact(query, key, value.abs(), mask, scale).max()
    allowed = 2 * (plain(*inputs).double() - right).abs().max() + rounding
    assert found.shape == right.shape
    assert found.dtype == inputs[0].dtype
    assert float((found.double() - right).abs().max()) <= float(allowed)


def a_cache(shape, layout, dtype):
    """Random keys or values with the strides that caches have."""
    batch, kv_heads, length, size = shape
    if layout == "transposed":  # places before heads
        return torch.randn(batch, length, kv_heads, size, device=DEVICE).to(dtype).transpose(1, 2)
    if layout == "sliced":
        return torch.randn(batch, kv_heads + 1, length + 3, size + 5, device=DEVICE).to(dtype)[:, 1:, 2:-1, 4:-1]
    return torch.randn(shape, device=DEVICE).to(dtype)


def inputs_of(batch, heads, kv_heads, size, length, used, *, dtype=torch.float32, layout="dense"):
    """Inputs whose unused places hold NaN; ``used`` is a number of places, or the share of them with holes between."""
    query = torch.randn(batch, heads, 1, size, device=DEVICE).to(dtype)
    key, value = (a_cache((batch, kv_heads, length, size), layout, dtype) for _ in range(2))
    if isinstance(used, int):
        mask = (torch.arange(length, device=DEVICE) < used).view(1, 1, 1, length)
    else:
        mask = torch.rand(batch, 1, 1, length, device=DEVICE) < used
        mask[torch.arange(batch), 0, 0, torch.randint(length, (batch,))] = True
    for cache in (key, value):
        cache.masked_fill_(~mask.transpose(2, 3), torch.nan)
    return query, key, value, mask, size**-0.5


@settings(max_examples=50)
@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (17, 1)]),
    size=st.sampled_from([1, 8, 16, 48, 64, 80]),
    length=st.integers(1, 150),
    used=st.one_of(st.integers(1, 150), st.sampled_from([0.0, 0.02, 0.5, 1.0])),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["dense", "transposed", "sliced"]),
    seed=st.integers(0, 1000),
)
def test_the_kernel_agrees_with_float64(batch, heads, size, length, used, dtype, layout, seed):
    torch.manual_seed(seed)
    used = min(used, length) if isinstance(used, int) else used
    inputs = inputs_of(batch, *heads, size, length, used, dtype=dtype, layout=layout)
    assert_as_good_as_plain(decode_attention_triton(*inputs), *inputs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_reference_agrees_with_float64(dtype):
    for used in (70, 0.3):
        inputs = inputs_of(2, 6, 2, 24, 100, used, dtype=dtype)
        assert_as_good_as_plain(decode_attention_reference(*inputs), *inputs)
    assert_as_good_as_plain(decode_attention(*inputs), *inputs)  # float64 has no kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [512, 500])
def test_many_parts_with_several_blocks_each(dtype, length, monkeypatch):
    monkeypatch.setattr("horst.kernels.decode_attention.triton._PROGRAMS", 4)
    assert part_sizes(1, length, 64)[0] == 128
    for used in (1, 129, 350, 0.001, 0.3):
        inputs = inputs_of(1, 3, 1, 64, length, used, dtype=dtype)
        assert_as_good_as_plain(decode_attention_triton(*inputs), *inputs)


def test_by_hand():
    """Two used places: weights 3/4 and 1/4, since exp(log 3) = 3."""
    key = torch.tensor([[0.0], [torch.nan], [1.0]], device=DEVICE).view(1, 1, 3, 1)
    value = torch.tensor([[8.0], [torch.nan], [4.0]], device=DEVICE).view(1, 1, 3, 1)
    mask = torch.tensor([True, False, True], device=DEVICE).view(1, 1, 1, 3)
    query = torch.full((1, 1, 1, 1), 2.0, device=DEVICE)
    scale = 0.5 * torch.log(torch.tensor(3.0)).item()
    torch.testing.assert_close(decode_attention(query, key, value, mask, scale).item(), 8 / 4 + 4 * 3 / 4)


def test_large_scores_do_not_overflow():
    query, key, value, mask, scale = inputs_of(1, 4, 2, 16, 200, 150)
    inputs = (300 * query, 300 * key, value, mask, scale)
    assert_as_good_as_plain(decode_attention_triton(*inputs), *inputs)


def test_the_same_sums_in_the_same_order():
    inputs = inputs_of(2, 4, 2, 32, 500, 0.5, dtype=torch.bfloat16)
    assert torch.equal(decode_attention_triton(*inputs), decode_attention_triton(*inputs))


def test_memory_that_was_there_before_does_not_matter(monkeypatch):
    """torch.empty gives NaN: a part without a used place is not written, and must not be read."""
    inputs = inputs_of(1, 4, 2, 32, 400, 5)
    expected = decode_attention_triton(*inputs)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    assert torch.equal(decode_attention_triton(*inputs), expected)


def test_the_operator_is_what_the_compiler_is_told():
    inputs = inputs_of(2, 4, 2, 16, 40, 20)
    assert torch.equal(decode_attention(*inputs), decode_attention_triton(*inputs))
    torch.library.opcheck(torch.ops.horst.decode_attention, inputs, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(decode_attention, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*inputs), decode_attention(*inputs))


def test_without_a_kernel_the_reference_runs(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    inputs = inputs_of(1, 4, 2, 16, 40, 20)
    assert torch.equal(decode_attention(*inputs), decode_attention_reference(*inputs))


def test_parts_fill_the_device():
    for pairs in (1, 8, 32, 200):
        for length in (1, 100, 1024, 4096, 131072):
            places, block = part_sizes(pairs, length, 128)
            programs = pairs * -(-length // places)
            assert places % block == 0
            assert (block < places < 4096 and 132 <= programs <= 264) or places in (block, 4096)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.ones(1, 4, 2, 8)}, r"texts x heads x 1 x size, got shape \(1, 4, 2, 8\)\. For other"),
        ({"value": torch.ones(1, 2, 5, 4)}, r"key and value must both be 1 texts .* size 8.*\(1, 2, 5, 4\)"),
        ({"key": torch.ones(1, 2, 0, 8), "value": torch.ones(1, 2, 0, 8)}, "at least one place"),
        ({"query": torch.ones(1, 3, 1, 8)}, "a multiple of key heads, got 3 and 2"),
        ({"mask": torch.ones(1, 1, 1, 5)}, "mask must be bool with 4 dimensions, got torch.float32 with 4"),
        ({"mask": torch.ones(1, 1, 1, 6) > 0}, r"mask must be of shape \(1 or 1, 1, 1, 5\), got \(1, 1, 1, 6\)"),
        ({"query": torch.ones(1, 4, 1, 8).half()}, "of one float dtype, got torch.float16, torch.float32"),
        ({"mask": torch.ones(1, 1, 1, 5, device="meta") > 0}, "on one device, got cpu, cpu, cpu and meta"),
    ],
)
def test_wrong_inputs_are_refused(change, words):
    inputs = {"query": torch.ones(1, 4, 1, 8), "key": torch.ones(1, 2, 5, 8), "value": torch.ones(1, 2, 5, 8)}
    inputs["mask"] = torch.ones(1, 1, 1, 5) > 0
    with pytest.raises(ValueError, match=words):
        decode_attention(**{**inputs, **change}, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "size"), [(1, 64), (4, 80), (20, 256)])
def test_a_kernel_that_runs_is_found_right(group, size, dtype):
    assert runs_right(group, size, dtype, torch.device(DEVICE))


def raising(error):
    def fails(*inputs):
        raise error

    return fails


def test_a_kernel_that_fails_or_is_wrong_is_left_out_with_a_reason(monkeypatch, caplog):
    kernels = [raising(ValueError("out of resource: shared memory\nmore words")), raising(AssertionError())]
    kernels += [lambda *inputs: 1.1 * decode_attention(*inputs), lambda query, *rest: query * torch.nan]
    for kernel in kernels:
        monkeypatch.setattr(package, "decode_attention", kernel)
        with caplog.at_level(logging.WARNING, logger="horst.kernels.trial"):
            assert not runs_right.__wrapped__(2, 64, torch.float32, torch.device(DEVICE))
    assert "left out: out of resource: shared memory" in caplog.text
    assert "left out: AssertionError" in caplog.text
    assert "differ from the formula's by 1.0e-01" in caplog.text
    assert len(caplog.messages) == 4


def test_a_full_device_says_nothing_of_the_kernel(monkeypatch):
    inputs = (3, 16, torch.float32, torch.device(DEVICE))
    with monkeypatch.context() as full:
        full.setattr(package, "decode_attention", raising(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            runs_right(*inputs)
    assert runs_right(*inputs), "the failure was remembered"


def test_the_kernel_is_tried_with_heads_of_the_size_asked_for(monkeypatch):
    sizes = []

    def kernel(query, *rest):
        sizes.append(query.shape[-1])
        return decode_attention(query, *rest)

    monkeypatch.setattr(package, "decode_attention", kernel)
    assert all(runs_right.__wrapped__(1, size, torch.float32, torch.device(DEVICE)) for size in (24, 256))
    assert sizes == [24, 256]
