"""Which weights are masked: presets on real architectures, patterns, ties, and the summary."""

import pytest
import timm
import torch
from sparse_methods import Tiny, adamw
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from horst.sparsity import Static, find_layers
from horst.sparsity.layers import is_linear, summary_table


def names(model, *args, **kwargs):
    return [layer.name for layer in find_layers(model, *args, **kwargs)]


def count(model, *args):
    return sum(layer.param.numel() for layer in find_layers(model, *args))


@pytest.fixture(scope="module")
def deit_small():
    with torch.device("meta"):
        return timm.create_model("deit_small_patch16_224")


@pytest.fixture(scope="module")
def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2))


def test_deit_small_has_the_papers_prunable_weights(deit_small):
    assert count(deit_small) == 21_233_664
    assert count(deit_small, "all_linear") == 21_233_664 + 384_000
    assert count(deit_small, "all") == 21_233_664 + 384_000 + 384 * 3 * 16 * 16


def test_deit_base_has_the_papers_prunable_weights():
    with torch.device("meta"):
        model = timm.create_model("deit_base_patch16_224")
    assert count(model) == 84_934_656
    assert count(model, "all_linear") == 84_934_656 + 768_000


def test_blocks_of_gpt2_are_conv1d_with_the_input_first(gpt2):
    layers = find_layers(gpt2)
    assert [layer.name for layer in layers[:4]] == [
        f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert len(layers) == 8
    assert all(layer.input_dim == 0 for layer in layers)


def test_nm_on_conv1d_groups_along_the_input(gpt2):
    optimizer = adamw(gpt2.parameters())
    sparsifier = Static(gpt2, optimizer, pattern="2:4")
    for layer in sparsifier.layers:
        assert (sparsifier.masks[layer.name].t().reshape(-1, 4).sum(1) == 2).all()


def test_a_tied_head_appears_once(gpt2):
    assert names(gpt2, "all_linear").count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in names(gpt2, "all_linear")
    assert len(find_layers(gpt2, "all_linear")) == 9


def test_bert_and_torch_transformers_have_blocks():
    bert = BertModel(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12)
    )
    assert len(find_layers(bert)) == 12
    assert all(name.startswith("encoder.layer.") for name in names(bert))
    torch_encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2, enable_nested_tensor=False)
    assert names(torch_encoder)[:2] == ["layers.0.self_attn.in_proj_weight", "layers.0.self_attn.out_proj.weight"]
    assert len(find_layers(torch_encoder)) == 8


def test_include_adds_and_exclude_has_the_last_word():
    model = Tiny()
    assert names(model, include=["head.*"])[-1] == "head.weight"
    assert names(model, exclude=["*.1.*"]) == ["blocks.0.fc1.weight", "blocks.0.fc2.weight"]
    assert names(model, None, include=["embed.weight", "head.*"], exclude=["head.weight"]) == ["embed.weight"]


def test_wrappers_do_not_change_names():
    model = Tiny()
    assert names(torch.compile(model)) == names(model)
    assert names(nn.ModuleDict({"module": torch.compile(model)})) == names(model)


def test_names_that_differ_in_a_wrapper_only_are_refused():
    class Inner(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.module = nn.Linear(4, 4)

    with pytest.raises(ValueError, match=r"two parameters are called '0.weight' .*one of them is '0.module.weight'"):
        find_layers(nn.Sequential(Inner()), "all_linear")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("distribution", ["uniform", "global", "erk"])
def test_empty_weights_are_left_out(distribution):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0))
    optimizer = adamw(model.parameters())
    sparsifier = Static(model, optimizer, sparsity=0.5, layers="all_linear", distribution=distribution)
    assert list(sparsifier.masks) == ["0.weight"]
    assert "50.0%" in sparsifier.summary()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"preset": "block"}, ValueError, "layers must be 'blocks', 'all_linear', 'all' or None, got 'block'"),
        (
            {"include": ["haed.*"]},
            ValueError,
            r"include='haed.\*' matches no parameter .* Names look like: embed.weight",
        ),
        ({"exclude": ["norm"]}, ValueError, "exclude='norm' matches no parameter"),
        ({"exclude": "head.*"}, TypeError, "lists of patterns"),
        ({"exclude": ["blocks.*"]}, ValueError, "nothing to mask"),
        ({"preset": None}, ValueError, "nothing to mask"),
    ],
)
def test_choices_that_choose_nothing_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        find_layers(Tiny(), **arguments)


def test_a_model_without_blocks_is_told_what_to_do():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="No transformer blocks were found: use layers='all_linear'"):
        find_layers(model)


def test_what_leaves_nothing_to_mask_is_named():
    with pytest.raises(ValueError, match=r"What they choose is frozen \(requires_grad=False\)\. Parameters of"):
        find_layers(Tiny().requires_grad_(False))
    convolutions = nn.Sequential(*[nn.Sequential(nn.Conv2d(2, 2, 3)) for _ in range(3)])
    with pytest.raises(ValueError, match="The blocks hold no linear layers: use layers='all_linear' or 'all'"):
        find_layers(convolutions)
    with pytest.raises(ValueError, match=r"exclude=\['\*'\] choose no trainable weight\. Parameters of"):
        find_layers(Tiny(), exclude=["*"])


def test_the_summary_counts_layers_and_the_whole_model():
    model = Tiny()
    sparsifier = Static(model, adamw(model.parameters()), sparsity=0.5)
    lines = [line.split() for line in sparsifier.summary().splitlines()]
    assert lines[0] == ["layer", "shape", "weights", "zeros", "share"]
    assert lines[1] == ["blocks.0.fc1.weight", "12x8", "96", "48", "50.0%"]
    assert lines[5] == ["these", "layers", "384", "192", "50.0%"]
    total = sum(p.numel() for p in model.parameters())
    assert lines[6] == ["whole", "model", str(total), "192", f"{19200 / total:.1f}%"]


def test_frozen_weights_are_left_out_unless_asked_for():
    model = Tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="choose no trainable weight"):
        find_layers(model)
    assert names(model, frozen=True) == names(Tiny())


def test_linear_layers_are_linear_and_conv1d(gpt2):
    assert is_linear(gpt2.transformer.h[0].attn.c_attn)
    assert is_linear(gpt2.lm_head)
    assert not any(
        is_linear(module) for module in (nn.Conv1d(2, 2, 1), nn.Embedding(2, 2), nn.MultiheadAttention(2, 1))
    )


def test_a_table_of_large_layers_and_errors_keeps_its_columns_apart():
    rows = [("a.long.name.of.a.layer", (50304, 768), 5), ("b", (4, 4), 8)]
    table = summary_table(rows, 50304 * 768 + 16, {"b": 0.25})
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][-1] == "error"
    assert lines[1] == ["a.long.name.of.a.layer", "50304x768", "38633472", "5", "0.0%"]
    assert lines[2] == ["b", "4x4", "16", "8", "50.0%", "0.25"]


def test_only_a_layer_of_zeros_alone_is_shown_as_100_per_cent():
    lines = summary_table([("a", (100, 100), 9_996), ("b", (2, 2), 4)], 10_004).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["99.9%", "100.0%", "99.9%", "99.9%"]
