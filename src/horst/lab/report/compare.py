"""What the comparisons show: one table of all contenders, what the mirror step adds, and every try.

A difference counts only if it holds in every seed. In each column the best mean is bold, and with it every contender
that the best does not beat in each seed that both have. The figure is in :mod:`~horst.lab.report.compare_figures`.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content
from horst.lab.report.quality_tables import EDGE, TOLERANCE
from horst.lab.report.runs import ACCURACY, PERPLEXITY, Measure, zeros
from horst.lab.report.tables import Row, Table, level_name, number

Place = tuple[str, float]  # a way of pruning and a level
DENSE: Place = ("dense", 0.0)
SPREAD = 0.03  # of the mean: a larger deviation over seeds is shown
HUGE = 1000.0  # a larger perplexity is not written out
WAYS = {"sparsegpt": "SparseGPT", "wanda": "Wanda"}
# What each is without its mirror step.
MIRRORED = {
    "horst": "adamw",
    "horst-l1": "adamw-l1",
    "horst-muon": "muon",
    "horst-muon-l1": "muon-l1",
    "muon-l1-horst": "muon-l1",
}
_GIVEN = ("mirror", "target_sparsity")  # settings that no try varies and that a table need not repeat


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

    def spread(self, place: Place) -> float:
        """Standard deviation over fresh seeds."""
        values = list(self.values(place).values())
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def chosen(self) -> str:
        """The settings of the best try; a dagger where it is the first or last of three or more values."""
        best = [each["settings"] for each in self.tries if each["chosen"]]
        return settings_words(best[0], self._edges(best[0])) if best else ""

    def _edges(self, settings: Mapping[str, Any]) -> list[str]:
        tried = {name: {each["settings"][name] for each in self.tries} for name in settings}
        ordered = {n: sorted(v) for n, v in tried.items() if len(v) > 2 and not any(isinstance(x, str) for x in v)}
        return [name for name, values in ordered.items() if settings[name] in (values[0], values[-1])]

    def _quality(self, row: Row) -> float | None:
        value = row.get(self.measure.key)
        value = None if value is None else float(value)
        return None if value is None or value == float("inf") else self.measure.scale * value


def settings_words(settings: Mapping[str, Any], edges: Sequence[str] = ()) -> str:
    """Settings in a cell; those at the edge of their grid have a dagger.

    Example:
        >>> settings_words({"lr": 0.008, "alpha": "auto", "mirror": "all"}, ["lr"])
        'lr 0.008†, alpha auto'
        >>> settings_words({"matrix_lr": 2.0**-11, "sign_in_every": 200})
        'matrix lr 0.00049, sign in every 200'
    """
    said = {name: value for name, value in settings.items() if name not in _GIVEN}
    return ", ".join(
        f"{name.replace('_', ' ')} {_setting(value)}{EDGE if name in edges else ''}" for name, value in said.items()
    )


def _setting(value: float | str) -> str:
    return number(value, ".2g" if isinstance(value, float) and value < 1 else "g")


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


def compare_table(
    results: Sequence[Result], *, way: str = "", levels: Sequence[float] = (), brief: bool = False
) -> Table:
    """One row for each contender, the best first.

    Args:
        results: The result, alone.
        way: Way of pruning; that of the criterion unless given.
        levels: Levels to show; all unless given.
        brief: Whether to leave out the best try, the state and the time.
    """
    result = results[0]
    found, way = entries(result), way or criterion(result)[0]
    places = [DENSE, *((way, level) for level in levels or levels_of(result))]
    bold = {place: set(not_told_apart(found, place)) for place in places}
    time = _time_of(found, next(iter(result.curves["costs"])))
    missing = _missing(result, found)
    rows = []
    for entry in found:
        cells = [_cell(entry, place, entry.name in bold[place]) for place in places]
        if entry.reason:
            cells[0] = f"broke down: {entry.reason}" if entry.mean(DENSE) is None else cells[0]
        elif _guesses(result, entry):
            cells[0 if entry.measure.less else -1] += " (no better than guessing)"
        costs = [number(entry.cost["bytes_per_weight"], ".0f"), time[entry.name]]
        begin = [f"`{entry.name}`", *([] if brief else [entry.chosen]), *missing.get(entry.name, [])]
        rows.append([*begin, *cells, *([] if brief else costs)])
    title = found[0].measure.name + (f", pruned by {WAYS.get(way, way)}" if "tuned_by" in result.config else "")
    begin = [title, *([] if brief else ["best try"]), *(["tries", "seeds"] if missing else [])]
    costs = [] if brief else ["state, bytes per weight", "time per step"]
    return Table(columns=[*begin, *(level_name(level) for _, level in places), *costs], rows=rows)


def pairs_table(results: Sequence[Result], *, levels: Sequence[float] = ()) -> Table:
    """Each optimizer without and with the mirror step, and in how many seeds the mirror step is ahead."""
    result = results[0]
    found = {entry.name: entry for entry in entries(result)}
    places = [DENSE, *((criterion(result)[0], level) for level in levels or levels_of(result))]
    rows = []
    for name, other in pairs(found).items():
        cells = [_pair_cell(found[other], found[name], place) for place in places]
        rows.append([f"`{other}` → `{name}`", *cells])
    title = "mirror step: without → with (seeds won)"
    columns = [title, *(level_name(level) for _, level in places)]
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    return Table(columns=[columns[i] for i in kept], rows=[[row[i] for i in kept] for row in rows])


def pairs(names: Collection[str]) -> dict[str, str]:
    """Contenders with the mirror step, and the same without it, where both are there.

    Example:
        >>> pairs(["adamw+gmp", "horst+gmp", "horst-muon", "muon", "horst+set"])
        {'horst+gmp': 'adamw+gmp', 'horst-muon': 'muon'}
    """
    split = {name: name.partition("+") for name in names}
    plain = {name: MIRRORED.get(parts[0], "") + "".join(parts[1:]) for name, parts in split.items()}
    return {name: other for name, other in plain.items() if other in names}


def tries_table(results: Sequence[Result]) -> Table:
    """Every try with what it was compared by; the chosen one is bold."""
    found = entries(results[0])
    rows = []
    for entry in found:
        names = [name for name in entry.tries[0]["settings"] if name not in _GIVEN] if entry.tries else []
        cells = []
        for each in entry.tries:
            value = each["criterion"]
            value = value if value is None else entry.measure.scale * float(value)
            text = "broke down" if each.get("broke_down") else quality_words(value, entry.measure)
            text = text if each["done"] else "not run"
            settings = ", ".join(_setting(each["settings"][name]) for name in names)
            cells.append(f"{settings}: {f'**{text}**' if each['chosen'] else text}")
        rows.append([f"`{entry.name}`", ", ".join(name.replace("_", " ") for name in names), *cells])
    count = max(len(row) for row in rows) - 2
    rows = [[*row, *[""] * (2 + count - len(row))] for row in rows]
    return Table(columns=["tries", "settings", *(str(i + 1) for i in range(count))], rows=rows)


def quality_words(value: float | None, measure: Measure) -> str:
    """A number as a cell shows it; a huge perplexity is not written out.

    Example:
        >>> quality_words(7.092, PERPLEXITY), quality_words(1.4e65, PERPLEXITY)
        ('7.09', '> 1,000')
    """
    return f"> {HUGE:,.0f}" if value is not None and value > HUGE else number(value, measure.spec)


def setting_words(result: Result) -> str:
    """What was trained on what. Nearly every try has its own learning rate, so the base's is not said."""
    betas = ", ".join(f"{beta:g}" for beta in result.config["run"]["optimization"]["betas"])
    return f"{re.sub(', learning rate .*', '', result.config['setting'])}, betas ({betas})"


def zeros_words(result: Result) -> str:
    """What the level of the criterion is among all weights."""
    place = criterion(result)
    shares = [entry.zeros(place, "sparsity_of_all_weights") for entry in entries(result)]
    found = sorted({f"{share:.0%}" for share in shares if share is not None})
    among_all = " to ".join(found[:: max(1, len(found) - 1)])
    return f"{level_name(place[1])} of the pruned layers is {among_all} of all weights."


def words(result: Result) -> str:
    """Who is best, and whom it is not told apart from, at the criterion and dense."""
    found = entries(result)
    sentences = []
    for place, name in ((criterion(result), _place_words(result)), (DENSE, "before pruning")):
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
    from horst.lab.report import compare_figures  # which reads this module

    result = results[0]
    how = (
        "Means over fresh seeds at the settings of the best try; a standard deviation above 3 % of the mean is shown. "
        "Bold: the best mean of the column, and all that it does not beat in every seed. A dagger: the best try is at "
        f"the edge of its grid. The time per step is relative to the first contender's. {zeros_words(result)}"
    )
    others = [way for way in ways_of(result) if way != criterion(result)[0]]
    paired = pairs_table(results)
    tables = [
        compare_table(results).captioned(how),
        *(compare_table(results, way=way, brief=True).captioned(f"The same models pruned by {way}.") for way in others),
        *([paired.captioned("What the mirror step adds.")] if paired.rows else []),
        tries_table(results).captioned("Every try on the tuning seed."),
    ]
    told = words(result)
    figures = [compare_figures.figure(results)] if result.curves["less_is_better"] else []
    return Content(summary=[told] if told else [], tables=tables, figures=figures)


def _place(row: Row) -> Place:
    """A row's place in the table; of sparse training every way is in one column."""
    if not row["sparsity"]:
        return DENSE
    return ("sparse" if "top1" in row else row["method"], row["sparsity"])


def ways_of(result: Result) -> list[str]:
    """Ways of pruning once after training; of sparse training all are in one column."""
    return list(result.config["methods"]) if "tuned_by" in result.config else ["sparse"]


def levels_of(result: Result) -> list[float]:
    """Levels of sparsity."""
    return list(result.config["sparsities"]) if "tuned_by" in result.config else [result.config["sparsity"]]


def _place_words(result: Result) -> str:
    way, level = criterion(result)
    return f"at {level:.0%}" + (f" by {WAYS.get(way, way)}" if "tuned_by" in result.config else "")


def _beats(one: Entry, other: Entry, place: Place) -> bool:
    ours, theirs = one.values(place), other.values(place)
    sign = 1.0 if one.measure.less else -1.0
    both = ours.keys() & theirs.keys()
    return bool(both) and all(sign * ours[seed] < sign * theirs[seed] for seed in both)


def _cell(entry: Entry, place: Place, bold: bool) -> str:
    """The mean, its spread where that is large, and the actual zeros where they are not the level's."""
    mean = entry.mean(place)
    if mean is None:
        return ""
    text = quality_words(mean, entry.measure)
    spread = entry.spread(place)
    if spread > SPREAD * mean and mean <= HUGE:
        text += f" ± {number(spread, entry.measure.spec)}"
    text = f"**{text}**" if bold else text
    actual = entry.zeros(place) or 0.0
    return text + (f" ({actual:.0%} zeros)" if actual - place[1] >= TOLERANCE else "")


def _pair_cell(plain: Entry, mirrored: Entry, place: Place) -> str:
    ours, theirs = mirrored.values(place), plain.values(place)
    both = ours.keys() & theirs.keys()
    means = [plain.mean(place), mirrored.mean(place)]
    if not both or None in means:
        return ""
    sign = 1.0 if plain.measure.less else -1.0
    ahead = sum(sign * ours[seed] < sign * theirs[seed] for seed in both)
    shown = " → ".join(quality_words(mean, plain.measure) for mean in means)
    return f"{shown} ({ahead}/{len(both)})"


def _missing(result: Result, found: Sequence[Entry]) -> dict[str, list[str]]:
    """Tries and seeds of each contender, if some have not been run."""
    planned, cells = len(result.config["seeds"]), {}
    for entry in found:
        done, of = sum(each["done"] for each in entry.tries), len(entry.tries)
        cells[entry.name] = [
            str(done) if done in (0, of) else f"{done} of {of}",
            str(entry.fresh) if entry.fresh == planned else f"{entry.fresh} of {planned}",
        ]
    return cells if any(" of " in cell for both in cells.values() for cell in both) else {}


def _time_of(found: Sequence[Entry], first: str) -> dict[str, str]:
    """Each contender's time per step over that of the first."""
    times = {entry.name: entry.cost["milliseconds_per_step"] for entry in found}
    base = times[first]
    return {name: f"{time / base:.1f}" if time and base else "n/a" for name, time in times.items()}


def _guesses(result: Result, entry: Entry) -> bool:
    """Whether a model is no better than one that takes every token or class for equally likely."""
    model = result.config["run"]["model"]
    mean = entry.mean(DENSE if entry.measure.less else criterion(result))
    if mean is None:
        return False
    return mean >= model["vocabulary"] if entry.measure.less else mean <= 100 / model["classes"]
