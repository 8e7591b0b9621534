"""The tables of the README and the guides, from the committed result files.

``python -m horst.lab.report.pages`` rewrites the blocks ``<!-- table:NAME -->`` to ``<!-- /table -->`` of its pages.
The geometry page has a command of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from horst.extras import load_extra
from horst.lab.experiments.result import Result
from horst.lab.report import how_it_works
from horst.lab.report.figures import save_figure
from horst.lab.report.frontier import page as frontier_page
from horst.lab.report.quickstart_tables import language_table, vision_table
from horst.lab.report.tables import markdown, number, origins, rewrite_blocks
from horst.lab.report.transformer_figures import phases_and_overlap, quality_against_sparsity, weight_distributions
from horst.lab.report.transformer_tables import (
    acdc_table,
    methods_table,
    mirror_table,
    one_shot_table,
    paper_acdc_table,
    short_attention_table,
    speed_table,
    training_speed_table,
)

PAGES = (
    "README.md",
    "docs/benchmarks/optimizer_step_h200_202611.md",
    "docs/how_it_works.md",
    "docs/sparse_training.md",
    "docs/pruning.md",
    "docs/export.md",
    "docs/training.md",
    "docs/reproducing.md",
    "docs/frontier.md",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where things are.

    Args:
        root: The repository.
    """

    root: pathlib.Path = pathlib.Path()


def gpu_step_table(results: Sequence[Result], *, short: bool = False) -> str:
    """A line an optimizer and model: time in a row and alone, against the floor and torch's fused AdamW."""
    names = {"gpt2-small": "GPT-2 small", "gpt2-xl": "GPT-2 XL", "flat-1.07e9": "one tensor of 1.07e9"}
    kept = ("AdamW fused", "HORST fused (default)")
    lines = [
        [
            names[row["shapes"]],
            row["optimizer"],
            number(row["milliseconds"], ".3f"),
            number(row["times_floor"], ".2f"),
            number(row["times_AdamW fused"], ".2f"),
            number(row["alone_milliseconds"], ".3f"),
            number(row["alone_times_AdamW fused"], ".2f"),
            number(row["host_milliseconds"], ".2f"),
            number(row["extra_mebibytes"], ".0f"),
        ]
        for row in sorted(results[0].rows, key=lambda row: list(names).index(row["shapes"]))
        if not short or row["optimizer"] in kept
    ]
    columns = ["model", "optimizer", "ms in a row", "x floor", "x AdamW fused", "ms alone", "x AdamW fused"]
    return markdown([*columns, "host ms", "extra MiB"], lines)


def cpu_step_table(results: Sequence[Result]) -> str:
    """A line an optimizer on a CPU, against torch's default and fused AdamW."""
    lines = [
        [
            row["optimizer"],
            number(row["milliseconds"], ".1f"),
            number(row["times_floor"], ".2f"),
            number(row["times_AdamW (default)"], ".2f"),
            number(row["times_AdamW fused"], ".2f"),
        ]
        for row in results[0].rows
    ]
    return markdown(["optimizer", "ms", "x floor", "x AdamW (default)", "x AdamW fused"], lines)


def cifar_table(results: Sequence[Result]) -> str:
    """A line a run: what is pruned, accuracy sparse and dense, training loss, speed."""
    lines = [
        [
            "AdamW" if row["optimizer"] == "adamw" else f"HORST, alpha {row['alpha']:g}",
            number(row["lr"], "g"),
            str(row["seed"]),
            f"{row['pruned']:,} of {row['masked_weights']:,}",
            number(row["accuracy"], ".2%"),
            number(row["dense_phase_accuracy"], ".2%"),
            number(row["train_loss"], ".3f"),
            f"{row['images_per_second']:,.0f}",
        ]
        for result in results
        for row in result.rows
    ]
    columns = ["optimizer", "lr", "seed", "weights pruned", "accuracy", "after the last dense phase", "training loss"]
    return markdown([*columns, "images a second"], lines)


def quickstart_table(results: Sequence[Result]) -> str:
    """Both tables of the quickstart."""
    return f"{language_table(results)}\n\n{vision_table(results)}"


def digits_table(results: Sequence[Result]) -> str:
    """A line a learning rate: mean accuracy over seeds of both optimizers."""
    rows = results[0].rows
    names = ("AdamW", "HORST")
    lines = []
    for lr in dict.fromkeys(row["lr"] for row in rows):
        found = [[row["accuracy"] for row in rows if row["lr"] == lr and row["optimizer"] == name] for name in names]
        lines.append([f"{lr:g}", *(f"{statistics.mean(f):.2%} ± {statistics.pstdev(f):.2%}" for f in found)])
    zeros = f"{rows[0]['zeros']:,} of {rows[0]['masked_weights']:,} weights zero"
    return markdown(["learning rate", "AdamW", f"HORST, alpha 5 ({zeros} in each run)"], lines)


def selection_table(results: Sequence[Result]) -> str:
    """A line a tensor: selection beside torch.kthvalue."""
    lines = [
        [
            f"{row['weights']:,}",
            row["dtype"],
            row["content"],
            number(1e3 * row["select_s"], ".1f"),
            number(1e3 * row["kthvalue_s"], ".0f"),
            number(row["kthvalue_over_select"], ".0f"),
            number(row["extra_bytes_share"], ".1%"),
        ]
        for row in results[0].rows
        if row["what"] == "selection"
    ]
    columns = ["weights", "dtype", "content", "selection ms", "kthvalue ms", "times faster", "extra memory"]
    return markdown(columns, lines)


def mask_overhead_table(results: Sequence[Result]) -> str:
    """A line a phase: the training step with masks beside the step without."""
    lines = [
        [row["masks"], number(1e3 * row["step_s"], ".2f"), number(row["overhead"], "+.2%")]
        for row in results[0].rows
        if row["what"] == "deit_small step"
    ]
    return markdown(["DeiT-small, batch 1024", "ms a step", "overhead"], lines)


def pruning_speed_table(results: Sequence[Result]) -> str:
    """A line a method: seconds with the model on the host or on the device, and the device's peak memory."""
    lines = [
        [row["what"], row["model_on"], number(row["seconds"], ".2f"), f"{row['peak_bytes'] / 2**20:,.0f}"]
        for row in results[0].rows
    ]
    return markdown(["GPT-2 small, 128 x 512 tokens", "model on the", "seconds", "peak MiB on the device"], lines)


def export_files_table(results: Sequence[Result]) -> str:
    """A line a file: dense and sparse size."""
    lines = [
        [
            row["content"],
            number(row["sparsity"], ".0%"),
            f"{row['dense_bytes'] / 1e6:.1f}",
            f"{row['sparse_bytes'] / 1e6:.1f}",
            number(row["ratio"], ".3f"),
        ]
        for row in results[0].rows
        if row["what"] == "file"
    ]
    return markdown(["stored", "zeros", "dense MB", "sparse MB", "ratio"], lines)


def export_models_table(results: Sequence[Result]) -> str:
    """A line a form and number of tokens: memory and time beside dense, on one thread."""
    lines = [
        [
            row["content"],
            str(row["tokens"]),
            row["form"],
            number(row["memory_ratio"], ".2f"),
            number(row["milliseconds"], ".0f"),
            number(row["speedup"], ".2f"),
        ]
        for row in results[0].rows
        if row["what"] == "model" and row["threads"] == 1
    ]
    return markdown(["model", "tokens", "form", "x memory", "ms", "times faster"], lines)


def spread_table(results: Sequence[Result]) -> str:
    """A line a model: how its standardised weights are spread."""
    lines = [
        [row["model"], f"{row['weights']:,}", number(row["kurtosis"], ".1f"), number(row["near_zero"], ".2%")]
        for row in results[0].rows
    ]
    return markdown(["model", "weights", "kurtosis", "within 0.1 deviations of zero"], lines)


def language_figure(results: Sequence[Result]) -> Any:
    """Figure 8: the weights of GPT-2's blocks."""
    return weight_distributions(results[0].curves["histograms"], "Weights of GPT-2's blocks")


def spread_figure(results: Sequence[Result]) -> Any:
    """Figure 1 (left): the weights of pretrained models."""
    return weight_distributions(results[0].curves["histograms"], "Weights of pretrained models")


def kept_weights_figure(results: Sequence[Result]) -> Any:
    """Figure 3 (left): what AC/DC left of the weights, at the sparsity that all the results have."""
    found = [result.curves["histograms"] for result in results]
    (level,) = set.intersection(*(set(levels) for levels in found))
    histograms = {name: histogram for levels in found for name, histogram in levels[level].items()}
    return weight_distributions(histograms, f"Weights of DeiT-small that AC/DC kept, {float(level):.0%} zeros")


def phases_figure(results: Sequence[Result]) -> Any:
    """The phases of AC/DC, at the highest sparsity of a result."""
    phases = results[0].curves["phases"]
    highest = max(run["sparsity"] for run in phases)
    return phases_and_overlap([run for run in phases if run["sparsity"] == highest])


_GPU_STEP = ("benchmarks/results/optimizer_step_h200.json",)
_SPARSITY = ("benchmarks/results/sparsity_h200.json",)
_EXPORT = ("benchmarks/results/export_cpu.json",)
_TABLE1_DIGITS = ("results/transformers/table1_digits_cpu.json",)
_TABLE1_CIFAR10 = tuple(
    f"results/transformers/table1_cifar10_{name}.json"
    for name in ("adamw", "adamw_80", "adamw_70", "ham", "alpha5_90", "alpha5_80", "alpha5_70")
)
_TABLE6 = ("results/transformers/table6_gpt2_wikipedia.json",)
_MIRROR = tuple(
    f"results/transformers/mirror_tensors/{name}.json"
    for name in (
        "adamw_matrices_alpha5",
        *(f"horst_{tensors}_alpha{alpha}" for alpha in (5, 20) for tensors in ("blocks", "matrices", "all")),
    )
)
_FIGURE1 = ("results/transformers/figure1_weight_spread.json",)
# Marker on a page -> result files and the function that writes its table.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Result]], str]]] = {
    "optimizer_step_gpu": (_GPU_STEP, gpu_step_table),
    "optimizer_step_gpu_short": (_GPU_STEP, functools.partial(gpu_step_table, short=True)),
    "optimizer_step_cpu": (("benchmarks/results/optimizer_step_cpu.json",), cpu_step_table),
    "acdc_cifar10": (("results/sparsity/acdc_cifar10.json", "results/sparsity/acdc_cifar10_alpha20.json"), cifar_table),
    "acdc_digits": (("results/sparsity/acdc_digits.json",), digits_table),
    "quickstart": (("results/quickstart.json",), quickstart_table),
    "table1_digits": (_TABLE1_DIGITS, acdc_table),
    "table1_cifar10": (_TABLE1_CIFAR10, acdc_table),
    "table1_cifar10_paper_lr": (
        tuple(f"results/transformers/table1_cifar10_paper_lr_{name}.json" for name in ("adamw", "alpha5")),
        acdc_table,
    ),
    "table6": (("results/transformers/table6_gpt2_alpha5.json", *_TABLE6), one_shot_table),
    "table6_thresholds": (
        tuple(
            f"results/transformers/table6_gpt2_{name}.json"
            for name in ("adamw_beta2_0.999", "alpha5_beta2_0.999", "alpha5_decay_all")
        ),
        methods_table,
    ),
    "table6_speed": (_TABLE6, speed_table),
    "mirror_tensors": (_MIRROR, mirror_table),
    "one_shot_methods": (("results/transformers/one_shot_methods_cpu.json",), methods_table),
    "paper_acdc": ((), paper_acdc_table),
    "figure1_left": (_FIGURE1, spread_table),
    "pruned_squares": (_TABLE6, how_it_works.pruned_squares_table),
    "training_speed": (("benchmarks/results/training_h200.json",), training_speed_table),
    "training_speed_matmul": (("benchmarks/results/training_h200_attention_matmul.json",), training_speed_table),
    "short_attention": (("benchmarks/results/short_attention_h200.json",), short_attention_table),
    "pruning_speed": (("benchmarks/results/pruning_h200.json",), pruning_speed_table),
    "export_files": (_EXPORT, export_files_table),
    "export_models": (_EXPORT, export_models_table),
    "selection": (_SPARSITY, selection_table),
    "mask_overhead": (_SPARSITY, mask_overhead_table),
    **frontier_page.TABLES,
}


# Figure file -> result files and the function that draws it.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Result]], Any]]] = {
    "docs/figures/figure1_weight_spread.png": (_FIGURE1, spread_figure),
    "docs/figures/figure3_cifar10_weights.png": (
        tuple(f"results/transformers/table1_cifar10_{name}.json" for name in ("adamw", "ham", "alpha5_90")),
        kept_weights_figure,
    ),
    "docs/figures/figure4_gpt2_one_shot.png": (_TABLE6, quality_against_sparsity),
    "docs/figures/figure8_gpt2_weights.png": (_TABLE6, language_figure),
    "docs/figures/phases_digits.svg": (_TABLE1_DIGITS, phases_figure),
    "docs/figures/how_it_works/steepest_steps.svg": ((), how_it_works.steepest_steps),
    "docs/figures/how_it_works/step_sizes.svg": ((), how_it_works.step_sizes),
    "docs/figures/how_it_works/composition_order.svg": (
        ("results/geometry/figure3_composition_order.json",),
        how_it_works.composition_order,
    ),
    "docs/figures/how_it_works/pruned_squares.svg": (_TABLE6, how_it_works.pruned_squares),
    **frontier_page.FIGURES,
}


def rewrite_page(page: str, root: pathlib.Path) -> str:
    """The page with every marked block replaced by its table and, below it, where the numbers come from."""

    def write_table(name: str) -> str:
        files, write = TABLES[name]
        results = [Result.load(root / file) for file in files]
        return "\n\n".join(part for part in (write(results), origins(files, results)) if part)

    return rewrite_blocks(page, {name: functools.partial(write_table, name) for name in TABLES})


def build(config: Config) -> list[pathlib.Path]:
    """Draw the figures and rewrite the pages; the files written."""
    written = []
    for figure, (files, draw) in FIGURES.items():
        written.append(config.root / figure)
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        save_figure(draw([Result.load(config.root / file) for file in files]), written[-1])
    for page in PAGES:
        path = config.root / page
        path.write_text(rewrite_page(path.read_text(), config.root))
        written.append(path)
    return written


def main() -> None:
    """The command line."""
    for path in build(load_extra("tyro").cli(Config)):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
