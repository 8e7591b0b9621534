"""2:4 in torch's semi-structured form: the same outputs on a GPU, a clear error elsewhere."""

import pytest
import torch
from torch import nn

from horst.export import compare, is_two_four, to_semi_structured
from horst.sparsity import magnitude_mask


def two_four(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.masked_fill_(~magnitude_mask(module.weight.data, pattern="2:4"), 0)
    return model


def test_the_pattern_is_recognised():
    weight = torch.randn(8, 16)
    assert not is_two_four(weight)
    assert is_two_four(weight.masked_fill(~magnitude_mask(weight, pattern="2:4"), 0))
    assert is_two_four(torch.zeros(2, 4))
    assert not is_two_four(torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]))
    assert not is_two_four(torch.zeros(2, 6))
    assert not is_two_four(torch.zeros(8))


def test_dense_models_and_cpus_are_refused():
    with pytest.raises(ValueError, match="no linear layer of the model is 2:4"):
        to_semi_structured(nn.Linear(64, 64))
    model = two_four(nn.Linear(64, 64))
    weight = model.weight
    with pytest.raises(ValueError, match=r"need float16 or bfloat16 on a CUDA device, got .*On a CPU use sparsify"):
        to_semi_structured(model)
    assert model.weight is weight


@pytest.mark.gpu
def test_outputs_are_those_of_the_dense_weights():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layers = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), conv1d(256, 256)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    for module in model:
        if hasattr(module, "weight"):
            weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.t().contiguous()
            weight.masked_fill_(~magnitude_mask(weight, pattern="2:4"), 0)
            module.weight.data = weight if isinstance(module, nn.Linear) else weight.t().contiguous()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        row = compare(model, x, forms=("2:4",), seconds=0.1).rows[1]
        assert to_semi_structured(model) == ["0", "2", "3"]
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    assert row["memory_ratio"] < 0.8
    assert row["max_error"] < 2e-2
