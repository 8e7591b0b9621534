"""The int8 head: within its bound of float64, tied or not, saved and loaded without a change."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from horst.export import Int8Embedding, Int8Linear, int8_head, load_sparse, quantize_head, save_sparse
from horst.export.int8_head import Int8Rows, has_int8_product, quantize_rows

transformers = pytest.importorskip("transformers")
PRODUCTS = [True, False] if has_int8_product() else [False]


def gpt2(tied=True):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 64}
    config = transformers.GPT2Config(**shape, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def llama(tied):
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=200, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval()


MODELS = {
    "gpt2": gpt2,
    "gpt2, untied": lambda: gpt2(tied=False),
    "llama": lambda: llama(False),
    "llama, tied": lambda: llama(True),
}
TOKENS = torch.arange(14).view(2, 7)


def exact_product(x, rows):
    """x @ W.T with W = scales * codes, in float64."""
    return x.double() @ (rows.codes.double() * rows.scales.double()[:, None]).t()


def assert_within_the_bound(y, x, rows):
    """Inputs are off by at most a 508th of a 127th of their largest; then come a few roundings in float32."""
    weight = rows.codes.double().abs() * rows.scales.double()[:, None]
    largest = x.double().abs().amax(dim=1, keepdim=True)
    bound = largest / (127 * 508) * weight.sum(dim=1)
    rounding = (x.shape[1] + 8) * 2**-24 * largest * weight.sum(dim=1)
    assert bool(((y.double() - exact_product(x, rows)).abs() <= bound + rounding + 1e-30).all())


@pytest.mark.parametrize("int8", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_products_agree_with_float64(monkeypatch, int8, tokens, bias):
    monkeypatch.setattr(int8_head, "has_int8_product", lambda: int8)
    rows, b = Int8Rows(torch.randn(5000, 96)), torch.randn(5000) if bias else None
    x = torch.randn(tokens, 96) * torch.logspace(-3, 3, tokens)[:, None]
    y = Int8Linear(rows, b)(x.view(1, tokens, 96))
    assert y.shape == (1, tokens, 5000)
    without_bias = y[0].double() - (0 if b is None else b.double())
    if bias:  # its sum is one more rounding, of a size of its own
        x, without_bias = x[-1:], without_bias[-1:]
    assert_within_the_bound(without_bias, x, rows)


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 70), tokens=st.integers(1, 6), int8=st.sampled_from(PRODUCTS),
    outlier=st.sampled_from([1.0, 50.0, 1e4]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_products_agree_at_every_shape_and_with_outliers(rows, columns, tokens, int8, outlier, seed):
    torch.manual_seed(seed)
    stored, x = Int8Rows(torch.randn(rows, columns)), torch.randn(tokens, columns)
    x[:, 0] *= outlier
    y = torch.empty(tokens, rows)
    (int8_head._packed_product if int8 else int8_head._float_product)(x, stored, y)
    assert_within_the_bound(y, x, stored)


def test_two_digits_hold_sixteen_bits_of_an_input():
    x = torch.randn(3, 100)
    digits, step = int8_head._digits(x)
    first, second = digits.double().sub(128).chunk(2)
    assert float(first.abs().max()) == 127
    assert float(second.abs().max()) <= 127
    error = (step.double() * (first + second / 254) - x.double()).abs()
    assert bool((error <= step.double() / 508 * (1 + 1e-4)).all())


@given(
    rows=st.integers(1, 6), columns=st.integers(1, 9), seed=st.integers(0, 1000), power=st.integers(-45, 30)
)  # from 1e-45, where float32 ends, to 1e30
def test_rows_are_within_half_a_scale_and_stay_where_they_are(rows, columns, seed, power):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * 10.0**power
    codes, scales = quantize_rows(weight)
    dense = codes.float() * scales[:, None]
    assert torch.equal(dense.double(), codes.double() * scales.double()[:, None])  # exact in float32
    assert bool(((dense.double() - weight.double()).abs() <= scales.double()[:, None] * (0.5 + 1e-6)).all())
    tightest = weight.double().abs().amax(dim=1) / 127
    assert bool((scales.double() <= (tightest * (1 + 2**-14)).clamp(min=1e-29)).all())
    again, same = quantize_rows(dense)
    assert torch.equal(again, codes)
    zeros = codes.eq(0).all(dim=1)  # of a row of zeros the scale says nothing
    assert torch.equal(same[~zeros], scales[~zeros])


def test_rows_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="infinite or NaN"):
        quantize_rows(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_quantized_weight(name):
    model = MODELS[name]()
    quantized = quantize_head(copy.deepcopy(model))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert isinstance(quantized.get_output_embeddings(), Int8Linear)
    assert isinstance(quantized.get_input_embeddings(), Int8Embedding if tied else nn.Embedding)
    model.load_state_dict(quantized.state_dict())  # the quantized weight in float32
    with torch.no_grad():
        expected, found = model(TOKENS).logits, quantized(TOKENS).logits
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.std()))
    assert torch.equal(quantized(TOKENS).logits, found)  # the same every time


@pytest.mark.parametrize("name", MODELS)
def test_generation_goes_on_with_a_cache(name):
    model = quantize_head(MODELS[name]())
    tokens = model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] <= 13
    with torch.no_grad():
        logits = model(tokens).logits
    assert torch.equal(logits[:, 6].argmax(-1), tokens[:, 7])  # the first new token is the model's own choice


def test_the_weight_alone_costs_the_untied_logits_at_most_half_a_scale_per_input():
    model = gpt2(tied=False)
    quantized = quantize_head(copy.deepcopy(model))
    with torch.no_grad():
        hidden, logits = model.transformer(TOKENS).last_hidden_state, model(TOKENS).logits
        error = (quantized(TOKENS).logits - logits).abs()
    bound = hidden.abs().sum(dim=-1, keepdim=True) * quantized.lm_head.rows.scales / 2
    assert bool((error <= 1.01 * bound).all())


def test_perplexity_of_a_trained_model_hardly_changes():
    model = gpt2()
    text = (torch.arange(64) * 7 % 23).view(1, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    with torch.no_grad():
        before = float(model(text, labels=text).loss)
        after = float(quantize_head(model)(text, labels=text).loss)
    assert before < 2.0  # of log(200) = 5.3: it learnt something
    assert abs(after - before) < 0.01


def test_state_dicts_are_float32_and_loading_one_back_changes_nothing(tmp_path):
    model = quantize_head(gpt2())
    with torch.no_grad():
        before = model(TOKENS).logits
    state = model.state_dict()
    assert set(state) == set(gpt2().state_dict())
    assert all(tensor.dtype == torch.float32 for tensor in state.values() if tensor.is_floating_point())
    assert state["lm_head.weight"] is not None
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()  # tied: a file has it once
    path = save_sparse(model, tmp_path / "model.safetensors")
    assert path.stat().st_size < 1.1 * save_sparse(gpt2(), tmp_path / "dense.safetensors").stat().st_size
    for _ in range(2):
        model.load_state_dict(load_sparse(path))
        with torch.no_grad():
            assert torch.equal(model(TOKENS).logits, before)


def test_loading_other_weights_replaces_both_ends_and_the_packed_copy():
    model, other = quantize_head(gpt2()), gpt2()
    for parameter in other.parameters():
        parameter.data.mul_(2)
    with torch.no_grad():
        before = model(TOKENS).logits
        model.load_state_dict(other.state_dict())
        expected = quantize_head(other)(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, expected)
    assert not torch.equal(before, expected)


def test_missing_and_misshapen_weights_are_named():
    model = quantize_head(gpt2(tied=False))
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight: .*\(3, 64\), the model's \(200, 64\)"):
        model.load_state_dict(state | {"lm_head.weight": torch.zeros(3, 64)})
    del state["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"lm_head.weight"'):
        model.load_state_dict(state)


def test_copies_and_moves_keep_one_weight():
    model = quantize_head(gpt2())
    with torch.no_grad():
        before = model(TOKENS).logits
        copied = copy.deepcopy(model).to("cpu")
        assert torch.equal(copied(TOKENS).logits, before)
    assert copied.lm_head.rows is copied.transformer.wte.rows
    assert copied.lm_head.rows is not model.lm_head.rows


def test_memory_falls_to_a_half_or_less():
    model = gpt2()
    dense = model.lm_head.weight.nbytes
    rows = quantize_head(model).lm_head.rows
    assert rows.codes.nbytes + rows.scales.nbytes < 0.27 * dense
    assert rows.nbytes_packed() == 0
    with torch.no_grad():
        model(TOKENS)
    assert rows.nbytes_packed() == (rows.codes.nbytes if has_int8_product() else 0)


def test_an_embedding_of_its_own_kind_keeps_float32():
    class Scaled(nn.Embedding):
        def forward(self, tokens):
            return 8 * super().forward(tokens)

    model = gpt2()
    scaled = Scaled(200, 64)
    scaled.weight = model.lm_head.weight
    model.transformer.wte = scaled
    with torch.no_grad():
        model(TOKENS)
        quantize_head(model)
        assert model.transformer.wte is scaled
        assert isinstance(model.lm_head, Int8Linear)


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(TypeError, match=r"got no head in Sequential"):
        quantize_head(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu. Convert the model first"):
        quantize_head(gpt2().bfloat16())
    with pytest.raises(ValueError, match="in int8 already"):
        quantize_head(quantize_head(gpt2()))
    layer = Int8Linear(Int8Rows(torch.randn(4, 3)))
    with pytest.raises(ValueError, match=r"computes in float32 on a CPU, got torch.float64"):
        layer(torch.randn(1, 3).double())
    with pytest.raises(RuntimeError, match="has no gradient"):
        layer(torch.randn(1, 3, requires_grad=True))


def test_a_build_without_the_product_says_so(monkeypatch):
    monkeypatch.setattr(int8_head, "has_int8_product", lambda: False)
    with pytest.warns(UserWarning, match="the head is smaller now, and slower"):
        quantize_head(gpt2())


@pytest.mark.parametrize("x", [torch.zeros(1, 3), torch.zeros(0, 3)])
def test_zeros_and_nothing_give_zeros_and_nothing(x):
    assert torch.equal(Int8Linear(Int8Rows(torch.randn(4, 3)))(x), torch.zeros(len(x), 4))


def test_inputs_that_are_not_finite_give_outputs_that_are_not():
    y = Int8Linear(Int8Rows(torch.randn(4, 3)))(torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), 1.0, 2.0]]))
    assert not bool(y.isfinite().any())
