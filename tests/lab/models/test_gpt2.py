"""GPT-2 against Hugging Face's, its counts against the paper's, its loss against the plain one."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from horst import param_groups
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.sparsity.layers import find_layers

TINY = GPT2Config(layers=2, heads=2, width=16, context=12, vocabulary=40, loss_rows=10)


def tiny(**changes):
    return GPT2(dataclasses.replace(TINY, **changes))


def some_tokens(rows=3, length=12, vocabulary=40):
    return torch.randint(vocabulary, (2, rows, length), generator=torch.Generator().manual_seed(1))


def with_random_biases_and_norms(model):
    """Biases of zero and norms of one would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.mul_(10)
    return model


@pytest.fixture(scope="module")
def paper_model():
    with torch.device("meta"):
        return GPT2()


def test_the_residual_stream_is_in_the_precision_asked_for():
    seen = {}
    for residual in ("float32", "autocast"):
        model = tiny(residual=residual)
        model.transformer.h[0].register_forward_hook(lambda m, x, y, name=residual: seen.update({name: y.dtype}))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 4, dtype=torch.int64))
    assert seen == {"float32": torch.float32, "autocast": torch.bfloat16}
    with pytest.raises(ValueError, match="residual must be one of float32, autocast, got 'half'"):
        GPT2Config(residual="half")


def test_the_default_has_the_paper_s_parameters(paper_model):
    assert sum(p.numel() for p in paper_model.parameters()) == 123_980_544
    assert paper_model.lm_head.weight is paper_model.transformer.wte.weight


def test_blocks_1_to_10_have_the_weights_that_table_6_prunes(paper_model):
    blocks = tuple(f"transformer.h.{i}." for i in range(1, 11))
    chosen = [layer for layer in find_layers(paper_model) if layer.name.startswith(blocks)]
    assert [layer.name for layer in chosen[:4]] == [
        f"transformer.h.1.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert sum(layer.param.numel() for layer in chosen) == 70_778_880


def test_linear_weights_decay_and_embeddings_norms_and_head_do_not(paper_model):
    rows = param_groups(paper_model, weight_decay=0.1, alpha=5.0).rows
    assert {row.name for row in rows if row.decay} == {layer.name for layer in find_layers(paper_model)}


def test_weights_start_as_the_paper_s_base_code_draws_them():
    model = GPT2(GPT2Config(layers=8, heads=2, width=128, context=256, vocabulary=512, bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 4 = sqrt(2 * 8 layers)
            assert_close(parameter.std().item(), std, rtol=0.03, atol=0)
            assert abs(parameter.mean().item()) < 0.03 * std


def test_the_global_seed_decides_the_weights():
    def drawn(seed):
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in tiny().parameters()])

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


@pytest.mark.parametrize("loss_rows", [None, 10, 36, 100])
def test_the_loss_is_the_cross_entropy_of_the_logits(loss_rows):
    model = tiny(loss_rows=loss_rows).double()
    tokens, targets = some_tokens()
    targets[0, :5] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    found = model.loss(tokens, targets)
    assert_close(found, expected)
    weights = list(model.parameters())
    assert_close(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights))


def test_no_token_sees_those_after_it():
    model = with_random_biases_and_norms(tiny().double())
    tokens, other = some_tokens()
    changed = torch.cat([tokens[:, :7], other[:, 7:]], dim=1)
    assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(tokens)[:, 7:], model(changed)[:, 7:])


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one():
    model = tiny().double()
    tokens, _ = some_tokens()
    assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


# torch 2.11 warns of its own tracing of an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("attention", ["auto", "cudnn"])
def test_a_traced_graph_under_autocast_gives_the_same_loss_and_gradients(attention):
    model = tiny(attention=attention)
    tokens, targets = some_tokens()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(tokens, targets)

    def loss_and_gradients(function):
        loss = function()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(loss_and_gradients(compiled), loss_and_gradients(step))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["auto", "cudnn"])
@pytest.mark.parametrize("loss_rows", [None, 64])
def test_compiled_on_a_gpu_the_error_is_at_most_twice_that_of_the_eager_logits(attention, loss_rows):
    config = GPT2Config(
        layers=2, heads=2, width=128, context=64, vocabulary=512, attention=attention, loss_rows=loss_rows
    )
    model = GPT2(config).cuda()
    tokens, targets = some_tokens(rows=8, length=64, vocabulary=512).cuda()

    def gradients(loss, model):
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    reference = copy.deepcopy(model).double()
    exact = gradients(F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten()), reference)
    with torch.autocast("cuda", torch.bfloat16):
        eager = gradients(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()), model)
        compiled = gradients(torch.compile(model.loss, fullgraph=True)(tokens, targets), model)
    assert (compiled - exact).norm() <= 2 * (eager - exact).norm()


def test_the_preferred_attention_kernel_does_not_change_the_logits():
    auto, cudnn = tiny().double(), tiny(attention="cudnn").double()
    cudnn.load_state_dict(auto.state_dict())
    tokens, _ = some_tokens()
    assert_close(auto(tokens), cudnn(tokens))


def test_dropout_acts_in_training_alone():
    model = tiny(dropout=0.5)
    tokens, _ = some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_s_logits_are_ours(bias, gelu, tied):
    model = with_random_biases_and_norms(tiny(bias=bias, gelu=gelu, tied=tied)).eval()
    theirs = model.to_hugging_face()
    tokens, _ = some_tokens()
    with torch.no_grad():
        assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
        assert_close(theirs.double()(tokens).logits, model.double()(tokens), rtol=1e-12, atol=1e-12)
        model.transformer.wte.weight.zero_()
    assert theirs.transformer.wte.weight.any(), "weights of its own"
    assert (theirs.lm_head.weight is theirs.transformer.wte.weight) == tied


def test_conversion_draws_no_random_numbers():
    model = tiny()
    state = torch.get_rng_state()
    model.to_hugging_face()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 5}, "width must be a multiple of heads, got 16 and 5"),
        ({"gelu": "quick"}, r"gelu must be one of \['exact', 'tanh'\], got 'quick'"),
        ({"dropout": 10}, "Give a fraction: 0.1, not 10"),
        ({"attention": "flash"}, "attention must be 'auto' or 'cudnn', got 'flash'"),
        ({"loss_rows": 0}, "loss_rows must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **setting)


def test_bad_tokens_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match=r"at most 12 in a sequence, the model's context, got shape \(1, 13\)"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got shape \(5,\)"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets must be shaped as tokens, \(1, 5\), got \(1, 4\)"):
        model.loss(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
