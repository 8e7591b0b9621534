"""Hugging Face directories: dense ones any tool loads, sparse ones one call loads, and no way out of the folder."""

import json

import pytest
import torch
from torch import nn

from horst.export import (
    InvalidFileError,
    SparseLinear,
    load_pretrained,
    load_sparse,
    save_hugging_face,
    sparse_linear,
)
from horst.export.plan import Plan

transformers = pytest.importorskip("transformers")


def tiny_gpt2(**options):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0, **options
    )
    return prune(transformers.GPT2LMHeadModel(config))


def tiny_llama():
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        bos_token_id=0,
        eos_token_id=0,
    )
    return prune(transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def tiny_bert():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=96
    )
    return prune(transformers.BertModel(config))


def prune(model):
    for name, p in model.named_parameters():
        if p.dim() == 2 and "emb" not in name and "wte" not in name and "wpe" not in name and "head" not in name:
            p.data.masked_fill_(torch.rand(p.shape) < 0.9, 0)
    return model.eval()


class Ours(nn.Module):
    """A model of another library that knows its Hugging Face form."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_gpt2()

    def to_hugging_face(self):
        return self.inner


def assert_same(a, b):
    assert type(a) is type(b)
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert all(first[name].dtype == second[name].dtype for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
    tokens = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        assert torch.equal(a(tokens)[0], b(tokens)[0])


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_bert])
@pytest.mark.parametrize("sparse", [False, True])
def test_round_trip(tmp_path, make, sparse):
    model = make()
    assert save_hugging_face(model, tmp_path / "m", sparse=sparse) == tmp_path / "m"
    assert_same(load_pretrained(tmp_path / "m"), model)
    assert (tmp_path / "m" / "model.sparse.safetensors").exists() == sparse
    assert (tmp_path / "m" / "model.safetensors").exists() != sparse
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_auto_model_loads_the_dense_directory_of_any_model_that_converts_itself(tmp_path):
    model = Ours()
    save_hugging_face(model, tmp_path / "m")
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m"), model.inner)
    assert_same(load_pretrained(tmp_path / "m"), model.inner)


def test_ties_and_generation_settings_come_back(tmp_path):
    model = tiny_gpt2()
    model.generation_config.max_new_tokens = 17
    save_hugging_face(model, tmp_path / "m", sparse=True)
    loaded = load_pretrained(tmp_path / "m")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.generation_config.max_new_tokens == 17
    assert model.config.architectures == tiny_gpt2().config.architectures  # the caller's config is left alone
    untied = tiny_gpt2(tie_word_embeddings=False)
    save_hugging_face(untied, tmp_path / "untied", sparse=True)
    assert_same(load_pretrained(tmp_path / "untied"), untied)


def test_a_sparse_directory_has_the_dtypes_of_a_dense_one_in_what_no_file_holds(tmp_path):
    """The causal mask of OpenAI's first GPT is a buffer that is not saved: in float32 the model did not run."""
    config = transformers.OpenAIGPTConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=96, n_positions=16)
    transformers.OpenAIGPTLMHeadModel(config).bfloat16().save_pretrained(tmp_path / "dense")
    dense = load_pretrained(tmp_path / "dense")
    sparse = load_pretrained(save_hugging_face(dense, tmp_path / "sparse", sparse=True))
    kinds = [{name: b.dtype for name, b in model.named_buffers()} for model in (dense, sparse)]
    assert kinds[0] == kinds[1]
    tokens = torch.randint(96, (2, 12))
    with torch.no_grad():
        assert torch.equal(dense(tokens).logits, sparse(tokens).logits)
    assert torch.get_default_dtype() == torch.float32


def test_sharded_dense_directories_load(tmp_path):
    model = tiny_gpt2()
    model.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    assert_same(load_pretrained(tmp_path / "m"), model)


def test_layers_can_be_loaded_sparse_and_saved_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: Plan({1: {"dense": 1.0, "bag": 0.1}}))
    model = tiny_gpt2()
    for sparse in (False, True):
        save_hugging_face(model, tmp_path / f"{sparse}", sparse=sparse)
        loaded = load_pretrained(tmp_path / f"{sparse}", sparse=True)
        assert sum(isinstance(module, SparseLinear) for module in loaded.modules()) == 8
        save_hugging_face(loaded, tmp_path / f"{sparse} again", sparse=sparse)
        assert_same(load_pretrained(tmp_path / f"{sparse} again"), model)


@pytest.mark.parametrize("sparse", [False, True])
def test_tokenizer_files_are_copied(tmp_path, sparse):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "merges.txt").write_text("a b")
    (source / "pytorch_model.bin").write_text("not this")
    save_hugging_face(tiny_gpt2(), tmp_path / "m", sparse=sparse, tokenizer=source)
    assert (tmp_path / "m" / "merges.txt").read_text() == "a b"
    assert not (tmp_path / "m" / "pytorch_model.bin").exists()
    with pytest.raises(FileNotFoundError, match="has no tokenizer files"):
        save_hugging_face(tiny_gpt2(), tmp_path / "n", sparse=sparse, tokenizer=tmp_path / "m" / "nowhere")
    assert not (tmp_path / "n").exists()


def test_a_tokenizer_is_saved(tmp_path):
    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "vocab.json").write_text("{}")

    save_hugging_face(tiny_gpt2(), tmp_path / "m", sparse=True, tokenizer=Tokenizer())
    assert (tmp_path / "m" / "vocab.json").exists()


def test_existing_directories_and_foreign_models_are_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "file").write_text("x")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        save_hugging_face(tiny_gpt2(), tmp_path / "m")
    with pytest.raises(TypeError, match=r"Linear is no transformers model and has no to_hugging_face\(\)"):
        save_hugging_face(nn.Linear(2, 2), tmp_path / "n")
    with pytest.raises(NotADirectoryError):
        load_pretrained(tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def sharded(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path / "m", max_shard_size="50KB")
    return tmp_path / "m", tmp_path / "m" / "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["../secret.safetensors", "{tmp}/secret.safetensors", "link.safetensors", 7])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, name):
    folder, index = sharded(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    name = name.format(tmp=tmp_path) if isinstance(name, str) else name
    edit(index, weight_map=weight_map | {"transformer.wte.weight": name})
    with pytest.raises(InvalidFileError, match=r"out of its folder m|is not the name of a file"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"), [({"a": "absent.safetensors"}, "not there: absent"), ([], "no weight_map"), ({}, "no w")]
)
def test_a_bad_index_is_refused(tmp_path, weight_map, message):
    folder, index = sharded(tmp_path)
    edit(index, weight_map=weight_map)
    with pytest.raises(InvalidFileError, match=message):
        load_pretrained(folder)


def test_links_out_of_the_folder_are_refused(tmp_path):
    save_hugging_face(tiny_gpt2(), tmp_path / "a", sparse=True)
    save_hugging_face(tiny_gpt2(), tmp_path / "b")
    for folder, file in (("a", "model.sparse.safetensors"), ("b", "model.safetensors"), ("b", "config.json")):
        (tmp_path / folder / file).rename(tmp_path / f"{folder}-{file}")
        (tmp_path / folder / file).symlink_to(tmp_path / f"{folder}-{file}")
        with pytest.raises(InvalidFileError, match="is a link out of its folder"):
            load_pretrained(tmp_path / folder)


def test_pickles_are_refused(tmp_path):
    save_hugging_face(tiny_gpt2(), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(tiny_gpt2().state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(InvalidFileError, match=r"pytorch_model.bin may be pickles, .* never loaded"):
        load_pretrained(tmp_path / "m")
    torch.save(tiny_gpt2().state_dict(), tmp_path / "m" / "model.safetensors")
    with pytest.raises(InvalidFileError, match="is a pickle"):
        load_pretrained(tmp_path / "m")


@pytest.mark.parametrize("sparse", [False, True])
def test_truncated_weights_are_refused(tmp_path, sparse):
    save_hugging_face(tiny_gpt2(), tmp_path / "m", sparse=sparse)
    file = next((tmp_path / "m").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidFileError, match="is truncated"):
        load_pretrained(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["os"]}, "names the architecture 'os'"),
        ({"architectures": ["AutoModel"]}, "names the architecture 'AutoModel'"),
        ({"architectures": None}, "names the architecture None"),
        ({"architectures": [["GPT2Model"]]}, "names the architecture None"),
        ({"transformers_weights": "../x.safetensors"}, "takes its weights from elsewhere"),
    ],
)
def test_configurations_that_lead_elsewhere_are_refused(tmp_path, change, message):
    for sparse in (False, True):
        save_hugging_face(tiny_gpt2(), tmp_path / f"{sparse}", sparse=sparse)
        edit(tmp_path / f"{sparse}" / "config.json", **change)
        with pytest.raises(InvalidFileError, match=message):
            load_pretrained(tmp_path / f"{sparse}")


def test_other_damage_to_a_directory_is_refused(tmp_path):
    save_hugging_face(tiny_gpt2(), tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidFileError, match="an adapter"):
        load_pretrained(tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").unlink()
    edit(tmp_path / "m" / "config.json", n_layer=3)
    with pytest.raises(
        InvalidFileError, match=r"does not hold all weights of GPT2LMHeadModel: it lacks transformer.h.2"
    ):
        load_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(InvalidFileError, match="is not valid JSON"):
        load_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(InvalidFileError, match=r"has no config\.json"):
        load_pretrained(tmp_path / "m")


def test_a_sparse_file_of_another_model_is_refused(tmp_path):
    save_hugging_face(tiny_gpt2(), tmp_path / "m", sparse=True)
    edit(tmp_path / "m" / "config.json", n_layer=3)
    with pytest.raises(ValueError, match=r"is not of this model: it lacks transformer\.h\.2"):
        load_pretrained(tmp_path / "m")


def test_a_file_and_a_directory_each_name_the_function_that_reads_them(tmp_path):
    folder = save_hugging_face(tiny_gpt2(), tmp_path / "sparse", sparse=True)
    with pytest.raises(IsADirectoryError, match=r"sparse is a directory.* with horst\.export\.load_pretrained"):
        load_sparse(folder)
    with pytest.raises(NotADirectoryError, match=r"is not a directory.* is read by horst\.export\.load_sparse"):
        load_pretrained(folder / "model.sparse.safetensors")
