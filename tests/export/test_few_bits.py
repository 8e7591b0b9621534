"""Zeros and few bits in one file: exact to the stored precision, as small as promised, zeros stay zeros."""

import logging
import math

import pytest
import safetensors
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from horst.export import load_sparse, positions, read_layout, read_parts, save_sparse
from horst.export.positions import (
    choose_remainder_bits,
    decode_gaps,
    encode_gaps,
    gaps_between,
    pack_numbers,
    positions_of,
    unpack_numbers,
)
from horst.parameters.quantization import Grid
from horst.pruning import prune
from horst.sparsity import magnitude_mask

VALUES = ["float32", "bfloat16", "int8", "int4", "int3", "int2"]


def pruned(shape, sparsity, dtype=torch.float32, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return weight.masked_fill_(~magnitude_mask(weight, sparsity), 0).to(dtype)


def tiny_gpt2(width=64):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_positions=16, n_embd=width, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    prune(model, 0.7)
    return model


# Positions and packed numbers


@given(kept=st.lists(st.booleans(), max_size=200), k=st.integers(1, 3))
def test_gaps_lead_back_to_the_mask(kept, k):
    mask = torch.tensor(kept, dtype=torch.bool)
    gaps = gaps_between(mask)
    unary, remainders = encode_gaps(gaps, k)
    assert len(unary) == -(-(sum(g >> k for g in gaps.tolist()) + len(gaps)) // 8)
    found = decode_gaps(unary, remainders, k, len(gaps))
    assert torch.equal(found, gaps)
    assert positions_of(found).tolist() == [*mask.nonzero().squeeze(1).tolist(), len(kept)]
    assert choose_remainder_bits(gaps)[1] <= len(unary) + len(remainders)


@given(numbers=st.lists(st.integers(-128, 127), max_size=60), bits=st.sampled_from([1, 2, 3, 4, 8]))
def test_packed_numbers_come_back(numbers, bits):
    wrapped = [((n + 2 ** (bits - 1)) % 2**bits) - 2 ** (bits - 1) for n in numbers]
    given_numbers = torch.tensor(wrapped, dtype=torch.int8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "_PIECE", 16)
        packed = pack_numbers(given_numbers, bits)
        assert len(packed) == -(-len(numbers) * bits // 8)
        assert unpack_numbers(packed, bits, len(numbers), signed=True).tolist() == wrapped
        assert unpack_numbers(packed, bits, len(numbers)).tolist() == [n % 2**bits for n in wrapped]


@pytest.mark.parametrize(
    ("sparsity", "code", "bits"),
    [(0.5, "bitmask", 1.0), (0.7, "gaps, 1 bits", 0.888), (0.8, "gaps, 2 bits", 0.739), (0.9, "gaps, 3 bits", 0.476)],
)
def test_positions_take_the_shorter_code(tmp_path, caplog, sparsity, code, bits):
    with caplog.at_level(logging.INFO):
        path = save_sparse({"w": pruned((500, 512), sparsity)}, tmp_path / "w", values="int8")
    (row,) = read_layout(path)
    assert row["positions"] == code
    assert f"w: positions {code}, values int8, groups of 128" in caplog.text
    assert row["bits per weight"] == pytest.approx(8 * (1 - row["zeros"]) + bits + 16 / 128, abs=0.005)


# The round trip


@st.composite
def states(draw):
    """A few finite matrices of any floating dtype, with zeros, -0.0 among them, and things that are no matrices."""
    state = {"norm": torch.randn(7), "count": torch.tensor(3), "mask": torch.ones(3, 5, dtype=torch.bool)}
    for i in range(draw(st.integers(0, 2))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
        shape = [*draw(st.tuples(st.integers(2, 6), st.integers(2, 6))), *draw(st.lists(st.integers(1, 3), max_size=2))]
        numbers = st.one_of(st.just(0.0), st.just(-0.0), st.floats(-1, 1, width=16), st.floats(-60000, 60000, width=16))
        count = math.prod(shape)
        flat = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float64)
        state[f"w{i}"] = flat.to(dtype).view(shape)
    return state


@settings(max_examples=100)
@given(state=states(), values=st.sampled_from(VALUES), group_size=st.integers(1, 9))
def test_what_was_saved_once_is_saved_again_bit_for_bit(tmp_path_factory, state, values, group_size):
    folder = tmp_path_factory.mktemp("few_bits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("horst.export.stored_tensor.ENTRY_BYTES", -1000)  # small tensors are split, too
        patch.setattr(positions, "_PIECE", 16)
        first = save_sparse(state, folder / "first", values=values, group_size=group_size)
        loaded = load_sparse(first)
        second = save_sparse(loaded, folder / "second", values=values, group_size=group_size)
    assert first.read_bytes() == second.read_bytes()
    for name, tensor in state.items():
        found = loaded[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert (found[tensor == 0] == 0).all()
        if not name.startswith("w"):
            assert torch.equal(found, tensor)
        elif values == "float32" and tensor.dtype != torch.float64:
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), "to the bit"
        elif values == "bfloat16":
            assert torch.equal(found, tensor if tensor.itemsize == 2 else tensor.bfloat16().to(tensor.dtype))
        elif values.startswith("int"):
            assert torch.equal(found, Grid(int(values[3]), group_size).round(tensor.flatten(1)).view(tensor.shape))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_tied_and_transposed_weights_comes_back(tmp_path, values, dtype):
    model = tiny_gpt2().to(dtype)
    path = save_sparse(model, tmp_path / "first", values=values, head_values="int8", group_size=32)
    other = load_sparse(path, tiny_gpt2().to(dtype))
    assert other.lm_head.weight is other.transformer.wte.weight
    again = save_sparse(other, tmp_path / "second", values=values, head_values="int8", group_size=32)
    assert path.read_bytes() == again.read_bytes()
    before, after = model.state_dict(), other.state_dict()
    for name, tensor in after.items():
        assert (tensor[before[name] == 0] == 0).all()
        if tensor.dim() == 1:
            assert torch.equal(tensor, before[name])
    if values.startswith("int"):  # Conv1D: groups run along its inputs, dimension 0
        grid, name = Grid(int(values[3]), 32), "transformer.h.1.mlp.c_fc.weight"
        assert torch.equal(after[name].t(), grid.round(before[name].t().contiguous()))
    with safetensors.safe_open(path, framework="pt") as file:
        assert "transformer.wte.weight::scales" in file.keys()  # noqa: SIM118
        assert not [key for key in file.keys() if key.startswith("lm_head")]  # noqa: SIM118


@pytest.mark.parametrize("values", ["int8", "int4", "int2"])
def test_what_sparsegpt_rounded_is_stored_without_further_loss(tmp_path, values):
    model = tiny_gpt2()
    batches = [torch.randint(101, (4, 16)) for _ in range(4)]
    prune(model, 0.5, method="sparsegpt", data=batches, values=values, group_size=32)
    loaded = load_sparse(save_sparse(model, tmp_path / "m", values=values, group_size=32))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_experts_are_grouped_along_their_inputs(tmp_path):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 20, 16))  # experts x out x in
            self.down_proj = nn.Parameter(torch.randn(3, 16, 10))

    model = Mixture()
    loaded = load_sparse(save_sparse(model, tmp_path / "m", values="int4", group_size=8))
    for name, p in model.named_parameters():
        assert torch.equal(loaded[name], Grid(4, 8).round(p.detach()))
    model.is_transposed = True  # now experts x in x out
    model.gate_up_proj.data, model.down_proj.data = torch.randn(3, 16, 20), torch.randn(3, 10, 16)
    loaded = load_sparse(save_sparse(model, tmp_path / "t", values="int4", group_size=8))
    for name, p in model.named_parameters():
        assert torch.equal(loaded[name].mT, Grid(4, 8).round(p.detach().mT.contiguous()))


# Sizes


def test_seventy_percent_and_int8_take_less_than_the_bar(tmp_path):
    """0.3 * 8 bits of values, 0.888 of positions, 0.125 of scales: 0.1067 of float32."""
    state = {"w": pruned((512, 768), 0.7)}
    size = save_sparse(state, tmp_path / "w", values="int8").stat().st_size
    assert size <= 0.108 * state["w"].nbytes


@pytest.mark.parametrize(("values", "bits"), [("int8", 8), ("int4", 4), ("int3", 3), ("int2", 2), ("bfloat16", 16)])
def test_a_dense_model_is_stored_in_its_bits_and_scales(tmp_path, values, bits):
    weight = torch.randn(512, 768)
    path = save_sparse({"w": weight}, tmp_path / "w", values=values)
    (row,) = read_layout(path)
    assert row["positions"] == "all"
    assert row["bits per weight"] == bits + (16 / 128 if values.startswith("int") else 0)


def test_head_and_body_are_apart_and_norms_are_kept(tmp_path):
    model = tiny_gpt2()
    rows = {
        row["tensor"]: row for row in read_layout(save_sparse(model, tmp_path / "m", values="int4", head_values="int8"))
    }
    assert rows["transformer.wte.weight"]["values"] == "int8, groups of 128"
    assert rows["transformer.wpe.weight"]["values"] == "int8, groups of 128"
    assert rows["transformer.h.0.attn.c_attn.weight"]["values"] == "int4, groups of 128"
    assert rows["transformer.ln_f.weight"]["values"] == "float32"
    assert rows["transformer.h.0.attn.c_attn.bias"]["values"] == "float32"
    rows = {row["tensor"]: row for row in read_layout(save_sparse(model, tmp_path / "n", values="int4"))}
    assert rows["transformer.wte.weight"]["values"] == "float32"


def test_without_values_the_file_is_the_first_version(tmp_path):
    """So that what read it before still reads it."""
    for values, version in ((None, "1"), ("float32", "2"), ("int8", "2")):
        save_sparse({"w": pruned((64, 64), 0.9)}, tmp_path / "w", values=values)
        with safetensors.safe_open(tmp_path / "w", framework="pt") as file:
            assert file.metadata()["format_version"] == version


# Parts, for layers that are built without the dense tensor


@pytest.mark.parametrize("values", [None, *VALUES])
def test_parts_make_up_the_tensor(tmp_path, values):
    model = tiny_gpt2()
    path = save_sparse(model, tmp_path / "m", values=values, head_values="int4", group_size=32)
    loaded, parts = load_sparse(path), read_parts(path)
    assert list(parts) == list(loaded)
    assert parts["lm_head.weight"] is parts["transformer.wte.weight"]
    for name, tensor in loaded.items():
        assert torch.equal(parts[name].dense(), tensor)
    layer = parts["transformer.h.0.mlp.c_fc.weight"]
    assert layer.kept.sum() == len(layer.values) > 0
    if layer.scales is None:
        with pytest.raises(ValueError, match="has no codes"):
            layer.grouped()
        return
    codes, scales = layer.grouped()  # out x in, though Conv1D stores in x out
    assert (codes.shape, scales.shape) == ((256, 64), (256, 2))
    W = codes.float() * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(W.t(), loaded["transformer.h.0.mlp.c_fc.weight"])


# Refusals


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: nn.Linear(4, 4), {"values": "int5"}, "values must be one of float32, bfloat16, int8"),
        (lambda: nn.Linear(4, 4), {"head_values": 8}, "head_values must be one of .*, got 8"),
        (lambda: nn.Linear(4, 4), {"values": "int4", "group_size": 0}, "group_size must be at least 1"),
        (lambda: {"w": torch.ones(4, 4)}, {"head_values": "int8"}, "head_values needs the module"),
        (lambda: {"w": torch.full((4, 4), math.nan)}, {"values": "int8"}, "w: weights with NaN or infinity"),
        (
            lambda: {"w": torch.ones(40, 40), "w::scales": torch.ones(2)},
            {"values": "int8"},
            "'w' would be stored as 'w::scales', the name of another tensor",
        ),
    ],
)
def test_what_cannot_be_stored_in_few_bits_is_refused(tmp_path, model, options, message):
    with pytest.raises(ValueError, match=message):
        save_sparse(model(), tmp_path / "new" / "w", **options)
    assert not any(tmp_path.iterdir())


def test_layers_in_their_sparse_form_are_refused(tmp_path):
    from horst.export import SparseLinear

    layer = nn.Linear(64, 64)
    prune(nn.Sequential(layer), 0.9, layers="all_linear")
    model = nn.Sequential(SparseLinear(layer))
    with pytest.raises(ValueError, match="Store the dense model in fewer bits"):
        save_sparse(model, tmp_path / "m", values="int8")
