"""``horst prune MODEL --method METHOD --sparsity S --data TEXT --out DIRECTORY``: one shot, layer by layer."""

from __future__ import annotations

import dataclasses
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst import __version__, files
from horst.cli.destination import beside, check_free, replaced
from horst.cli.output import Share, table, write, write_json
from horst.cli.parsing import read_pattern
from horst.cli.progress import blocks_counted, spinner

if TYPE_CHECKING:
    from torch import Tensor

    from horst.cli.models import LoadedModel
    from horst.pruning import PrunedLayer

RECORD = "pruning.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the method, and the directory to make."""

    model: Path
    """The model: a directory of Hugging Face or timm, or of a finished run."""
    method: Literal["magnitude", "wanda", "sparsegpt"] | None = None
    """Rule that chooses the weights to remove; by default sparsegpt with --data (wanda for blocks), else magnitude."""
    sparsity: float | None = None
    """Share of the weights of the pruned layers that become zero: 0.5, not 50. An N:M pattern fixes it."""
    out: Path | None = None
    """Directory to make; by default next to the model, with the sparsity in its name."""
    pattern: str | None = None
    """Pattern of the zeros: by default single weights; 2:4 or any N:M; or blocks, as 4x4."""
    distribution: Literal["uniform", "global", "erk", "owl"] = "uniform"
    """Division of the zeros among the layers."""
    layers: Literal["blocks", "paper", "all_linear", "all"] = "blocks"
    """Layers to prune: those in the blocks; all blocks but the first and last (paper); all linear; all."""
    include: tuple[str, ...] = ()
    """Wildcard patterns of further parameters to prune."""
    exclude: tuple[str, ...] = ()
    """Wildcard patterns of parameters to leave alone."""
    values: Literal["bfloat16", "int8", "int4", "int3", "int2"] | None = None
    """Precision to round the kept weights to, for horst export with the same --values; by default they stay."""
    group_size: int = 128
    """Inputs of a row that share a scale, for integers."""
    data: str | None = None
    """Calibration data. Text: .txt, .jsonl, .parquet, a folder of horst data, wikitext, hub:owner/name. Images: digits,
    .npz, a folder of CIFAR-10 or with train and val."""
    samples: int | None = None
    """Windows of text, or images, to calibrate on; by default 128, and 64 windows of text on a CPU."""
    context: int | None = None
    """Tokens per window; by default the model's, at most 2048, and at most 512 on a CPU."""
    seed: int = 0
    """Seed of the choice of windows."""
    tokenizer: Literal["auto", "gpt2", "bytes"] = "auto"
    """For text: auto is the model's own."""
    device: str | None = None
    """Device to compute on, one block at a time; by default the GPU if there is one."""
    overwrite: bool = False
    """Replace an existing directory, if horst made it."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Prune, save, and say what became of each layer."""
    from horst.cli.models import choose_device, load_model
    from horst.parameters.quantization import parse_values
    from horst.pruning import prune
    from horst.pruning.chains import block_sequences
    from horst.sparsity.masks import NM, check_sparsity, parse_pattern

    parse_values(options.values, options.group_size)
    pattern = read_pattern(options.pattern)
    units = parse_pattern(pattern)
    calibrated = "wanda" if isinstance(pattern, tuple) else "sparsegpt"
    method = options.method or ("magnitude" if options.data is None else calibrated)
    if options.sparsity is not None:
        check_sparsity(options.sparsity, units)
    elif not isinstance(units, NM):
        raise ValueError("give the share of weights to remove, --sparsity 0.5, or a pattern, --pattern 2:4.")
    if method != "magnitude" and options.data is None:
        raise ValueError(f"{method} needs text or images to calibrate on: --data. Magnitude needs none.")
    if method == "magnitude":
        _refuse_calibration(options)
    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {options.samples}.")
    device = choose_device(options.device)
    amount = options.pattern.replace(":", "-") if options.pattern else f"{100 * (options.sparsity or 0):g}"
    amount += f"-{options.values}" if options.values else ""
    out = options.out or beside(options.model, amount)  # my-gpt2-50, my-gpt2-2-4, my-gpt2-50-int4
    check_free(out, options.overwrite, "directory", [options.model, *filter(None, [options.data])])
    loaded = load_model(options.model)
    _check_exclude(options, loaded)
    data, drawn = None, {"samples": options.samples}
    if options.data is not None:
        with spinner("reading calibration data"):
            data, drawn = _calibration(options, loaded, cpu=device.type == "cpu")
    with spinner("pruning"), blocks_counted(sum(map(len, block_sequences(loaded.model).values()))):
        report = prune(
            loaded.model,
            options.sparsity,
            method=method,
            data=data,
            pattern=pattern,
            distribution=options.distribution,
            layers=options.layers,
            include=options.include,
            exclude=options.exclude,
            samples=None,
            device=device,
            values=options.values,
            group_size=options.group_size,
        )
    record = {
        "horst": __version__,
        "method": report.method,
        **{key: getattr(options, key) for key in ("sparsity", "pattern", "distribution", "layers")},
        **({"values": options.values, "group_size": options.group_size} if options.values else {}),
        **drawn,
        "data": options.data and Path(options.data).name,
        **report.shares(),
        "pruned": report.rows(),
    }
    with replaced(out, options.overwrite) as directory:
        loaded.save(directory)
        files.write_json(directory / RECORD, record)
    if options.json:
        write_json({"out": str(out), **record})
        return
    has_errors = any(layer.error is not None for layer in report.layers)
    rows = [_shown(layer, has_errors) for layer in report.layers]
    write(table(rows))
    if has_errors:
        write("error: share of the energy of the layer's output that is lost on the calibration data")
    write(
        f"{report.method}: {100 * report.sparsity_of_pruned_layers:.1f} % of these layers, "
        f"{100 * report.sparsity_of_all_weights:.1f} % of all weights are zero -> {out}"
    )


def _shown(layer: PrunedLayer, has_errors: bool) -> dict[str, Any]:
    """A row of the table."""
    row = {"layer": layer.name, "shape": "x".join(map(str, layer.shape)), "weights": layer.weights}
    row |= {"zeros": Share(layer.sparsity)}
    return row | ({"error": layer.error} if has_errors else {})


def _refuse_calibration(options: Options) -> None:
    """Options for calibration that magnitude does not read; with OWL it reads data, if they are given."""
    owl = options.distribution == "owl"
    if owl and options.data is not None:
        return
    names = ["samples", "context", "seed", "tokenizer"] if owl else ["data", "samples", "context", "seed", "tokenizer"]
    given = [f"--{name}" for name in names if getattr(options, name) != getattr(Options, name)]
    if given:
        has = "has" if len(given) == 1 else "have"
        why = "without --data" if owl else "with --method magnitude, which needs no calibration"
        instead = "give --data" if owl else "use --method sparsegpt or wanda with --data"
        raise ValueError(
            f"{', '.join(given)} {has} no effect {why}. Leave {'it' if has == 'has' else 'them'} out, or {instead}."
        )


def _check_exclude(options: Options, loaded: LoadedModel) -> None:
    """Say that everything was excluded where that is why nothing is left to prune."""
    from horst.sparsity import find_layers

    if options.exclude:
        preset = "blocks" if options.layers == "paper" else options.layers
        layers = find_layers(loaded.model, preset, include=options.include, frozen=True)
        if all(any(fnmatchcase(layer.name, pattern) for pattern in options.exclude) for layer in layers):
            given = " ".join(options.exclude)
            raise ValueError(
                f"--exclude {given} leaves nothing to prune: it matches all {len(layers)} layers that --layers "
                f"{options.layers} chooses. Exclude fewer of them."
            )


def _calibration(options: Options, loaded: LoadedModel, cpu: bool) -> tuple[list[Tensor], dict[str, int | None]]:
    """The data to calibrate on, and how much they are."""
    from horst.cli.images import calibration_images, open_images
    from horst.cli.texts import SAMPLES, calibration_windows, check_reads_text_alone, choose_calibration, token_file

    assert options.data is not None
    if loaded.reads == "images":
        count = options.samples or SAMPLES
        return calibration_images(open_images(options.data, loaded, batch_size=1), loaded, count), {"samples": count}
    check_reads_text_alone(loaded)
    samples, context = choose_calibration(loaded, options.samples, options.context, cpu)
    with token_file(options.data, loaded, options.tokenizer, "train") as path:
        windows = calibration_windows(path, loaded, context=context, samples=samples, seed=options.seed)
    fewer = " (the default on a CPU; on a GPU 128 of up to 2048)" if cpu and options.samples is None else ""
    write(f"calibrating on {sum(map(len, windows))} windows of {context} tokens{fewer}", sys.stderr)
    return windows, {"samples": samples, "context": context}
