"""The tables of the frontier studies in Markdown: HORST's own rule, AdamW tuned, other contenders and methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from horst.lab.experiments.result import Result
from horst.lab.report.frontier.cells import (
    CONTENDERS,
    Cell,
    any_adamw,
    at,
    best,
    best_text,
    budget,
    budget_words,
    by_budget,
    cells_of,
    default_tensors,
    level_names,
    levels_of,
    of,
    one_way,
    text_of,
    with_settings,
)
from horst.lab.report.tables import markdown
from horst.lab.report.transformer_tables import LABELS

TUNED_BY = {
    "adamw": "",
    "adamw-held": "",
    "horst": "alpha * lr",
    "hyperbolic": "alpha * lr",
    "horst-muon": "alpha * lr",
    "muon": "Muon's lr over lr",
    "adamw-l1": "penalty",
    "adamw-proximal": "threshold over lr",
    "horst-proximal": "threshold over lr",
    "spred": "decay of the factors",
}


def auto_table(results: Sequence[Result]) -> str:
    """HORST's own rule against alpha 5 at every learning rate and budget, below AdamW at its best."""
    cells = one_way(results)
    levels = levels_of(cells)
    lines = []
    for given, own in by_budget(cells).items():
        tuned = [best_text(at(any_adamw(own), sparsity=level)) for level in levels]
        label = budget_words(given)
        if any(tuned):
            lines.append([label, "best", "AdamW", *tuned, ""])
            label = ""
        for lr in _rates(own):
            for name in ("HORST, alpha 5", "HORST, auto"):
                found = [_only(at(of(own, name), lr=lr, sparsity=level)) for level in levels]
                behind = _behind(own, lr) if name == "HORST, auto" else {}
                verdict = ", ".join(f"{level_names([level])[0]}: {by}" for level, by in behind.items()) or "nowhere"
                lines.append([label, f"{lr:g}", name, *map(text_of, found), verdict if name == "HORST, auto" else ""])
                label = ""
    columns = [cells[0].measure.name, "lr", "optimizer", *level_names(levels), "auto worse than alpha 5"]
    return markdown(columns, lines)


def auto_words(results: Sequence[Result]) -> str:
    """How often HORST's own rule is behind alpha 5 and ahead of AdamW at its best, over the cells of the table."""
    cells = one_way(results)
    compared, behind, always, clearly, where, beaten, beside = 0, 0, 0, 0, [], 0, 0
    for given, own in by_budget(cells).items():
        for lr in _rates(own):
            found = _behind(own, lr)
            behind += len(found)
            always += sum(_behind_with_every_seed(own, lr, level) for level in found)
            clearly += sum(_behind_beyond_noise(own, lr, level) for level in found)
            where += [f"{budget_words(given)}, lr {lr:g}, {', '.join(level_names(found))}"] if found else []
            compared += sum(1 for level in levels_of(own) if _pair(own, lr, level) is not None)
            for level in levels_of(own):
                auto = _only(at(of(own, "HORST, auto"), lr=lr, sparsity=level))
                adamw = best(at(any_adamw(own), sparsity=level))
                if auto is not None and adamw is not None:
                    beside += 1
                    beaten += auto.cost < adamw.cost
    words = f"With every seed it is so in {always}, by more than twice the standard error in {clearly}. "
    better = f"It is better than AdamW at AdamW's best learning rate and weight decay in {beaten} of {beside}."
    return (
        f"By the mean over seeds, auto is worse than alpha 5 in {behind} of {compared} cells{': ' if where else ''}"
        f"{'; '.join(where)}. {words if where else ''}{better if beside else ''}"
    ).strip()


def tuned_table(results: Sequence[Result]) -> str:
    """The best of AdamW over learning rates and weight decays, and of HORST over learning rates, at each sparsity."""
    cells = one_way(results)
    levels = levels_of(cells)
    decay = results[0].config["run"]["optimization"]["weight_decay"]
    contenders: dict[str, Callable[[Cell], bool]] = {
        "AdamW": CONTENDERS["AdamW"],
        f"AdamW, decay {decay:g}": lambda cell: CONTENDERS["AdamW"](cell) and cell.row["weight_decay"] == decay,
        LABELS["adamw-held"]: lambda cell: cell.row["optimizer"] == "adamw-held",
        "HORST, alpha 5": CONTENDERS["HORST, alpha 5"],
        "HORST, any alpha": lambda cell: cell.row["optimizer"] == "horst" and cell.row["alpha"] != "auto",
        "HORST, auto": CONTENDERS["HORST, auto"],
    }
    lines = []
    for given, own in by_budget(cells).items():
        tuned = len({cell.row["weight_decay"] for cell in of(own, "AdamW")}) > 1
        for name, belongs in contenders.items():
            if name.startswith("AdamW, decay") and not tuned:
                continue
            tried = [[cell for cell in at(own, sparsity=level) if belongs(cell)] for level in levels]
            if name == LABELS["adamw-held"] and not any(tried):  # in the language study alone
                continue
            words = [with_settings(level, decays=tuned, products=name == "HORST, any alpha") for level in tried]
            lines.append([budget_words(given), name, *words])
    return markdown([f"best {cells[0].measure.name}", "optimizer", *level_names(levels)], lines)


def contenders_table(results: Sequence[Result], steps: int | None = None) -> str:
    """Every contender at its best strength and learning rate, pruned by magnitude; of AdamW, the best decay too.

    Args:
        results: Of frontier_compositions, and if wanted of frontier_language, which has AdamW with other decays.
        steps: Of the runs to show; none is the budget of the first.
    """
    cells = _same_budget(results) if steps is None else at(one_way(results), steps=steps)
    levels = levels_of(cells)
    lines = []
    for optimizer in dict.fromkeys(cell.row["optimizer"] for cell in cells):
        own = [cell for cell in at(cells, optimizer=optimizer) if default_tensors(cell)]
        for auto in sorted({cell.row["alpha"] == "auto" for cell in own}):
            of_kind = [cell for cell in own if (cell.row["alpha"] == "auto") is auto]
            decays = len({cell.row["weight_decay"] for cell in of_kind}) > 1
            strengths = any(cell.row["strength"] is not None for cell in of_kind)  # the rule alone has none
            words = [with_settings(at(of_kind, sparsity=level), decays=decays, products=strengths) for level in levels]
            by = TUNED_BY[optimizer] if strengths else ""
            tuned = " and ".join(filter(None, [by, "lr", "weight decay" if decays else ""]))
            lines.append([LABELS[optimizer] + (", auto" if auto else ""), tuned, *words])
    return markdown(["best perplexity", "tuned", *level_names(levels)], lines)


def pruning_table(results: Sequence[Result]) -> str:
    """AdamW and HORST pruned in every way, each at its best learning rate for the level."""
    cells = cells_of(results)
    levels = levels_of(cells)[1:]
    methods = [name for name in dict.fromkeys(cell.row["method"] for cell in cells) if name != "dense"]
    chosen = results[0].config["mirror_alpha_lr"]
    contenders: dict[str, Callable[[Cell], bool]] = {
        "AdamW": CONTENDERS["AdamW"],
        "HORST, alpha 5": CONTENDERS["HORST, alpha 5"],
        f"HORST, alpha * lr {chosen:g}": lambda cell: _is_product(cell, chosen) and default_tensors(cell),
        "HORST, auto": CONTENDERS["HORST, auto"],
    }
    lines = []
    for name, belongs in contenders.items():
        own = [cell for cell in cells if belongs(cell)]
        dense = best_text(at(own, method="dense"))
        for method in methods:
            found = [best_text(at(own, method=method, sparsity=level)) for level in levels]
            lines.append([name, method, dense, *found])
    return markdown(["trained by", "pruned by", *level_names([0.0, *levels])], lines)


def tensors_table(results: Sequence[Result]) -> str:
    """Which tensors get the mirror step, at one product of alpha and the learning rate."""
    cells = cells_of(results)
    levels = levels_of(cells)
    chosen = results[0].config["mirror_alpha_lr"]
    names = {"matrices": "matrices and embeddings", "all": "all, norms too", "blocks": "matrices in blocks",
             "matrices, not matrix": "embeddings"}  # fmt: skip
    own = [cell for cell in cells if cell.row["method"] in ("dense", "magnitude")]
    lines = []
    for lr in _rates(own):
        adamw = at(of(own, "AdamW"), lr=lr)
        lines.append([f"{lr:g}", "none: AdamW", *(text_of(_only(at(adamw, sparsity=level))) for level in levels)])
        for mirror in ("blocks", "matrices, not matrix", "matrices", "all"):
            found = [cell for cell in at(own, lr=lr, mirror=mirror) if _is_product(cell, chosen)]
            lines.append([f"{lr:g}", names[mirror], *(text_of(_only(at(found, sparsity=level))) for level in levels)])
    return markdown(["lr", f"mirror step at alpha * lr {chosen:g} for", *level_names(levels)], lines)


def training_methods_table(results: Sequence[Result]) -> str:
    """AC/DC, GMP and RigL with AdamW and HORST, at one learning rate and width."""
    cells = cells_of(results)
    others = [cell for cell in cells if cell.row["method"] not in ("dense", "acdc")]
    first = others[0].row
    same = at(
        cells, lr=first["lr"], width=first["width"], sparsity=first["sparsity"], weight_decay=first["weight_decay"]
    )
    lines = []
    for method in ("acdc", *dict.fromkeys(cell.row["method"] for cell in others)):
        found = [_only(of(at(same, method=method), name)) for name in CONTENDERS]
        lines.append([{"acdc": "AC/DC", "gmp": "GMP", "rigl": "RigL"}[method], *map(text_of, found)])
    return markdown([f"accuracy in %, lr {first['lr']:g}, {first['sparsity']:.0%} zeros", *CONTENDERS], lines)


def _same_budget(results: Sequence[Result]) -> list[Cell]:
    """Those of the first result's budget."""
    cells = one_way(results)
    return [cell for cell in cells if budget(cell) == budget(cells[0])]


def _is_product(cell: Cell, product: float) -> bool:
    found = cell.row["alpha_lr"]
    return cell.row["optimizer"] == "horst" and found is not None and math.isclose(found, product, rel_tol=1e-6)


def _rates(cells: Iterable[Cell]) -> list[float]:
    return sorted({cell.row["lr"] for cell in cells if cell.row["optimizer"] == "horst"})


def _only(cells: Sequence[Cell]) -> Cell | None:
    """The one cell, or none; with several decays, the first study's."""
    return cells[0] if cells else None


def _pair(cells: Sequence[Cell], lr: float, level: float) -> tuple[Cell, Cell] | None:
    auto, five = (_only(at(of(cells, name), lr=lr, sparsity=level)) for name in ("HORST, auto", "HORST, alpha 5"))
    return None if auto is None or five is None else (auto, five)


def _behind_with_every_seed(cells: Sequence[Cell], lr: float, level: float) -> bool:
    """Whether HORST's own rule is behind alpha 5 in each pair of runs with the same seed."""
    pair = _pair(cells, lr, level)
    assert pair is not None
    auto, five = ({row["seed"]: row[cell.measure.key] for row in cell.rows} for cell in pair)
    cost = pair[0].measure.cost
    shared = auto.keys() & five.keys()
    return all(
        auto[seed] is None or (five[seed] is not None and cost(auto[seed]) > cost(five[seed])) for seed in shared
    )


def _behind_beyond_noise(cells: Sequence[Cell], lr: float, level: float) -> bool:
    """Whether the mean of HORST's own rule is behind alpha 5's by more than twice the difference's standard error."""
    pair = _pair(cells, lr, level)
    assert pair is not None
    auto, five = pair
    if auto.broken or five.broken or min(len(auto.rows), len(five.rows)) < 2:
        return auto.cost > five.cost
    error = math.sqrt(sum(statistics.variance(cell.values()) / len(cell.rows) for cell in pair))
    return auto.cost - five.cost > 2 * error


def _behind(cells: Sequence[Cell], lr: float) -> dict[float, str]:
    """By sparsity, how far HORST's own rule is behind alpha 5 at a learning rate; what it is not behind is left out."""
    found = {}
    for level in levels_of(cells):
        pair = _pair(cells, lr, level)
        by = pair[0].measure.worse_by(pair[0].mean, pair[1].mean) if pair else ""
        if by:
            found[level] = by
    return found
