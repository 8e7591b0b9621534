"""What the page of ``horst export --report`` shows: every form of a model beside dense, best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.tables import Row, Table, from_rows, number

NAMES = {"perplexity": "perplexity", "top1": "accuracy"}


def section(results: Sequence[Result]) -> Content:
    """The sentences, the bars, the table."""
    result = results[0]
    caption = (
        "Every form, the fastest first. Ratios are to dense; a file that is dense again once loaded has its speed. "
        "Largest error: of an output, against dense."
    )
    bars = Figure(
        name="speed",
        draw=lambda: draw_speed(result),
        caption=f"{_speed_title(result)}, by form; more is better. The dashed line is the dense model.",
        alt=f"Bar chart of {_speed_title(result).lower()} by form. {' '.join(words(result))}",
    )
    return Content(summary=words(result), tables=[forms_table(result).captioned(caption)], figures=[bars])


def forms_table(result: Result) -> Table:
    """One row per form: size, speed, quality, each beside its ratio to dense."""
    columns: list[tuple[str, Any]] = [
        ("form", "{title}"),
        ("file MB", lambda row: _megabytes(row["file_bytes"])),
        ("of dense", "{file_ratio:.3f}"),
        ("memory MB", lambda row: _megabytes(row["memory_bytes"])),
        ("of dense", "{memory_ratio:.3f}"),
    ]
    if _generates(result):
        columns += [("new tokens per s", "{tokens_per_s:.1f}"), ("times dense", "{generation_speedup:.2f}")]
    calls = "prompt tokens per s" if result.curves["unit"] == "tokens" else "images per s"
    columns += [(calls, "{inputs_per_s:.1f}"), ("times dense", "{speedup:.2f}")]
    columns += [(NAMES[name], lambda row, name=name: number(row[name], ".4g")) for name in result.curves["metrics"]]
    columns += [("largest error", "{max_error:.1e}"), ("name", "{form}")]
    return from_rows(result.rows, *columns)


def words(result: Result) -> list[str]:
    """The fastest form and the smallest file, and what each costs.

    Example:
        >>> rows = [{"form": f, "title": f, "file_bytes": b, "file_ratio": r, "inputs_per_s": s, "speedup": x,
        ...          "perplexity": p} for f, b, r, s, x, p in (("sparse", None, None, 9.0, 3.0, 20.1),
        ...          ("file", 2, 0.2, None, None, 20.0), ("dense", 10, 1.0, 3.0, 1.0, 20.0))]
        >>> curves = {"unit": "images", "metrics": ["perplexity"]}
        >>> rest = {"config": {}, "notes": [], "environment": {}, "seconds": 1.0}
        >>> for line in words(Result(experiment="export", rows=rows, curves=curves, **rest)):
        ...     print(line)
        Fastest: sparse, 3.00 times dense; perplexity 20.1, dense 20.
        Smallest file: file, 0.200 of dense; perplexity 20, dense 20.
    """
    dense = next(row for row in result.rows if row["form"].split(" on ")[0] == "dense")
    timed = [row for row in result.rows if row[_speed(result)] is not None]
    fastest = max(timed, key=lambda row: row[_speed(result)])
    ratio = fastest["generation_speedup" if _generates(result) else "speedup"]
    lines = [f"Fastest: {fastest['title']}, {ratio:.2f} times dense{_quality(fastest, dense, result)}."]
    if fastest is dense:
        lines = ["Dense is the fastest form here."]
    smallest = min((row for row in result.rows if row["file_bytes"] is not None), key=lambda row: row["file_bytes"])
    if smallest is not dense:
        share = f"{smallest['file_ratio']:.3f} of dense{_quality(smallest, dense, result)}"
        lines.append(f"Smallest file: {smallest['title']}, {share}.")
    return lines


def draw_speed(result: Result) -> Any:
    """Bars, the fastest at the top; a dashed line for each dense model."""
    rows = [row for row in result.rows if row[_speed(result)] is not None][::-1]
    figure, axes = new_figure(1, 1, figsize=(6.8, 0.42 * len(rows) + 1.2))
    drawn = axes.barh(
        [row["title"] for row in rows], [row[_speed(result)] for row in rows], color="#0072B2", height=0.6
    )
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
    for row in rows:
        if row["form"].split(" on ")[0] == "dense":
            axes.axvline(row[_speed(result)], linestyle="--", color="0.4", linewidth=1)
    axes.margins(x=0.12)
    axes.set_xlabel(_speed_title(result).lower())
    return figure


def _generates(result: Result) -> bool:
    return "tokens_per_s" in result.rows[0]


def _speed(result: Result) -> str:
    return "tokens_per_s" if _generates(result) else "inputs_per_s"


def _speed_title(result: Result) -> str:
    return "New tokens per second" if _generates(result) else f"{result.curves['unit'].capitalize()} per second"


def _quality(row: Row, dense: Row, result: Result) -> str:
    shown = [name for name in result.curves["metrics"] if row[name] is not None]
    return "".join(f"; {NAMES[name]} {row[name]:.4g}, dense {dense[name]:.4g}" for name in shown)


def _megabytes(size: int | None) -> str:
    return number(None if size is None else size / 1e6, ",.1f" if size and size >= 1e6 else ",.3f")
