"""Kinds of parameters: what a layer is counts before what it is called."""

import pytest
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
