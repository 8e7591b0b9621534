"""``horst export MODEL --to FORM``: save a pruned model in a compressed or faster format; ``--report`` measures it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.destination import beside, check_free, replaced
from horst.cli.output import table, write, write_json
from horst.cli.parsing import check_seconds
from horst.cli.progress import quiet, spinner

if TYPE_CHECKING:
    import torch

    from horst.cli.models import LoadedModel
    from horst.export import Comparison

FORMATS = {
    "sparse-safetensors": "positions and values: a smaller file, which horst loads; dense again in memory",
    "hugging-face": "a directory that transformers (or timm) loads, zeros and all: no smaller, no faster",
    "onnx": "a graph for ONNX Runtime, zeros and all: no smaller, no faster by its zeros",
}
PAGE = "report.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the format, and whether to measure it."""

    model: Path
    """The model: a directory of Hugging Face or timm, or of a finished run."""
    to: Literal["sparse-safetensors", "hugging-face", "onnx"] = "sparse-safetensors"
    """The format."""
    out: Path | None = None
    """Directory to make; by default next to the model, with the format in its name."""
    values: Literal["float32", "bfloat16", "int8", "int4", "int3", "int2"] | None = None
    """Precision of the matrices in sparse-safetensors, pruned or not; by default theirs."""
    head_values: Literal["float32", "bfloat16", "int8", "int4", "int3", "int2"] | None = None
    """Precision of embeddings and head in sparse-safetensors; by default theirs."""
    group_size: int = 128
    """Inputs of a row that share a scale, for integers."""
    report: bool = False
    """Measure file, memory and time per call against dense, on this machine; writes report.md into the directory."""
    tokens: int = 128
    """Tokens (of text) in the call that the report measures."""
    batch_size: int = 1
    """Sequences or images in the call that the report measures."""
    seconds: float = 5.0
    """Duration of the measurement."""
    device: str | None = None
    """Device to measure on; by default the CPU, where unstructured zeros can be faster."""
    overwrite: bool = False
    """Replace an existing directory, if horst made it."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Write the directory, measure if asked to, and say how large it is."""
    from horst.cli.models import choose_device, load_model
    from horst.parameters.quantization import parse_values

    if options.batch_size < 1 or options.tokens < 1:
        raise ValueError(f"--batch-size and --tokens must be at least 1, got {options.batch_size}, {options.tokens}.")
    check_seconds(options.seconds)
    few_bits = {name: getattr(options, name) for name in ("values", "head_values", "group_size")}
    if options.to != "sparse-safetensors" and (options.values or options.head_values):
        raise ValueError(f"--values and --head-values need --to sparse-safetensors, got --to {options.to}.")
    parse_values(options.values, options.group_size)
    device = choose_device(options.device or "cpu")
    out = options.out or beside(options.model, options.to)
    check_free(out, options.overwrite, "directory", [options.model])
    loaded = load_model(options.model)
    comparison = None
    with spinner("exporting"), quiet("horst.export"), replaced(out, options.overwrite) as directory:
        if options.to == "onnx":
            _export_onnx(loaded, directory / "model.onnx")
            loaded.copy_side_files(directory)
        else:
            is_sparse = options.to == "sparse-safetensors"
            loaded.save(directory, sparse=is_sparse, **few_bits if is_sparse else {})
        if options.report:
            comparison = _measure(loaded, options, device)
            (directory / PAGE).write_text(f"# {options.model.name}\n\n{comparison.markdown()}")
    dense = sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
    found: dict[str, Any] = {"out": str(out), "bytes": _file_bytes(out), "dense bytes": dense}
    found |= {"of dense": found["bytes"] / dense, "zeros": loaded.zeros}
    if options.json:
        if comparison is not None:
            found |= {"forms": comparison.rows, "notes": comparison.notes}
        write_json(found)
        return
    write(table([found]))
    if comparison is not None:
        write("\n" + table(comparison.rows) + "\n" + "\n".join(f"- {note}" for note in comparison.notes))
        write(f"-> {out / PAGE}")


def example_inputs(loaded: LoadedModel, *, batch_size: int, tokens: int, device: torch.device | str = "cpu") -> Any:
    """A call of the model with random numbers: times and shapes do not depend on them."""
    import torch

    if loaded.reads == "images":
        dtype = next(p.dtype for p in loaded.model.parameters() if p.is_floating_point())
        return torch.rand(batch_size, *loaded.image_shape, device=device).to(dtype)
    length = min(tokens, loaded.longest or tokens)
    numbers = torch.randint(loaded.vocabulary, (batch_size, length), device=device)
    if not loaded.is_transformers:
        return numbers
    # With its cache a model returns keys and values too, which no ONNX graph should.
    caching = {"use_cache": False} if hasattr(loaded.model.config, "use_cache") else {}
    return {"input_ids": numbers, **caching}


def _export_onnx(loaded: LoadedModel, path: Path) -> None:
    """Any number of sequences or images, and of tokens."""
    from torch.export import Dim

    from horst.export import export_onnx

    inputs = example_inputs(loaded, batch_size=2, tokens=8)  # a dimension of 1 would be taken for a constant
    shapes: Any = ({0: Dim.DYNAMIC},)
    if loaded.reads == "text":
        varying = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        shapes = (
            {name: varying if name == "input_ids" else None for name in inputs}
            if isinstance(inputs, dict)
            else (varying,)
        )
    export_onnx(loaded.model, inputs, path, dynamic_shapes=shapes)


def _measure(loaded: LoadedModel, options: Options, device: torch.device) -> Comparison:
    from horst.export import compare

    loaded.model.to(device)
    inputs = example_inputs(loaded, batch_size=options.batch_size, tokens=options.tokens, device=device)
    faster = {"cpu": ["sparse-linear"], "cuda": ["2:4"]}.get(device.type, [])
    forms = ["sparse-safetensors", *faster, *["onnx"] * (options.to == "onnx")]
    return compare(loaded.model, inputs, forms=forms, seconds=options.seconds)


def _file_bytes(directory: Path) -> int:
    """Size of the files with weights."""
    return sum(f.stat().st_size for f in directory.iterdir() if f.suffix in (".safetensors", ".onnx", ".data"))
