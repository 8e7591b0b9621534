"""Files that lie: every one is refused with an error of ours, and the model is left alone."""

import json
import os
import pickle
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from horst.export import InvalidFileError, load_sparse, read_layout, read_metadata, read_parts, save_sparse
from horst.export.sparse_safetensors import read_dtypes
from horst.files import path_inside


def example_state():
    sparse = torch.zeros(31, 33)
    sparse[::5, ::7] = torch.randn(7, 5)
    return {"sparse": sparse, "dense": torch.randn(5, 3).bfloat16(), "count": torch.tensor(3)}


@pytest.fixture
def valid(tmp_path):
    return save_sparse(example_state(), tmp_path / "valid", metadata={"architecture": "toy"})


def forge(path, change):
    """Apply ``change(header, metadata, data)`` to a valid file and make all checksums right again, as an enemy can."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    metadata = header["__metadata__"]
    for key in ("index", "tied", "crc32"):
        metadata[key] = json.loads(metadata[key])
    change(header, metadata, data)
    for name, entry in header.items():
        start, end = (0, 0) if name == "__metadata__" else entry["data_offsets"]
        if name in metadata["crc32"] and isinstance(start, int):
            metadata["crc32"][name] = f"{zlib.crc32(bytes(data[start:end])):08x}"
    for key in ("index", "tied", "crc32"):
        metadata[key] = json.dumps(metadata[key])
    metadata["header_crc32"] = "0" * 8
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw = raw.replace(b'"header_crc32":"00000000"', b'"header_crc32":"%08x"' % zlib.crc32(raw))
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def test_the_forger_itself_makes_valid_files(valid):
    forge(valid, lambda header, metadata, data: None)
    assert list(load_sparse(valid)) == ["sparse", "dense", "count"]


def set_path(mapping, *keys, to):
    *path, last = keys
    for key in path:
        mapping = mapping[key]
    mapping[last] = to


FORGERIES = {
    "mask with a bit more": (lambda h, m, d: flip(h, d, "sparse::bitmask", 0, 2), "36 bits are set for 35 values"),
    "mask with a bit less": (lambda h, m, d: flip(h, d, "sparse::bitmask", 0, 1), "34 bits are set for 35 values"),
    "bits beyond the last weight": (
        lambda h, m, d: (flip(h, d, "sparse::bitmask", 0, 1), flip(h, d, "sparse::bitmask", 127, 128)),
        "some beyond the last weight",
    ),
    "nnz that is not the number of values": (lambda h, m, d: set_path(m, "index", "sparse", "nnz", to=34), "disagree"),
    "nnz above the number of weights": (
        lambda h, m, d: set_path(m, "index", "sparse", "nnz", to=31 * 33 + 1),
        "cannot have nnz=1024",
    ),
    "negative nnz": (lambda h, m, d: set_path(m, "index", "sparse", "nnz", to=-1), "cannot have nnz=-1"),
    "a huge shape": (
        lambda h, m, d: set_path(m, "index", "sparse", "shape", to=[1 << 40, 1 << 10]),
        "disagree on sparse::bitmask",
    ),
    "a shape beyond 64 bits": (
        lambda h, m, d: set_path(m, "index", "sparse", "shape", to=[1 << 40, 1 << 40, 0]),
        "larger than any tensor",
    ),
    "a huge dense shape": (lambda h, m, d: set_path(h, "dense", "shape", to=[1 << 30, 3]), "needs 6442450944 bytes"),
    "a shape with a fraction": (lambda h, m, d: set_path(h, "dense", "shape", to=[7.5, 2]), "no list of natural"),
    "a shape with a negative size": (lambda h, m, d: set_path(h, "dense", "shape", to=[-5, -3]), "no list of natural"),
    "a shape of truth values": (lambda h, m, d: set_path(h, "dense", "shape", to=[True, 15]), "no list of natural"),
    "a hundred dimensions": (lambda h, m, d: set_path(h, "dense", "shape", to=[1] * 100), "larger than any tensor"),
    "an unknown dtype": (lambda h, m, d: set_path(h, "dense", "dtype", to="F7"), "not one of F64"),
    "a dtype that is a list": (lambda h, m, d: set_path(m, "index", "dense", "dtype", to=[]), "not one of F64"),
    "another dtype": (lambda h, m, d: set_path(m, "index", "dense", "dtype", to="F16"), "disagree on dense"),
    "offsets that overlap": (lambda h, m, d: move(h, "dense", -2), "overlaps another"),
    "offsets with a hole": (lambda h, m, d: (move(h, "dense", 2), move(h, "sparse::bitmask", 2)), "leaves a hole"),
    "offsets that leave the file": (lambda h, m, d: last_entry_grows(h), "is truncated"),
    "offsets that are no numbers": (
        lambda h, m, d: set_path(h, "dense", "data_offsets", to=["0", "30"]),
        "not two nat",
    ),
    "offsets beyond 64 bits": (lambda h, m, d: move(h, "dense", 1 << 70), "leaves a hole"),
    "bytes after the end": (lambda h, m, d: d.extend(b"more"), "is too long"),
    "an entry without an index": (lambda h, m, d: m["index"].pop("dense"), "disagree on dense"),
    "an index without an entry": (
        lambda h, m, d: set_path(m, "index", "ghost", to={"shape": [], "dtype": "F32", "nnz": None}),
        "disagree on ghost",
    ),
    "an index that is a list": (lambda h, m, d: set_path(m, "index", to=[]), "is list in JSON"),
    "an index of strings": (lambda h, m, d: set_path(m, "index", "dense", to="F32"), "must give shape"),
    "an entry with other keys": (lambda h, m, d: set_path(h, "dense", "pickle", to="x"), "must have dtype"),
    "tied to nothing": (lambda h, m, d: set_path(m, "tied", "alias", to="ghost"), "ties alias to tensors"),
    "tied to a list": (lambda h, m, d: set_path(m, "tied", "alias", to=["dense"]), "ties alias to tensors"),
    "tied to itself": (lambda h, m, d: set_path(m, "tied", "dense", to="dense"), "ties dense to tensors"),
    "a missing checksum": (lambda h, m, d: m["crc32"].pop("dense"), "the data of 'dense' .* is damaged"),
    "another version": (lambda h, m, d: set_path(m, "format_version", to="3"), "format version '3'"),
    "another format": (lambda h, m, d: set_path(m, "format", to="pt"), "not of the sparse form"),
    "metadata that is no string": (lambda h, m, d: set_path(m, "extra", to=3), "not a map from strings to strings"),
}


def flip(header, data, name, byte, bits):
    data[header[name]["data_offsets"][0] + byte] ^= bits


def move(header, name, by):
    header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]


def last_entry_grows(header):
    entry = header["sparse::bitmask"]
    entry["data_offsets"][1] += 8
    entry["shape"] = [entry["shape"][0] + 8]


def few_bits_state():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(61, 67, generator=generator)
    weight[torch.rand(61, 67, generator=generator) < 0.9] = 0.0
    return {"w": weight, "v": torch.randn(9, 11, generator=generator)}


@pytest.fixture
def few_bits(tmp_path):
    """``w`` by gaps with 3 lowest bits, and ``v`` whole; codes of 4 bits."""
    return save_sparse(few_bits_state(), tmp_path / "few_bits", values="int4", group_size=16)


def change(key, to, name="w"):
    return lambda h, m, d: set_path(m, "index", name, key, to=to)


def fill(header, data, name, content):
    start, end = header[name]["data_offsets"]
    data[start:end] = (content * (end - start))[: end - start]


FEW_BITS_FORGERIES = {
    "the first version with codes": (lambda h, m, d: set_path(m, "format_version", to="1"), "must give shape"),
    "an unknown key": (change("code", "x"), "must give shape"),
    "five bits": (change("bits", 5), "cannot have bits=5"),
    "bits that are true": (change("bits", True), "cannot have bits=True"),
    "other bits": (change("bits", 8), "disagree on"),
    "no bits": (lambda h, m, d: m["index"]["w"].pop("bits"), "cannot have bits=None"),
    "groups of nothing": (change("group_size", 0), "group_size=0"),
    "groups of a fraction": (change("group_size", 0.5), "group_size=0.5"),
    "groups beyond 31 bits": (change("group_size", 1 << 31), "group_size=2147483648"),
    "other groups": (change("group_size", 17), "disagree on w::scales"),
    "a view of another size": (change("view", [61, 68, 1]), r"cannot be seen as \[61, 68, 1\]"),
    "a view that is negative": (change("view", [-61, -67, 1]), "cannot be seen as"),
    "a view of two": (change("view", [61, 67]), "cannot be seen as"),
    "a view the other way": (change("view", [1, 61, 67]), "disagree on w::scales"),
    "no view": (lambda h, m, d: m["index"]["w"].pop("view"), "cannot be seen as None"),
    "codes and a dtype": (change("values", "BF16"), "both a dtype of its values and codes"),
    "an integer tensor with codes": (change("dtype", "I32"), "not stored in fewer bits"),
    "gaps of a dense tensor": (change("gaps", [1, 5], "v"), "cannot have gaps"),
    "no lowest bits": (change("gaps", [0, 100]), "cannot have gaps"),
    "too many lowest bits": (change("gaps", [4, 100]), "cannot have gaps"),
    "gaps that are null": (change("gaps", None), "cannot have gaps"),
    "other lowest bits": (change("gaps", [2, 100]), "disagree on w::"),
    "fewer bytes of gaps": (lambda h, m, d: m["index"]["w"]["gaps"].__setitem__(1, 3), "disagree on w::gaps"),
    "gaps without ones": (lambda h, m, d: fill(h, d, "w::gaps", b"\0"), "gaps do not lead through 4087 weights"),
    "gaps of ones": (lambda h, m, d: fill(h, d, "w::gaps", b"\xff"), "gaps do not lead through 4087 weights"),
    "a gap that is longer": (lambda h, m, d: flip(h, d, "w::remainders", 5, 1), "gaps do not lead through"),
    "a shape that is larger": (
        lambda h, m, d: m["index"]["w"].update(shape=[61, 68], view=[61, 68, 1]),
        "gaps do not lead through 4148 weights",
    ),
    "bits beyond the last code": (
        lambda h, m, d: flip(h, d, "v::values", 49, 128),
        "bits are set beyond its last code",
    ),
    "a code below the least": (lambda h, m, d: fill(h, d, "v::values", b"\x08" + b"\0" * 49), "a code is below -7"),
    "scales that are NaN": (lambda h, m, d: fill(h, d, "w::scales", b"\xff"), "a scale is negative, infinite or NaN"),
    "a negative scale": (lambda h, m, d: flip(h, d, "w::scales", 1, 128), "a scale is negative, infinite or NaN"),
}


@pytest.mark.parametrize("forgery", FEW_BITS_FORGERIES)
def test_forged_files_of_few_bits_are_refused(few_bits, forgery):
    assert [row["positions"] for row in read_layout(few_bits)] == ["gaps, 3 bits", "all"]
    forge(few_bits, lambda header, metadata, data: None)
    load_sparse(few_bits)
    change, message = FEW_BITS_FORGERIES[forgery]
    forge(few_bits, change)
    for read in (load_sparse, read_parts):
        with pytest.raises(InvalidFileError, match=message):
            read(few_bits)


def test_values_of_another_dtype_are_checked(tmp_path):
    path = save_sparse({"w": torch.randn(9, 9)}, tmp_path / "w", values="bfloat16")
    forge(path, change("values", "F32"))
    with pytest.raises(InvalidFileError, match=r"is torch.float32; its values cannot be torch.float32"):
        load_sparse(path)


@settings(max_examples=100)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=4))
def test_forged_data_of_few_bits_is_refused_or_some_tensor(tmp_path_factory, changes):
    """Whatever the bytes say, with right checksums: weights of the right shape, or an error of ours."""
    path = save_sparse(few_bits_state(), tmp_path_factory.mktemp("forged") / "f", values="int4", group_size=16)

    def damage(header, metadata, data):
        for position, xor in changes:
            data[position % len(data)] ^= xor

    forge(path, damage)
    try:
        loaded = load_sparse(path)
    except InvalidFileError:
        return
    assert {name: w.shape for name, w in loaded.items()} == {name: w.shape for name, w in few_bits_state().items()}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_files_are_refused(valid, forgery):
    change, message = FORGERIES[forgery]
    forge(valid, change)
    with pytest.raises(InvalidFileError, match=message):
        load_sparse(valid)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes and no header"),
        (b"\x10\0\0", "has 3 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "announces a header of 9223372036854775808 bytes"),
        ((8).to_bytes(8, "little") + b"not json", "is not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "is not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "is list in JSON, not an object"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "is not valid JSON"),
        ((14).to_bytes(8, "little") + b'{"a":1,"a":2 }', "'a' appears twice"),
        ((6).to_bytes(8, "little") + b'{"a":' + b"1", "is not valid JSON"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "must have dtype, shape and data_offsets"),
        ((5007).to_bytes(8, "little") + b'{"a":' + b"1" * 5001 + b"}", "is not valid JSON"),
        ((2).to_bytes(8, "little") + b"{}", "not of the sparse form"),
    ],
)
def test_bad_headers_are_refused(tmp_path, content, message):
    path = tmp_path / "bad"
    path.write_bytes(content)
    for read in (load_sparse, read_metadata):
        with pytest.raises(InvalidFileError, match=message):
            read(path)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("the pickle was loaded",)


@pytest.mark.parametrize(
    "write", [lambda p: p.write_bytes(pickle.dumps(Trap())), lambda p: torch.save({"w": Trap()}, p)]
)
def test_a_pickle_is_refused_unread(tmp_path, write):
    write(tmp_path / "model.sparse.safetensors")
    with pytest.raises(InvalidFileError, match=r"is a pickle .* never loaded here"):
        load_sparse(tmp_path / "model.sparse.safetensors")


def test_a_plain_safetensors_file_says_how_to_read_it(tmp_path):
    import safetensors.torch

    safetensors.torch.save_file({"w": torch.zeros(3)}, tmp_path / "plain")
    with pytest.raises(InvalidFileError, match=r"Read it with safetensors\.torch\.load_file"):
        load_sparse(tmp_path / "plain")


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in example_state().items():
            self.register_buffer(name, torch.full_like(tensor, 5))


STATE = example_state()
DAMAGE = st.one_of(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
    st.binary(min_size=1, max_size=20),
)


@settings(max_examples=400)
@given(damage=DAMAGE, in_header=st.booleans())
def test_damage_is_found_or_does_no_harm(tmp_path_factory, damage, in_header):
    """Bytes changed, cut off or added: the same tensors come out, or an error of ours and an untouched model."""
    path = save_sparse(STATE, tmp_path_factory.mktemp("damage") / "file")
    content = bytearray(path.read_bytes())
    span = 8 + int.from_bytes(content[:8], "little") if in_header else len(content)
    if isinstance(damage, list):
        for position, xor in damage:
            content[position % span] ^= xor
    elif isinstance(damage, int):
        del content[damage % span :]
    else:
        content += damage
    path.write_bytes(content)
    model = Holder()
    try:
        load_sparse(path, model)
    except InvalidFileError:
        assert all(bool((tensor == 5).all()) for tensor in model.state_dict().values())
    else:
        assert all(torch.equal(tensor, STATE[name]) for name, tensor in model.state_dict().items())


def test_any_changed_byte_of_the_header_is_found(valid):
    """Names, shapes, the caller's metadata: none of it can change unnoticed."""
    content = valid.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    for position in range(length):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        valid.write_bytes(damaged)
        for read in (load_sparse, read_metadata):
            with pytest.raises(InvalidFileError):
                read(valid)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..\\x", "C:x", "", "a\0b", 3, None, ["x"]])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(InvalidFileError, match=r"leads out of its folder|is not the name of a file"):
        path_inside(tmp_path, name)


def test_links_that_leave_the_folder_are_refused(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "out_folder").symlink_to(tmp_path)
    (folder / "within").symlink_to(folder / "sub")
    for name in ("out", "out_folder/secret"):
        with pytest.raises(InvalidFileError, match="is a link out of its folder"):
            path_inside(folder, name)
    assert path_inside(folder, "within/file") == folder / "within" / "file"


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("x")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert path_inside(snapshot, "model.safetensors").read_text() == "x"


@pytest.mark.parametrize("read", [load_sparse, read_metadata, read_dtypes, read_parts, read_layout])
def test_a_pipe_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidFileError, match="pipe is a pipe or a device; a sparse file must be a plain one"):
        read(tmp_path / "pipe")
