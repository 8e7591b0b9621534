"""Documents of every kind to token files: contents, hold-out, order, and nothing half done."""

import gzip
import json
import lzma
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horst.lab.data import tokenization
from horst.lab.data.documents import Document, Fields, Source
from horst.lab.data.token_files import open_tokens
from horst.lab.data.tokenization import document_hash, tokenize, write_token_files
from horst.lab.data.tokenizer import ByteTokenizer

DOCUMENTS = {f"doc-{i}": f"text number {i}" + " ünï\n" * (i % 4) for i in range(40)}


def as_lines(documents):
    return "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in documents.items())


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text(as_lines(DOCUMENTS))
    return path


def texts_of(path):
    """The documents of a file, read without the code under test."""
    tokens = np.fromfile(path, dtype="<u2")
    assert tokens[-1] == 256
    ends = np.flatnonzero(tokens == 256)
    starts = [0, *(ends[:-1] + 1)]
    return [bytes(tokens[a:b].astype(np.uint8)).decode() for a, b in zip(starts, ends, strict=True)]


def test_every_document_is_written_once_in_order_and_closed(jsonl, tmp_path):
    out = tokenize(jsonl, tmp_path / "tokens", tokenizer="bytes", validation=0.2)
    train, held_out = texts_of(out / "train.bin"), texts_of(out / "val.bin")
    assert 0 < len(held_out) < 20
    everything = list(DOCUMENTS.values())
    assert sorted(train + held_out) == sorted(everything)
    assert train == [text for text in everything if text in train]
    assert held_out == [text for text in everything if text in held_out]


def test_meta_says_what_was_done(jsonl, tmp_path):
    out = tokenize(jsonl, tmp_path / "tokens", tokenizer="bytes", validation=7)
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["tokenizer"], meta["vocabulary"], meta["end_of_text"]) == ("bytes", 257, 256)
    assert (meta["version"], meta["dtype"]) == (1, "uint16")
    assert {split: count["documents"] for split, count in meta["splits"].items()} == {"train": 33, "val": 7}
    assert meta["splits"]["val"]["tokens"] * 2 == (out / "val.bin").stat().st_size
    (source,) = meta["sources"]
    assert (source["file"], source["bytes"]) == ("documents.jsonl", jsonl.stat().st_size)
    assert len(source["sha256"]) == 64
    assert meta["split"]["validation"] == 7
    assert str(tmp_path) not in json.dumps(meta)


def gzipped(path, text):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text)


def xzipped(path, text):
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write(text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_mark_that_windows_writes_in_front_is_no_text(name, tmp_path):
    text = json.dumps({"text": "one"}) if name == "a.jsonl" else "one"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [document.text for document in Source(tmp_path / name).documents()] == ["one"]


def write_parquet(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": list(DOCUMENTS.values()), "id": list(DOCUMENTS), "other": [0] * len(DOCUMENTS)})
    parquet.write_table(table, path, row_group_size=7)


def dataset():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": list(DOCUMENTS), "meta": [{}] * 40, "text": list(DOCUMENTS.values())})


def sources(folder):
    (folder / "a.jsonl").write_text(as_lines(DOCUMENTS), encoding="utf-8")
    gzipped(folder / "a.jsonl.gz", as_lines(DOCUMENTS))
    xzipped(folder / "a.jsonl.xz", as_lines(DOCUMENTS))
    write_parquet(folder / "a.parquet")
    dataset().save_to_disk(folder / "saved")
    names = ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet", "saved")
    return {name: folder / name for name in names} | {"dataset": dataset(), "streamed": dataset().to_iterable_dataset()}


@pytest.mark.parametrize("kind", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet", "saved", "dataset", "streamed"])
def test_every_kind_of_source_gives_the_same_documents(kind, tmp_path):
    found = list(Source(sources(tmp_path)[kind]).documents())
    assert found == [Document(name, text) for name, text in DOCUMENTS.items()]


def test_a_name_on_the_hub_is_loaded_by_its_split(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    Source("owner/name")
    out = tokenize("owner/name:test", tmp_path / "tokens", tokenizer="bytes", validation=0)
    assert asked == [("owner/name", "train"), ("owner/name", "test")]
    (source,) = json.loads((out / "meta.json").read_text())["sources"]
    assert (source["dataset"], source["rows"]) == ("owner/name:test", 40)


def test_a_saved_dataset_is_described_without_its_place(tmp_path):
    dataset().save_to_disk(tmp_path / "saved")
    out = tokenize(str(tmp_path / "saved"), tmp_path / "tokens", tokenizer="bytes", validation=0)
    (source,) = json.loads((out / "meta.json").read_text())["sources"]
    assert (source["dataset"], source["rows"]) == ("saved", 40)
    assert source["fingerprint"]


def test_of_a_saved_dataset_with_splits_one_must_be_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": dataset(), "test": dataset()}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"the splits \['test', 'train'\]: give one of them, .*saved/train"):
        Source(tmp_path / "saved")
    assert len(list(Source(tmp_path / "saved" / "test").documents())) == 40


def test_a_text_file_is_one_document_or_parted(tmp_path):
    path = tmp_path / "a.txt.gz"
    gzipped(path, "one\r\n\n\ntwo\n\nthree")
    assert [d.text for d in Source(path).documents()] == ["one\r\n\n\ntwo\n\nthree"]
    assert [d.text for d in Source(path).documents(Fields(separator="\n\n"))] == ["one\r", "\ntwo", "three"]


def test_other_names_of_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "hello", "url": 3}\n\n')
    assert list(Source(path).documents(Fields(text="body", id="url"))) == [Document("3", "hello")]


identities = st.lists(st.text(max_size=8), min_size=1, max_size=30)


@given(names=identities, share=st.floats(0, 0.99))
def test_the_hold_out_of_a_document_depends_on_its_id_alone(names, share):
    limit = tokenization._hash_limit([], share, None)
    for name in names:
        expected = document_hash(Document(name, "")) / 2**64 < share
        assert (document_hash(Document(name, "another text")) < limit) == expected


def test_the_order_of_sources_and_documents_does_not_change_the_hold_out(tmp_path):
    names = list(DOCUMENTS)
    (tmp_path / "a.jsonl").write_text(as_lines({name: DOCUMENTS[name] for name in names[:20]}))
    (tmp_path / "b.jsonl").write_text(as_lines({name: DOCUMENTS[name] for name in reversed(names[20:])}))
    forward, backward = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    for validation in (0.3, 5):
        one = tokenize(forward, tmp_path / f"one-{validation}", tokenizer="bytes", validation=validation)
        two = tokenize(backward, tmp_path / f"two-{validation}", tokenizer="bytes", validation=validation)
        assert sorted(texts_of(one / "val.bin")) == sorted(texts_of(two / "val.bin"))
        assert texts_of(one / "train.bin") != texts_of(two / "train.bin")  # each in the order of its sources


def test_the_share_held_out_is_about_the_share_asked_for():
    limit = tokenization._hash_limit([], 0.1, None)
    held_out = sum(document_hash(Document(str(i), "")) < limit for i in range(10_000))
    assert 900 < held_out < 1100  # three standard deviations


def test_documents_without_an_id_are_known_by_their_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["same", "other", "same", "more"]))
    out = tokenize(path, tmp_path / "tokens", tokenizer="bytes", validation=1)
    held_out = texts_of(out / "val.bin")
    assert len(set(held_out)) == 1
    assert not set(held_out) & set(texts_of(out / "train.bin"))


def test_processes_do_not_change_a_byte(jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "_CHARACTERS", 50)  # some twenty pieces, more than the queue holds
    one = tokenize(jsonl, tmp_path / "one", tokenizer="gpt2", validation=0.2)
    two = tokenize(jsonl, tmp_path / "two", tokenizer="gpt2", validation=0.2, workers=2)
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_process_that_dies_is_reported(tmp_path):
    with pytest.raises(RuntimeError, match="one of 2 tokenizing processes died"):
        write_token_files([("train", "x")], tmp_path / "tokens", tokenizer=Dying(), splits=["train"], workers=2)
    assert list(tmp_path.iterdir()) == []


class Dying(ByteTokenizer):
    def __reduce__(self):
        return os._exit, (3,)


class Large(ByteTokenizer):
    name, vocabulary, end_of_text = "large", 100_000, 99_999

    def encode(self, text):
        return [70_000 + ord(character) for character in text]


def test_a_vocabulary_beyond_16_bits_is_written_in_32(jsonl, tmp_path):
    out = tokenize(jsonl, tmp_path / "tokens", tokenizer=Large(), validation=0)
    file = open_tokens(out / "train.bin")
    assert (file.tokens.dtype, file.vocabulary) == (np.uint32, 100_000)
    first = next(iter(DOCUMENTS.values()))
    assert file.tokens[: len(first) + 1].tolist() == [*Large().encode(first), 99_999]


def test_a_tokenizer_that_leaves_its_vocabulary_is_refused(jsonl, tmp_path):
    class Wrong(Large):
        vocabulary, end_of_text = 300, 299

    class WrongEnd(ByteTokenizer):
        end_of_text = 257

    with pytest.raises(ValueError, match="'large' has a vocabulary of 300, but gave tokens from 70032 to 70120"):
        tokenize(jsonl, tmp_path / "tokens", tokenizer=Wrong())
    with pytest.raises(ValueError, match="'bytes' has a vocabulary of 257, which does not hold its end_of_text, 257"):
        tokenize(jsonl, tmp_path / "tokens", tokenizer=WrongEnd())
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_run_leaves_nothing(tmp_path, error):
    def texts():
        yield "train", "a text"
        yield "val", "another" * 1_000_000  # large enough to be written
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        write_token_files(texts(), tmp_path / "tokens", tokenizer="bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_folder_by_that_name(tmp_path):
    program = f"""
        import os
        from horst.lab.data.tokenization import write_token_files

        def texts():
            yield "train", "x" * 3_000_000
            yield "val", "x" * 3_000_000
            os._exit(9)

        write_token_files(texts(), {str(tmp_path / "tokens")!r}, tokenizer="bytes")
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == 9
    assert not (tmp_path / "tokens").exists()
    assert len(list(tmp_path.iterdir())) == 1  # hidden, with what was written of it
    write_token_files([("train", "x"), ("val", "y")], tmp_path / "tokens", tokenizer="bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_folder_with_something_in_it_is_left_alone(jsonl, tmp_path):
    out = tmp_path / "tokens"
    out.mkdir()
    tokenize(jsonl, out, tokenizer="bytes", validation=2)  # an empty one is fine
    before = (out / "train.bin").read_bytes()
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        tokenize(jsonl, out, tokenizer="gpt2")
    assert (out / "train.bin").read_bytes() == before


def test_an_empty_split_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("all in one")
    with pytest.raises(ValueError, match=r"of 1 documents none went to val\.bin.*Fields\(separator"):
        tokenize(path, tmp_path / "tokens", tokenizer="bytes", validation=0.0001)
    with pytest.raises(ValueError, match=r"of 1 documents none went to train\.bin"):
        tokenize(path, tmp_path / "tokens", tokenizer="bytes", validation=5)
    path.write_text("")
    for validation in (0, 0.5, 2):
        with pytest.raises(ValueError, match=r"no text in .*a\.txt: nothing to tokenize"):
            tokenize(path, tmp_path / "tokens", tokenizer="bytes", validation=validation)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("validation", [-0.1, 1.0, 1.5, float("nan"), True, -3])
def test_a_bad_share_is_refused(jsonl, tmp_path, validation):
    with pytest.raises(ValueError, match=r"a share in \[0, 1\) or a whole number of documents"):
        tokenize(jsonl, tmp_path / "tokens", tokenizer="bytes", validation=validation)


def test_bad_arguments_are_refused(jsonl, tmp_path):
    with pytest.raises(ValueError, match="sources is empty"):
        tokenize([], tmp_path / "tokens")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        tokenize(jsonl, tmp_path / "tokens", tokenizer="bytes", workers=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": ', r"bad\.jsonl, line 2: no JSON"),
        ('{"text": "fine"}\n\n[1]\n', r"bad\.jsonl, line 3: an object with a field 'text' is needed"),
        ('{"title": "x", "body": "y"}\n', r"line 1 has no field 'text' \(it has 'title', 'body'\)"),
        ('{"text": 5}\n', "line 1: the field 'text' must be a text, got int"),
    ],
)
def test_a_bad_record_is_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        list(Source(path).documents())


@pytest.mark.parametrize(("pack", "name"), [(gzipped, "a.jsonl.gz"), (xzipped, "a.jsonl.xz")])
def test_a_file_that_was_cut_short_is_named(tmp_path, pack, name):
    pack(tmp_path / name, as_lines(DOCUMENTS))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name} is damaged or cut short"):
        list(Source(tmp_path / name).documents())
    (tmp_path / name).write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match=f"{name} is damaged or cut short"):
        list(Source(tmp_path / name).documents())


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    write_parquet(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    content = whole[:-100] if damage == "cut" else whole[:4] + b"\xff" * 200 + whole[204:]
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: .* If it is damaged, fetch it anew"):
        list(Source(tmp_path / "a.parquet").documents())


def test_a_row_without_a_text_is_named_by_its_number(tmp_path):
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    texts = {"text": ["fine"] * 1234 + [None]}
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(texts), tmp_path / "a.parquet")
    wrong = r"row 1234 \(the first is 0\): the field 'text' must be a text, got NoneType"
    with pytest.raises(ValueError, match=rf"a\.parquet, {wrong}"):
        list(Source(tmp_path / "a.parquet").documents())
    with pytest.raises(ValueError, match=rf"the dataset, {wrong}"):
        list(Source(datasets.Dataset.from_dict(texts)).documents())


def test_a_text_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: byte 0xe9 at position 3"):
        list(Source(tmp_path / "a.txt").documents())


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*missing\.jsonl"):
        Source(tmp_path / "missing.jsonl")
    (tmp_path / "a.csv").write_text("text")
    with pytest.raises(ValueError, match=r"a\.csv is no file to read documents from\. Give \.jsonl"):
        Source(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\]: give one of them"):
        Source({"train": dataset(), "test": dataset()})
    with pytest.raises(TypeError, match=r"a path, a datasets\.Dataset or the name of one, got int"):
        Source(3)


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the dataset has no column 'body'\. Its columns: id, meta, text"):
        list(Source(dataset()).documents(Fields(text="body")))
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'body'\. Its columns: text, id, other"):
        list(Source(tmp_path / "a.parquet").documents(Fields(text="body")))
