"""``horst export MODEL --to FORM``: save a model in fewer bytes or for another tool; ``--report`` measures it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.destination import beside, check_free, replaced
from horst.cli.export_report import PAGE, measure, terminal_table, write_page
from horst.cli.output import ALL_ZEROS, Share, table, write, write_json
from horst.cli.parsing import check_seconds
from horst.cli.progress import quiet, spinner

if TYPE_CHECKING:
    import torch

    from horst.cli.models import LoadedModel

FORMATS = {
    "sparse-safetensors": "positions and values, with --values in few bits: a smaller file, dense again in memory",
    "hugging-face": "a directory that transformers (or timm) loads, zeros and all: no smaller, no faster",
    "onnx": "a graph for ONNX Runtime, zeros and all: no smaller, no faster by its zeros",
}


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
    """Measure every form of the model against dense, on this machine: file, memory, speed, and perplexity with --data;
    writes report.html into the directory."""
    data: str | None = None
    """For the report: data to judge by that the model was not trained on, as horst eval takes them."""
    eval_tokens: int = 8192
    """Tokens of --data to judge by, from its beginning."""
    tokens: int = 128
    """Tokens (of text) in the prompt that the report measures."""
    new_tokens: int = 16
    """Tokens to generate in the report."""
    batch_size: int = 1
    """Sequences or images in the call that the report measures."""
    seconds: float = 5.0
    """Duration of the measurement of calls."""
    device: str | None = None
    """Device to measure on; by default the CPU, and the GPU too if there is one."""
    overwrite: bool = False
    """Replace an existing directory, if horst made it."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Write the directory, measure if asked to, and say how large it is."""
    from horst.cli.models import choose_device, load_model
    from horst.parameters.quantization import parse_values

    for name in ("batch_size", "tokens", "new_tokens", "eval_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}.")
    if options.data and not options.report:
        raise ValueError("--data is what the report judges by: add --report.")
    check_seconds(options.seconds)
    few_bits = {name: getattr(options, name) for name in ("values", "head_values", "group_size")}
    if options.to != "sparse-safetensors" and (options.values or options.head_values):
        raise ValueError(f"--values and --head-values need --to sparse-safetensors, got --to {options.to}.")
    parse_values(options.values, options.group_size)
    devices = [choose_device(name) for name in ([options.device] if options.device else ["cpu", None])]
    out = options.out or beside(options.model, options.to)
    check_free(out, options.overwrite, "directory", [options.model])
    loaded = load_model(options.model)
    result = None
    with spinner("exporting"), quiet("horst.export"), replaced(out, options.overwrite) as directory:
        if options.to == "onnx":
            _export_onnx(loaded, directory / "model.onnx")
            loaded.copy_side_files(directory)
        else:
            is_sparse = options.to == "sparse-safetensors"
            loaded.save(directory, sparse=is_sparse, **few_bits if is_sparse else {})
        if options.report:
            result = measure(loaded, options, list(dict.fromkeys(devices)))
            write_page(result, directory)
    dense = sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
    found: dict[str, Any] = {"out": str(out), "bytes": _file_bytes(out), "dense bytes": dense}
    found |= {"of dense": found["bytes"] / dense, "zeros": loaded.zeros}
    if options.json:
        if result is not None:
            found |= {"forms": result.rows, "notes": result.notes}
        write_json(found)
        return
    shown = {key: value for key, value in found.items() if key not in ("of dense", "zeros")}
    zeros = f"{ALL_ZEROS} before rounding" if (options.values or "").startswith("int") else ALL_ZEROS
    write(table([{**shown, "of dense": Share(found["of dense"]), zeros: Share(loaded.zeros)}]))
    if options.to == "sparse-safetensors":
        if found["bytes"] >= dense:
            share = 100 * loaded.zeros
            write(f"The file is not smaller: {share:.1f} % of the weights are zero. Try --values int8, or prune first.")
        write(loaded.how_to_load(out))
    if result is not None:
        write(f"\n{terminal_table(result)}\n-> {out / PAGE}")


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


def _file_bytes(directory: Path) -> int:
    """Size of the files with weights."""
    return sum(f.stat().st_size for f in directory.iterdir() if f.suffix in (".safetensors", ".onnx", ".data"))
