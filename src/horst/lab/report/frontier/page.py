"""The tables and figures of the page on the frontier studies, by their names there."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.frontier.figures import (
    by_second_beta,
    quality_against_product,
    tuned_against_sparsity,
    weights_against_product,
)
from horst.lab.report.frontier.headline import free_table, sparse_against_dense_table
from horst.lab.report.frontier.tables import (
    auto_table,
    auto_words,
    contenders_table,
    pruning_table,
    tensors_table,
    training_methods_table,
    tuned_table,
)
from horst.lab.report.transformer_tables import acdc_table, methods_table

_LANGUAGE = "results/transformers/frontier_language.json"
_LANGUAGE_LONG_MEMORY = "results/transformers/frontier_language_beta2_0.999.json"
_FRESH_SEEDS = "results/transformers/frontier_language_fresh_seeds.json"
_UNTOUCHED_SEEDS = "results/transformers/frontier_language_untouched_seeds.json"
_VISION = "results/transformers/frontier_vision.json"
_VISION_SHORT_MEMORY = "results/transformers/frontier_vision_beta2_0.95.json"
_VISION_FRESH_SEEDS = "results/transformers/frontier_vision_fresh_seeds.json"
_VISION_SHORT_MEMORY_FRESH_SEEDS = "results/transformers/frontier_vision_beta2_0.95_fresh_seeds.json"
_COMPOSITIONS = "results/transformers/frontier_compositions.json"
_RATE_OF_A_TENTH = "results/transformers/rate_of_0.1"
_GPT2_PAPERS_BETA2 = tuple(
    f"results/transformers/table6_gpt2_{name}.json"
    for name in (
        "wikipedia",
        "adamw",
        "adamw_held",
        "alpha5",
        "auto",
        "auto_lr_0.008",
        "adamw_proximal",
        "proximal",
        "proximal_lr_0.008",
        "proximal_lr_0.008_seed_1",
    )
)
_GPT2_LONG_MEMORY = tuple(
    f"results/transformers/table6_gpt2_{name}.json"
    for name in ("adamw_beta2_0.999", "alpha5_beta2_0.999", "proximal_beta2_0.999", "proximal_beta2_0.999_l1_0.01")
)
_GPT2 = (*_GPT2_PAPERS_BETA2, *_GPT2_LONG_MEMORY)
_DEIT = (
    *(
        f"results/transformers/table1_cifar10_{name}.json"
        for name in ("adamw", "adamw_beta2_0.95", "adamw_decay_1", "alpha5_90", "alpha5_decay_1", "auto")
    ),
    *(f"results/transformers/long_memory/table1_cifar10_auto{name}.json" for name in ("", "_decay_1")),
)


def gpt2_table(results: Sequence[Result]) -> str:
    """AdamW and HORST by way of pruning, at the levels that half of the files have; Table 6 has the rest, and HAM.

    One threshold for all tensors has a table of its own.
    """
    runs = [
        [row for row in result.rows if row["optimizer"] != "ham" and row["method"] != "magnitude-global"]
        for result in results
    ]
    having = collections.Counter(level for rows in runs for level in {row["sparsity"] for row in rows})
    kept = [[row for row in rows if having[row["sparsity"]] >= len(runs) / 2] for rows in runs]
    return methods_table([dataclasses.replace(result, rows=rows) for result, rows in zip(results, kept, strict=True)])


def auto_table_and_words(results: Sequence[Result]) -> str:
    """The table, and below it what it says."""
    return f"{auto_table(results)}\n\n{auto_words(results)}"


# Marker on the page -> result files and the function that writes its table.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Result]], str]]] = {
    "frontier_free": ((_COMPOSITIONS, _LANGUAGE), free_table),
    "frontier_free_gpt2": (_GPT2, free_table),
    "frontier_gpt2": (_GPT2_LONG_MEMORY, gpt2_table),
    "frontier_gpt2_papers_beta2": (_GPT2_PAPERS_BETA2, gpt2_table),
    "frontier_deit": (_DEIT, acdc_table),
    "rate_too_large_gpt2": (
        ("results/transformers/table6_gpt2_wikipedia.json", f"{_RATE_OF_A_TENTH}/table6_gpt2.json"),
        gpt2_table,
    ),
    "rate_too_large_deit": (
        ("results/transformers/table1_cifar10_adamw.json", f"{_RATE_OF_A_TENTH}/table1_cifar10.json"),
        acdc_table,
    ),
    "rate_of_a_tenth": ((f"{_RATE_OF_A_TENTH}/frontier_language.json",), free_table),
    "frontier_auto": ((_LANGUAGE,), auto_table_and_words),
    "frontier_auto_fresh_seeds": ((_FRESH_SEEDS,), auto_table_and_words),
    "frontier_auto_untouched_seeds": ((_UNTOUCHED_SEEDS,), auto_table_and_words),
    "frontier_auto_all_seeds": ((_LANGUAGE, _FRESH_SEEDS, _UNTOUCHED_SEEDS), auto_words),
    "frontier_tuned": ((_LANGUAGE,), tuned_table),
    "frontier_tuned_long_memory": ((_LANGUAGE_LONG_MEMORY,), tuned_table),
    "frontier_vision_headline": ((_VISION,), sparse_against_dense_table),
    "frontier_vision_auto": ((_VISION,), auto_table_and_words),
    "frontier_vision_auto_fresh_seeds": ((_VISION_FRESH_SEEDS,), auto_table_and_words),
    "frontier_vision_auto_all_seeds": ((_VISION, _VISION_FRESH_SEEDS), auto_words),
    "frontier_vision_short_memory": ((_VISION_SHORT_MEMORY,), sparse_against_dense_table),
    "frontier_vision_short_memory_auto": ((_VISION_SHORT_MEMORY,), auto_table_and_words),
    "frontier_vision_short_memory_auto_fresh_seeds": ((_VISION_SHORT_MEMORY_FRESH_SEEDS,), auto_table_and_words),
    "frontier_training_methods": ((_VISION,), training_methods_table),
    "frontier_training_methods_short_memory": ((_VISION_SHORT_MEMORY,), training_methods_table),
    "frontier_contenders": ((_COMPOSITIONS, _LANGUAGE), contenders_table),
    "frontier_contenders_long": ((_LANGUAGE,), functools.partial(contenders_table, steps=1600)),
    "frontier_pruning": ((_COMPOSITIONS,), pruning_table),
    "frontier_tensors": ((_COMPOSITIONS,), tensors_table),
}
# Figure file -> result files and the function that draws it.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Result]], Any]]] = {
    "docs/figures/frontier/language.svg": ((_LANGUAGE,), quality_against_product),
    "docs/figures/frontier/vision.svg": ((_VISION,), functools.partial(quality_against_product, levels=(0.9,))),
    "docs/figures/frontier/gpt2.svg": (_GPT2, by_second_beta),
    "docs/figures/frontier/weights.svg": ((_LANGUAGE,), weights_against_product),
    "docs/figures/frontier/sparsity.svg": (
        (_COMPOSITIONS, _LANGUAGE),
        functools.partial(tuned_against_sparsity, methods=("magnitude", "sparsegpt")),
    ),
}
