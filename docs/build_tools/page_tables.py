"""Tables and figures of the README and the docs: name of a marker or file -> result files and what writes it.

A file name may be a pattern; it stands for all files that match, in alphabetical order.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import benchmark_tables
import compare_page
import gpt2_tables
import how_it_works
import recovery_tables
import small_language_tables

from horst.lab.experiments.result import Result
from horst.lab.report import compare_figures, figures, frontier, geometry, paper
from horst.lab.report.quality_figures import against_product, against_zeros
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.quickstart import language_table, recovery_table, vision_table
from horst.lab.report.runs import LABELS
from horst.lab.report.tables import Table
from horst.lab.report.transformer_figures import phases_and_overlap, quality_against_sparsity, weight_distributions
from horst.lab.report.transformer_tables import digits_table, one_shot_table, speed_table, spread_table

Part = Table | str
Writer = Callable[[Sequence[Result]], Part | Sequence[Part]]
RESULTS = "results/transformers"


def gradient_scaling_table(results: Sequence[Result]) -> Table:
    """Accuracy of each seed without and with scaled gradients, one row per optimizer and learning rate."""
    runs: dict[tuple[str, float], dict[bool, list[str]]] = {}
    for row in results[0].rows:
        both = runs.setdefault((row["optimizer"], row["lr"]), {False: [], True: []})
        both[row["scale_gradients"]].append(f"{100 * row['accuracy']:.2f}")
    rows = [[name, f"{lr:g}", ", ".join(both[False]), ", ".join(both[True])] for (name, lr), both in runs.items()]
    return Table(columns=["accuracy in % of each seed", "learning rate", "plain", "scaled"], rows=rows)


acdc_table = functools.partial(quality_table, show=["lr"])


def paper_acdc_table(_: Sequence[Result] = ()) -> Table:
    """The paper's Tables 1 and 3, to set ours beside."""
    rows = [
        [model, LABELS[name], *(f"{mean} ± {deviation}" for mean, deviation in levels.values())]
        for model, optimizers in paper.TABLE1.items()
        for name, levels in optimizers.items()
    ]
    rows += [["DeiT-small, Table 3, seed 1", LABELS[name], "", "", str(value)] for name, value in paper.TABLE3.items()]
    return Table(columns=["the paper, ImageNet, accuracy in %", "optimizer", "70%", "80%", "90%"], rows=rows)


def kept_weights_figure(results: Sequence[Result]) -> Any:
    """Figure 3 (left): the weights that AC/DC kept, at the sparsity that all the results have."""
    found = [result.curves["histograms"] for result in results]
    (level,) = set.intersection(*(set(levels) for levels in found))
    histograms = {name: histogram for levels in found for name, histogram in levels[level].items()}
    return weight_distributions(histograms, f"Weights of DeiT-small that AC/DC kept, {float(level):.0%} zeros")


def phases_figure(results: Sequence[Result]) -> Any:
    """The phases of AC/DC, at the highest sparsity of a result."""
    phases = results[0].curves["phases"]
    highest = max(run["sparsity"] for run in phases)
    return phases_and_overlap([run for run in phases if run["sparsity"] == highest])


def histograms(title: str) -> Callable[[Sequence[Result]], Any]:
    return lambda results: weight_distributions(results[0].curves["histograms"], title)


def files(*names: str, folder: str = RESULTS) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.json" for name in names)


def toy(name: str, write: Callable[[Result], Any]) -> tuple[tuple[str, ...], Callable[[Sequence[Result]], Any]]:
    """A table or figure of one file of the geometry lab."""
    return files(name, folder="results/geometry"), lambda results: write(results[0])


BENCH = functools.partial(files, folder="benchmarks/results")
TABLE6 = files("table6_gpt2_wikipedia")
TABLE1_DIGITS = files("table1_digits_cpu")
FIGURE1 = files("figure1_weight_spread")
LANGUAGE, VISION = files("frontier_language"), files("frontier_vision")
LENGTHS = (*LANGUAGE, *files("frontier_language_12800_steps", "frontier_language_width_40"))
GPT2_EVIDENCE = (f"{RESULTS}/evidence/*.json",)
GPT2_HEADLINE = (
    *files("table6_gpt2_adamw_beta2_0.999", "gpt2_headline/gpt2_adamw_seed1"), *GPT2_EVIDENCE,
    *files("rivals/gpt2_muon_seed0"),
)  # fmt: skip
COMPARE_GPT2 = (
    *GPT2_HEADLINE, *files("gpt2_headline/gpt2_adamw_l1_0.01_seed0", "rivals/gpt2_horst_muon_l1_seed0")
)  # fmt: skip
GPT2_LONG_MEMORY = (
    *(f"{RESULTS}/table6_gpt2_*beta2_0.999*.json", f"{RESULTS}/gpt2_headline/*.json"), *GPT2_EVIDENCE
)  # fmt: skip
WHOSE_GAIN = (
    *files("table6_gpt2_adamw_beta2_0.999", "gpt2_headline/gpt2_adamw_seed1", "gpt2_headline/gpt2_adamw_l1_0.01_seed0"),
    *files("whose_gain/gpt2_norms", "whose_gain/gpt2_blocks", "table6_gpt2_alpha5_beta2_0.999"),
    *files("gpt2_headline/gpt2_horst_l1_0.01_seed0", "gpt2_headline/gpt2_horst_l1_0.01_seed1"),
)
GPT2_PAPERS_BETA2 = files(
    "table6_gpt2_wikipedia", "table6_gpt2_adamw", "table6_gpt2_adamw_held", "table6_gpt2_alpha5", "table6_gpt2_auto",
    "table6_gpt2_auto_lr_0.008", "table6_gpt2_adamw_proximal", "table6_gpt2_proximal",
    "table6_gpt2_proximal_lr_0.008", "table6_gpt2_proximal_lr_0.008_seed_1",
)  # fmt: skip
DEIT = files(
    *(f"table1_cifar10_{name}" for name in ("adamw", "adamw_beta2_0.95", "adamw_decay_1", "alpha5_90")),
    *("table1_cifar10_alpha5_decay_1", "rule/cifar10_adamw_dense", "rule/cifar10_alpha45"),
    "rule/cifar10_adamw_dense_seeds_1_2",
    *(f"rule/cifar10_auto_{name}" for name in ("seed0", "seed1", "seed2", "beta2_0.99")),
)

# They may not have been run; then the page says so, and there is no figure.
COMPARE_LANGUAGE, COMPARE_VISION = ((f"{RESULTS}/compare_{name}*.json",) for name in ("language", "vision"))
RECOVERY = tuple(f"benchmarks/results/recovery_{name}*.json" for name in ("smollm2", "gpt2"))
ROOT = pathlib.Path(__file__).resolve().parents[2]

# Tables of short pages, which link to the study that names the result files.
WITHOUT_FILES = frozenset({"gpt2_headline"})

# Name of the marker on a page -> result files and the function that writes its block.
TABLES: dict[str, tuple[tuple[str, ...], Writer]] = {
    "gpt2_headline": (GPT2_HEADLINE, gpt2_tables.gpt2_headline),
    "fine_tuning": (("benchmarks/results/fine_tuning_smollm2.json",), benchmark_tables.fine_tuning_table),
    "quickstart": (
        ("results/quickstart.json",),
        lambda results: [language_table(results), vision_table(results), recovery_table(results)],
    ),
    # the paper's tables
    "table1_digits": (TABLE1_DIGITS, acdc_table),
    "table1_cifar10": (
        files(
            *(f"table1_cifar10_{n}" for n in ("adamw", "adamw_80", "adamw_70", "ham", "alpha5_90", "alpha5_80")),
            "table1_cifar10_alpha5_70",
        ),
        acdc_table,
    ),
    "table1_cifar10_paper_lr": (files("table1_cifar10_paper_lr_adamw", "table1_cifar10_paper_lr_alpha5"), acdc_table),
    "table6": ((*files("table6_gpt2_alpha5"), *TABLE6), one_shot_table),
    "table6_thresholds": (
        files("table6_gpt2_adamw_beta2_0.999", "table6_gpt2_alpha5_beta2_0.999", "table6_gpt2_alpha5_decay_all"),
        quality_table,
    ),
    "one_threshold_gpt2": (GPT2_EVIDENCE, quality_table),
    "l1_by_length": (files("l1_by_length"), functools.partial(quality_table, methods=("sparsegpt-global",))),
    "table6_speed": (TABLE6, speed_table),
    "one_shot_methods": (files("one_shot_methods_cpu"), quality_table),
    "paper_acdc": ((), paper_acdc_table),
    "figure1_left": (FIGURE1, spread_table),
    "pruned_squares": (TABLE6, how_it_works.pruned_squares_table),
    "acdc_cifar10": (
        files("acdc_cifar10", "acdc_cifar10_alpha20", folder="results/sparsity"),
        benchmark_tables.cifar_table,
    ),
    "acdc_digits": (files("acdc_digits", folder="results/sparsity"), digits_table),
    "gradient_scaling": (files("rigl_gradient_scaling", folder="results/sparsity"), gradient_scaling_table),
    # beyond the paper
    "compare_gpt2": (COMPARE_GPT2, gpt2_tables.compare_gpt2),
    "compare_language": (COMPARE_LANGUAGE, compare_page.comparison),
    "compare_vision": (COMPARE_VISION, compare_page.comparison),
    "compare_muon_l1": (files("compare_muon_l1"), functools.partial(compare_page.comparison, figure=False)),
    "compare_muon_l1_long": (
        files("compare_muon_l1_3200_steps"),
        functools.partial(compare_page.comparison, figure=False),
    ),
    "frontier_gpt2": (GPT2_LONG_MEMORY, gpt2_tables.gpt2_table),
    "whose_gain": (WHOSE_GAIN, gpt2_tables.whose_gain_table),
    "frontier_gpt2_papers_beta2": (GPT2_PAPERS_BETA2, gpt2_tables.gpt2_table),
    "frontier_deit": (DEIT, acdc_table),
    "small_tuned": (LANGUAGE, small_language_tables.tuned),
    "small_beta2": (LANGUAGE, small_language_tables.beta2),
    "small_rates": (LANGUAGE, small_language_tables.rates),
    "small_long": (LANGUAGE, small_language_tables.long),
    "small_lengths": (LENGTHS, small_language_tables.lengths),
    "small_longest": (LENGTHS, small_language_tables.longest),
    "small_muon": ((*LANGUAGE, *files("frontier_language_muon")), small_language_tables.muon),
    "small_parts": ((*LANGUAGE, *files("frontier_language_learning_rates")), small_language_tables.parts),
    "digits_rates": (VISION, frontier.rate_table),
    # speed and size
    "optimizer_step_gpu": (BENCH("optimizer_step_h200"), benchmark_tables.gpu_step_table),
    "optimizer_step_gpu_short": (
        BENCH("optimizer_step_h200"),
        functools.partial(benchmark_tables.gpu_step_table, short=True),
    ),
    "optimizer_step_cpu": (BENCH("optimizer_step_cpu"), benchmark_tables.cpu_step_table),
    "training_speed": (BENCH("training_h200"), benchmark_tables.training_speed_table),
    "training_speed_matmul": (BENCH("training_h200_attention_matmul"), benchmark_tables.training_speed_table),
    "short_attention": (BENCH("short_attention_h200"), benchmark_tables.short_attention_table),
    "pruning_speed": (BENCH("pruning_h200"), benchmark_tables.pruning_speed_table),
    "export_files": (BENCH("export_cpu"), benchmark_tables.export_files_table),
    "export_models": (BENCH("export_cpu"), benchmark_tables.export_models_table),
    "generate_cpu": (BENCH("generate_cpu"), benchmark_tables.generate_cpu_table),
    "head_cpu": (BENCH("generate_cpu"), benchmark_tables.head_cpu_table),
    # these may not have been run
    "recovery": (RECOVERY, recovery_tables.recovery_tables),
    "recovery_small": (("benchmarks/results/recovery_byte_gpt.json",), recovery_tables.recovery_tables),
    "sentence_embeddings": (
        ("benchmarks/results/sentence_embeddings_*.json",),
        recovery_tables.sentence_embeddings_table,
    ),
    "sizes": (BENCH("sizes_smollm2_cpu"), benchmark_tables.sizes_table),
    "sizes_gpt2": (
        BENCH("sizes_gpt2_h200_seed0", "sizes_gpt2_h200_seed1"),
        benchmark_tables.sizes_of_seeds_table,
    ),
    "sparse_layers": (BENCH("sparse_gpu_layers"), benchmark_tables.sparse_layers_table),
    "sparse_tokens": (BENCH("sparse_gpu"), benchmark_tables.sparse_tokens_table),
    "sparse_models": (BENCH("sparse_gpu_models"), benchmark_tables.sparse_models_table),
    "selection": (BENCH("sparsity_h200"), benchmark_tables.selection_table),
    "mask_overhead": (BENCH("sparsity_h200"), benchmark_tables.mask_overhead_table),
    # geometry
    "summary": toy("toy_suite", geometry.summary_table),
    "ratios": toy("toy_suite", geometry.ratio_table),
    "dichotomy": toy("figure2_dichotomy", geometry.dichotomy_table),
    "diagonal": toy("figure1_diagonal_network", geometry.summary_table),
    "losses": toy("figure7_loss_curves", geometry.loss_table),
    "theorem": toy("theorem4_7_implicit_bias", geometry.theorem_table),
    "theorem_small": toy("theorem4_7_small", geometry.theorem_table),
    "ablation": toy("toy_ablation", geometry.ablation_table),
    "alphas": toy("toy_ablation", geometry.alpha_table),
}
GEOMETRY_FIGURES: dict[str, Callable[[Result], Any]] = {
    "figure1_diagonal_network": figures.figure1,
    "figure3_composition_order": figures.figure3,
    "figure5_additive_vs_multiplicative": figures.figure5,
    "figure6_mirror_maps": figures.figure6,
    "figure7_loss_curves": figures.figure7,
    "theorem4_7_implicit_bias": figures.theorem4_7,
    "theorem4_7_small": figures.theorem4_7,
    "toy_ablation": figures.toy_ablation,
    "toy_suite": figures.toy_suite,
}

# Figure file -> result files and the function that draws it.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Result]], Any]]] = {
    "docs/figures/gpt2_headline.svg": (GPT2_HEADLINE, gpt2_tables.gpt2_headline_figure),
    "docs/figures/figure1_weight_spread.png": (FIGURE1, histograms("Weights of pretrained models")),
    "docs/figures/figure3_cifar10_weights.png": (
        files(*(f"table1_cifar10_{name}" for name in ("adamw", "ham", "alpha5_90"))), kept_weights_figure
    ),
    "docs/figures/figure4_gpt2_one_shot.png": (TABLE6, lambda results: quality_against_sparsity(results[0].rows)),
    "docs/figures/figure8_gpt2_weights.png": (TABLE6, histograms("Weights of GPT-2's blocks")),
    "docs/figures/phases_digits.svg": (TABLE1_DIGITS, phases_figure),
    "docs/figures/how_it_works/steepest_steps.svg": ((), how_it_works.steepest_steps),
    "docs/figures/how_it_works/step_sizes.svg": ((), how_it_works.step_sizes),
    "docs/figures/how_it_works/composition_order.svg": (
        files("figure3_composition_order", folder="results/geometry"), how_it_works.composition_order
    ),
    "docs/figures/how_it_works/pruned_squares.svg": (TABLE6, how_it_works.pruned_squares),
    "docs/figures/frontier/language.svg": (LANGUAGE, functools.partial(against_product, levels=(0.0, 0.5, 0.7))),
    "docs/figures/frontier/vision.svg": (VISION, functools.partial(against_product, levels=(0.9,))),
    "docs/figures/frontier/gpt2.svg": (
        (*GPT2_PAPERS_BETA2, *GPT2_LONG_MEMORY),
        functools.partial(
            against_zeros, best_over=("lr", "l1"), where=lambda row: row["optimizer"] != "ham",
            panels=lambda row: f"beta2 {row['beta2']:g}, pruned by magnitude",
        ),
    ),
    **{
        f"docs/{compare_page.FIGURE}": (COMPARE_LANGUAGE, lambda results: compare_figures.against_zeros(results[:1]))
        for _ in sorted(ROOT.glob(COMPARE_LANGUAGE[0]))[:1]
    },
    **{
        f"docs/figures/geometry/{name}.png": toy(name, draw) for name, draw in GEOMETRY_FIGURES.items()
    },
}  # fmt: skip
