"""Sparse layers in the form of a GPU: the same class, here by the kernel's interpreter and its reference."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from horst.export import Plan, SparseLinear, gpu_kernels, sparse_linear, sparsify
from horst.export.gpu_kernels import LAUNCHES, launches_of
from horst.kernels.sparse_matvec import Launch

TRITON = str(Launch(4, 128, 4, overlap=True))
STAGED = next(name for name in LAUNCHES if "staged" in name)
# a launch for one token, the expanded weight for more
PLAN = Plan({1: {"dense": 1.0, STAGED: 0.1}, 4: {"expanded": 0.1, STAGED: 0.2}})
WITH_DENSE = Plan({1: {"dense": 1.0, STAGED: 0.1}, 4: {"dense": 0.1, STAGED: 0.2}})


def conv1d(inputs, outputs):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


def pruned(layer, sparsity=0.8):
    layer.weight.data *= torch.rand_like(layer.weight) > sparsity
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [nn.Linear, conv1d, lambda i, o: nn.Linear(i, o, bias=False)])
@pytest.mark.parametrize("plan", [PLAN, WITH_DENSE], ids=["sparse", "with dense"])
def test_it_drops_in_for_linear_and_conv1d(make, dtype, plan):
    layer = pruned(make(24, 40)).to(dtype)
    sparse = SparseLinear(layer, plan)
    assert (sparse.dense is not None) == (plan is WITH_DENSE)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    with torch.no_grad():
        for shape in ((), (1,), (3, 5), (0,), (2, 0)):
            x = torch.randn(*shape, 24).to(dtype)
            torch.testing.assert_close(sparse(x), layer(x), **tolerance)
        x = torch.randn(24, 6, 4).to(dtype).permute(1, 2, 0)  # not contiguous
        torch.testing.assert_close(sparse(x), layer(x), **tolerance)


@pytest.mark.parametrize("make", [nn.Linear, conv1d])
def test_state_dicts_copies_and_pickles(make):
    layer, other, x = pruned(make(16, 32)).bfloat16(), pruned(make(16, 32)).bfloat16(), torch.randn(2, 16).bfloat16()
    sparse = SparseLinear(layer, PLAN).eval()
    assert torch.equal(sparse.weight, layer.weight)
    assert all(torch.equal(sparse.state_dict()[name], tensor) for name, tensor in layer.state_dict().items())
    assert list(sparse.state_dict()) == ["weight", "bias"]
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for same in (copy.deepcopy(sparse), torch.load(buffer, weights_only=False)):
        assert torch.equal(same(x), sparse(x))
    assert sparse.load_state_dict(other.state_dict()) == ([], [])
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), other(x), rtol=0.05, atol=0.05)
    assert torch.equal(sparse.weight, other.weight)
    assert sparse.stored.kept == int(other.weight.count_nonzero())


def test_it_holds_no_dense_weight():
    layer = pruned(nn.Linear(512, 256, bias=False), 0.9).bfloat16()
    sparse = SparseLinear(layer, PLAN)
    held = sum(tensor.nbytes for tensor in (*sparse.parameters(), *sparse.buffers()))
    assert held < 0.25 * layer.weight.nbytes


def test_other_dtypes_and_gradients_are_refused():
    sparse = SparseLinear(pruned(nn.Linear(8, 8)).bfloat16(), PLAN)
    with pytest.raises(ValueError, match=r"computes in torch.bfloat16 on cpu, got torch.float32"):
        sparse(torch.randn(1, 8))
    with pytest.raises(RuntimeError, match="for inference and has no gradient"):
        sparse(torch.randn(1, 8).bfloat16().requires_grad_())
    with pytest.raises(ValueError, match=r"65536 inputs are more than 16-bit columns.*Keep the layer dense"):
        SparseLinear(nn.Linear(65536, 1, dtype=torch.bfloat16), PLAN)


def test_the_launches_of_a_plan_reach_as_far_as_it_would_choose_them():
    names = list(LAUNCHES)
    plan = Plan({1: {names[0]: 1.0}, 4: {names[1]: 1.0}, 16: {names[2]: 3.0, "expanded": 1.0}, 64: {names[2]: 1.0}})
    launches = launches_of(plan)
    assert launches == {2: LAUNCHES[names[0]], 8: LAUNCHES[names[1]]}, "past the first expanded one there is no launch"
    for tokens in range(1, 9):
        chosen = next(launch for most, launch in launches.items() if tokens <= most)
        assert str(chosen) == plan.kernel(tokens)
    assert plan.kernel(9) == "expanded"


def test_a_launch_that_is_wrong_or_fails_is_left_out(monkeypatch, caplog):
    from horst.kernels.sparse_matvec import pack

    x, matrix, bias = torch.randn(1, 32), pack(pruned(nn.Linear(32, 16)).weight.data), torch.randn(16)
    launch = Launch(4, 32, 1)
    assert gpu_kernels._works(launch, x, matrix, bias)
    assert not gpu_kernels._works(LAUNCHES[STAGED], x, matrix, bias), "no CUDA device here"
    monkeypatch.setattr(gpu_kernels, "sparse_matvec", lambda x, matrix, bias, launch: torch.full((1, 16), torch.nan))
    assert not gpu_kernels._works(launch, x, matrix, bias)
    assert "is left out: its numbers differ" in caplog.text

    errors = iter([RuntimeError("out of registers\nand more"), RuntimeError(), torch.OutOfMemoryError()])

    def fails(*_):
        raise next(errors)

    monkeypatch.setattr(gpu_kernels, "sparse_matvec", fails)
    assert not gpu_kernels._works(launch, x, matrix, bias)
    assert not gpu_kernels._works(launch, x, matrix, bias)
    assert "is left out: out of registers" in caplog.text
    assert "is left out: RuntimeError" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):  # the plan is remembered: it must not hang on a full device
        gpu_kernels._works(launch, x, matrix, bias)


def test_tritons_launches_are_for_what_the_staged_kernel_does_not_take(monkeypatch):
    staged = {name for name, launch in LAUNCHES.items() if launch.staged}
    monkeypatch.setattr(gpu_kernels, "_works", lambda launch, x, matrix, bias: True)
    assert gpu_kernels._working(LAUNCHES, None, None, None).keys() == staged
    monkeypatch.setattr(gpu_kernels, "_works", lambda launch, x, matrix, bias: not launch.staged)
    assert gpu_kernels._working(LAUNCHES, None, None, None).keys() == LAUNCHES.keys() - staged
    monkeypatch.setattr(gpu_kernels, "_works", lambda launch, x, matrix, bias: False)
    assert gpu_kernels._working(LAUNCHES, None, None, None) == {}


def test_it_compiles_as_one_operator_for_any_number_of_tokens():
    model = nn.Sequential(SparseLinear(pruned(nn.Linear(16, 16)), PLAN), nn.ReLU())
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (2, 3, 9):
            x = torch.randn(tokens, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1, "one graph for all numbers of tokens"
    assert sum("sparse_linear" in str(target) for target in graphs[0]) == 1


def test_compiled_it_is_one_call_and_what_is_compared_before_it_may_be_skipped():
    """torch compares before each call what it read; 2.10 and 2.11 skip that for tensors, strings and the like alone."""
    layer, graphs, compared = SparseLinear(pruned(nn.Linear(16, 16)).bfloat16(), PLAN).eval(), [], {}

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph

    def keep_all(guards):
        compared.update({guard.name: guard.value for guard in guards if guard.has_value and "stored" in guard.name})
        return [True] * len(guards)

    options = {"guard_filter_fn": keep_all}
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False, options=options)
    x = torch.randn(1, 16).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    (graph,) = graphs
    assert [node.op for node in graph.nodes if node.op.startswith("call")] == ["call_function"]
    assert sum(node.op == "placeholder" for node in graph.nodes) == 5, "inputs, three tensors of the weight, bias"
    plain = [value for value in compared.values() if not isinstance(value, (torch.Tensor, nn.Module, dict, type(None)))]
    assert plain == [layer.stored._form], "one string, no list and no dtype"


def test_generation_with_a_static_cache_compiles_and_goes_on_as_before(monkeypatch):
    """As on a GPU, where such a cache makes transformers compile the step of decoding; there with CUDA graphs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, **ends)).eval()
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".layers." in name:
            p.data = 10 * p.data * (torch.rand_like(p) > 0.5)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and ".layers." in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SparseLinear(layer, PLAN))
    prompt, seen = torch.randint(1, 64, (1, 5)), []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "sparse_linear" in str(node.target))
        return graph

    compiling = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.requires_grad_(False).generate(prompt, **options)
    found = model.generate(prompt, **options, cache_implementation="static", compile_config=compiling)
    assert torch.equal(found, expected)
    assert len(seen) == 14, "one graph, with every sparse layer as one operator"


def test_layers_that_stay_dense_are_counted_with_the_reason(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: Plan({1: {"dense": 1.0, "bag": 2.0}}))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float16))
    model[1].weight.data.zero_()
    with pytest.warns(UserWarning, match=r"converted none of 3 linear layers, in torch.float16 on cpu, torch.float32"):
        sparsify(model)
    assert "0 of 3 linear layers are now sparse" in caplog.text
    assert "1 linear layers stay dense: they have too few zeros" in caplog.text
    assert "1 linear layers stay dense: no sparse kernel was measured faster" in caplog.text
    assert "1 linear layers stay dense: on a CPU the sparse form is for float32" in caplog.text
