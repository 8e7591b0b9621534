"""From result files to the sections of a report: what each kind of result shows, and which files belong together."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horst.lab.experiments.identity import STRENGTHS, deciding
from horst.lab.experiments.result import Result
from horst.lab.report import compare, export_forms, figures, frontier, geometry, quickstart, sparsify
from horst.lab.report.document import Content, Figure, Section, blamed
from horst.lab.report.runs import identity, settings_of
from horst.lab.report.tables import Table
from horst.lab.report.transformer_sections import one_shot, sparse_training, weight_spread
from horst.lab.report.transformer_tables import digits_table

Source = tuple[pathlib.Path, Result]
ROWS = 200  # of a table of an unknown kind


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a kind of result is shown.

    Args:
        title: Title of its section.
        group: Heading in the table of contents.
        write: Function that returns its tables and figures.
        joins: Whether results with equal settings share a section: the seeds or optimizers of one table.
    """

    title: str
    group: str
    write: Callable[[Sequence[Result]], Content]
    joins: bool = False


def sections(sources: Sequence[Source]) -> list[Section]:
    """One section per kind and setting, in the order of :data:`KINDS`; kinds of others come last, each with its rows.

    Raises:
        ValueError: A result lacks what its table or figure needs; the message names the file.
    """
    order = {kind: place for place, kind in enumerate(KINDS)}
    groups: list[list[Source]] = []
    for path, result in sorted(sources, key=lambda source: order.get(source[1].experiment, len(order))):
        with blamed([path], result.experiment):
            home = next((group for group in groups if _belong_together(group, result)), None)
        if home is None:
            groups.append([(path, result)])
        else:
            home.append((path, result))
    titles: dict[str, int] = {}
    return [_section(group, titles) for group in groups]


def _section(group: Sequence[Source], titles: dict[str, int]) -> Section:
    path, result = group[0]
    kind = KINDS.get(result.experiment) or Kind(result.experiment, "Other results", _rows_as_they_are)
    with blamed([path for path, _ in group], result.experiment):
        content = kind.write([result for _, result in group])
    titles[kind.title] = titles.get(kind.title, 0) + 1
    title = kind.title if titles[kind.title] == 1 else f"{kind.title} ({path.stem})"
    anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "result"
    used = titles[f"#{anchor}"] = titles.get(f"#{anchor}", 0) + 1
    anchor = anchor if used == 1 else f"{anchor}-{used}"
    return Section(title=title, anchor=anchor, group=kind.group, content=content, results=group)


def _belong_together(group: Sequence[Source], result: Result) -> bool:
    """Of one kind, with equal settings, and no run twice: a repeated one would count as another seed."""
    first = group[0][1]
    if result.experiment != first.experiment or result.experiment not in KINDS or not KINDS[result.experiment].joins:
        return False
    return _settings(result) == _settings(first) and not any(_runs(result) & _runs(other) for _, other in group)


def _settings(result: Result) -> str:
    """What the numbers of one table share: all that decides a run, but for what tells its contenders apart."""
    run = deciding(result.config.get("run", {}))
    own = STRENGTHS if KINDS[result.experiment].group == _LANGUAGE else {*STRENGTHS, "lr"}  # vision has a column for it
    shared = {name: value for name, value in run.get("optimization", {}).items() if name not in own}
    return json.dumps({**run, "optimization": shared}, sort_keys=True)


def _runs(result: Result) -> set[tuple[Any, ...]]:
    shared = settings_of(result)
    return {(row.get("seed"), *identity({**shared, **row})) for row in result.rows}


def _rows_as_they_are(results: Sequence[Result]) -> Content:
    rows = results[0].rows
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[_cell(row.get(column)) for column in columns] for row in rows[:ROWS]]
    left = f" The first {ROWS} of {len(rows)} rows; the file has all." if len(rows) > ROWS else ""
    caption = f"The rows of the file as they are.{left}"
    return Content(tables=[Table(caption=caption, columns=columns, rows=lines)] if columns else [])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (dict, list)):
        value = json.dumps(value)
        return value if len(value) <= 80 else f"{value[:77]}..."
    return "" if value is None else str(value)


_LANGUAGE, _VISION, _BEYOND, _GEOMETRY, _SPEED = "Language", "Vision", "Beyond the paper", "Geometry", "Speed"
_SUMMARY = (
    "Means over seeds. Off-support magnitude is the mean magnitude of the uninformative features, as a share of the "
    "largest; angles in degrees to the max-margin solutions."
)
_PROFILE = "The mean over seeds with a band of one deviation; the informative features are on green ground."


def _table(caption: str, write: Callable[[Sequence[Result]], Table]) -> Callable[[Sequence[Result]], Content]:
    """Content that is one table."""
    return lambda results: Content(tables=[write(results).captioned(caption)])


def _toy(
    title: str, draw: Callable[[Result], Any], caption: str, alt: str, *tables: tuple[str, Callable[[Result], Table]]
) -> Kind:
    """A figure of the geometry lab, and tables with their captions."""

    def write(results: Sequence[Result]) -> Content:
        drawn = Figure(name="", draw=functools.partial(draw, results[0]), caption=caption, alt=alt)
        return Content(tables=[table(results[0]).captioned(words) for words, table in tables], figures=[drawn])

    return Kind(title, _GEOMETRY, write)


# The kinds of results and how each is shown, in the report's order.
KINDS: Mapping[str, Kind] = {
    "quickstart": Kind("AdamW and HORST side by side", "Quickstart", quickstart.section),
    "sparsify": Kind("A model made sparse", "Your models", sparsify.section),
    "export": Kind("A model in every form", "Your models", export_forms.section),
    "table6_gpt2_one_shot": Kind("Table 6: GPT-2, pruned in one shot", _LANGUAGE, one_shot, joins=True),
    "one_shot_methods": Kind("One-shot pruning by several methods", _LANGUAGE, one_shot, joins=True),
    "table1_deit_acdc": Kind("Table 1: DeiT with AC/DC", _VISION, sparse_training, joins=True),
    "table3_ham": Kind("Table 3: HAM beside both", _VISION, sparse_training, joins=True),
    "table4_long_run": Kind("Table 4: twice as long", _VISION, sparse_training, joins=True),
    "acdc_cifar10_vit": Kind("AC/DC on CIFAR-10", _VISION, _rows_as_they_are),
    "acdc_digits_vit": Kind(
        "AC/DC on digits",
        _VISION,
        _table("Mean accuracy over seeds and their deviation, by learning rate", digits_table),
    ),
    "rigl_gradient_scaling": Kind("Scaled gradients in RigL, on digits", _VISION, _rows_as_they_are),
    "frontier_language": Kind("Beyond the paper: alpha and the learning rate, language", _BEYOND, frontier.language),
    "frontier_vision": Kind("Beyond the paper: alpha and the learning rate, vision", _BEYOND, frontier.vision),
    "compare_language": Kind("Every contender with equal tries, language", _BEYOND, compare.section),
    "compare_vision": Kind("Every contender with equal tries, vision", _BEYOND, compare.section),
    "figure1_weight_spread": Kind("Figure 1: how weights are spread", "Weights", weight_spread),
    "figure1_diagonal_network": _toy(
        "Figure 1: the diagonal network",
        figures.figure1,
        f"Figure 1 (right): final classifiers of gradient descent and Adam by feature. {_PROFILE}",
        "Line charts of the final weights by feature, for gradient descent and for Adam.",
        (_SUMMARY, geometry.summary_table),
    ),
    "figure2_dichotomy": Kind(
        "Figure 2: which operators commute, are bounded, are coercive",
        _GEOMETRY,
        _table("Properties as measured by probes, and where each leads", lambda r: geometry.dichotomy_table(r[0])),
    ),
    "figure3_composition_order": _toy(
        "Figure 3: the order of composition",
        figures.figure3,
        f"Figure 3 (right): the mirror map before and after Adam. {_PROFILE}",
        "Line chart of the final weights by feature, for Adam-Exp and Exp-Adam.",
    ),
    "figure5_additive_vs_multiplicative": _toy(
        "Figure 5: additive and multiplicative updates",
        figures.figure5,
        f"Figure 5: final classifiers of additive and of multiplicative updates. {_PROFILE}",
        "Line charts of the final weights by feature: SGD and Exp-SGD on the left, Adam and Exp-Adam on the right.",
    ),
    "figure6_mirror_maps": _toy(
        "Figure 6: two mirror maps",
        figures.figure6,
        f"Figure 6: final classifiers of hyperbolic and cosh entropy. {_PROFILE}",
        "Line charts of the final weights by feature: hyperbolic entropy on the left, cosh entropy on the right.",
    ),
    "figure7_loss_curves": _toy(
        "Figure 7: how fast the loss falls",
        figures.figure7,
        "Figure 7: the loss over time, of SignSGD and of the cosh entropy by learning rate.",
        "Line charts of the logarithm of the loss against the step; the table has the steps to reach each loss.",
        ("Steps to reach a loss", geometry.loss_table),
    ),
    "theorem4_7_implicit_bias": _toy(
        "Theorem 4.7: the bias of the flow",
        figures.theorem4_7,
        "The gap to the largest L1 margin against the norm of the classifier, one line per p, on logarithmic axes.",
        "Line charts of the margin gap against the norm, one panel per setup; the table has the ends of the lines.",
        ("Where the flow ends, by setup and p", geometry.theorem_table),
    ),
    "toy_suite": _toy(
        "Every method on the toy problem",
        figures.toy_suite,
        "Angles to the three max-margin directions and the mass off the support, over time, of every method.",
        "Four line charts over the steps, one line per method; the tables have the ends of the lines.",
        (_SUMMARY, geometry.summary_table),
        (
            "The norm at margin 1 over the smallest possible, in each geometry; 1 is the max-margin one",
            geometry.ratio_table,
        ),
    ),
    "toy_ablation": _toy(
        "Variants of the toy problem",
        figures.toy_ablation,
        "Mean magnitude off the support, one row per variant and one column per method; less is sparser.",
        "Heat map of the mean magnitude off the support; the table has the same numbers.",
        ("Mean magnitude off the support; a star where the data are not separated", geometry.ablation_table),
        ("HORST and HAM by alpha", geometry.alpha_table),
    ),
    "bench_optimizer_step": Kind("Time of a step", _SPEED, _rows_as_they_are),
    "bench_pruning": Kind("Time of one-shot pruning", _SPEED, _rows_as_they_are),
    "bench_sparsity": Kind("Time of selection and masks", _SPEED, _rows_as_they_are),
}
