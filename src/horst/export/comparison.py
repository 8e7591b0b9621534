"""A pruned model in each form against dense: bytes in a file and in memory, and measured time per call.

Plain statements go with the numbers: a form that stores zeros, or multiplies them, is as large or as slow as before.
"""

from __future__ import annotations

import copy
import pathlib
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from horst.export.cpu_kernels import interleaved_times
from horst.export.onnx import export_onnx
from horst.export.semi_structured import to_semi_structured
from horst.export.sparse_linear import SparseLinear, linear_layers, sparsify
from horst.export.sparse_safetensors import save_sparse
from horst.extras import load_extra
from horst.parameters.modes import Batch, as_call, evaluating

_FORMATS = {"form": "{}", "file_bytes": "{:,.2f} MB", "memory_bytes": "{:,.2f} MB", "speedup": "{:.2f}"}
_FORMATS |= dict.fromkeys(("file_ratio", "memory_ratio", "milliseconds"), "{:.3f}") | {"max_error": "{:.1e}"}
FORMS = ("dense", "sparse-safetensors", "sparse-linear", "onnx", "2:4")


@dataclass(frozen=True)
class Comparison:
    """One row per form, and notes on reading them.

    Each row has ``form``, ``file_bytes``, ``memory_bytes`` (parameters and buffers), ``milliseconds`` (median of a
    call), their ratios to the dense row (``file_ratio``, ``memory_ratio``, ``speedup``) and ``max_error``, the largest
    difference of an output from the dense model's. None: the form has no such number.
    """

    rows: list[dict[str, Any]]
    notes: list[str]

    def markdown(self) -> str:
        """The rows as a Markdown table, and the notes as a list."""
        lines = [
            "| form | file | of dense | memory | of dense | ms per call | times faster | largest error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            megabytes = {key: row[key] and row[key] / 1e6 for key in ("file_bytes", "memory_bytes")}
            cells = ["" if v is None else _FORMATS[key].format(v) for key, v in (row | megabytes).items()]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"


@torch.no_grad()
def compare(
    model: nn.Module, example_inputs: Batch, *, forms: Sequence[str] = FORMS[:3], seconds: float = 5.0
) -> Comparison:
    """Measure a pruned model, dense and in other forms, on this machine.

    Times are medians of calls taken in turns. The model itself is not changed: a form that runs is made from a
    copy.

    Args:
        model: The pruned model, on the device to measure on.
        example_inputs: A tensor, a sequence of arguments, or a mapping from names to arguments. The number of tokens
            in it decides much: measure with what you will run.
        forms: Names among ``"dense"`` (always there), ``"sparse-safetensors"`` (a file, dense again when loaded),
            ``"sparse-linear"`` (:func:`sparsify` for the number of tokens in ``example_inputs``, on a CPU), ``"onnx"``
            (extra ``onnx``) and ``"2:4"`` (:func:`to_semi_structured`, on a GPU).
        seconds: Duration of all timing together.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> comparison = compare(model, torch.randn(2, 64), seconds=0.01)
        >>> [row["form"] for row in comparison.rows]
        ['dense', 'sparse-safetensors', 'sparse-linear']
    """
    unknown = [form for form in forms if form not in _BUILDERS]
    if unknown:
        raise ValueError(f"forms must be among {', '.join(_BUILDERS)}, got {unknown}.")
    call = as_call(example_inputs)
    with evaluating(model), tempfile.TemporaryDirectory() as folder:
        built = {form: _BUILDERS[form](model, call, pathlib.Path(folder)) for form in dict.fromkeys(("dense", *forms))}
        calls = {form: one.call for form, one in built.items() if one.call is not None}
        times = interleaved_times(calls, seconds=seconds)
        milliseconds = {form: 1e3 * statistics.median(taken) for form, taken in times.items()}
        outputs = {form: list(_tensors(run())) for form, run in calls.items()}
    rows: list[dict[str, Any]] = [
        {
            "form": form,
            "file_bytes": one.file_bytes,
            "file_ratio": _ratio(one.file_bytes, built["dense"].file_bytes),
            "memory_bytes": one.memory_bytes,
            "memory_ratio": _ratio(one.memory_bytes, built["dense"].memory_bytes),
            "milliseconds": milliseconds.get(form),
            "speedup": _ratio(milliseconds["dense"], milliseconds.get(form)),
            "max_error": _largest_difference(outputs[form], outputs["dense"]) if form in outputs else None,
        }
        for form, one in built.items()
    ]
    where = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    notes = [f"Measured on {where.type} with {torch.get_num_threads()} threads, torch {torch.__version__}."]
    notes += [note for one in built.values() for note in one.notes]
    notes += [
        f"{row['form']} is not faster than dense here: {row['speedup']:.2f} times."
        for row in rows
        if row["form"] != "dense" and row["speedup"] is not None and row["speedup"] < 1.05
    ]
    return Comparison(rows, notes)


_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class _Built:
    """A form of the model: its size, how to call it if it runs, and what to say of it."""

    file_bytes: int | None
    memory_bytes: int | None
    call: Callable[[], Any] | None
    notes: list[str]


def _dense(model: nn.Module, call: _Call, folder: pathlib.Path) -> _Built:
    size = save_sparse(model, folder / "dense.safetensors", min_sparsity=1.0).stat().st_size
    notes = ["Zeros in the dense form cost what other weights cost: bytes in the file, in memory, and time."]
    return _Built(size, _bytes(model), _caller(model, call), notes)


def _sparse_safetensors(model: nn.Module, call: _Call, folder: pathlib.Path) -> _Built:
    size = save_sparse(model, folder / "sparse.safetensors").stat().st_size
    note = "sparse-safetensors is a form of the file. Loaded, the model is dense again: same memory, same time."
    return _Built(size, _bytes(model), None, [note])


def _sparse_linear(model: nn.Module, call: _Call, folder: pathlib.Path) -> _Built:
    tokens = _tokens_seen(model, call)
    with warnings.catch_warnings():  # the note below says how many layers it converts
        warnings.filterwarnings("ignore", message="sparsify.. converted none")
        sparse = sparsify(copy.deepcopy(model), tokens=tokens or (1,))
    layers = [module for module in sparse.modules() if isinstance(module, SparseLinear)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    share = weights / max(sum(p.numel() for p in model.parameters()), 1)
    notes = [
        f"sparse-linear runs {len(layers)} layers with {share:.0%} of the parameters sparse, where that was measured "
        f"faster at {', '.join(map(str, tokens))} tokens. All else (embeddings, a tied head, attention, norms, "
        "activations, layers with few zeros) takes as long as before."
    ]
    return _Built(None, _bytes(sparse), _caller(sparse, call), notes)


def _onnx(model: nn.Module, call: _Call, folder: pathlib.Path) -> _Built:
    runtime, (args, kwargs) = load_extra("onnxruntime"), call
    path = export_onnx(model, kwargs or args, folder / "model.onnx")
    size = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    positional = iter(args)
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: (kwargs[name] if kwargs else next(positional)).cpu().numpy() for name in names}
    note = "onnx stores and multiplies the zeros: what is faster there is ONNX Runtime, not the sparsity."
    return _Built(size, None, lambda: [torch.from_numpy(array) for array in session.run(None, feed)], [note])


def _two_four(model: nn.Module, call: _Call, folder: pathlib.Path) -> _Built:
    sparse = copy.deepcopy(model)
    names = to_semi_structured(sparse)
    note = (
        f"2:4 runs {len(names)} layers on the GPU's sparse cores; the rest is dense. Its gain shrinks with few tokens."
    )
    return _Built(None, _bytes(sparse), _caller(sparse, call), [note])


_BUILDERS = dict(zip(FORMS, (_dense, _sparse_safetensors, _sparse_linear, _onnx, _two_four), strict=True))


def _caller(model: nn.Module, call: _Call) -> Callable[[], Any]:
    def run() -> Any:
        output = model(*call[0], **call[1])
        if any(tensor.is_cuda for tensor in _tensors(output)):
            torch.cuda.synchronize()
        return output

    return run


def _tokens_seen(model: nn.Module, call: _Call) -> tuple[int, ...]:
    """Numbers of tokens that the linear layers get in one call."""
    seen: set[int] = set()

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.add(inputs[0].numel() // max(inputs[0].shape[-1], 1))

    handles = [layer.register_forward_pre_hook(record) for layer in linear_layers(model).values()]
    model(*call[0], **call[1])
    for handle in handles:
        handle.remove()
    return tuple(sorted(seen - {0}))


def _bytes(model: nn.Module) -> int:
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if is_traceable_wrapper_subclass(tensor):  # torch's semi-structured tensors: what they hold inside
            total += sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
        else:
            total += tensor.nbytes
    return total


def _tensors(output: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _largest_difference(outputs: list[Tensor], dense: list[Tensor]) -> float | None:
    pairs = [(a, b) for a, b in zip(outputs, dense, strict=False) if a.shape == b.shape and a.numel()]
    return max((float((a.float().cpu() - b.float().cpu()).abs().max()) for a, b in pairs), default=None)


def _ratio(value: float | None, dense: float | None) -> float | None:
    return None if value is None or not dense else value / dense
