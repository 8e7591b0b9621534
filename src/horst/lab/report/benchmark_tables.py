"""Tables of measured times, and of the first sparse-training runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Table, number


def gpu_step_table(results: Sequence[Result], *, short: bool = False) -> Table:
    """Time of a step on a GPU, in a row and alone, against the floor and torch's fused AdamW: one row per optimizer."""
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
    return Table(columns=[*columns, "host ms", "extra MiB"], rows=lines)


def cpu_step_table(results: Sequence[Result]) -> Table:
    """Time of a step on a CPU, against torch's default and fused AdamW: one row per optimizer."""
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
    return Table(columns=["optimizer", "ms", "x floor", "x AdamW (default)", "x AdamW fused"], rows=lines)


def cifar_table(results: Sequence[Result]) -> Table:
    """What is pruned, accuracy sparse and dense, training loss, speed: one row per run."""
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
    return Table(columns=[*columns, "images per second"], rows=lines)


def digits_table(results: Sequence[Result]) -> Table:
    """Mean accuracy over seeds of both optimizers: one row per learning rate."""
    rows = results[0].rows
    names = ("AdamW", "HORST")
    lines = []
    for lr in dict.fromkeys(row["lr"] for row in rows):
        found = [[row["accuracy"] for row in rows if row["lr"] == lr and row["optimizer"] == name] for name in names]
        lines.append([f"{lr:g}", *(f"{statistics.mean(f):.2%} ± {statistics.pstdev(f):.2%}" for f in found)])
    zeros = f"{rows[0]['zeros']:,} of {rows[0]['masked_weights']:,} weights zero"
    return Table(columns=["learning rate", "AdamW", f"HORST, alpha 5 ({zeros} in each run)"], rows=lines)


def selection_table(results: Sequence[Result]) -> Table:
    """Selection beside torch.kthvalue: one row per tensor."""
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
    return Table(columns=columns, rows=lines)


def mask_overhead_table(results: Sequence[Result]) -> Table:
    """The training step with masks beside the step without: one row per phase."""
    lines = [
        [row["masks"], number(1e3 * row["step_s"], ".2f"), number(row["overhead"], "+.2%")]
        for row in results[0].rows
        if row["what"] == "deit_small step"
    ]
    return Table(columns=["DeiT-small, batch 1024", "ms per step", "overhead"], rows=lines)


def pruning_speed_table(results: Sequence[Result]) -> Table:
    """Seconds of pruning and the device's peak memory: one row per method and place of the model."""
    lines = [
        [row["what"], row["model_on"], number(row["seconds"], ".2f"), f"{row['peak_bytes'] / 2**20:,.0f}"]
        for row in results[0].rows
    ]
    return Table(
        columns=["GPT-2 small, 128 x 512 tokens", "model on the", "seconds", "peak MiB on the device"], rows=lines
    )
