"""Sparse safetensors: exact, as small as promised, valid for the safetensors library, and never twice in memory."""

import json
import logging
import math
import subprocess
import sys

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from horst.export import bitmask, load_sparse, read_metadata, save_sparse
from horst.export.safetensors_header import _DTYPES
from horst.sparsity import magnitude_mask


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: torch.equal takes -0.0 for 0.0 and NaN for unequal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def pruned(shape, sparsity, dtype=torch.float32):
    weight = torch.randn(shape, dtype=dtype)
    return weight.masked_fill_(~magnitude_mask(weight, sparsity), 0)


@st.composite
def tensors(draw):
    """Any dtype and shape, random bits (so NaN, infinities, subnormals, -0.0), a random share of them zero."""
    dtype = draw(st.sampled_from(list(_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    n, itemsize = math.prod(shape), dtype.itemsize
    if dtype == torch.bool:
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    else:
        raw = draw(st.binary(min_size=n * itemsize, max_size=n * itemsize))
        flat = torch.frombuffer(bytearray(raw) or bytearray(8), dtype=dtype)[:n].clone()
    keep = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    flat.view(bits).masked_fill_(~keep, 0)
    return flat.reshape(shape)


@given(state=st.dictionaries(st.text(max_size=12).filter(lambda name: name != "__metadata__"), tensors(), max_size=4))
def test_the_round_trip_keeps_every_bit(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("round_trip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitmask, "PIECE", 16)  # many pieces, the last one not whole
        patch.setattr("horst.export.sparse_safetensors.ENTRY_BYTES", 0)  # small tensors are split, too
        path = save_sparse(state, folder / "state")
        loaded = load_sparse(path)
    assert list(loaded) == list(state)
    assert all(same_bits(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_minus_zero_nan_and_infinity_are_values(tmp_path, dtype):
    weight = torch.zeros(40, 40, dtype=dtype)
    weight[0, :4] = torch.tensor([-0.0, torch.nan, -torch.inf, 1.0])
    loaded = load_sparse(save_sparse({"w": weight}, tmp_path / "w"))["w"]
    assert same_bits(loaded, weight)
    with safetensors.safe_open(tmp_path / "w", framework="pt") as file:
        assert file.get_tensor("w::values").shape == (4,)


def test_a_piece_of_the_format_by_hand(tmp_path):
    """Bit 0 of the first byte is the first weight."""
    weight = torch.zeros(1, 400)
    weight[0, [0, 9]] = torch.tensor([2.0, 3.0])
    save_sparse({"w": weight}, tmp_path / "w", metadata={"architecture": "toy"})
    with safetensors.safe_open(tmp_path / "w", framework="pt") as file:
        assert set(file.keys()) == {"w::bitmask", "w::values"}
        assert file.get_tensor("w::bitmask").tolist() == [1, 2, *[0] * 48]
        assert file.get_tensor("w::values").tolist() == [2.0, 3.0]
        metadata = file.metadata()
    assert json.loads(metadata["index"]) == {"w": {"shape": [1, 400], "dtype": "F32", "nnz": 2}}
    assert (metadata["format"], metadata["format_version"], metadata["architecture"]) == ("horst-sparse", "1", "toy")
    assert read_metadata(tmp_path / "w") == {"architecture": "toy"}


@pytest.mark.parametrize(("sparsity", "limit"), [(0.9, 0.135), (0.5, 0.54)])
def test_the_file_is_as_small_as_promised(tmp_path, sparsity, limit):
    state = {f"blocks.{i}.weight": pruned((512, 384), sparsity) for i in range(4)}
    size = save_sparse(state, tmp_path / "sparse").stat().st_size
    assert size <= limit * sum(weight.nbytes for weight in state.values())
    dense = save_sparse(state, tmp_path / "dense", min_sparsity=1.0).stat().st_size
    assert size <= limit * dense


def test_tensors_that_would_not_get_smaller_stay_dense(tmp_path):
    state = {
        "dense": torch.randn(64, 64),
        "sparse": pruned((64, 64), 0.5),
        "tiny": torch.zeros(8),
        "0-d": torch.ones(()),
    }
    save_sparse(state, tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", framework="pt") as file:
        assert set(file.keys()) == {"dense", "sparse::bitmask", "sparse::values", "tiny", "0-d"}
    save_sparse(state, tmp_path / "b", min_sparsity=0.5)  # exactly at the limit: not above it
    with safetensors.safe_open(tmp_path / "b", framework="pt") as file:
        assert set(file.keys()) == set(state)


def test_names_that_look_like_parts_do_not_collide(tmp_path):
    state = {"w": torch.zeros(900), "w::values": torch.ones(3), "w::bitmask": torch.zeros(900)}
    loaded = load_sparse(save_sparse(state, tmp_path / "w"))
    assert all(same_bits(loaded[name], state[name]) for name in state)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(7))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = Tied()
    path = save_sparse(model, tmp_path / "tied")
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"embedding.weight", "body.weight", "body.bias", "steps"}
    state = load_sparse(path)
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    other = Tied()
    assert load_sparse(path, other) is other
    assert other.head.weight is other.embedding.weight
    assert all(same_bits(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_model_that_is_not_tied_gets_both_copies(tmp_path):
    model, other = Tied(), Tied()
    other.head.weight = nn.Parameter(torch.zeros(50, 16))
    load_sparse(save_sparse(model, tmp_path / "tied"), other)
    assert same_bits(other.head.weight.data, model.head.weight.data)
    assert other.head.weight.data_ptr() != other.embedding.weight.data_ptr()
    with pytest.raises(ValueError, match=r"one tensor in the model, but two in untied"):
        load_sparse(save_sparse(other, tmp_path / "untied"), model)


def test_views_and_transposes_are_written_as_they_read(tmp_path):
    base = pruned((48, 32), 0.8)
    state = {"whole": base, "transposed": base.t(), "part": base[10:20], "strided": base[:, ::3]}
    loaded = load_sparse(save_sparse(state, tmp_path / "views"))
    assert all(same_bits(loaded[name], state[name]) for name in state)


def test_a_model_with_strided_weights_is_filled_in_place(tmp_path):
    source, target = nn.Linear(48, 48), nn.Linear(48, 48)
    source.weight.data = pruned((48, 48), 0.8)
    target.weight.data = torch.randn(48, 48).t()
    memory = target.weight.data_ptr()
    load_sparse(save_sparse(source, tmp_path / "m"), target)
    assert target.weight.data_ptr() == memory
    assert same_bits(target.weight.data, source.weight.data)


def test_names_of_wrapped_models_are_clean(tmp_path):
    model = nn.Linear(4, 4)
    wrapped = nn.ModuleDict({"_orig_mod": model})
    assert list(load_sparse(save_sparse(wrapped, tmp_path / "w"))) == ["weight", "bias"]
    load_sparse(tmp_path / "w", wrapped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: nn.Linear(5, 4), r"has shape \(4, 4\) and torch.float32 .* the model has \(4, 5\)"),
        (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), r"model.to\(torch.float32\)"),
        (lambda: nn.Linear(4, 4, device="meta"), "not on the meta device"),
        (lambda: nn.Linear(4, 4, bias=False), "has bias that the model has not"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "is not of this model: it lacks 0.bias, 0.weight"),
    ],
)
def test_another_model_is_refused_and_left_alone(tmp_path, change, message):
    path, model = save_sparse(nn.Linear(4, 4), tmp_path / "m"), change()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_sparse(path, model)
    if not any(tensor.is_meta for tensor in before.values()):
        assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({"w": torch.zeros(2)}, {"min_sparsity": 90}, "Give a fraction: 0.5, not 50"),
        ({"w": torch.zeros(2)}, {"min_sparsity": math.nan}, r"min_sparsity must lie in \[0, 1\]"),
        ({"w": torch.zeros(2)}, {"metadata": {"config": {}}}, "Use json.dumps"),
        ({"w": torch.zeros(2)}, {"metadata": {"index": ""}}, "'index' is the format's own"),
        ({"w": 3}, {}, "'w' is a int; only tensors"),
        ({"__metadata__": torch.zeros(2)}, {}, "cannot be stored under the name"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, {}, "safetensors holds no torch.complex64"),
        ({"w": torch.zeros(2, device="meta")}, {}, "no plain dense tensor"),
        ({"w": torch.eye(3).to_sparse()}, {}, "to_dense"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_nothing_written(tmp_path, state, options, message):
    with pytest.raises(ValueError, match=message):
        save_sparse(state, tmp_path / "new" / "w", **options)
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_sparse({"w": torch.ones(300)}, tmp_path / "w")
    monkeypatch.setattr("horst.export.sparse_safetensors.write_dense", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_sparse({"w": torch.zeros(3)}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    assert same_bits(load_sparse(path)["w"], torch.ones(300))
    with pytest.raises(IsADirectoryError):
        save_sparse({"w": torch.zeros(3)}, tmp_path)


def test_negative_zeros_are_kept_and_told(tmp_path, caplog):
    weight = torch.randn(100, 100)
    weight *= magnitude_mask(weight, 0.9)  # leaves -0.0 where a negative weight was removed
    with caplog.at_level(logging.WARNING):
        save_sparse({"w": weight}, tmp_path / "w")
    assert "weights are -0.0 and are stored as values" in caplog.text
    assert same_bits(load_sparse(tmp_path / "w")["w"], weight)


def test_sparse_loading_needs_a_model(tmp_path):
    path = save_sparse({"w": torch.zeros(3)}, tmp_path / "w")
    with pytest.raises(ValueError, match="give the model, too"):
        load_sparse(path, sparse=True)


MEMORY_SCRIPT = """
import resource, sys, torch
from horst.export import load_sparse, save_sparse
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = torch.nn.ParameterList([torch.zeros(4, 1 << 20) for _ in range(8)])   # 8 x 16 MiB
for p in model: p.data[:2].fill_(1)
size, before = sum(p.nbytes for p in model), peak()
save_sparse(model, sys.argv[1])
saved = peak()
load_sparse(sys.argv[1], model)
print(size, saved - before, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux only")
def test_saving_and_loading_need_no_second_copy(tmp_path):
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path / "m")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size, saving, both = map(int, out.split())
    assert size == 128 << 20
    assert saving < 0.25 * size
    assert both < 0.25 * size
