"""Tables of what training wins back after pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Row, Table, number

_TRAINED_BY = {
    "adamw": "AdamW", "horst": "HORST", "horst-l1": "HORST, l1, in stages", "horst-stages": "HORST, in stages",
    "ast": "AST", "cast": "CAST", "admm": "ADMM", "dense": "dense, trained further",
}  # fmt: skip
_METHODS = {"magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT"}


def recovery_tables(results: Sequence[Result]) -> list[Table | str]:
    """What training wins back, one table per model: pruned and not trained, each contender, and the share won back.

    A contender has the learning rate that was best on the validation text; the last table has all that were tried.
    """
    rows = [row for result in results for row in result.rows]
    if not rows:
        return ["Not measured yet."]
    tables: list[Table | str] = [_recovery_of_a_model(name, own) for (name,), own in _grouped(rows, "model").items()]
    tried = _grouped([row for row in rows if "lr" in row], "model", "pattern", "contender")
    lines = [
        [
            model,
            _pattern(pattern),
            _TRAINED_BY[contender],
            ", ".join(f"{lr:g}: {_judged(by_rate[lr,])}" for (lr,) in sorted(by_rate)),
        ]
        for (model, pattern, contender), own in tried.items()
        if len(by_rate := _grouped(own, "lr")) > 1
    ]
    return [
        *tables,
        Table(columns=["model", "zeros", "trained by", "lr: perplexity on the validation text"], rows=lines),
    ]


def _recovery_of_a_model(name: str, rows: Sequence[Row]) -> Table:
    seeds = [_chosen(own) for own in _grouped(rows, "seed").values()]
    trained = [row for row in rows if "lr" in row and "test" in row]
    contenders = [way for way in dict.fromkeys(row["contender"] for row in trained) if way != "dense"]
    patterns = sorted(
        {row["pattern"] for row in trained if row["contender"] != "dense"}, key=lambda p: (":" not in p, p)
    )
    lines = [["dense", "", *[_mean_quality(seeds, "not trained, dense", "0")] * len(patterns)]]
    further = {pattern for seed in seeds for way, pattern in seed if way == "dense"}
    for pattern in further:
        lines.append(
            [_TRAINED_BY["dense"], _rates(seeds, "dense"), *[_mean_quality(seeds, "dense", pattern)] * len(patterns)]
        )
    for method, words in _METHODS.items():
        cells = [_mean_quality(seeds, f"not trained, {method}", pattern) for pattern in patterns]
        if any(cells):
            lines.append([f"{words}, not trained", "", *cells])
    for way in contenders:
        starts_pruned = way not in ("ast", "cast", "admm")
        words = f"SparseGPT, then {_TRAINED_BY[way]}" if starts_pruned else _TRAINED_BY[way]
        lines.append([words, _rates(seeds, way), *(_mean_quality(seeds, way, pattern) for pattern in patterns)])
    for way in contenders:
        shares = [[_won_back(seed, way, pattern) for seed in seeds] for pattern in patterns]
        kept = [[share for share in own if share is not None] for own in shares]
        cells = [f"{sum(own) / len(own):.0%}" if own else "" for own in kept]
        lines.append([f"won back by {_TRAINED_BY[way]}", "", *cells])
    if len(seeds) > 1 and {"adamw", "horst"} <= set(contenders):
        pairs = [[(seed.get(("horst", p)), seed.get(("adamw", p))) for seed in seeds] for p in patterns]
        counts = [[h["test"] < a["test"] for h, a in own if h is not None and a is not None] for own in pairs]
        lines.append(["seeds in which HORST is ahead of AdamW", "", *(f"{sum(c)} of {len(c)}" for c in counts)])
    tokens = ", ".join(f"{count / 1e6:.1f} M" for count in sorted({row["tokens"] for row in trained}))
    over = "one seed" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    return Table(
        columns=[f"{name}, perplexity after {tokens} tokens, {over}", "lr", *map(_pattern, patterns)], rows=lines
    )


def _chosen(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Of each way and pattern of one seed, the row with the learning rate that the validation text chose."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        way = row["contender"] if "lr" in row else f"not trained, {row['method']}"
        best = found.get((way, row["pattern"]))
        if "test" in row and (best is None or float(row["validation"]) < float(best["validation"])):
            found[way, row["pattern"]] = row
    return found


def _won_back(seed: Mapping[tuple[str, str], Row], way: str, pattern: str) -> float | None:
    """The share of what SparseGPT lost."""
    row, start = seed.get((way, pattern)), seed.get(("not trained, sparsegpt", pattern))
    if row is None or start is None:
        return None
    dense = float(seed["not trained, dense", "0"]["test"])
    return 1 - (float(row["test"]) - dense) / (float(start["test"]) - dense)


def _rates(seeds: Sequence[Mapping[tuple[str, str], Row]], way: str) -> str:
    return ", ".join(
        f"{rate:g}" for rate in sorted({row["lr"] for seed in seeds for (w, _), row in seed.items() if w == way})
    )


def _mean_quality(seeds: Sequence[Mapping[tuple[str, str], Row]], way: str, pattern: str) -> str:
    found = [float(seed[way, pattern]["test"]) for seed in seeds if (way, pattern) in seed]
    if not found:
        return ""
    mean = sum(found) / len(found)
    return number(mean, ".2f" if mean < 1e3 else ",.0f")


def _judged(rows: Sequence[Row]) -> str:
    """Perplexity on the validation text, of one seed after the other."""
    return " and ".join(f"{row['validation']:.2f}" if "test" in row else "broke down" for row in rows)


def _grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _pattern(pattern: str) -> str:
    return pattern if ":" in pattern else f"{float(pattern):.0%}"


def sentence_embeddings_table(results: Sequence[Result]) -> Table | str:
    """Mean cosine to the dense model's embeddings, over the seeds: one row per way, each with its best rate."""
    rows = [row for result in results for row in result.rows]
    if not rows:
        return "Not measured yet."
    lines = []
    for (model, method, training), own in _grouped(rows, "model", "method", "training").items():
        by_rate = _grouped(own, "lr")
        means = {rate: sum(row["validation"] for row in tried) / len(tried) for rate, tried in by_rate.items()}
        rate = max(means, key=means.__getitem__)
        found = [row["test"] for row in by_rate[rate]]
        zeros = f"{by_rate[rate][0]['sparsity_of_pruned_layers']:.0%}"
        trained = "not trained" if training == "none" else _TRAINED_BY[training]
        seeds = ", ".join(f"{value:.4f}" for value in found)
        mean = f"{sum(found) / len(found):.4f}"
        lines.append([model, zeros, method, trained, "" if rate[0] is None else f"{rate[0]:g}", mean, seeds])
    return Table(columns=["model", "zeros", "pruned by", "trained by", "lr", "mean cosine", "each seed"], rows=lines)
