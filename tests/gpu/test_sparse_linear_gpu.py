"""Sparse layers on a CUDA device: each launch within rounding of float64, graphs, compilation, generation, memory."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn

from horst.export import Plan, SparseLinear, plan_for, sparse_linear, sparsify
from horst.export.gpu_kernels import LAUNCHES
from horst.kernels.sparse_matvec import Launch, driver, operator, pack, sparse_matvec

pytestmark = pytest.mark.gpu
STAGED = next(name for name in LAUNCHES if "staged" in name)
TRITON = next(name for name in LAUNCHES if "staged" not in name)


def pruned(rows, columns, sparsity=0.9, dtype=torch.bfloat16):
    weight = torch.randn(rows, columns, device="cuda").to(dtype)
    return weight.masked_fill_(torch.rand(rows, columns, device="cuda") < sparsity, 0)


def sparse_layer(layer, kernel):
    layer.weight.data.masked_fill_(torch.rand_like(layer.weight, dtype=torch.float32) < 0.9, 0)
    return SparseLinear(layer, Plan({1: {"dense": 1.0, kernel: 0.1}, 64: {"expanded": 0.1, kernel: 1.0}}))


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16, 20])
@pytest.mark.parametrize("shape", [(1024, 4096), (777, 1999), (33, 14336)])
def test_every_launch_agrees_with_float64(name, tokens, shape):
    weight, x = pruned(*shape), torch.randn(tokens, shape[1], device="cuda").bfloat16()
    weight[3] = 0
    y = sparse_matvec(x, pack(weight), None, LAUNCHES[name])
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    allowed = (shape[1] + 2) * 2**-24 * size + 2**-8 * exact.abs()
    assert bool(((y.double() - exact).abs() <= allowed).all())
    assert torch.equal(y, sparse_matvec(x, pack(weight), None, LAUNCHES[name]))


@pytest.mark.parametrize("kernel", [STAGED, TRITON])
@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_a_captured_graph_equals_eager_calls(kernel, tokens):
    layer = sparse_layer(nn.Linear(512, 768, device="cuda", dtype=torch.bfloat16), kernel)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(layer(x)[:, :512].contiguous())
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, layer(layer(x)[:, :512].contiguous()))


def chain(layers, x, kernel_between):
    """Each layer on the outputs of the one before it: a launch that does not wait for them reads what was there."""
    for _ in range(100 // len(layers)):
        for layer in layers:
            x = torch.tanh(layer(x)) if kernel_between else layer(x)
    return x


@pytest.mark.parametrize("name", [name for name, launch in LAUNCHES.items() if launch.overlap])
@pytest.mark.parametrize("kernel_between", [False, True])
def test_overlapping_launches_wait_for_their_inputs(name, kernel_between):
    torch.manual_seed(0)
    width = 2048
    weights = [pruned(width, width) / (0.1 * width) ** 0.5 for _ in range(2)]
    matrices = [pack(weight) for weight in weights]
    x = torch.randn(1, width, device="cuda").bfloat16()
    launch = LAUNCHES[name]
    alone = Launch(launch.rows, launch.block, launch.warps, staged=launch.staged)  # the same sums in the same order
    layers = [functools.partial(sparse_matvec, matrix=matrix, launch=launch) for matrix in matrices]
    expected = chain([functools.partial(sparse_matvec, matrix=m, launch=alone) for m in matrices], x, kernel_between)
    assert bool(expected.isfinite().all())
    assert float(expected.abs().max()) > 0
    for _ in range(20):
        assert torch.equal(chain(layers, x, kernel_between), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(layers, x, kernel_between)
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def test_a_matrix_is_complete_when_it_is_packed_copied_or_moved():
    """Overlapping launches read it before they wait for what was launched before them."""
    torch.manual_seed(0)
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    for seed in range(10):
        torch.manual_seed(seed)
        weight = pruned(4096, 4096)
        y = sparse_matvec(x, pack(weight), None, LAUNCHES[STAGED])
        expected = x.float() @ weight.float().t()
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=0.2)
        layer = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        layer.weight.data = weight
        sparse = SparseLinear(layer, Plan({1: {"dense": 1.0, STAGED: 0.1}}))
        with torch.no_grad():
            for same in (copy.deepcopy(sparse), sparse.cpu().cuda(), sparse._apply(torch.clone)):
                assert torch.equal(same(x), y)


def test_overlapping_is_available_on_sm_90():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm_90")
    assert driver.can_overlap(torch.device("cuda", 0))


def test_the_short_way_equals_the_operator():
    layer = sparse_layer(nn.Linear(512, 768, device="cuda", dtype=torch.bfloat16), STAGED)
    stream = torch.cuda.Stream()
    with torch.no_grad():
        for tokens in (1, 2, 3, 7, 8, 9, 16, 100):
            x = torch.randn(2, tokens, 512, device="cuda").bfloat16()[:, :, :]
            stored = layer.stored
            tensors = (stored.columns, stored.values, stored.starts, stored.order, None)
            expected = operator.sparse_linear(x, *tensors, layer.bias, stored._form)
            assert torch.equal(layer(x), expected)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                y = layer(x)
            stream.synchronize()
            assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("kernel", [STAGED, TRITON])
def test_a_call_never_waits_for_the_device(kernel):
    layer = sparse_layer(nn.Linear(512, 768, device="cuda", dtype=torch.bfloat16), kernel)
    inputs = [torch.randn(tokens, 512, device="cuda").bfloat16() for tokens in (1, 3, 100)]
    with torch.no_grad():
        expected = [layer(x) for x in inputs]
        torch.cuda.set_sync_debug_mode("error")
        found = [layer(x) for x in inputs]
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", [STAGED, TRITON])
def test_it_compiles(kernel):
    model = nn.Sequential(sparse_layer(nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16), kernel), nn.GELU())
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for tokens in (1, 5, 100):
            x = torch.randn(tokens, 256, device="cuda").bfloat16()
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


def test_sparsify_measures_and_frees_the_dense_weights(caplog):
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers[:3]:
        layer.weight.data.masked_fill_(torch.rand_like(layer.weight, dtype=torch.float32) < 0.95, 0)
    del layers, layer
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    with torch.no_grad():
        expected = model(x)
        gc.collect()
        before = torch.cuda.memory_allocated()
        sparsify(model)
        gc.collect()
        after = torch.cuda.memory_allocated()
        torch.testing.assert_close(model(x), expected, rtol=5e-2, atol=5e-2 * float(expected.abs().max()))
    assert [type(layer) for layer in model] == [SparseLinear] * 3 + [nn.Linear]
    assert after - before < -0.8 * 3 * 2 * 4096**2
    assert "is left out" not in caplog.text


def test_a_plan_is_measured_once_and_knows_many_tokens():
    weight = pruned(2048, 2048)
    plan = plan_for(weight)
    assert plan_for(weight.clone()) is plan
    assert "dense" in plan.seconds[1]
    assert all("dense" not in seconds for tokens, seconds in plan.seconds.items() if tokens != 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation_goes_on_as_before(kind, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, **ends))
    else:
        sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 64, "n_positions": 128}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))
    for name, p in model.named_parameters():
        if p.dim() == 2 and (".layers." in name or ".h." in name):
            p.data = 10 * p.data * (torch.rand_like(p) > 0.8)
    model = model.eval().cuda()  # float32: the most likely token does not hang on rounding
    tokens = torch.randint(1, 64, (2, 40), device="cuda")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    plan = Plan({1: {"dense": 1.0, TRITON: 0.1}, 64: {"expanded": 0.1, TRITON: 1.0}})
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: plan)
    sparse = sparsify(copy.deepcopy(model))
    assert sum(isinstance(module, SparseLinear) for module in sparse.modules()) >= 8
    assert torch.equal(sparse.generate(tokens, **options), model.generate(tokens, **options))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generation_with_a_static_cache(dtype, monkeypatch):
    """transformers then compiles the step of decoding, with CUDA graphs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, **ends))
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".layers." in name:
            p.data = 10 * p.data * (torch.rand_like(p) > 0.8)
    model = model.eval().to("cuda", dtype)
    kernel = TRITON if dtype == torch.float32 else STAGED
    plan = Plan({1: {"dense": 1.0, kernel: 0.1}, 64: {"expanded": 0.1, kernel: 1.0}})
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: plan)
    sparse = sparsify(model)
    assert sum(isinstance(module, SparseLinear) for module in sparse.modules()) == 14
    tokens = torch.randint(1, 64, (1, 20), device="cuda")
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = sparse.generate(tokens, **options)
    found = [sparse.generate(tokens, **options, cache_implementation="static") for _ in range(2)]
    first = tokens.shape[1]
    for one in found:
        if not torch.equal(one.sequences[:, first], expected.sequences[:, first]):
            continue  # a tie that rounding has decided: what follows has another input
        scale = float(expected.logits[1].float().abs().max())
        torch.testing.assert_close(
            one.logits[1].float(), expected.logits[1].float(), rtol=0, atol=(1e-3 if kernel == TRITON else 0.1) * scale
        )
    if dtype == torch.float32:  # the most likely token does not hang on rounding
        assert torch.equal(found[1].sequences, expected.sequences)
