"""The frontier studies' tables and figures say what the rows say, also where that is bad news."""

import dataclasses
import math
import pathlib
import statistics
from typing import get_args

import pytest
from horst.lab.report.frontier.cells import best, cells_of
from horst.lab.report.frontier.figures import (
    CROPPED,
    by_second_beta,
    quality_against_product,
    tuned_against_sparsity,
    weights_against_product,
)
from horst.lab.report.frontier.headline import free_sparsity, free_table, sparse_against_dense_table
from horst.lab.report.frontier.tables import (
    auto_table,
    auto_words,
    contenders_table,
    pruning_table,
    tensors_table,
    training_methods_table,
    tuned_table,
)
from hypothesis import given
from hypothesis import strategies as st

from horst.lab.baselines.contenders import Name
from horst.lab.experiments import frontier_vision
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.report.figures import save_figure
from horst.lab.report.frontier import sections as frontier_sections
from horst.lab.report.tables import parse
from horst.lab.report.transformer_figures import COLOURS
from horst.lab.report.transformer_tables import LABELS

ROOT = pathlib.Path(__file__).parents[3]
WIKIPEDIA = Result.load(ROOT / "results/transformers/table6_gpt2_wikipedia.json")


def changed(result, change, **where):
    """The result with some rows changed."""
    hit = [all(row.get(key) == value for key, value in where.items()) for row in result.rows]
    assert any(hit)
    rows = [{**row, **change(row)} if found else row for row, found in zip(result.rows, hit, strict=True)]
    return dataclasses.replace(result, rows=rows)


def mean(result, key="perplexity", **where):
    found = [row[key] for row in result.rows if all(row[name] == value for name, value in where.items())]
    assert len(found) == 2  # seeds
    return statistics.mean(found)


def lines_of(table, *starts):
    """The lines of a table that begin so."""
    return [line for line in parse(table)[1] if line[: len(starts)] == list(starts)]


# --- cells ------------------------------------------------------------------------------------------------------------


def test_seeds_are_averaged_and_a_run_that_two_studies_share_counts_once(frontier):
    language, compositions = frontier["frontier_language"], frontier["frontier_compositions"]
    cells = cells_of([compositions, language])
    assert {len(cell.rows) for cell in cells} == {2}
    cell = next(
        c for c in cells if c.row["optimizer"] == "adamw" and c.row["lr"] == 2e-3 and c.row["method"] == "dense"
    )
    values = [row["perplexity"] for row in cell.rows]
    assert cell.mean == pytest.approx(statistics.mean(values))
    assert str(cell) == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


@pytest.mark.parametrize("lost", [None, "inf"])
def test_a_run_that_broke_down_is_said_so_and_is_never_the_best(frontier, lost):
    good = {"optimizer": "horst", "alpha": "auto", "lr": 2e-3, "width": 64, "steps": 400, "sparsity": 0.0}
    broken = changed(frontier["frontier_language"], lambda row: {"perplexity": lost}, **good, seed=1)
    cell = next(c for c in cells_of([broken]) if all(c.row.get(key) == value for key, value in good.items()))
    assert math.isinf(cell.mean)
    assert str(cell) == "broke down (1 of 2)"
    assert best([cell]) is None
    (line,) = [line for line in lines_of(auto_table([broken]), "", "0.002", "HORST, auto") if "broke" in line[3]]
    assert line[-1] == "dense: broke down"
    assert "auto is worse than alpha 5 in 1 of 50 cells: width 64, 400 steps, lr 0.002, dense." in auto_words([broken])


# --- tables -----------------------------------------------------------------------------------------------------------


def test_where_auto_is_worse_than_alpha_5_is_marked(frontier):
    language = frontier["frontier_language"]
    assert {line[-1] for line in lines_of(auto_table([language]), "") if line[2] == "HORST, auto"} == {"nowhere"}
    assert "worse than alpha 5 in 0 of 50 cells. " in auto_words([language])
    here = {"lr": 8e-3, "width": 128, "steps": 400, "sparsity": 0.7}
    five = mean(language, optimizer="horst", alpha=5.0, **here)
    worse = changed(language, lambda row: {"perplexity": 1.1 * five}, optimizer="horst", alpha="auto", **here)
    marked = [line[-1] for line in lines_of(auto_table([worse]), "") if line[-1] not in ("", "nowhere")]
    assert marked == ["70%: 10.0%"]
    words = auto_words([worse])
    assert "in 1 of 50 cells: width 128, 400 steps, lr 0.008, 70%. With every seed it is so in 1, " in words
    assert "by more than twice the standard error in 1. " in words
    noisy = {0: 0.5 * five, 1: 1.6 * five}
    worse = changed(language, lambda row: {"perplexity": noisy[row["seed"]]}, optimizer="horst", alpha="auto", **here)
    assert "With every seed it is so in 0, by more than twice the standard error in 0. " in auto_words([worse])
    del here["sparsity"]
    worse = changed(language, lambda row: {"perplexity": 99.0}, optimizer="horst", alpha="auto", **here)
    words = auto_words([worse])
    assert "in 5 of 50 cells: width 128, 400 steps, lr 0.008, dense, 50%, 60%, 70%, 80%. With every" in words
    assert "With every seed it is so in 5, by more than twice the standard error in 5. It is" in words


def test_the_longer_runs_have_the_contenders_that_trained_so_long(frontier):
    columns, lines = parse(contenders_table([frontier["frontier_language"]], steps=1600))
    horst = ["HORST", "HORST, auto"]
    assert [line[0] for line in lines] == ["AdamW", "AdamW, lr held", *horst, "proximal AdamW", "proximal HORST, auto"]
    thresholds = {line[0]: line[1] for line in lines}
    assert thresholds["proximal HORST, auto"] == thresholds["proximal AdamW"] == "threshold over lr and lr"
    own = {"optimizer": "horst-proximal", "steps": 1600, "sparsity": 0.7}
    lucky = changed(frontier["frontier_language"], lambda row: {"perplexity": 2.0}, **own, lr=2e-3, strength=0.1)
    (line,) = [x for x in parse(contenders_table([lucky], steps=1600))[1] if x[0] == "proximal HORST, auto"]
    assert line[columns.index("70%")] == "2.00 ± 0.00 (0.1†, lr 0.002)"


def test_where_auto_is_worse_in_accuracy_is_marked_in_points(frontier):
    here = {"optimizer": "horst", "alpha": "auto", "lr": 3e-3, "width": 32, "method": "acdc"}
    worse = changed(frontier["frontier_vision"], lambda row: {"top1": row["top1"] - 0.5}, **here)
    marked = [line[-1] for line in parse(auto_table([worse]))[1] if line[-1].startswith("90%")]
    assert len(marked) == 1
    assert marked[0].endswith(" points")


def test_adamw_is_at_its_best_over_learning_rates_and_decays(frontier):
    language = frontier["frontier_language"]
    lucky = {"optimizer": "adamw", "lr": 1.6e-2, "weight_decay": 1.0, "sparsity": 0.7, "width": 64, "steps": 400}
    tuned = changed(language, lambda row: {"perplexity": 3.0 + row["seed"]}, **lucky)
    (line,) = lines_of(tuned_table([tuned]), "width 64, 400 steps", "AdamW")
    assert line[parse(tuned_table([tuned]))[0].index("70%")] == "3.50 ± 0.71 (lr 0.016†, decay 1†)"
    assert "(lr 0.004, decay 0.1)" in line[2]  # the others as they were
    (at_one_decay,) = lines_of(tuned_table([tuned]), "width 64, 400 steps", "AdamW, decay 0.1")
    assert "3.50" not in " ".join(at_one_decay)
    untuned = dataclasses.replace(
        tuned, rows=[row for row in tuned.rows if row["width"] == 64 or row["weight_decay"] == 0.1]
    )
    assert len(lines_of(tuned_table([tuned]), "width 128, 400 steps", "AdamW, decay 0.1")) == 1
    assert lines_of(tuned_table([untuned]), "width 128, 400 steps", "AdamW, decay 0.1") == []


def test_every_contender_is_shown_at_its_best(frontier):
    language, compositions = frontier["frontier_language"], frontier["frontier_compositions"]
    columns, lines = parse(contenders_table([compositions, language]))
    rows = [*compositions.rows, *(row for row in language.rows if (row["width"], row["steps"]) == (64, 400))]
    names = {LABELS[name] for name in get_args(Name) if name != "ham"}
    assert {line[0].removesuffix(", auto") for line in lines} == names
    for line in lines:
        optimizer = next(name for name, label in LABELS.items() if label == line[0].removesuffix(", auto"))
        own = [
            row
            for row in rows
            if row["optimizer"] == optimizer and (row["alpha"] == "auto") is line[0].endswith(", auto")
            and row["method"] in ("dense", "magnitude") and row["mirror"] == "matrices"
        ]  # fmt: skip
        for level, cell in zip((0.0, 0.5, 0.6, 0.7, 0.8), line[2:], strict=True):
            found = min(row["perplexity"] for row in own if row["sparsity"] == level and row["seed"] == 0)
            assert cell.startswith(f"{found + 0.05:.2f} ± 0.07 (")  # a seed adds 0.1
    assert columns[-1] == "80%"


def test_every_optimizer_has_a_label_and_a_colour():
    assert set(LABELS) == set(COLOURS) == set(get_args(Name))
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_ways_to_prune_and_tensors_of_the_mirror_step(frontier):
    compositions = frontier["frontier_compositions"]
    methods = compositions.config["methods"]
    columns, lines = parse(pruning_table([compositions]))
    assert columns == ["trained by", "pruned by", "dense", "50%", "60%", "70%", "80%"]
    assert len(lines) == 4 * len(methods)
    (line,) = lines_of(pruning_table([compositions]), "HORST, auto", "sparsegpt")
    lrs = compositions.config["lrs"]
    same = {"optimizer": "horst", "alpha": "auto", "method": "sparsegpt", "sparsity": 0.7}
    assert line[5].startswith(f"{min(mean(compositions, lr=lr, **same) for lr in lrs):.2f} ±")

    lines = parse(tensors_table([compositions]))[1]
    assert len(lines) == 5 * len(lrs)
    assert all(cell for line in lines for cell in line)


def test_ways_to_train_sparse(frontier):
    vision = frontier["frontier_vision"]
    better = changed(vision, lambda row: {"top1": 0.99}, method="rigl", alpha="auto")
    columns, lines = parse(training_methods_table([better]))
    assert columns == ["accuracy in %, lr 0.01, 90% zeros", "AdamW", "HORST, alpha 5", "HORST, auto"]
    assert [line[0] for line in lines] == ["AC/DC", "GMP", "RigL"]
    assert lines[2][3] == "99.0 ± 0.0"
    acdc = mean(vision, "top1", optimizer="adamw", lr=1e-2, weight_decay=0.1, width=32, method="acdc")
    assert lines[0][1].startswith(f"{100 * acdc:.1f} ±")


# --- the headline -----------------------------------------------------------------------------------------------------


@given(
    costs=st.lists(st.floats(1.0, 100.0), min_size=2, max_size=6),
    limit=st.floats(0.5, 120.0),
)
def test_up_to_the_free_sparsity_the_line_stays_within_the_limit(costs, limit):
    levels = [i / len(costs) for i in range(len(costs))]
    found = free_sparsity(dict(zip(levels, costs, strict=True)), limit)
    if costs[0] > limit:
        assert found is None
        return
    assert all(cost <= limit for level, cost in zip(levels, costs, strict=True) if level <= found)
    if found < levels[-1]:  # there the line crosses the limit, upwards
        i = max(i for i, level in enumerate(levels) if level <= found)
        assert costs[i + 1] > limit
        share = (found - levels[i]) / (levels[i + 1] - levels[i])
        assert costs[i] + share * (costs[i + 1] - costs[i]) == pytest.approx(limit, abs=1e-6)
    else:
        assert all(cost <= limit for cost in costs)


def test_a_level_that_broke_down_ends_what_is_free():
    assert free_sparsity({0.0: 8.0, 0.5: 9.0, 0.7: math.inf}, limit=10.0) == 0.5


def test_the_headline_of_table_6_with_a_second_file():
    """AdamW's dense model is in one file, HORST with its own rule in another."""
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "horst"]
    auto = dataclasses.replace(
        WIKIPEDIA, rows=[{**row, "alpha": "auto", "perplexity": 0.9 * row["perplexity"]} for row in own]
    )
    dense = next(row["perplexity"] for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and not row["sparsity"])
    columns, lines = parse(free_table([auto, WIKIPEDIA]))
    assert columns[-2:] == ["no worse up to", "within 1% up to"]
    assert [line[1] for line in lines] == ["AdamW", "HORST, alpha 5", "HORST, auto"]
    assert {line[0] for line in lines} == {f"width 768, 6,000 steps: {dense:.2f}"}
    levels = {row["sparsity"]: 0.9 * row["perplexity"] for row in own}
    assert levels[0.4] < dense < levels[0.5]
    free = 0.4 + 0.1 * (dense - levels[0.4]) / (levels[0.5] - levels[0.4])
    assert lines[2][3] == f"{free:.0%} (lr 0.001)"

    everywhere = {**auto.config["run"]["optimization"], "mirror": "all"}
    on_all = dataclasses.replace(auto, config={"run": {**auto.config["run"], "optimization": everywhere}})
    found = parse(free_table([on_all, WIKIPEDIA]))[1]  # another choice of tensors is another contender
    assert [line[1] for line in found] == ["AdamW", "HORST, alpha 5", "HORST, auto, mirror step on all"]
    assert found[2][2:] == lines[2][2:]

    longer = {**auto.config, "run": {**auto.config["run"], "steps": 9000}}
    with pytest.raises(ValueError, match=r"no dense AdamW of width 768, 9,000 steps .* as well"):
        free_table([WIKIPEDIA, dataclasses.replace(auto, config=longer)])


def broken_down(result, **where):
    """The result with these runs as a study writes those that broke down."""
    numbers = ("perplexity", "top1", "largest", "std", "kurtosis")

    def without_numbers(row):
        return {**{key: None for key in numbers if key in row}, "broke_down": "the loss is nan at step 50"}

    return changed(result, without_numbers, **where)


def test_where_all_dense_adamw_broke_down_tables_say_so_and_compare_nothing(frontier):
    language = broken_down(frontier["frontier_language"], optimizer="adamw", width=64)
    language = broken_down(language, optimizer="adamw-held", width=64)
    lines = parse(free_table([language]))[1]
    lost = [line for line in lines if line[0] == "width 64, 400 steps: broke down"]
    assert [line[1] for line in lost] == ["AdamW", "HORST, alpha 5", "HORST, auto", "AdamW, lr held"]
    assert {cell for line in lost for cell in line[3:]} == {""}
    wide = [line for line in lines if line[0].startswith("width 128")]
    assert wide == lines_of(free_table([frontier["frontier_language"]]), wide[0][0])  # as they were
    (line,) = lines_of(auto_table([language]), "width 64, 400 steps")
    assert line[1:-1] == ["best", "AdamW", *["broke down"] * 5]

    vision = broken_down(frontier["frontier_vision"], optimizer="adamw", method="dense")
    table = sparse_against_dense_table([vision])
    assert lines_of(table, "width 32, 40 epochs", "AdamW", "dense")[0][3:] == ["broke down", ""]
    assert {line[4] for line in parse(table)[1]} == {""}
    assert "broke down" not in lines_of(table, "width 32, 40 epochs", "HORST, auto", "90%")[0][3]

    compositions = broken_down(frontier["frontier_compositions"], optimizer="adamw", method="dense")
    assert lines_of(pruning_table([compositions]), "AdamW", "sparsegpt")[0][2] == "broke down"


@pytest.mark.parametrize("where", [{"method": "dense"}, {"optimizer": "adamw"}, {}])
@pytest.mark.parametrize("study", ["language", "vision", "compositions"])
@pytest.mark.filterwarnings("error")
def test_a_study_of_which_runs_broke_down_has_its_report(frontier, study, where, tmp_path):
    content = getattr(frontier_sections, study)([broken_down(frontier[f"frontier_{study}"], **where)])
    assert "broke down" in str([table.lines for table in content.tables])
    for figure in content.figures:
        save_figure(figure.draw(), tmp_path / "figure.svg")


def test_second_betas_whose_runs_broke_down_have_panels(with_long_memory):
    figure = by_second_beta([WIKIPEDIA, broken_down(with_long_memory)])
    assert figure.axes[0].get_ylim()[0] > 1.0  # that of the panel with numbers
    assert by_second_beta([broken_down(WIKIPEDIA), broken_down(with_long_memory)]).axes


@pytest.fixture
def with_long_memory():
    """The same runs with another second beta, a tenth better, which count as no other seed."""
    optimization = {**WIKIPEDIA.config["run"]["optimization"], "betas": [0.9, 0.999]}
    config = {"run": {**WIKIPEDIA.config["run"], "optimization": optimization}}
    rows = [{**row, "perplexity": 0.9 * row["perplexity"]} for row in WIKIPEDIA.rows]
    return dataclasses.replace(WIKIPEDIA, config=config, rows=rows)


def test_the_dense_adamw_to_match_is_the_best_of_all_second_betas(with_long_memory):
    dense = next(row["perplexity"] for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and not row["sparsity"])
    lines = parse(free_table([WIKIPEDIA, with_long_memory]))[1]
    assert {line[0] for line in lines} == {f"width 768, 6,000 steps: {0.9 * dense:.2f}"}
    assert lines[0][3] == "0% (lr 0.001, beta2 0.999)"
    assert lines[1][3].endswith("% (lr 0.001, beta2 0.999)")


def test_a_panel_a_second_beta_has_the_same_line_across(with_long_memory):
    figure = by_second_beta([WIKIPEDIA, with_long_memory])
    assert [axes.get_title() for axes in figure.axes] == ["second beta 0.95, magnitude", "second beta 0.999, magnitude"]
    short, long = ({line.get_label(): line.get_ydata() for line in axes.lines} for axes in figure.axes)
    assert (
        short["dense AdamW"][0] == long["dense AdamW"][0] == long["AdamW"][0] == pytest.approx(0.9 * short["AdamW"][0])
    )
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_nothing_is_free_if_the_dense_model_is_worse(frontier):
    bad = changed(frontier["frontier_language"], lambda row: {"perplexity": 99.0}, optimizer="horst", alpha="auto")
    assert {line[3] for line in parse(free_table([bad]))[1] if line[1] == "HORST, auto"} == {"not even dense"}
    good = changed(frontier["frontier_language"], lambda row: {"perplexity": 1.5}, optimizer="horst", alpha="auto")
    found = {line[3].partition(" (")[0] for line in parse(free_table([good]))[1] if line[1] == "HORST, auto"}
    assert found == {"at least 80%"}


def test_sparse_vision_is_set_against_dense_adamw(frontier):
    vision = changed(frontier["frontier_vision"], lambda row: {"top1": 0.99}, optimizer="adamw", method="dense")
    vision = changed(vision, lambda row: {"top1": 0.985}, optimizer="horst", alpha="auto", method="acdc")
    found = [line for line in parse(sparse_against_dense_table([vision]))[1] if line[1:3] == ["HORST, auto", "90%"]]
    assert [line[4] for line in found] == ["-0.5", "-0.5"]


@pytest.mark.parametrize("study", ["language", "vision"])
def test_a_study_without_adamw_shows_the_rule_alone(frontier, study):
    whole = frontier[f"frontier_{study}"]
    rows = [row for row in whole.rows if row["optimizer"] == "horst" and row["alpha"] in (5.0, "auto")]
    content = getattr(frontier_sections, study)([dataclasses.replace(whole, rows=rows)])
    assert len(content.tables) == 1
    assert content.figures == []
    words, with_adamw = content.summary[0], auto_words([whole])
    assert "AdamW" not in words
    assert with_adamw.startswith(words)
    lines = parse(auto_table([dataclasses.replace(whole, rows=rows)]))[1]
    assert {line[2] for line in lines} == {"HORST, alpha 5", "HORST, auto"}
    assert [line[0] for line in lines if line[0]] == [line[0] for line in parse(auto_table([whole]))[1] if line[0]]


# --- figures and sections ---------------------------------------------------------------------------------------------


def test_quality_is_drawn_against_alpha_times_the_rate(frontier):
    language = frontier["frontier_language"]
    figure = quality_against_product([language])
    assert len(figure.axes) == 9
    dense, _, at_70 = figure.axes[:3]
    assert at_70.get_title() == "width 64, 400 steps, 70%"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    stars = [line for line in dense.lines if line.get_marker() == "*"]
    auto = dense.get_xticks()[-1]
    assert [tick.get_text() for tick in dense.get_xticklabels()][-1] == "auto"
    assert [line.get_xdata()[0] for line in stars] == [auto] * 4
    assert auto > max(row["alpha_lr"] or 0.0 for row in language.rows)
    where = {"width": 64, "steps": 400, "sparsity": 0.0}
    lrs = language.config["lrs"]
    expected = [mean(language, optimizer="horst", alpha="auto", lr=lr, **where) for lr in lrs]
    assert [line.get_ydata()[0] for line in stars] == pytest.approx(expected)
    drawn = {line.get_label(): line for line in at_70.lines}
    tuned = min(cell.mean for cell in cells_of([language]) if cell.row["optimizer"] == "adamw"
                and (cell.row["width"], cell.row["steps"], cell.row["sparsity"]) == (64, 400, 0.7))  # fmt: skip
    assert drawn["AdamW at its best"].get_ydata()[0] == pytest.approx(tuned)
    assert list(drawn["lr 0.002"].get_xdata()[1:]) == pytest.approx([0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*(f"lr {lr:g}" for lr in lrs), "AdamW at its best", "HORST, alpha 5", "HORST, auto"]


def test_runs_that_broke_down_or_are_far_off_are_marked(frontier):
    language = frontier["frontier_language"]
    where = {"optimizer": "horst", "alpha": "auto", "width": 64, "steps": 400, "sparsity": 0.0}
    axes = quality_against_product([changed(language, lambda row: {"perplexity": None}, **where, lr=2e-3)]).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"] == [[axes.get_xticks()[-1]]]
    axes = quality_against_product([changed(language, lambda row: {"perplexity": 1e4}, **where, lr=2e-3)]).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "^"] == [[axes.get_xticks()[-1]]]
    tuned = next(line for line in axes.lines if line.get_label() == "AdamW at its best").get_ydata()[0]
    assert axes.get_ylim()[1] == pytest.approx(CROPPED * tuned)


def test_the_spread_of_the_weights_is_drawn(frontier):
    language = changed(frontier["frontier_language"], lambda row: {"largest": 77.0}, alpha="auto")
    axes = weights_against_product([language]).axes
    assert len(axes) == 6
    assert {line.get_ydata()[0] for line in axes[0].lines if line.get_marker() == "*"} == {77.0}
    assert {line.get_ydata()[0] for line in axes[1].lines if line.get_marker() == "*"} != {77.0}


def test_perplexity_against_sparsity_has_dense_adamw_across(frontier):
    both = [frontier["frontier_compositions"], frontier["frontier_language"]]
    figure = tuned_against_sparsity(both, ("magnitude", "sparsegpt"))
    assert [axes.get_title().rpartition(", ")[2] for axes in figure.axes] == ["magnitude", "sparsegpt"]
    adamw = {
        cell.row["lr"]: cell.mean
        for cell in cells_of(both)
        if cell.row["optimizer"] == "adamw" and cell.row["weight_decay"] == 0.1 and cell.row["method"] == "dense"
        and (cell.row["width"], cell.row["steps"]) == (64, 400)
    }  # fmt: skip
    for axes, pruned in zip(figure.axes, (adamw, both[0].config["lrs"]), strict=True):
        drawn = {line.get_label(): line for line in axes.lines}
        assert drawn["dense AdamW"].get_ydata()[0] == min(adamw.values())
        # the curve begins with the models that were pruned this way, which not all learning rates were
        assert drawn["AdamW"].get_ydata()[0] == min(adamw[lr] for lr in pruned)
        assert list(drawn["HORST, auto"].get_xdata()) == [0, 50, 60, 70, 80]
    first, second = (set(axes.get_legend_handles_labels()[1]) for axes in figure.axes)
    magnitude_alone = {"AdamW, lr held", "proximal AdamW", "proximal HORST, auto"}
    assert first - second == magnitude_alone, "no other way of pruning was asked of these"


@pytest.mark.parametrize("name", ["frontier_language", "frontier_vision", "frontier_compositions"])
def test_every_figure_of_a_section_can_be_drawn(frontier, name):
    write = {
        "frontier_language": frontier_sections.language,
        "frontier_vision": frontier_sections.vision,
        "frontier_compositions": frontier_sections.compositions,
    }[name]
    content = write([frontier[name]])
    for figure in content.figures:
        assert all(axes.get_xlabel() and axes.lines for axes in figure.draw().axes)
    assert all(table.lines for table in content.tables)


def test_a_handful_of_runs_on_a_gpu_has_its_section(made_up_vision):
    config = RECIPES["frontier_vision"].scales["gpu"]()
    result = made_up_vision(config)
    assert len(result.rows) == len(frontier_vision.points(config)) == 5
    content = frontier_sections.vision([result])
    assert len(content.tables) == 3  # nothing but AC/DC
    assert all(figure.draw().axes for figure in content.figures)
