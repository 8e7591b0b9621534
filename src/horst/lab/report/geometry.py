"""Tables of the geometry lab: toy problems whose max-margin solutions are known."""

from __future__ import annotations

from collections.abc import Callable

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Row, Table, from_rows, number

_ANGLES = ("angle_l1", "angle_l2", "angle_linf")


def summary_table(result: Result) -> Table:
    """One row per method: loss, mass off the support, whether the informative features lead, angles."""
    return from_rows(
        result.rows,
        ("", "{label}"),
        ("lr", "{lr:g}"),
        ("log10 loss", _with_spread("log10_loss", ".2f")),
        ("off-support magnitude", _with_spread("off_support", ".4f")),
        ("off-support L1 share", _with_spread("off_mass", ".3f")),
        ("informative lead", "{leads:.0%}"),
        ("angle to L1", _with_spread("angle_l1", ".1f")),
        ("to L2", _with_spread("angle_l2", ".1f")),
        ("to L-inf", _with_spread("angle_linf", ".1f")),
    )


def ratio_table(result: Result) -> Table:
    """One row per method: the norm at margin 1 beside the smallest possible, in each geometry."""
    return from_rows(
        result.rows,
        ("", "{label}"),
        ("L1 norm ratio", _with_spread("norm_ratio_l1", ".3f")),
        ("L2 norm ratio", _with_spread("norm_ratio_l2", ".3f")),
        ("L-inf norm ratio", _with_spread("norm_ratio_linf", ".3f")),
    )


def dichotomy_table(result: Result) -> Table:
    """Figure 2 as measured."""
    led_nowhere = dict.fromkeys((*_ANGLES, "off_support"))
    return from_rows(
        [{**led_nowhere, **row} for row in result.rows],
        ("operator", "{operator}"),
        ("class", "{class}"),
        ("linear", _yes("linear")),
        ("bounded", _yes("bounded")),
        ("C", "{bound:.3g}"),
        ("commutes with hyperbolic", _yes("commutes_with_hyperbolic")),
        ("inversely coercive", _yes("coercive")),
        ("mu", "{mu:.3g}"),
        ("angle to L1", "{angle_l1:.1f}"),
        ("to L2", "{angle_l2:.1f}"),
        ("to L-inf", "{angle_linf:.1f}"),
        ("off-support", "{off_support:.3f}"),
    )


def loss_table(result: Result) -> Table:
    """Figure 7 as a table: steps to reach a loss."""

    def steps(key: str) -> Callable[[Row], str]:
        return lambda row: number(row[key], "d", none="not reached")

    return from_rows(
        result.rows,
        ("", "{label}"),
        ("lr", "{lr:g}"),
        *((f"steps to {key[9:]}", steps(key)) for key in result.rows[0] if key.startswith("steps_to_")),
        ("final log10 loss", "{log10_loss:.2f}"),
    )


def theorem_table(result: Result) -> Table:
    """Theorem 4.7 by setup and p."""
    table = from_rows(
        [row for row in result.rows if row["p"] is not None],
        ("setup", "{setup}"),
        ("p", "{p:g}"),
        ("smoothing", "{smoothing:g}"),
        ("seeds", "{solvable_seeds}"),
        ("norm of theta", lambda row: f"{10 ** row['log10_norm']:.0e}"),
        ("gap halfway", "{gap_halfway:.4f}"),
        ("gap", "{gap:.4f}"),
        ("gap to global", "{gap_global:.4f}"),
        ("angle to restricted L1", "{angle_restricted:.1f}"),
        ("to L1", "{angle_l1:.1f}"),
        ("to L2", "{angle_l2:.1f}"),
        ("to L-inf", "{angle_linf:.1f}"),
        ("angle between starts", "{angle_between_starts:.1f}"),
        ("measured exponent", "{measured_exponent:.3f}"),
        ("predicted exponent", "{predicted_exponent:.3f}"),
    )
    without = [[row["setup"], "", "", "0", "none separable", *[""] * 10] for row in result.rows if row["p"] is None]
    return Table(columns=table.columns, rows=[*table.rows, *without])


def alpha_table(result: Result) -> Table:
    """HORST and HAM by alpha."""
    magnitude = _with_spread("off_support", ".4f")
    return from_rows(
        [row for row in result.rows if "_alpha_" in row["method"]],
        ("", "{label}"),
        ("off-support magnitude", lambda row: "diverged" if row["diverged"] else magnitude(row)),
        ("informative lead", "{leads:.0%}"),
        ("log10 loss", "{log10_loss:.2f}"),
        ("angle to L1", "{angle_l1:.1f}"),
    )


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


def _with_spread(key: str, spec: str) -> Callable[[Row], str]:
    """Mean and, where there is one, spread."""

    def cell(row: Row) -> str:
        spread = row.get(f"{key}_std")
        return number(row.get(key), spec) + (f" ± {format(spread, spec)}" if spread is not None else "")

    return cell


def _yes(key: str) -> Callable[[Row], str]:
    return lambda row: "n/a" if row[key] is None else ("yes" if row[key] else "no")
