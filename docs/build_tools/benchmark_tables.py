"""Tables of measured times, and of the first sparse-training runs on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Row, Table, from_rows, number

_SHAPES = {"gpt2-small": "GPT-2 small", "gpt2-xl": "GPT-2 XL", "flat-1.07e9": "one tensor of 1.07e9"}


def gpu_step_table(results: Sequence[Result], *, short: bool = False) -> Table:
    """Time of a step on a GPU, in a row and alone, against the floor and torch's fused AdamW: one row per optimizer."""
    kept = ("AdamW fused", "HORST fused (default)")
    rows = sorted(results[0].rows, key=lambda row: list(_SHAPES).index(row["shapes"]))
    return from_rows(
        [row for row in rows if not short or row["optimizer"] in kept],
        ("model", lambda row: _SHAPES[row["shapes"]]),
        ("optimizer", "{optimizer}"),
        ("ms in a row", "{milliseconds:.3f}"),
        ("x floor", "{times_floor:.2f}"),
        ("x AdamW fused", "{times_AdamW fused:.2f}"),
        ("ms alone", "{alone_milliseconds:.3f}"),
        ("x AdamW fused", "{alone_times_AdamW fused:.2f}"),
        ("host ms", "{host_milliseconds:.2f}"),
        ("extra MiB", "{extra_mebibytes:.0f}"),
    )


def cpu_step_table(results: Sequence[Result]) -> Table:
    """Time of a step on a CPU, against torch's default and fused AdamW: one row per optimizer."""
    return from_rows(
        results[0].rows,
        ("optimizer", "{optimizer}"),
        ("ms", "{milliseconds:.1f}"),
        ("x floor", "{times_floor:.2f}"),
        ("x AdamW (default)", "{times_AdamW (default):.2f}"),
        ("x AdamW fused", "{times_AdamW fused:.2f}"),
    )


def cifar_table(results: Sequence[Result]) -> Table:
    """What is pruned, accuracy sparse and dense, training loss, speed: one row per run."""
    return from_rows(
        [row for result in results for row in result.rows],
        ("optimizer", lambda row: "AdamW" if row["optimizer"] == "adamw" else f"HORST, alpha {row['alpha']:g}"),
        ("lr", "{lr:g}"),
        ("seed", "{seed}"),
        ("weights pruned", "{pruned:,} of {masked_weights:,}"),
        ("accuracy", "{accuracy:.2%}"),
        ("after the last dense phase", "{dense_phase_accuracy:.2%}"),
        ("training loss", "{train_loss:.3f}"),
        ("images per second", "{images_per_second:,.0f}"),
    )


def selection_table(results: Sequence[Result]) -> Table:
    """Selection beside torch.kthvalue: one row per tensor."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "selection"],
        ("weights", "{weights:,}"),
        ("dtype", "{dtype}"),
        ("content", "{content}"),
        ("selection ms", lambda row: f"{1e3 * row['select_s']:.1f}"),
        ("kthvalue ms", lambda row: f"{1e3 * row['kthvalue_s']:.0f}"),
        ("times faster", "{kthvalue_over_select:.0f}"),
        ("extra memory", "{extra_bytes_share:.1%}"),
    )


def mask_overhead_table(results: Sequence[Result]) -> Table:
    """The training step with masks beside the step without: one row per phase."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "deit_small step"],
        ("DeiT-small, batch 1024", "{masks}"),
        ("ms per step", lambda row: f"{1e3 * row['step_s']:.2f}"),
        ("overhead", "{overhead:+.2%}"),
    )


def pruning_speed_table(results: Sequence[Result]) -> Table:
    """Seconds of pruning and the device's peak memory: one row per method and place of the model."""
    return from_rows(
        results[0].rows,
        ("GPT-2 small, 128 x 512 tokens", "{what}"),
        ("model on the", "{model_on}"),
        ("seconds", "{seconds:.2f}"),
        ("peak MiB on the device", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
    )


def sparse_layers_table(results: Sequence[Result], *, tokens: int = 1) -> Table:
    """Sparse layers on a GPU beside cuBLAS: one row per layer and sparsity, rows of like length."""
    return from_rows(
        [
            row
            for row in results[0].rows
            if row["what"] == "layer" and row["form"] == "sparse" and row["tokens"] == tokens
            if row["row_lengths"] == "alike"
        ],
        ("layer", "{outputs} x {inputs}"),
        ("zeros", "{sparsity:.0%}"),
        ("x memory", "{bytes_of_dense:.2f}"),
        ("us", "{microseconds:.1f}"),
        ("x floor", lambda row: f"{row['microseconds'] / row['floor_microseconds']:.1f}"),
        ("times faster than cuBLAS", "{times_faster:.2f}"),
    )


def sparse_tokens_table(results: Sequence[Result], *, sparsity: float = 0.9) -> Table:
    """Times faster than cuBLAS by number of tokens, by the kernel or an expanded weight: one row per layer."""
    rows = [
        row
        for row in results[0].rows
        if row["what"] == "layer" and row["sparsity"] == sparsity and row["row_lengths"] == "alike"
    ]
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for shape in dict.fromkeys((row["outputs"], row["inputs"]) for row in rows):
        own = [row for row in rows if (row["outputs"], row["inputs"]) == shape and row["form"] != "dense"]
        best = [max(row["times_faster"] for row in own if row["tokens"] == count) for count in counts]
        lines.append([f"{shape[0]} x {shape[1]}", *(f"{ratio:.2f}" for ratio in best)])
    return Table(columns=[f"times faster at {sparsity:.0%} zeros, by tokens", *map(str, counts)], rows=lines)


def sparse_models_table(results: Sequence[Result]) -> Table:
    """A Llama that generates one text, dense and sparse: one row per way of running it."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "model"],
        ("model", "{model}"),
        ("zeros", "{sparsity:.0%}"),
        ("way", "{way}"),
        ("form", "{form}"),
        ("x memory", "{memory_ratio:.2f}"),
        ("tokens per second", "{tokens_per_second:,.0f}"),
        ("times faster", "{times_faster:.2f}"),
    )


def generate_cpu_table(results: Sequence[Result]) -> Table:
    """Generation with each form, one row per form and number of threads."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "generation"],
        ("form", "{form}"),
        ("threads", "{threads}"),
        ("new tokens per s", "{tokens_per_s:.0f}"),
        ("times faster", "{times_faster:.2f}"),
        ("x memory", "{memory_ratio:.2f}"),
        ("error of logits", "{logit_error:.1e}"),
    )


def head_cpu_table(results: Sequence[Result]) -> Table:
    """One token through the head in each form, one row per form and number of threads."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "head"],
        ("head", "{kernel}"),
        ("threads", "{threads}"),
        ("ms", "{milliseconds:.1f}"),
        ("times faster", "{times_faster:.2f}"),
        ("error of logits", "{logit_error:.1e}"),
    )


def export_models_table(results: Sequence[Result]) -> Table:
    """Memory and time beside dense, on one thread, one row per form and number of tokens."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "model" and row["threads"] == 1],
        ("model", "{content}"),
        ("tokens", "{tokens}"),
        ("form", "{form}"),
        ("x memory", "{memory_ratio:.2f}"),
        ("ms", "{milliseconds:.0f}"),
        ("times faster", "{speedup:.2f}"),
    )


def fine_tuning_table(results: Sequence[Result]) -> Table:
    """Perplexity after each count of steps, one row per optimizer and seed."""
    runs: dict[tuple[str, int], list[Row]] = {}
    for row in results[0].rows:
        runs.setdefault((row["optimizer"], row["seed"]), []).append(row)
    steps = [row["step"] for row in next(iter(runs.values()))]
    rows = [
        [name, f"{own[0]['alpha']:.3g}", str(seed), *(f"{row['perplexity']:.2f}" for row in own)]
        for (name, seed), own in sorted(runs.items())
    ]
    return Table(columns=["perplexity after so many steps", "alpha", "seed", *map(str, steps)], rows=rows)


def export_files_table(results: Sequence[Result]) -> Table:
    """Dense and sparse size, one row per file."""
    return from_rows(
        [row for row in results[0].rows if row["what"] == "file"],
        ("stored", "{content}"),
        ("zeros", "{sparsity:.0%}"),
        ("dense MB", lambda row: f"{row['dense_bytes'] / 1e6:.1f}"),
        ("sparse MB", lambda row: f"{row['sparse_bytes'] / 1e6:.1f}"),
        ("ratio", "{ratio:.3f}"),
    )


def short_attention_table(results: Sequence[Result]) -> Table:
    """Each contender's time, and how many times the floor that is, one row per shape and direction."""
    measured: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in (row for result in results for row in result.rows):
        if row.get("kernel", "attention") == "attention":
            # a file from before there was a second kernel has a column for each side
            sides = (str(row[side]) for side in ("batch", "tokens", "heads", "head_width") if side in row)
            shape = row.get("shape") or " x ".join(sides)
            measured.setdefault((shape, row["direction"]), {})[row["contender"]] = row
    contenders = list(next(iter(measured.values())))
    rows = []
    for (shape, direction), own in measured.items():
        floor = own[contenders[0]]["floor_microseconds"]
        words = [f"{own[name]['microseconds']:.0f} ({own[name]['times_floor']:.1f} x)" for name in contenders]
        rows.append([shape, direction, f"{floor:.0f}", *words])
    return Table(columns=["batch x tokens x heads x their width", "", "floor, us", *contenders], rows=rows)


def training_speed_table(results: Sequence[Result]) -> Table:
    """Units per second of a plain loop and of ours, with AdamW and with HORST, one row per model and setting."""
    rows = results[0].rows
    loops = ("plain loop, AdamW", "horst.training, adamw", "horst.training, horst")
    lines = []
    for what, settings in dict.fromkeys((row["what"], row["settings"]) for row in rows):
        rate = {row["loop"]: row["rate"] for row in rows if (row["what"], row["settings"]) == (what, settings)}
        cost = rate[loops[1]] / rate[loops[2]] - 1
        lines.append([what, settings, *(number(rate[loop], ",.0f") for loop in loops), number(cost, "+.1%")])
    columns = ["per second", "settings", "plain loop, AdamW", "`horst.training`, AdamW"]
    return Table(columns=[*columns, "`horst.training`, HORST", "HORST costs"], rows=lines)


_ROUNDED = {"nearest": "to the nearest", "sparsegpt": "by SparseGPT"}
_SIZE_COLUMNS = (
    ("values", "{values}"),
    ("rounded", lambda row: _ROUNDED[row["rounding"]] if row["values"].startswith("int") else ""),
    ("MB", lambda row: f"{row['bytes'] / 1e6:.0f}"),
    ("of float32", "{of_dense_float32:.3f}"),
    ("of float32, matrices alone", "{of_float32_in_matrices:.3f}"),
    ("perplexity", lambda row: number(row["perplexity"], ".2f" if row["perplexity"] < 1e4 else ",.0f")),
)


def sizes_table(results: Sequence[Result]) -> Table:
    """File and perplexity of a model with zeros and few bits: one row per sparsity, precision and way of rounding."""
    return from_rows(results[0].rows, ("zeros", "{sparsity:.0%}"), *_SIZE_COLUMNS)


def sizes_of_seeds_table(results: Sequence[Result]) -> Table:
    """The same for a model trained with several seeds, a file each; with the zeros that rounding adds."""
    return from_rows(
        [row for result in results for row in result.rows],
        ("seed", lambda row: row["model"].rpartition("seed")[2]),
        ("pruned", lambda row: f"{row['sparsity']:.0%}" if row["sparsity"] else ""),
        ("zeros", "{zeros_in_matrices:.0%}"),
        *_SIZE_COLUMNS,
    )
