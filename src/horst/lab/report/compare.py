"""What the comparisons show: one table of all contenders, their tries, and quality against actual zeros.

A difference counts only if it holds in every seed. In each column the best mean is bold, and with it every contender
that the best does not beat in each seed that both have.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.quality_tables import TOLERANCE
from horst.lab.report.runs import ACCURACY, PERPLEXITY, Measure, zeros
from horst.lab.report.tables import Row, Table, level_name, number

SHOWN = 8  # contenders of the figure
CROPPED = 1.6  # times the best dense model's perplexity: the axis ends there
Place = tuple[str, float]  # a way of pruning and a level
_DENSE: Place = ("dense", 0.0)
# Okabe and Ito's colours without yellow, which is too pale on white, and with grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKS = "osD^vP*X"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender of a result.

    Args:
        name: Name of the contender.
        rows: Rows by place and seed: those of the fresh seeds, or of the tuning seed if there are none.
        fresh: Number of fresh seeds.
        tries: What the result says of its tries.
        cost: Bytes per weight and milliseconds per step.
        measure: Measure of quality.
    """

    name: str
    rows: Mapping[Place, Mapping[int, Row]]
    fresh: int
    tries: Sequence[Mapping[str, Any]]
    cost: Mapping[str, Any]
    measure: Measure

    def values(self, place: Place) -> dict[int, float]:
        """Quality by fresh seed, as it is shown; seeds that broke down are left out."""
        found = self.rows.get(place, {}) if self.fresh else {}
        return {seed: value for seed, row in found.items() if (value := self._quality(row)) is not None}

    def mean(self, place: Place) -> float | None:
        """The mean over all seeds there are, the tuning seed if there is no other; none if one broke down."""
        values = [self._quality(row) for row in self.rows.get(place, {}).values()]
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known and len(known) == len(values) else None

    def cost_at(self, place: Place) -> float:
        """The mean with less always better; infinite without one."""
        mean = self.mean(place)
        return float("inf") if mean is None else mean if self.measure.less else -mean

    def zeros(self, place: Place, key: str = "") -> float | None:
        """Mean of the actual zeros among the pruned weights, or of the share of a key."""
        rows = [row for row in self.rows.get(place, {}).values() if self._quality(row) is not None]
        return statistics.mean(float(row[key]) if key else zeros(row) for row in rows) if rows else None

    @property
    def reason(self) -> str:
        """Why a run broke down, if one did."""
        found = [row["broke_down"] for rows in self.rows.values() for row in rows.values() if row.get("broke_down")]
        return found[0] if found else ""

    @property
    def chosen(self) -> str:
        """The settings of the best try."""
        best = [each for each in self.tries if each["chosen"]]
        return settings_words(best[0]["settings"]) if best else ""

    def _quality(self, row: Row) -> float | None:
        value = row.get(self.measure.key)
        value = None if value is None else float(value)
        return None if value is None or value == float("inf") else self.measure.scale * value


def settings_words(settings: Mapping[str, Any]) -> str:
    """Settings in a cell.

    Example:
        >>> settings_words({"lr": 0.002, "alpha": "auto"})
        'lr 0.002, alpha auto'
    """
    return ", ".join(f"{name.replace('_', ' ')} {number(value, '.4g')}" for name, value in settings.items())


def entries(result: Result) -> list[Entry]:
    """The contenders of a result, the best first; those that broke down come last."""
    measure = PERPLEXITY if result.curves["less_is_better"] else ACCURACY
    found = []
    for name, cost in result.curves["costs"].items():
        own = [row for row in result.rows if row["contender"] == name]
        fresh = [row for row in own if row["stage"] == "seed"]
        rows: dict[Place, dict[int, Row]] = {}
        for row in fresh or own:
            rows.setdefault(_place(row), {})[row.get("seed", 0)] = row
        tries = [each for each in result.curves["tries"] if each["contender"] == name]
        seeds = len({row.get("seed") for row in fresh})
        found.append(Entry(name=name, rows=rows, fresh=seeds, tries=tries, cost=cost, measure=measure))
    return sorted(found, key=lambda entry: entry.cost_at(criterion(result)))


def criterion(result: Result) -> Place:
    """Where the tries were compared."""
    config = result.config
    return (config["tuned_by"], config["tuned_at"]) if "tuned_by" in config else ("sparse", config["sparsity"])


def not_told_apart(found: Sequence[Entry], place: Place) -> list[str]:
    """The best mean of a column, then those that it does not beat in every seed that both have.

    One seed tells nothing apart from chance, so a contender needs two to take part.
    """
    part = [entry for entry in found if len(entry.values(place)) > 1 and entry.mean(place) is not None]
    if not part:
        return []
    best = min(part, key=lambda entry: entry.cost_at(place))
    return [best.name, *(entry.name for entry in part if entry is not best and not _beats(best, entry, place))]


def compare_table(results: Sequence[Result]) -> Table:
    """One row for each contender, the best first."""
    result = results[0]
    found, ways, levels = entries(result), _ways(result), _levels(result)
    bold = {place: set(not_told_apart(found, place)) for place in [_DENSE, *((w, s) for w in ways for s in levels)]}
    planned = len(result.config["seeds"])
    time = _time_of(found, next(iter(result.curves["costs"])))
    rows = []
    for entry in found:
        done = sum(each["done"] for each in entry.tries)
        tries = str(done) if done in (0, len(entry.tries)) else f"{done} of {len(entry.tries)}"
        seeds = str(entry.fresh) if entry.fresh == planned else f"{entry.fresh} of {planned}"
        cells = [_cell(entry, _DENSE, bold), *(_level(entry, ways, level, bold) for level in levels)]
        if entry.reason:
            cells[0] = f"broke down: {entry.reason}" if entry.mean(_DENSE) is None else cells[0]
        elif _guesses(result, entry):
            cells[0 if entry.measure.less else -1] += " (no better than guessing)"
        share = [number(entry.zeros(criterion(result), key), ".1%", none="") for key in ("", "sparsity_of_all_weights")]
        memory = number(entry.cost["bytes_per_weight"], ".1f")
        zeros_words = " / ".join(share) if share[0] else ""
        rows.append([f"`{entry.name}`", entry.chosen, tries, seeds, *cells, zeros_words, memory, time[entry.name]])
    title = found[0].measure.name + (f", pruned by {' / '.join(ways)}" if len(ways) > 1 else "")
    at = level_name(criterion(result)[1])
    return Table(
        columns=[
            title, "best try", "tries", "seeds", "dense", *map(level_name, levels),
            f"zeros at {at}: pruned layers / all weights", "state, bytes per weight", "time per step",
        ],
        rows=rows,
    )  # fmt: skip


def tries_table(results: Sequence[Result]) -> Table:
    """Every try with what it was compared by; the chosen one is bold."""
    result = results[0]
    found = entries(result)
    scale, spec = found[0].measure.scale, found[0].measure.spec
    rows = []
    for entry in found:
        cells = []
        for each in entry.tries:
            value = each["criterion"]
            words = "not run" if not each["done"] else number(value if value is None else scale * float(value), spec)
            words = "broke down" if each.get("broke_down") else words
            cells.append(f"{settings_words(each['settings'])}: {f'**{words}**' if each['chosen'] else words}")
        rows.append([f"`{entry.name}`", *cells])
    count = max(len(row) for row in rows) - 1
    rows = [[*row, *[""] * (1 + count - len(row))] for row in rows]
    return Table(columns=["tries", *(str(i + 1) for i in range(count))], rows=rows)


def words(result: Result) -> str:
    """Who is best, and whom it is not told apart from, at the criterion and dense."""
    found = entries(result)
    sentences = []
    for place, name in ((criterion(result), _place_words(result)), (_DENSE, "before pruning")):
        group = not_told_apart(found, place)
        if not group:
            continue
        best = next(entry for entry in found if entry.name == group[0])
        value = number(best.mean(place), best.measure.spec)
        text = f"{name[0].upper()}{name[1:]}, `{best.name}` has the best mean, {value}"
        others = ", ".join(f"`{other}`" for other in group[1:])
        sentences.append(f"{text}. It does not beat {others} in every seed." if others else f"{text}, in every seed.")
    return " ".join(sentences)


def section(results: Sequence[Result]) -> Content:
    """The sentences, the tables, the figure of language models."""
    result = results[0]
    how = (
        "Means over fresh seeds at the settings of the best try. Bold: the best mean of the column, and all that it "
        "does not beat in every seed. The time per step is relative to the first contender's."
    )
    tables = [compare_table(results).captioned(how), tries_table(results).captioned("Every try on the tuning seed.")]
    figure = Figure(
        name="zeros",
        draw=functools.partial(against_zeros, results),
        caption=f"Perplexity against actual zeros, the best {SHOWN} by the criterion; dots are seeds.",
        alt="Line charts of perplexity against the share of zeros; the table has the same numbers.",
    )
    told = words(result)
    return Content(summary=[told] if told else [], tables=tables, figures=[figure] if len(_ways(result)) > 1 else [])


def against_zeros(results: Sequence[Result]) -> Any:
    """Perplexity against the actual share of zeros, the best eight, one panel for each way of pruning.

    The first contender, AdamW, is dotted where it is not among them.
    """
    result = results[0]
    working = [entry for entry in entries(result) if entry.mean(criterion(result)) is not None]
    found = working[:SHOWN]
    found += [entry for entry in working[SHOWN:] if entry.name == next(iter(result.curves["costs"]))]
    ways, levels = _ways(result), _levels(result)
    figure, panels = new_figure(1, len(ways), figsize=(1.2 + 4.2 * len(ways), 4.8), sharey=True)
    best = min(filter(None, (entry.mean(_DENSE) for entry in found)), default=1.0)
    shown: list[float] = []
    for axes, way in zip(panels if len(ways) > 1 else [panels], ways, strict=True):
        for entry, colour, mark in zip(found, (*_COLOURS, "#404040"), (*_MARKS, ""), strict=False):
            means = {place: entry.mean(place) for place in (_DENSE, *((way, level) for level in levels))}
            places = {place: mean for place, mean in means.items() if mean is not None}
            x = [100 * (entry.zeros(place) or 0.0) for place in places]
            y = list(places.values())
            shown += y
            look = {"color": colour, "marker": mark, "linestyle": "-" if mark else ":"}
            axes.plot(x, y, **look, markersize=5, linewidth=1.6, label=entry.name)
            for at, place in zip(x, places, strict=True):
                dots = list(entry.values(place).values())
                axes.plot([at] * len(dots), dots, ".", color=colour, alpha=0.35, markersize=4)
        axes.set_title(f"pruned by {way}", fontsize=10)
        axes.set_xlabel("zeros among the pruned weights, %")
        axes.grid(alpha=0.3, linewidth=0.5)
    first = figure.axes[0]
    first.set_ylabel("perplexity")
    low, high = min(shown, default=1.0), min(max(shown, default=2.0), CROPPED * best)
    first.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _place(row: Row) -> Place:
    """A row's place in the table; of sparse training every way is in one column."""
    if not row["sparsity"]:
        return _DENSE
    return ("sparse" if "top1" in row else row["method"], row["sparsity"])


def _ways(result: Result) -> list[str]:
    return list(result.config["methods"]) if "tuned_by" in result.config else ["sparse"]


def _levels(result: Result) -> list[float]:
    return list(result.config["sparsities"]) if "tuned_by" in result.config else [result.config["sparsity"]]


def _place_words(result: Result) -> str:
    way, level = criterion(result)
    return f"at {level:.0%}" + (f" by {way}" if "tuned_by" in result.config else "")


def _beats(one: Entry, other: Entry, place: Place) -> bool:
    ours, theirs = one.values(place), other.values(place)
    sign = 1.0 if one.measure.less else -1.0
    both = ours.keys() & theirs.keys()
    return bool(both) and all(sign * ours[seed] < sign * theirs[seed] for seed in both)


def _cell(entry: Entry, place: Place, bold: Mapping[Place, set[str]]) -> str:
    text = number(entry.mean(place), entry.measure.spec, none="")
    return f"**{text}**" if text and entry.name in bold[place] else text


def _level(entry: Entry, ways: Sequence[str], level: float, bold: Mapping[Place, set[str]]) -> str:
    """One number for each way of pruning, and the actual zeros where they are not the level's."""
    text = " / ".join(cell or "-" for cell in (_cell(entry, (way, level), bold) for way in ways))
    actual = [share for way in ways if (share := entry.zeros((way, level))) is not None]
    if not actual:
        return ""
    return text + (f" ({max(actual):.0%} zeros)" if max(actual) - level >= TOLERANCE else "")


def _time_of(found: Sequence[Entry], first: str) -> dict[str, str]:
    """Each contender's time per step over that of the first."""
    times = {entry.name: entry.cost["milliseconds_per_step"] for entry in found}
    base = times[first]
    return {name: f"{time / base:.2f}" if time and base else "n/a" for name, time in times.items()}


def _guesses(result: Result, entry: Entry) -> bool:
    """Whether a model is no better than one that takes every token or class for equally likely."""
    model = result.config["run"]["model"]
    mean = entry.mean(_DENSE if entry.measure.less else criterion(result))
    if mean is None:
        return False
    return mean >= model["vocabulary"] if entry.measure.less else mean <= 100 / model["classes"]
