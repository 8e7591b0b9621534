"""The blocks of the study *Methods compared*: setting, tables, figure, and what is folded away."""

from __future__ import annotations

from collections.abc import Sequence

from horst.lab.experiments.result import Result
from horst.lab.report import compare
from horst.lab.report.tables import Table

Part = Table | str
FIGURE = "figures/compare_language.svg"
LEVELS = (0.5, 0.7, 0.8, 0.9)  # of the main table
_TEXT, _TIME = "The text:", "time per step"
_FIGURE_ON_PAGE = (
    "![Two charts of perplexity against the share of zeros, pruned by SparseGPT. Left, AdamW, AdamW with l1, and Muon, "
    "each without and with the mirror step. Right, the methods that are best at some level, and AdamW. The tables have "
    f"the same numbers](../{FIGURE})\n\n"
    "*Pruned by SparseGPT; the axis is compressed below 50 %. Bars: the range over seeds. Left: dashed without the "
    "mirror step, solid with it. Right: all methods that are bold in some column of the table, and AdamW, dotted.*"
)


def comparison(results: Sequence[Result], *, figure: bool = True) -> list[Part]:
    """Of each result the setting and the table; of the first of language models the figure; the rest folded.

    Args:
        results: Results of the comparisons.
        figure: Whether :data:`FIGURE` shows the first of them.
    """
    parts = [part for result in results for part in _parts(result, drawn=figure and result is results[0])]
    return parts or ["Not measured yet."]


def _parts(result: Result, *, drawn: bool) -> list[Part]:
    text = " ".join(note.partition(", digest")[0].rstrip(".") + "." for note in result.notes if note.startswith(_TEXT))
    setting = f"Setting: {compare.setting_words(result)}. {text} {compare.zeros_words(result)}"
    criterion, levels = compare.criterion(result)[0], compare.levels_of(result)
    table = _comparable(compare.compare_table([result], levels=[level for level in levels if level in LEVELS]), result)
    pairs = compare.pairs_table([result], levels=[level for level in levels if level in LEVELS])
    figures = [_FIGURE_ON_PAGE] if drawn and result.curves["less_is_better"] else []
    parts: list[Part] = [" ".join(setting.split()), *([pairs] if pairs.rows else []), *figures, table]
    for way in compare.ways_of(result):
        if "tuned_by" in result.config and way != criterion:
            name = compare.WAYS.get(way, way)
            other = compare.compare_table([result], way=way, brief=True)
            parts.append(folded(f"The same models pruned by {name}", other))
    if result.config["tries"] > 1:
        parts.append(folded("All tries", compare.tries_table([result])))
    return parts


def _comparable(table: Table, result: Result) -> Table:
    """Without the times of runs that were not timed, or not on one kind of machine."""
    times = table.columns.index(_TIME)
    if result.environment["cores"] != "various" and any(row[times] != "n/a" for row in table.rows):
        return table
    kept = [i for i in range(len(table.columns)) if i != times]
    return Table(columns=[table.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in table.rows])


def folded(title: str, table: Table) -> str:
    """A table that opens on a click, on GitHub and on the site.

    Example:
        >>> print(folded("More", Table(columns=["x"], rows=[["1"]])))
        <details markdown="1"><summary>More</summary>
        <BLANKLINE>
        | x |
        |---|
        | 1 |
        <BLANKLINE>
        </details>
    """
    return f'<details markdown="1"><summary>{title}</summary>\n\n{table.markdown()}\n\n</details>'
