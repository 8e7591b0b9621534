"""Sparse linear layers: each kernel within rounding of float64, a drop-in for both kinds of layer, chosen by timing."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from horst.export import Plan, SparseLinear, load_sparse, plan_for, save_sparse, sparse_linear, sparsify
from horst.export.cpu_kernels import KERNELS, available_kernels, to_csr

SPARSE_KERNELS = [name for name in available_kernels() if name != "dense"]


def always(kernel):
    return Plan({1: {"dense": 1.0, kernel: 0.1}})


def pruned(rows, columns, sparsity):
    return torch.randn(rows, columns) * (torch.rand(rows, columns) >= sparsity)


def assert_within_rounding(y, x, weight, bias):
    """Any order of a float32 sum of n products is within about n eps of the sum of their magnitudes."""
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    terms = int((weight != 0).sum(dim=1).max()) + 2 if weight.numel() else 2
    assert bool(((y.double() - exact).abs() <= terms * 2**-24 * size + 1e-30).all())


@pytest.mark.parametrize("kernel", SPARSE_KERNELS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_kernels_agree_with_float64(kernel, tokens, bias):
    weight, b = pruned(96, 160, 0.9), torch.randn(96) if bias else None
    x = torch.randn(tokens, 160)
    y = KERNELS[kernel](x, to_csr(weight), b)
    assert y.shape == (tokens, 96)
    assert y.is_contiguous()
    assert_within_rounding(y, x, weight, b)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    tokens=st.integers(1, 70),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    kernel=st.sampled_from(SPARSE_KERNELS),
    seed=st.integers(0, 1000),
)
def test_kernels_agree_on_small_and_empty_rows(rows, columns, tokens, sparsity, kernel, seed):
    torch.manual_seed(seed)
    weight, x = pruned(rows, columns, sparsity), torch.randn(tokens, columns)
    assert_within_rounding(KERNELS[kernel](x, to_csr(weight), None), x, weight, None)


def conv1d(inputs, outputs):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


@pytest.mark.parametrize("kernel", [*SPARSE_KERNELS, "dense"])
@pytest.mark.parametrize("make", [nn.Linear, conv1d, lambda i, o: nn.Linear(i, o, bias=False)])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0)])
def test_it_drops_in_for_linear_and_conv1d(kernel, make, shape):
    layer = make(24, 40)
    layer.weight.data *= torch.rand_like(layer.weight) > 0.9
    plan = always(kernel) if kernel != "dense" else Plan({1: {"dense": 1.0, "bag": 2.0}})
    sparse = SparseLinear(layer, plan)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        expected, y = layer(x), sparse(x)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        x = torch.randn(24, 6, 4).permute(1, 2, 0)  # not contiguous
        torch.testing.assert_close(sparse(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [nn.Linear, conv1d])
def test_weight_and_state_dict_are_the_dense_layers(make):
    layer = make(16, 32)
    layer.weight.data *= torch.rand_like(layer.weight) > 0.9
    for plan in (always("bag"), Plan({1: {"dense": 1.0, "bag": 2.0}})):
        sparse = SparseLinear(layer, plan)
        assert torch.equal(sparse.weight, layer.weight)
        state = sparse.state_dict()
        assert list(state) == ["weight", "bias"]
        assert all(torch.equal(state[name], tensor) for name, tensor in layer.state_dict().items())
        make(16, 32).load_state_dict(state)


@pytest.mark.parametrize("plan", [always("bag"), Plan({1: {"dense": 1.0, "bag": 2.0}})], ids=["sparse", "dense"])
@pytest.mark.parametrize("make", [nn.Linear, conv1d, lambda i, o: nn.Linear(i, o, bias=False)])
def test_a_state_dict_is_read_back(make, plan):
    x = torch.randn(5, 16)
    first, second = make(16, 32), make(16, 32)
    for layer in (first, second):  # zeros in other places, and not as many
        layer.weight.data *= torch.rand_like(layer.weight) > (0.9 if layer is first else 0.7)
    sparse, kept = nn.Sequential(SparseLinear(first, plan)), copy.deepcopy(first)
    with torch.no_grad():
        sparse(x)  # the sparse tensor is made and must be made again
        state = nn.Sequential(second).state_dict()
        assert sparse.load_state_dict(state) == ([], [])
        torch.testing.assert_close(sparse(x), second(x), rtol=1e-5, atol=1e-6)
        for name, tensor in state.items():
            assert torch.equal(sparse.state_dict()[name], tensor)
            tensor.zero_()
        assert sparse[0].weight.any(), "the layer's own, not the state's"
        assert sparse[0].stored.kept == int(sparse[0].weight.count_nonzero())
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), kept.parameters(), strict=True))


def test_a_state_that_does_not_fit_is_refused_as_torch_does():
    sparse = nn.Sequential(SparseLinear(nn.Linear(16, 32), always("bag")))
    state = sparse.state_dict()
    for bad, text in (
        ({**state, "0.weight": torch.ones(16, 32)}, r"size mismatch for 0.weight: .* \(16, 32\), .* \(32, 16\)"),
        ({**state, "0.weight": torch.ones(32)}, r"size mismatch for 0.weight: .* \(32,\)"),
        ({**state, "0.bias": torch.ones(3)}, r"size mismatch for 0.bias"),
        ({"0.bias": state["0.bias"]}, r'Missing key\(s\) in state_dict: "0.weight"'),
        ({"0.weight": state["0.weight"]}, r'Missing key\(s\) in state_dict: "0.bias"'),
        ({**state, "0.scale": torch.ones(3)}, r'Unexpected key\(s\) in state_dict: "0.scale"'),
    ):
        with pytest.raises(RuntimeError, match=text):
            sparse.load_state_dict(bad)
    assert sparse.load_state_dict({}, strict=False) == (["0.weight", "0.bias"], [])
    assert all(torch.equal(value, state[name]) for name, value in sparse.state_dict().items())


def test_copies_and_pickles_work():
    layer = nn.Linear(16, 32)
    layer.weight.data *= torch.rand_like(layer.weight) > 0.9
    sparse, x = SparseLinear(layer, always(SPARSE_KERNELS[0])).eval(), torch.randn(2, 16)
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(sparse), torch.load(buffer, weights_only=False), sparse.cpu()):
        assert torch.equal(other(x), sparse(x))
    copied = copy.deepcopy(sparse)
    copied.stored.values.zero_()
    assert not torch.equal(copied(x), sparse(x))


def test_what_it_cannot_do_is_said():
    layer = nn.Linear(4, 4)
    sparse = SparseLinear(layer, always("bag"))
    with pytest.raises(RuntimeError, match="for inference and has no gradient"):
        sparse(torch.randn(2, 4, requires_grad=True))
    with pytest.raises(ValueError, match=r"computes in float32 on a CPU, got torch.float64"):
        sparse(torch.randn(2, 4).double())
    with pytest.raises(ValueError, match=r"model.float\(\).cpu\(\)"):
        SparseLinear(nn.Linear(4, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="got Conv2d"):
        SparseLinear(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="tokens must be a list of counts"):
        sparsify(layer, tokens=(0,))
    with pytest.raises(TypeError, match=r"tokens must be a list of counts, got 1. For one count write \(1,\)"):
        sparsify(layer, tokens=1)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got './dir'"):
        sparsify("./dir")


def test_the_plan_takes_the_nearest_measurement_and_asks_for_a_margin():
    plan = Plan(
        {
            1: {"dense": 1.0, "csr": 0.5, "bag": 0.7},
            16: {"dense": 1.0, "csr": 0.95, "bag": 0.93},  # faster by less than the margin
            256: {"dense": 1.0, "csr": 2.0, "bag": 0.9},
        }
    )
    assert [plan.kernel(n) for n in (0, 1, 3, 5, 16, 60, 70, 256, 10**6)] == [
        *["csr"] * 3,
        *["dense"] * 3,
        *["bag"] * 3,
    ]
    assert plan.choices() == {"csr", "dense", "bag"}


def test_plans_are_measured_once_for_each_case():
    weight = pruned(32, 32, 0.9)
    plan = plan_for(weight, tokens=(1, 4))
    assert plan_for(weight.clone(), tokens=(1, 4)) is plan
    assert plan_for(weight, tokens=(1, 5)) is not plan
    assert {name for seconds in plan.seconds.values() for name in seconds} == set(available_kernels())


class Block(nn.Module):
    """Every kind of layer that sparsify must tell apart."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.plain = nn.Linear(8, 8)
        self.full = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda module, inputs, output: output + 1)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.full:
                module.weight.data[:, 1:] = 0

    def forward(self, tokens):
        x = self.plain(self.embedding(tokens))
        x = self.hooked(self.full(self.attention(x, x, x)[0])) + self.narrow(x.bfloat16()).float()
        return self.head(self.encoder(x))


def test_sparsify_replaces_only_what_it_may(monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: always("bag"))
    model, tokens = Block().eval(), torch.randint(0, 12, (2, 5))
    expected = model(tokens)
    assert sparsify(model) is model
    assert [name for name, module in model.named_modules() if isinstance(module, SparseLinear)] == ["plain"]
    torch.testing.assert_close(model(tokens), expected.detach())
    assert not any(p.requires_grad for p in model.parameters())
    assert isinstance(sparsify(nn.Linear(4, 4).apply(lambda m: m.weight.data.zero_())), SparseLinear)


def test_sparsify_says_which_layers_it_cannot_take(caplog):
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    assert sparsify(model) is model
    assert "1 linear layers stay dense: on a CPU the sparse form is for float32, the layer is torch.bf" in caplog.text


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.GELU()])
def test_sparsify_that_converts_nothing_warns(model):
    with pytest.warns(UserWarning, match=r"sparsify\(\) converted none of [01] linear layers") as caught:
        sparsify(nn.Sequential(model))
    assert caught[0].filename == __file__


def test_sparsify_keeps_dense_weights_only_where_asked(monkeypatch):
    plan = Plan({1: {"dense": 1.0, "csr": 0.5}, 512: {"dense": 1.0, "csr": 2.0}})
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: plan)

    def model():
        return nn.Sequential(nn.Linear(8, 8).apply(lambda m: m.weight.data[1:].zero_()))

    assert isinstance(sparsify(model())[0], nn.Linear)  # dense wins at 512 tokens: leave it
    both = sparsify(model(), keep_dense=True)[0]
    assert isinstance(both, SparseLinear)
    assert both.dense is not None
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: always("csr"))
    assert sparsify(model(), keep_dense=True)[0].dense is None


def test_a_sparse_model_round_trips_through_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: always("bag"))

    def model():
        return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))

    dense, x = model(), torch.randn(3, 64)
    dense[0].weight.data.masked_fill_(torch.rand(96, 64) < 0.9, 0)
    path = save_sparse(dense, tmp_path / "dense")
    sparse = load_sparse(path, model(), sparse=True)
    assert [type(layer) for layer in sparse] == [SparseLinear, nn.GELU, nn.Linear]
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-5, atol=1e-6)
    assert save_sparse(sparse, tmp_path / "sparse").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="Load into the dense model"):
        load_sparse(path, sparse)


def test_a_pruned_gpt2_generates_the_same_text(monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: always("bag"))
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            p.data = 20 * p.data * (torch.rand_like(p) > 0.8)
    tokens = torch.randint(1, 64, (2, 6))
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    sparsify(model)
    assert sum(isinstance(module, SparseLinear) for module in model.modules()) == 8
    assert torch.equal(model.generate(tokens, **options), expected)
