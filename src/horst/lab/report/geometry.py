"""The geometry page: its figures and the tables between its markers, from the result files.

``python -m horst.lab.report.geometry`` draws every figure of ``results/geometry`` into ``docs/figures/geometry`` and
rewrites the blocks ``<!-- table:NAME -->`` to ``<!-- /table -->`` of ``docs/geometry.md``. No number there is typed.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from horst.extras import load_extra
from horst.lab.experiments.result import Result
from horst.lab.report.figures import FIGURES, save_figure
from horst.lab.report.tables import markdown, number, origin, rewrite_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where things are.

    Args:
        results: The folder of result files.
        page: The page whose tables are rewritten.
        figures: The folder the figures go to.
    """

    results: pathlib.Path = pathlib.Path("results/geometry")
    page: pathlib.Path = pathlib.Path("docs/geometry.md")
    figures: pathlib.Path = pathlib.Path("docs/figures/geometry")


def summary_table(result: Result) -> str:
    """One line a method: loss, mass off the support, whether the informative features lead, angles."""
    columns = ["", "lr", "log10 loss", "off-support magnitude", "off-support L1 share", "informative lead"]
    angles = ["angle to L1", "to L2", "to L-inf"]
    lines = [
        [
            row["label"],
            number(row["lr"], "g"),
            _with_spread(row, "log10_loss", ".2f"),
            _with_spread(row, "off_support", ".4f"),
            _with_spread(row, "off_mass", ".3f"),
            number(row["leads"], ".0%"),
            *(_with_spread(row, f"angle_{g}", ".1f") for g in ("l1", "l2", "linf")),
        ]
        for row in result.rows
    ]
    return markdown([*columns, *angles], lines)


def ratio_table(result: Result) -> str:
    """One line a method: the norm at margin 1 beside the smallest possible, in each geometry."""
    lines = [
        [row["label"], *(_with_spread(row, f"norm_ratio_{g}", ".3f") for g in ("l1", "l2", "linf"))]
        for row in result.rows
    ]
    return markdown(["", "L1 norm ratio", "L2 norm ratio", "L-inf norm ratio"], lines)


def dichotomy_table(result: Result) -> str:
    """Figure 2 as measured."""
    lines = [
        [
            row["operator"],
            row["class"],
            *(_yes(row[key]) for key in ("linear", "bounded")),
            number(row["bound"], ".3g"),
            _yes(row["commutes_with_hyperbolic"]),
            _yes(row["coercive"]),
            number(row["mu"], ".3g"),
            *(number(row.get(f"angle_{g}"), ".1f") for g in ("l1", "l2", "linf")),
            number(row.get("off_support"), ".3f"),
        ]
        for row in result.rows
    ]
    columns = ["operator", "class", "linear", "bounded", "C", "commutes with hyperbolic", "inversely coercive", "mu"]
    return markdown([*columns, "angle to L1", "to L2", "to L-inf", "off-support"], lines)


def loss_table(result: Result) -> str:
    """Figure 7 as a table: steps to reach a loss."""
    keys = [key for key in result.rows[0] if key.startswith("steps_to_")]
    lines = [
        [
            row["label"],
            number(row["lr"], "g"),
            *(number(row[key], "d", none="not reached") for key in keys),
            number(row["log10_loss"], ".2f"),
        ]
        for row in result.rows
    ]
    return markdown(["", "lr", *(f"steps to {key[9:]}" for key in keys), "final log10 loss"], lines)


def theorem_table(result: Result) -> str:
    """Theorem 4.7 by setup and p."""
    columns = [
        "setup",
        "p",
        "smoothing",
        "seeds",
        "norm of theta",
        "gap halfway",
        "gap",
        "gap to global",
        "angle to restricted L1",
    ]
    more = ["to L1", "to L2", "to L-inf", "angle between starts", "measured exponent", "predicted exponent"]
    lines = []
    for row in result.rows:
        if row["p"] is None:
            lines.append([row["setup"], "", "", "0", "none separable", *[""] * 10])
            continue
        lines.append(
            [
                row["setup"],
                f"{row['p']:g}" if row["p"] != "inf" else "inf",
                number(row["smoothing"], "g"),
                str(row["solvable_seeds"]),
                f"{10 ** row['log10_norm']:.0e}",
                *(number(row[key], ".4f") for key in ("gap_halfway", "gap", "gap_global")),
                *(number(row[key], ".1f") for key in ("angle_restricted", "angle_l1", "angle_l2", "angle_linf")),
                number(row["angle_between_starts"], ".1f"),
                *(number(row[key], ".3f") for key in ("measured_exponent", "predicted_exponent")),
            ]
        )
    return markdown([*columns, *more], lines)


def alpha_table(result: Result) -> str:
    """HORST and HAM by alpha."""
    lines = [
        [
            row["label"],
            "diverged" if row["diverged"] else _with_spread(row, "off_support", ".4f"),
            *(number(row[key], spec) for key, spec in (("leads", ".0%"), ("log10_loss", ".2f"), ("angle_l1", ".1f"))),
        ]
        for row in result.rows
        if "_alpha_" in row["method"]
    ]
    return markdown(["", "off-support magnitude", "informative lead", "log10 loss", "angle to L1"], lines)


def ablation_table(result: Result) -> str:
    """Off-support magnitude by variant and method; a star where the data are not separated."""
    rows = [row for row in result.rows if "_alpha_" not in row["method"]]
    methods = list(dict.fromkeys(row["label"] for row in rows))
    cells = {(row["variant"], row["label"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = [variant]
        for method in methods:
            row = cells[variant, method]
            star = "*" if row["margin"] is not None and row["margin"] <= 0 else ""
            line.append("diverged" if row["diverged"] else f"{row['off_support']:.3f}{star}")
        lines.append(line)
    return markdown(["variant", *methods], lines)


# Marker on the page -> result file and the function that writes its table.
TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "summary": ("toy_suite", summary_table),
    "ratios": ("toy_suite", ratio_table),
    "dichotomy": ("figure2_dichotomy", dichotomy_table),
    "diagonal": ("figure1_diagonal_network", summary_table),
    "losses": ("figure7_loss_curves", loss_table),
    "theorem": ("theorem4_7_implicit_bias", theorem_table),
    "theorem_small": ("theorem4_7_small", theorem_table),
    "ablation": ("toy_ablation", ablation_table),
    "alphas": ("toy_ablation", alpha_table),
}


def rewrite_page(page: str, results: dict[str, Result]) -> str:
    """The page with every marked block replaced by its table and, below it, where the numbers come from."""

    def writer(name: str) -> Callable[[], str]:
        def write_table() -> str:
            file, write = TABLES[name]
            if file not in results:
                raise ValueError(f"the table {name!r} needs the result file {file}.json. Run the experiment first.")
            return f"{write(results[file])}\n\n{origin(f'results/geometry/{file}.json', results[file])}"

        return write_table

    return rewrite_blocks(page, {name: writer(name) for name in TABLES})


def build(config: Config) -> list[pathlib.Path]:
    """Draw the figures and rewrite the page; the files written."""
    results = {path.stem: Result.load(path) for path in sorted(config.results.glob("*.json"))}
    written = []
    config.figures.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        if name in results:
            path = config.figures / f"{name}.png"
            save_figure(draw(results[name]), path)
            written.append(path)
    config.page.write_text(rewrite_page(config.page.read_text(), results))
    return [*written, config.page]


def main() -> None:
    """The command line."""
    for path in build(load_extra("tyro").cli(Config)):
        sys.stdout.write(f"{path}\n")


def _with_spread(row: dict[str, Any], key: str, spec: str) -> str:
    """Mean and, where there is one, spread."""
    spread = row.get(f"{key}_std")
    return number(row.get(key), spec) + (f" ± {format(spread, spec)}" if spread is not None else "")


def _yes(value: bool | None) -> str:
    return "n/a" if value is None else ("yes" if value else "no")


if __name__ == "__main__":
    main()
