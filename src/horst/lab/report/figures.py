"""The figures of the geometry lab, each drawn from one result file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from horst.extras import load_extra
from horst.lab.experiments.result import Result

# Okabe and Ito's colours, which remain distinct to colour-blind readers; the dash tells pairs of one family apart.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000"
_LINES = {
    "sgd": (_BLUE, "-"),
    "exp_sgd": (_BLUE, "--"),
    "sign_sgd": (_GREEN, "-"),
    "coordinate": (_GREEN, "--"),
    "hyperbolic": (_PURPLE, "--"),
    "cosh": (_PURPLE, "-"),
    "adam": (_RED, "-"),
    "exp_adam": (_RED, "--"),
    "adam_exp": (_RED, ":"),
    "horst": (_BLACK, "-"),
    "ham": (_BLACK, "--"),
}


def figure1(result: Result) -> Any:
    """Figure 1 (right): final classifiers of the diagonal network, one panel per start."""
    names = list(result.curves["profiles"])
    panels = [("u and v start equal", names[:2])]
    if len(names) > 2:
        panels.append(("v starts at 0", names[2:]))
    figure = _profiles(result, panels, labels=["GD", "Adam"])
    figure.suptitle("Diagonal network $\\langle u \\odot v, x \\rangle$: gradient descent against Adam")
    return figure


def figure3(result: Result) -> Any:
    """Figure 3 (right): Adam-Exp against Exp-Adam."""
    figure = _profiles(result, [("", ["adam_exp", "exp_adam"])])
    figure.suptitle("The order of composition")
    return figure


def figure5(result: Result) -> Any:
    """Figure 5: additive against multiplicative updates."""
    panels = [("(a) SGD and Exp-SGD", ["sgd", "exp_sgd"]), ("(b) Adam and Exp-Adam", ["adam", "exp_adam"])]
    return _profiles(result, panels)


def figure6(result: Result) -> Any:
    """Figure 6: hyperbolic against cosh entropy."""
    return _profiles(result, [("(a) hyperbolic entropy", ["hyperbolic"]), ("(b) cosh entropy", ["cosh"])])


def figure7(result: Result) -> Any:
    """Figure 7: loss over time of SignSGD and, by learning rate, of the cosh entropy."""
    figure, (left, right) = new_figure(1, 2, figsize=(9.6, 3.8))
    steps = result.curves["steps"]
    losses = result.curves["losses"]
    for key, curve in losses.items():
        if key.startswith("sign_sgd@"):
            left.plot(steps, curve, color=_GREEN)
    left.axhline(-323.3, color="0.5", linewidth=1, linestyle=":")
    left.annotate(
        "smallest float64", (1.2, -323.3), xytext=(0, 4), textcoords="offset points", color="0.35", fontsize=8
    )
    left.set_title("(a) SignSGD, learning rate 0.1")
    sweep = [key for key in losses if key.startswith("cosh@")]
    colours = load_extra("matplotlib").colormaps["viridis"]
    for i, key in enumerate(sweep):
        right.plot(steps, losses[key], color=colours(i / max(1, len(sweep) - 1) * 0.92), label=key.partition("@")[2])
    for key, curve in losses.items():
        if key.startswith("sgd@"):
            right.plot(steps, curve, color=_BLACK, linestyle="--", label=f"SGD {key.partition('@')[2]}")
    right.set_title("(b) cosh entropy, by learning rate")
    right.legend(fontsize=7, title="learning rate", title_fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, steps[-1])
        axes.set_xlabel("step")
        axes.set_ylabel("log$_{10}$ of the loss")
    return figure


def toy_suite(result: Result) -> Any:
    """Every method over time: angle to the three max-margin directions, and mass off the support."""
    figure, panels = new_figure(1, 4, figsize=(14.5, 3.9))
    steps, methods = result.curves["steps"], result.curves["methods"]
    titles = {
        "angle_l1": "angle to $L_1$ max margin",
        "angle_l2": "angle to $L_2$ max margin",
        "angle_linf": "angle to $L_\\infty$ max margin",
        "off_support": "mean magnitude off the support",
    }
    labels = {row["method"]: row["label"] for row in result.rows}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for name, curves in methods.items():
            colour, dash = _LINES[name]
            axes.plot(steps, curves[key], color=colour, linestyle=dash, label=labels[name], linewidth=1.4)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, steps[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("degrees" if key.startswith("angle") else "share of the largest magnitude")
        axes.set_title(title, fontsize=10)
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def theorem4_7(result: Result) -> Any:
    """The margin gap of the flow against the norm of theta, one panel per setup, one line per p."""
    titles = {
        "positive": "positive start",
        "pairs": "features $x$ and $-x$ ($\\theta = u - v$)",
        "random_signs": "random signs at the start",
    }
    setups = list(dict.fromkeys(row["setup"] for row in result.rows if row.get("p") is not None))
    figure, panels = new_figure(1, len(setups), figsize=(4.2 * len(setups) + 0.8, 3.9), sharey=True)
    panels = panels if len(setups) > 1 else [panels]
    norms = [10**value for value in result.curves["log10_norm"]]
    colours = load_extra("matplotlib").colormaps["viridis"]
    for axes, setup in zip(panels, setups, strict=True):
        keys = [key for key in result.curves["gap"] if key.startswith(f"{setup} ")]
        for i, key in enumerate(keys):
            p = key.rpartition("=")[2]
            axes.plot(
                norms,
                result.curves["gap"][key],
                color=_RED if p == "inf" else colours(0.9 * i / max(1, len(keys) - 1)),
                linestyle="--" if p == "inf" else "-",
                label="$p = \\infty$" if p == "inf" else f"$p = {p}$",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("$\\|\\theta\\|_1$")
        axes.set_title(titles[setup], fontsize=10)
    panels[0].set_ylabel("gap to the $L_1$ max margin\nwith the signs of the start")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def toy_ablation(result: Result) -> Any:
    """Mean magnitude off the support, variants by methods."""
    rows = [row for row in result.rows if "_alpha_" not in row["method"]]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    methods = list(dict.fromkeys(row["label"] for row in rows))
    cells = {(row["variant"], row["label"]): row for row in rows}
    values = [[_or_nan(cells[variant, method]["off_support"]) for method in methods] for variant in variants]
    figure, axes = new_figure(1, 1, figsize=(0.95 * len(methods) + 2, 0.42 * len(variants) + 1.6))
    image = axes.imshow(values, cmap="cividis", vmin=0, aspect="auto")
    limit = 0.5 * max(value for line in values for value in line if not math.isnan(value))
    for i, variant in enumerate(variants):
        for j, method in enumerate(methods):
            row, value = cells[variant, method], values[i][j]
            text = "diverged" if row["diverged"] else f"{value:.3f}" + ("*" if _or_nan(row["margin"]) <= 0 else "")
            colour = "black" if math.isnan(value) or value > limit else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color=colour)
    axes.set_xticks(range(len(methods)), methods, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(variants)), variants, fontsize=8)
    axes.set_xlabel("method")
    axes.set_ylabel("variant")
    axes.set_title("Mean magnitude off the support (* data not separated)", fontsize=10)
    figure.colorbar(image, ax=axes, label="share of the largest magnitude")
    return figure


def _profiles(result: Result, panels: Sequence[tuple[str, list[str]]], labels: Sequence[str] = ()) -> Any:
    """Final classifiers by feature: mean over seeds, a band of one standard deviation, the support in green."""
    figure, all_axes = new_figure(1, len(panels), figsize=(5.0 * len(panels) + 0.4, 3.6), sharey=True)
    all_axes = all_axes if len(panels) > 1 else [all_axes]
    support = result.curves["support"]
    for axes, (title, names) in zip(all_axes, panels, strict=True):
        axes.axvspan(-0.5, support - 0.5, color=_GREEN, alpha=0.25, linewidth=0, label="informative features")
        for edge in (-1, 1):
            axes.axhspan(edge - 0.04, edge + 0.04, color="0.85", linewidth=0)
        axes.axhline(0, color="0.6", linewidth=0.6)
        for i, name in enumerate(names):
            profile = result.curves["profiles"][name]
            mean, std = profile["mean"], profile["std"]
            colour, features = (_BLUE, _ORANGE)[i], range(len(mean))
            label = labels[i] if labels else profile["label"]
            axes.plot(features, mean, color=colour, label=label, linewidth=1.3, zorder=3 + i)
            low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
            axes.fill_between(features, low, high, color=colour, alpha=0.22, linewidth=0, zorder=2 + i)
        axes.set_xlim(-1.5, len(mean) - 0.5)
        axes.set_ylim(-1.45, 1.2)
        axes.set_xlabel("feature")
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8, loc="lower right", ncols=3, framealpha=0.9)
    all_axes[0].set_ylabel("$\\theta\\, /\\, \\|\\theta\\|_\\infty$")
    return figure


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure that belongs to no window and no global state, and its axes."""
    figure_class = load_extra("matplotlib.figure").Figure
    sharey = options.pop("sharey", False)
    figure = figure_class(layout="constrained", dpi=150, **options)
    return figure, figure.subplots(rows, columns, sharey=sharey)


def save_figure(figure: Any, out: Any, ending: str = "", *, transparent: bool = False) -> None:
    """Write a figure; the same figure gives the same file, which names no date.

    Args:
        figure: Figure of matplotlib.
        out: Path or open file.
        ending: File type, ``"png"`` or ``"svg"``, if the path does not end with it.
        transparent: Leave out the white ground.
    """
    ending = ending or os.path.splitext(out)[1].removeprefix(".")
    metadata = {"Date": None} if ending == "svg" else {"Software": None}
    ground = {"transparent": True} if transparent else {"facecolor": "white"}
    with load_extra("matplotlib").rc_context({"svg.hashsalt": "horst"}):
        figure.savefig(out, format=ending, metadata=metadata, **ground)


def _or_nan(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
