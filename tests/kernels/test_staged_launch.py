"""The short way to the staged kernel: its launches, read by a stand-in for the driver, are those of the reference."""

import copy
import ctypes
import importlib.util
import io
import pathlib
import threading

import pytest
import torch
from torch import nn

from horst.export import Plan, SparseLinear
from horst.export.gpu_kernels import LAUNCHES
from horst.kernels.sparse_matvec import Launch, driver, pack, sparse_matvec_reference, staged
from horst.kernels.sparse_matvec.direct import Product, is_plain
from horst.kernels.sparse_matvec.operator import encode

_spec = importlib.util.spec_from_file_location(
    "stand_in_driver", pathlib.Path(__file__).with_name("stand_in_driver.py")
)
stand_in_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in_driver)

OVERLAPPING = Launch(16, 256, 16, overlap=True, staged=True)
STAGED = next(name for name, launch in LAUNCHES.items() if launch.staged and launch.overlap)
PLAN = Plan({1: {"dense": 1.0, STAGED: 0.1}, 4: {STAGED: 0.1}, 64: {"expanded": 0.1, STAGED: 0.2}})


@pytest.fixture
def stand_in(monkeypatch):
    return stand_in_driver.install(monkeypatch)


def pruned(rows, columns, sparsity=0.8):
    return (torch.randn(rows, columns) * (torch.rand(rows, columns) >= sparsity)).bfloat16()


def pruned_layer(inputs=24, outputs=40, bias=True):
    layer = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    layer.weight.data = pruned(outputs, inputs)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(30,), (1, 1, 30), (3, 30), (2, 4, 30), (9, 30), (17, 30)])
def test_a_launch_is_the_product_of_the_reference(shape, has_bias, stand_in):
    matrix, bias = pack(pruned(21, 30)), torch.randn(21).bfloat16() if has_bias else None
    x = torch.randn(shape).bfloat16()
    expected = sparse_matvec_reference(x.reshape(-1, 30), matrix, bias).view(*shape[:-1], 21)
    product = Product(matrix, encode(matrix, {16: OVERLAPPING}))
    assert torch.equal(product(x, bias), expected)
    assert torch.equal(product(x, bias), expected)
    assert len(stand_in.launches) == (2 if x.numel() // 30 <= 8 else 0), "more tokens than one launch takes go round it"


def test_a_launch_has_its_grid_its_stream_and_the_attribute(stand_in):
    matrix = pack(pruned(33, 30))
    Product(matrix, encode(matrix, {16: OVERLAPPING}))(torch.randn(1, 30).bfloat16(), None)
    Product(matrix, encode(matrix, {16: Launch(32, 512, 16, staged=True)}))(torch.randn(1, 30).bfloat16(), None)
    first, second = stand_in.launches
    config = first.config
    assert (config.grid_x, config.grid_y, config.grid_z) == (3, 1, 1)
    assert (config.block_x, config.block_y, config.block_z) == (512, 1, 1)
    assert (config.shared_bytes, config.stream, first.function) == (62, 0x1234, 7)
    assert first.attributes == [(6, 1)], "programmatic stream serialization"
    assert (second.attributes, second.config.grid_x) == ([], 2)


def test_structures_have_the_layout_of_cuda_h():
    attribute, config = driver._Attribute, driver._Config
    assert (ctypes.sizeof(attribute), attribute.value.offset) == (72, 8)
    assert (ctypes.sizeof(config), config.stream.offset, config.attributes.offset) == (56, 32, 40)
    assert (config.shared_bytes.offset, config.attribute_count.offset) == (24, 48)


def test_more_than_48_kb_of_shared_memory_are_asked_for(stand_in):
    weight = torch.zeros(2, 30000, dtype=torch.bfloat16)
    weight[:, ::100] = 1
    x = torch.randn(1, 30000).bfloat16()
    matrix = pack(weight)
    Product(matrix, encode(matrix, {16: OVERLAPPING}))(x, None)
    assert stand_in.attribute == (8, 60002)


def test_a_failed_launch_says_so(stand_in):
    stand_in.result, matrix = 1, pack(pruned(4, 8))
    with pytest.raises(RuntimeError, match=r"the CUDA driver failed: invalid argument \(error 1\)"):
        Product(matrix, encode(matrix, {16: OVERLAPPING}))(torch.ones(1, 8).bfloat16(), None)


def test_inputs_that_are_not_contiguous(stand_in):
    matrix, x = pack(pruned(21, 30)), torch.randn(30, 4).bfloat16().t()
    expected = sparse_matvec_reference(x, matrix)
    assert torch.equal(Product(matrix, encode(matrix, {16: OVERLAPPING}))(x, None), expected)
    assert len(stand_in.launches) == 1


def test_a_layer_forgets_what_it_prepared_when_its_tensors_move(stand_in):
    layer, other, x = pruned_layer(), pruned_layer(), torch.randn(1, 24).bfloat16()
    sparse = SparseLinear(layer, PLAN).eval()

    def assert_equals(dense, module):
        before = len(stand_in.launches)
        y, expected = module(x), dense(x)
        assert len(stand_in.launches) == before + 1, "by the short way"
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)

    assert_equals(layer, sparse)
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    loaded, twin = torch.load(buffer, weights_only=False), copy.deepcopy(sparse)
    assert twin.stored._product is None
    sparse._apply(lambda tensor: tensor.clone())
    assert sparse.stored._product is None
    assert_equals(layer, sparse)
    sparse.to(torch.bfloat16)
    sparse.load_state_dict(other.state_dict())
    assert_equals(other, sparse)
    assert_equals(layer, loaded)
    assert_equals(layer, twin)
    # as tools that offload weights do it: the old tensors are gone
    for name, tensor in SparseLinear(layer, PLAN).stored.named_buffers():
        sparse.stored._buffers[name] = tensor
    sparse.bias = layer.bias
    assert_equals(layer, sparse)
    # in place: as torch.nn.utils.swap or .data do it
    wanted = SparseLinear(other, PLAN)
    for name, tensor in wanted.stored.named_buffers():
        getattr(sparse.stored, name).data = tensor
    sparse.bias = other.bias
    assert_equals(other, sparse)


def test_threads_share_a_layer(stand_in):
    sparse = SparseLinear(pruned_layer(), PLAN).eval()
    inputs = [torch.randn(1, 24).bfloat16() for _ in range(4)]
    expected, wrong = [sparse(x) for x in inputs], []

    def work(x, y):
        for _ in range(50):
            if not torch.equal(sparse(x), y):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_compiler_a_tracer_and_modes_see_the_operator(stand_in):
    sparse, x = SparseLinear(pruned_layer(), PLAN).eval(), torch.randn(1, 24).bfloat16()
    seen = []

    class Listener(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    assert is_plain(x)
    with Listener():
        y = sparse(x)
    assert any("sparse_linear" in name for name in seen)
    torch.testing.assert_close(y, sparse(x), rtol=2e-2, atol=2e-2)
    launches = len(stand_in.launches)
    exported = torch.export.export(sparse, (x,))
    assert any("sparse_linear" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(torch.compile(sparse, backend="eager", fullgraph=True)(x), y)
    assert len(stand_in.launches) == launches
    batched = torch.randn(3, 24).bfloat16()
    assert not torch.func.vmap(lambda one: torch.tensor(is_plain(one)))(batched).any()


def test_inputs_of_another_width_are_refused():
    sparse = SparseLinear(pruned_layer(), PLAN)
    with pytest.raises(ValueError, match=r"takes 24 inputs, got a tensor of shape \(2, 12\)"):
        sparse(torch.ones(2, 12).bfloat16())


@pytest.mark.parametrize("launch", [launch for launch in LAUNCHES.values() if launch.staged], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_the_source_compiles(launch, tokens):
    """By NVRTC, which comes with torch for CUDA and needs no device."""
    nvrtc = _nvrtc()
    for bfloat16 in (True, False):
        text = staged.source(tokens, launch.warps, launch.block // 128, bfloat16=bfloat16, overlap=launch.overlap)
        program = ctypes.c_void_p()
        assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"staged.cu", 0, None, None)
        options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_90")
        failed = nvrtc.nvrtcCompileProgram(program, 1, options)
        log = ctypes.create_string_buffer(1 << 16)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert not failed, log.value.decode()
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc():
    try:
        return torch.cuda._utils._get_nvrtc_library()
    except (OSError, AttributeError):
        pytest.skip("needs NVRTC, which comes with torch for CUDA")
