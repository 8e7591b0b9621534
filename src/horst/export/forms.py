"""The forms of a pruned model, one entry each: its name, what it is, and how to make it.

A form that cannot be made raises an error that says why; see :func:`horst.export.compare`.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from horst.export.int8_head import Int8Rows, quantize_head
from horst.export.onnx import export_onnx
from horst.export.semi_structured import to_semi_structured
from horst.export.sparse_linear import SparseLinear, linear_layers, sparsify
from horst.export.sparse_safetensors import load_sparse, save_sparse
from horst.extras import load_extra

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class Use:
    """What a form is made for.

    Args:
        call: A call of the model.
        tokens: Numbers of tokens that its layers will see per call.
        folder: Folder for files.
    """

    call: Call
    tokens: tuple[int, ...]
    folder: pathlib.Path


@dataclass(frozen=True)
class Built:
    """A form of the model: its size, how to call it if it runs, and what to say of it.

    Args:
        file_bytes: Size of its file; None if it has none of its own.
        memory_bytes: Size of its parameters and buffers; None if it is no module.
        model: The module, to be evaluated and to generate; None if it is none.
        call: Function that runs it once; None if that tells nothing beyond dense.
        timed: Whether its time is its own, and not that of the dense model.
        notes: Sentences on reading its numbers.
    """

    file_bytes: int | None = None
    memory_bytes: int | None = None
    model: nn.Module | None = None
    call: Callable[[], Any] | None = None
    timed: bool = True
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Form:
    """An entry of the table of forms.

    Args:
        title: What it is, in a few words.
        make: Function that makes it of the model, which it leaves alone.
    """

    title: str
    make: Callable[[nn.Module, Use], Built]


def _dense(model: nn.Module, use: Use) -> Built:
    size = save_sparse(model, use.folder / "dense.safetensors", min_sparsity=1.0).stat().st_size
    notes = ["Zeros in the dense form cost what other weights cost: bytes in the file, in memory, and time."]
    return Built(size, byte_size(model), model, caller(model, use.call), notes=notes)


def _dense_bfloat16(model: nn.Module, use: Use) -> Built:
    if _dtype(model) == torch.bfloat16:
        raise ValueError("the model is in bfloat16 already, as dense")
    low = copy.deepcopy(model).bfloat16()
    size = save_sparse(low, use.folder / "bfloat16.safetensors", min_sparsity=1.0).stat().st_size
    return Built(size, byte_size(low), low, caller(low, use.call))


def _sparse_file(model: nn.Module, use: Use) -> Built:
    size = save_sparse(model, use.folder / "sparse.safetensors").stat().st_size
    note = "sparse-safetensors is a form of the file. Loaded, the model is dense again: same memory, same time."
    return Built(size, byte_size(model), model, None, timed=False, notes=[note])


def _rounded_file(model: nn.Module, use: Use, *, values: str, head_values: str | None = None) -> Built:
    path = save_sparse(model, use.folder / "rounded.safetensors", values=values, head_values=head_values)
    loaded = copy.deepcopy(model)
    load_sparse(path, loaded)
    return Built(path.stat().st_size, byte_size(loaded), loaded, caller(loaded, use.call), timed=False)


def _sparse_linear(model: nn.Module, use: Use, *, int8_head: bool = False) -> Built:
    # On a GPU sparse layers are for few tokens, and prompts go through the dense weight.
    tokens = use.tokens[:1] if any(p.is_cuda for p in model.parameters()) else use.tokens
    with warnings.catch_warnings():  # the note below says how many layers it converts
        warnings.filterwarnings("ignore", message="sparsify.. converted none")
        sparse = sparsify(copy.deepcopy(model), tokens=tokens)
    layers = [module for module in sparse.modules() if isinstance(module, SparseLinear)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    share = weights / max(sum(p.numel() for p in model.parameters()), 1)
    notes = [
        f"sparse-linear runs {len(layers)} layers with {share:.0%} of the parameters sparse, where that was measured "
        f"faster at {', '.join(map(str, tokens))} tokens. All else (embeddings, a tied head, attention, norms, "
        "activations, layers with few zeros) takes as long as before."
    ]
    if not layers:
        notes = [
            f"sparse-linear changes nothing here: no layer was measured faster sparse at {', '.join(map(str, tokens))} "
            "tokens. It is the dense model, so its speed is not given."
        ]
    if int8_head:
        quantize_head(sparse)
        notes = ["sparse-linear-int8-head is sparse-linear with the head in int8, and with it a tied embedding."]
    run = caller(sparse, use.call)
    run()  # what is made on first use counts in memory
    return Built(None, byte_size(sparse), sparse, run, timed=bool(layers) or int8_head, notes=notes)


def _onnx(model: nn.Module, use: Use) -> Built:
    runtime, (args, kwargs) = load_extra("onnxruntime"), use.call
    path = export_onnx(model, kwargs or args, use.folder / "model.onnx")
    size = sum(file.stat().st_size for file in use.folder.glob("model.onnx*"))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    positional = iter(args)
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: (kwargs[name] if kwargs else next(positional)).cpu().numpy() for name in names}
    note = "onnx stores and multiplies the zeros: what is faster there is ONNX Runtime, not the sparsity."
    return Built(size, call=lambda: [torch.from_numpy(array) for array in session.run(None, feed)], notes=[note])


def _two_four(model: nn.Module, use: Use) -> Built:
    sparse = copy.deepcopy(model)
    if _dtype(sparse) == torch.float32 and any(p.is_cuda for p in sparse.parameters()):
        sparse.bfloat16()
    names = to_semi_structured(sparse)
    note = (
        f"2:4 runs {len(names)} layers on the GPU's sparse cores; the rest is dense. Its gain shrinks with few tokens."
    )
    return Built(None, byte_size(sparse), sparse, caller(sparse, use.call), notes=[note])


FORMS: Mapping[str, Form] = {
    "dense": Form("dense, as it is", _dense),
    "dense-bfloat16": Form("dense, in bfloat16", _dense_bfloat16),
    "sparse-safetensors": Form("sparse file, values as they are", _sparse_file),
    **{
        f"sparse-safetensors-{values}": Form(
            f"sparse file, values in {values}", functools.partial(_rounded_file, values=values)
        )
        for values in ("bfloat16", "int8", "int4")
    },
    **{
        f"sparse-safetensors-{values}-int8-head": Form(
            f"sparse file, values in {values}, embeddings and head in int8",
            functools.partial(_rounded_file, values=values, head_values="int8"),
        )
        for values in ("int8", "int4")
    },
    "sparse-linear": Form("sparse layers", _sparse_linear),
    "sparse-linear-int8-head": Form("sparse layers, int8 head", functools.partial(_sparse_linear, int8_head=True)),
    "onnx": Form("ONNX Runtime, on the CPU", _onnx),
    "2:4": Form("2:4 on a GPU", _two_four),
}


def caller(model: nn.Module, call: Call) -> Callable[[], Any]:
    """A call of the model, waited for; inputs that are no whole numbers are given in the model's dtype."""
    dtype = _dtype(model)
    call = tree_map_only(Tensor, lambda x: x.to(dtype) if dtype and x.is_floating_point() else x, call)

    def run() -> Any:
        output = model(*call[0], **call[1])
        if any(tensor.is_cuda for tensor in float_tensors(output)):
            torch.cuda.synchronize()
        return output

    return run


def float_tensors(output: Any) -> Iterable[Tensor]:
    """The tensors in a model's output that are no whole numbers."""
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def byte_size(model: nn.Module) -> int:
    """Bytes of parameters and buffers, and of what modules hold beside them."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if is_traceable_wrapper_subclass(tensor):  # torch's semi-structured tensors: what they hold inside
            total += sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
        else:
            total += tensor.nbytes
    return total + sum(module.nbytes_packed() for module in model.modules() if isinstance(module, Int8Rows))


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def tokens_seen(model: nn.Module, call: Call) -> set[int]:
    """Numbers of tokens that the linear layers get in one call."""
    seen: set[int] = set()

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.add(inputs[0].numel() // max(inputs[0].shape[-1], 1))

    handles = [layer.register_forward_pre_hook(record) for layer in linear_layers(model).values()]
    try:
        model(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen - {0}
