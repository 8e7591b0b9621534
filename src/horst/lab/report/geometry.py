"""Tables of the geometry lab: toy problems whose max-margin solutions are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Table, number


def summary_table(result: Result) -> Table:
    """One row per method: loss, mass off the support, whether the informative features lead, angles."""
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
    return Table(columns=[*columns, *angles], rows=lines)


def ratio_table(result: Result) -> Table:
    """One row per method: the norm at margin 1 beside the smallest possible, in each geometry."""
    lines = [
        [row["label"], *(_with_spread(row, f"norm_ratio_{g}", ".3f") for g in ("l1", "l2", "linf"))]
        for row in result.rows
    ]
    return Table(columns=["", "L1 norm ratio", "L2 norm ratio", "L-inf norm ratio"], rows=lines)


def dichotomy_table(result: Result) -> Table:
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
    return Table(columns=[*columns, "angle to L1", "to L2", "to L-inf", "off-support"], rows=lines)


def loss_table(result: Result) -> Table:
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
    return Table(columns=["", "lr", *(f"steps to {key[9:]}" for key in keys), "final log10 loss"], rows=lines)


def theorem_table(result: Result) -> Table:
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
    return Table(columns=[*columns, *more], rows=lines)


def alpha_table(result: Result) -> Table:
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
    return Table(columns=["", "off-support magnitude", "informative lead", "log10 loss", "angle to L1"], rows=lines)


def ablation_table(result: Result) -> Table:
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
    return Table(columns=["variant", *methods], rows=lines)


# Name of a table -> result file and the function that writes it.
TABLES: dict[str, tuple[str, Callable[[Result], Table]]] = {
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


def _with_spread(row: dict[str, Any], key: str, spec: str) -> str:
    """Mean and, where there is one, spread."""
    spread = row.get(f"{key}_std")
    return number(row.get(key), spec) + (f" ± {format(spread, spec)}" if spread is not None else "")


def _yes(value: bool | None) -> str:
    return "n/a" if value is None else ("yes" if value else "no")
