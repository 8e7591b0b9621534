"""Kinds of parameters: what a layer is counts before what it is called."""

import pytest
import timm
import torch
import transformers
from torch import nn

from horst.parameters.kinds import parameter_kinds


class NormedLinear(nn.Linear):
    """A linear layer that normalises its input, as classifiers of long-tailed data do."""


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), transformers.Conv1D(4, 4), nn.Conv1d(4, 4, 3), NormedLinear(4, 4)])
@pytest.mark.parametrize("name", ["pos_ffn", "pos_q_proj", "position_wise", "class_embedding", "fc"])
def test_the_weight_of_a_linear_layer_or_convolution_is_a_matrix_whatever_it_is_called(name, layer):
    model = nn.ModuleDict({name: layer, "norm": nn.LayerNorm(4)})
    assert parameter_kinds(model) == {
        f"{name}.weight": "matrix",
        f"{name}.bias": "bias",
        "norm.weight": "norm",
        "norm.bias": "norm",
    }


@pytest.mark.parametrize("name", ["wpe", "pos_embed", "embed_positions", "position_embeddings"])
def test_a_table_of_positions_is_one(name):
    assert parameter_kinds(nn.ModuleDict({name: nn.Embedding(4, 4)})) == {f"{name}.weight": "position"}
    assert parameter_kinds(nn.ParameterDict({name: nn.Embedding(4, 4).weight})) == {name: "position"}


def test_a_head_is_one_whatever_its_class_is_called():
    assert parameter_kinds(nn.ModuleDict({"head": NormedLinear(4, 4, bias=False)})) == {"head.weight": "head"}


@pytest.mark.parametrize("name", ["rel_pos_h", "pixel_pos", "cls_token_0", "cls_token1", "register_tokens"])
def test_a_table_of_positions_or_special_tokens_is_one_under_the_names_of_other_models(name):
    assert parameter_kinds(nn.ParameterDict({name: torch.zeros(4, 4)})) == {name: "position"}


def test_the_distillation_token_of_transformers_is_a_special_token():
    config = transformers.DeiTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=16, patch_size=8
    )
    kinds = parameter_kinds(transformers.DeiTModel(config))
    tokens = {"embeddings.cls_token", "embeddings.distillation_token", "embeddings.position_embeddings"}
    assert {name for name, kind in kinds.items() if kind == "position"} == tokens


@pytest.mark.parametrize(
    ("model", "name"), [("fastvit_t8", "layer_scale.gamma"), ("swinv2_tiny_window8_256", "logit_scale")]
)
def test_scales_with_more_dimensions_of_size_1_are_vectors(model, name):
    with torch.device("meta"):
        kinds = parameter_kinds(timm.create_model(model))
    assert {kind for key, kind in kinds.items() if key.endswith(name)} == {"vector"}


def test_one_row_of_a_layer_is_a_matrix_and_a_bias_of_attention_is_a_bias():
    model = nn.ModuleDict(
        {
            "gate": nn.Linear(4, 1),
            "types": nn.Embedding(1, 4),
            "classifier": nn.Linear(4, 1, bias=False),
            "attention": nn.MultiheadAttention(4, 1, bias=False, add_bias_kv=True),
        }
    )
    assert parameter_kinds(model) == {
        "gate.weight": "matrix",
        "gate.bias": "bias",
        "types.weight": "embedding",
        "classifier.weight": "head",
        "attention.in_proj_weight": "matrix",
        "attention.bias_k": "bias",
        "attention.bias_v": "bias",
        "attention.out_proj.weight": "matrix",
    }
