"""The benchmark tables of the README and the documentation, from the files in ``benchmarks/results``."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

from horst.data.lab import load_lab_module
from horst.experiments.result import Result
from horst.report.tables import markdown, number, origin, rewrite_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where things are.

    Args:
        results: The folder of benchmark files.
        pages: The pages whose tables are rewritten.
    """

    results: pathlib.Path = pathlib.Path("benchmarks/results")
    pages: tuple[pathlib.Path, ...] = (
        pathlib.Path("README.md"),
        pathlib.Path("docs/benchmarks/optimizer_step_h200_202611.md"),
        pathlib.Path("docs/sparse_training.md"),
    )


def gpu_step_table(result: Result, *, short: bool = False) -> str:
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
        for row in sorted(result.rows, key=lambda row: list(names).index(row["shapes"]))
        if not short or row["optimizer"] in kept
    ]
    columns = ["model", "optimizer", "ms in a row", "x floor", "x AdamW fused", "ms alone", "x AdamW fused"]
    return markdown([*columns, "host ms", "extra MiB"], lines)


def cpu_step_table(result: Result) -> str:
    """A line an optimizer on a CPU, against torch's default and fused AdamW."""
    lines = [
        [
            row["optimizer"],
            number(row["milliseconds"], ".1f"),
            number(row["times_floor"], ".2f"),
            number(row["times_AdamW (default)"], ".2f"),
            number(row["times_AdamW fused"], ".2f"),
        ]
        for row in result.rows
    ]
    return markdown(["optimizer", "ms", "x floor", "x AdamW (default)", "x AdamW fused"], lines)


# Marker on a page -> result file and the function that writes its table.
TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "optimizer_step_gpu": ("optimizer_step_h200", gpu_step_table),
    "optimizer_step_gpu_short": ("optimizer_step_h200", functools.partial(gpu_step_table, short=True)),
    "optimizer_step_cpu": ("optimizer_step_cpu", cpu_step_table),
}


def rewrite_page(page: str, results: pathlib.Path) -> str:
    """The page with every marked block replaced by its table and, below it, where the numbers come from."""

    def writer(name: str) -> Callable[[], str]:
        def write_table() -> str:
            file, write = TABLES[name]
            result = Result.load(results / f"{file}.json")
            return f"{write(result)}\n\n{origin(f'benchmarks/results/{file}.json', result)}"

        return write_table

    return rewrite_blocks(page, {name: writer(name) for name in TABLES})


def build(config: Config) -> list[pathlib.Path]:
    """Rewrite the pages; the files written."""
    for path in config.pages:
        path.write_text(rewrite_page(path.read_text(), config.results))
    return list(config.pages)


def main() -> None:
    """The command line."""
    for path in build(load_lab_module("tyro").cli(Config)):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
