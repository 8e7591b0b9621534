"""The training order and the evaluation windows: every property that resuming and scaling rest on."""

import contextlib
import itertools
import json
import math
import pathlib
import re
import shutil
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horst.lab.data.token_batches import TokenBatches, evaluation_batches
from horst.lab.data.token_files import new_token_folder, open_tokens
from horst.lab.models.gpt2 import GPT2, GPT2Config

END = 999_999


def write(folder, tokens, vocabulary=1_000_000):
    """Token files whose tokens are given; with a large vocabulary each can be its own place in the file."""
    meta = {"tokenizer": "places", "vocabulary": vocabulary, "end_of_text": min(END, vocabulary - 1)}
    with new_token_folder(folder, meta) as writer:
        writer.append("train", np.asarray(tokens), documents=1)
    return pathlib.Path(folder) / "train.bin"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A file in which token i is i."""
    return write(tmp_path_factory.mktemp("tokens") / "places", np.arange(1000))


def places_file(length):
    """The same of any length, made once a length; hypothesis does not go with a temporary folder a test."""
    folder = pathlib.Path(_FOLDER.name) / str(length)
    return folder / "train.bin" if folder.exists() else write(folder, np.arange(length))


_FOLDER = tempfile.TemporaryDirectory()


def take(source, count, start=0):
    return list(itertools.islice(source.batches(start), count))


def window_starts(source, batches, start=0):
    """Where each window begins, which is its first token, after a look at the rest of it."""
    starts = []
    for tokens, targets in take(source, batches, start):
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(source.context))
        assert torch.equal(targets, tokens + 1)
        starts += tokens[:, 0].tolist()
    return starts


sizes = {
    "length": st.integers(40, 120),
    "context": st.integers(1, 9),
    "batch_size": st.integers(1, 20),
    "seed": st.integers(0, 3),
}


@given(**sizes)
def test_each_epoch_visits_every_window_once_and_windows_do_not_overlap(length, context, batch_size, seed):
    source = TokenBatches(places_file(length), batch_size=batch_size, context=context, seed=seed)
    epochs = 3
    entries = window_starts(source, math.ceil(epochs * source.windows / batch_size))
    for epoch in range(epochs):
        starts = sorted(entries[epoch * source.windows : (epoch + 1) * source.windows])
        assert 0 <= starts[0] < context
        assert np.diff(starts).tolist() == [context] * (source.windows - 1)
        assert length - 3 * context <= starts[-1] + context < length  # hardly anything is left out


@given(**sizes, start=st.integers(0, 60))
def test_a_run_can_go_on_from_any_step(length, context, batch_size, seed, start):
    source = TokenBatches(places_file(length), batch_size=batch_size, context=context, seed=seed)
    again = TokenBatches(places_file(length), batch_size=batch_size, context=context, seed=seed)
    assert window_starts(again, 3, start) == window_starts(source, start + 3)[start * batch_size :]


@given(**sizes, world=st.integers(1, 4))
def test_the_ranks_together_have_the_batches_of_one(length, context, batch_size, seed, world):
    batch_size *= world
    path, common = places_file(length), {"batch_size": batch_size, "context": context, "seed": seed}
    alone = take(TokenBatches(path, **common), 4)
    ranks = [take(TokenBatches(path, **common, rank=rank, world_size=world), 4) for rank in range(world)]
    for number, (tokens, targets) in enumerate(alone):
        assert torch.equal(tokens, torch.cat([batches[number][0] for batches in ranks]))
        assert torch.equal(targets, torch.cat([batches[number][1] for batches in ranks]))


def test_the_order_is_that_of_the_paper_s_base_code(places):
    source = TokenBatches(places, batch_size=5, context=10)
    windows = (1000 - 10 - 1) // 10 - 1
    assert source.windows == windows == 97
    expected = []
    for epoch in range(2):
        random = np.random.default_rng(1337 + epoch)
        order = random.permutation(windows)
        expected += (order * 10 + random.integers(10)).tolist()
    assert window_starts(source, 38) == expected[:190]


def test_a_batch_across_two_epochs_has_the_end_of_one_and_the_beginning_of_the_next(places):
    source = TokenBatches(places, batch_size=10, context=10)  # 97 windows: batch 9 has 7 and 3
    row = torch.tensor(window_starts(source, 1, start=9))
    offsets = row % 10
    assert len(offsets[:7].unique()) == len(offsets[7:].unique()) == 1
    whole = window_starts(source, 20)
    assert row.tolist() == whole[90:97] + whole[97:100]


def test_epochs_and_seeds_differ(places):
    source = TokenBatches(places, batch_size=97, context=10)
    first, second = window_starts(source, 1), window_starts(source, 1, start=1)
    assert first != second
    assert window_starts(TokenBatches(places, batch_size=97, context=10, seed=1338), 1) == second  # seed + epoch
    assert window_starts(source, 1) == first


def test_batches_are_int64_and_contiguous(places):
    tokens, targets = next(TokenBatches(places, batch_size=4, context=10).batches(0))
    for tensor in (tokens, targets):
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (torch.int64, (4, 10), True)


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu(places):
    common = {"batch_size": 8, "context": 10}
    there, here = TokenBatches(places, **common, device="cuda"), TokenBatches(places, **common)
    for (tokens, targets), (a, b) in zip(take(there, 20), take(here, 20), strict=True):
        assert tokens.is_cuda
        assert torch.equal(tokens.cpu(), a)
        assert torch.equal(targets.cpu(), b)


@given(
    length=st.integers(2, 60),
    context=st.integers(1, 12),
    stride=st.integers(1, 12),
    share=st.integers(1, 3),
    world=st.integers(1, 3),
)
@settings(max_examples=200)
def test_every_token_but_the_first_is_scored_once_in_order(length, context, stride, share, world):
    stride = min(stride, context)
    batch_size = share * world
    common = {"context": context, "stride": stride, "batch_size": batch_size, "world_size": world}
    ranks = [list(evaluation_batches(places_file(length), rank=rank, **common)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    scored = []
    for parts in zip(*ranks, strict=True):
        assert {tensor.shape for part in parts for tensor in part} == {(share, context)}
        tokens, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        for row, wanted in zip(tokens, targets, strict=True):
            places = wanted != -100
            assert torch.equal(row[places] + 1, wanted[places])
            real = row[row != END]
            assert torch.equal(real, real[:1] + torch.arange(len(real)))
            if len(scored) and places.any():  # as much context before it as the stride leaves
                assert int(places.nonzero()[0]) == context - stride
            scored += wanted[places].tolist()
    assert scored == list(range(1, length))


def test_perplexity_does_not_depend_on_batches_and_ranks(tmp_path):
    model = GPT2(GPT2Config(layers=1, heads=1, width=8, context=8, vocabulary=20)).double()
    path = write(tmp_path / "tokens", np.random.default_rng(0).integers(20, size=77), vocabulary=20)
    tokens = torch.from_numpy(open_tokens(path).tokens.astype(np.int64))

    def weighted(**arguments):
        total, count = 0.0, 0
        for rank in range(arguments.get("world_size", 1)):
            for batch in evaluation_batches(path, context=8, rank=rank, **arguments):
                n = int((batch[1] != -100).sum())
                total, count = total + n * model.loss(*batch).item(), count + n
        assert count == 76
        return total / count

    with torch.no_grad():
        by_hand = 0.0
        for begin in range(0, 76, 8):
            window = tokens[begin : begin + 9]
            logits = model(window[None, :-1])[0]
            by_hand += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        expected = pytest.approx(by_hand / 76, rel=1e-12)
        assert weighted(batch_size=1) == expected
        assert weighted(batch_size=4) == expected
        assert weighted(batch_size=12, world_size=3) == expected  # some ranks have nothing to score at the end


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no token file .*train\.bin .*`horst data tokenize`"):
        open_tokens(tmp_path / "train.bin")


def test_a_foreign_file_is_refused(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(FileNotFoundError, match=r"meta\.json is missing: a \.bin file alone does not say"):
        open_tokens(tmp_path / "train.bin")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is not valid JSON"):
        open_tokens(tmp_path / "train.bin")
    foreign = {"[]": "not an object", '{"vocab_size": 50257}': "does not describe token files of ours"}
    for content, message in foreign.items():
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            open_tokens(tmp_path / "train.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this code reads 1. Tokenize anew"),
        ({"dtype": "float64"}, "has dtype 'float64'; it must be uint16 or uint32. Tokenize anew"),
        ({"end_of_text": 10**30}, r"has end_of_text 10{30}, which must lie in its vocabulary, \[0, 1000000\)"),
        ({"splits": {"val": {"tokens": 1, "documents": 1}}}, r"train\.bin is not one of .*meta\.json: val\.bin"),
        ({"splits": {"train": {"tokens": 99, "documents": 1}}}, "has 400 bytes, but its meta.json promises 99 tokens"),
        ({"dtype": "uint16"}, "has 400 bytes, but its meta.json promises 100 tokens of 2 bytes"),
    ],
)
def test_a_meta_that_disagrees_is_refused(tmp_path, change, message):
    path = write(tmp_path / "tokens", np.arange(100))
    meta = path.with_name("meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        open_tokens(path)


def changed_meta(path, places, value):
    """The file's meta.json with another value there; the names of what holds it go before."""
    meta = json.loads(path.with_name("meta.json").read_text())
    holder = meta
    for key in places[:-1]:
        holder = holder[key]
    holder[places[-1]] = value
    return json.dumps(meta)


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        (["tokenizer"], 3, "tokenizer must be a string, got 3"),
        (["vocabulary"], 1e8, "vocabulary must be a whole number, got 100000000.0"),
        (["end_of_text"], True, "end_of_text must be a whole number, got True"),
        (["dtype"], {}, "dtype must be a string, got {}"),
        (["splits"], 0, "splits must be an object, got 0"),
        (["splits", "train"], "../x", "splits.train must be an object, got '../x'"),
        (["splits", "val"], None, "splits.val must be an object, got None"),
        (["splits", "train"], {"documents": 1}, "splits.train.tokens must be a whole number, got nothing"),
        (["splits", "train", "tokens"], [], "splits.train.tokens must be a whole number, got []"),
        (["splits", "train", "documents"], "1", "splits.train.documents must be a whole number, got '1'"),
    ],
)
def test_a_meta_with_a_value_of_another_type_is_refused(tmp_path, places, value, message):
    path = write(tmp_path / "tokens", np.arange(100))
    path.with_name("meta.json").write_text(changed_meta(path, places, value))
    with pytest.raises(ValueError, match=re.escape(f"meta.json is damaged: {message}. Tokenize anew.")):
        open_tokens(path)


@given(
    places=st.sampled_from(
        [[key] for key in ("format", "version", "tokenizer", "vocabulary", "end_of_text", "dtype", "splits")]
        + [["splits", "train"], ["splits", "train", "tokens"], ["splits", "train", "documents"]]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["train", "tokens", "documents", "x"]), inner),
    ),
)
def test_a_meta_with_any_value_in_it_is_read_or_refused(places, value):
    path = places_file(40)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(path, folder)
        pathlib.Path(folder, "meta.json").write_text(changed_meta(path, places, value))
        with contextlib.suppress(ValueError):  # the file holds what it held, whatever the rest of meta.json says
            assert open_tokens(copy).tokens.tolist() == list(range(40))


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    path = write(tmp_path / "tokens", np.arange(100))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"has 397 bytes.*It was cut short"):
        TokenBatches(path, batch_size=1, context=4)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    path = write(tmp_path / "tokens", [5] * 50 + [12] + [5] * 50, vocabulary=10)
    with pytest.raises(ValueError, match=r"has the token 12 between .*says that there are 10"):
        take(TokenBatches(path, batch_size=9, context=10), 2)
    with pytest.raises(ValueError, match="has the token 12 between 48 and 57"):
        list(evaluation_batches(path, context=8, batch_size=1))


def test_a_model_with_too_small_a_vocabulary_is_refused(places):
    for opened in (
        lambda: TokenBatches(places, batch_size=1, context=4, vocabulary=50),
        lambda: evaluation_batches(places, batch_size=1, context=4, vocabulary=50),
    ):
        with pytest.raises(ValueError, match="tokens of 'places', 1000000 of them, but the model's vocabulary is 50"):
            opened()
    assert TokenBatches(places, batch_size=1, context=4, vocabulary=1_000_064).windows > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 400}, r"has 1,000 tokens; windows of context=400 need at least 1,201"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, world_size\), got rank=2, world_size=2"),
        ({"world_size": 3}, "the rows of all 3 processes and must be a positive multiple of their number, got 4"),
    ],
)
def test_bad_settings_are_refused(places, arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBatches(places, **{"batch_size": 4, "context": 10, **arguments})


def test_the_shortest_file_that_will_do(tmp_path):
    source = TokenBatches(write(tmp_path / "tokens", np.arange(31)), batch_size=2, context=10)
    assert source.windows == 1
    assert len(window_starts(source, 10)) == 20


def test_other_bad_arguments_are_refused_at_once(places, tmp_path):
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        TokenBatches(places, batch_size=4, context=10).batches(-1)
    with pytest.raises(ValueError, match="stride must be at most context=10, got 11"):
        evaluation_batches(places, context=10, batch_size=2, stride=11)
    with pytest.raises(ValueError, match="has 1 tokens: there is nothing to predict"):
        evaluation_batches(write(tmp_path / "tokens", [0]), context=10, batch_size=2)
