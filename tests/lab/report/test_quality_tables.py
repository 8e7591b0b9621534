"""The tables and figures of the studies say what the rows say, also where that is bad news."""

import dataclasses
import math
import pathlib
import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horst.lab.baselines.contenders import Name
from horst.lab.experiments.result import Result
from horst.lab.report import frontier
from horst.lab.report.figures import save_figure
from horst.lab.report.quality_figures import CROPPED, against_product, against_zeros
from horst.lab.report.quality_tables import compare_words, free_sparsity, quality_table
from horst.lab.report.runs import LABELS, best, cells_of, is_whole
from horst.lab.report.transformer_figures import COLOURS

ROOT = pathlib.Path(__file__).parents[3]
WIKIPEDIA = Result.load(ROOT / "results/transformers/table6_gpt2_wikipedia.json")


def changed(result, change, **where):
    """The result with some rows changed."""
    hit = [all(row.get(key) == value for key, value in where.items()) for row in result.rows]
    assert any(hit)
    rows = [{**row, **change(row)} if found else row for row, found in zip(result.rows, hit, strict=True)]
    return dataclasses.replace(result, rows=rows)


def rows_of(table, **cells):
    """The rows of a table that have these cells, as dictionaries; ``name`` is the first column."""
    records = [{"name": row[0], **record} for row, record in zip(table.rows, table.records(), strict=True)]
    return [r for r in records if all(r.get(key) == value for key, value in cells.items())]


# --- cells ------------------------------------------------------------------------------------------------------------


def test_seeds_are_averaged_and_a_run_that_two_studies_share_counts_once(studies):
    cells = cells_of([studies["frontier_language"], studies["frontier_language"]])
    assert {len(cell.rows) for cell in cells} == {2}
    cell = next(
        c for c in cells if c.row["optimizer"] == "adamw" and c.row["lr"] == 2e-3 and c.row["method"] == "dense"
    )
    values = [row["perplexity"] for row in cell.rows]
    assert cell.mean == pytest.approx(statistics.mean(values))
    assert str(cell) == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


@pytest.mark.parametrize("lost", [None, "inf"])
def test_a_run_that_broke_down_is_said_so_and_is_never_the_best(studies, lost):
    good = {"optimizer": "horst", "alpha": "auto", "lr": 2e-3, "width": 64, "steps": 400, "sparsity": 0.0}
    broken = changed(studies["frontier_language"], lambda row: {"perplexity": lost}, **good, seed=1)
    cell = next(c for c in cells_of([broken]) if all(c.row.get(key) == value for key, value in good.items()))
    assert math.isinf(cell.mean)
    assert str(cell) == "broke down (1 of 2)"
    assert best([cell]) is None
    table = frontier.rate_table([broken])
    (row,) = rows_of(table, name="HORST, alpha auto", budget="width 64, 400 steps", lr="0.002")
    assert row["dense"] == "broke down (1 of 2)"
    words = compare_words([broken], "HORST, alpha auto", "HORST, alpha 5")
    assert "in 1 of 50 cells (width 64, 400 steps, lr 0.002, dense), in 1 by more than" in words


def test_what_is_no_measurement_tells_runs_apart():
    rows = [{**row, "schedule": name} for row in WIKIPEDIA.rows for name in ("cosine", "triangle")]
    assert len(cells_of([dataclasses.replace(WIKIPEDIA, rows=rows)])) == 2 * len(cells_of([WIKIPEDIA]))


# --- tables -----------------------------------------------------------------------------------------------------------


def test_where_auto_is_worse_than_alpha_5_is_said(studies):
    language = studies["frontier_language"]
    names = ("HORST, alpha auto", "HORST, alpha 5")
    words = compare_words([language], *names)
    assert words.startswith("By the mean over seeds, HORST, alpha auto is worse than HORST, alpha 5 in 0 of 50 cells. ")
    here = {"optimizer": "horst", "alpha": "auto", "lr": 8e-3, "width": 128, "steps": 400, "sparsity": 0.7}
    noisy = changed(language, lambda row: {"perplexity": (1.0, 99.0)[row["seed"]]}, **here)
    words = compare_words([noisy], *names)
    assert "in 1 of 50 cells (width 128, 400 steps, lr 0.008, 70%), in 0 by more than twice the standard" in words
    clear = changed(language, lambda row: {"perplexity": 99.0 + row["seed"]}, **here)
    assert "in 1 by more than twice the standard error." in compare_words([clear], *names)


def test_adamw_is_at_its_best_over_learning_rates_and_decays(studies):
    lucky = {"optimizer": "adamw", "lr": 1.6e-2, "weight_decay": 1.0, "sparsity": 0.7, "width": 64, "steps": 400}
    tuned = changed(studies["frontier_language"], lambda row: {"perplexity": 3.0 + row["seed"]}, **lucky)
    (row,) = rows_of(frontier.tuned_table([tuned]), name="AdamW", budget="width 64, 400 steps")
    assert row["70%"] == "3.50 ± 0.71 (lr 0.016†, decay 1†)"
    assert row["60%"].endswith("(lr 0.004, decay 0.1)")
    assert row["seeds"] == "2"


def test_every_optimizer_has_a_label_and_a_colour():
    assert set(LABELS) == set(COLOURS) == {*get_args(Name), "adamw-clipped-lr"}, "the last is in old results alone"
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_parts_of_the_step_stand_beside_the_whole_at_their_learning_rates(parts):
    table = frontier.parts_table([parts], methods=("magnitude", "sparsegpt"))
    names = ["AdamW", "HORST, alpha auto", "AdamW, norms at 6 lr", "AdamW, lr at most 0.002", "HORST, alpha 27.3"]
    assert [row[0] for row in table.rows[::2]] == names, "auto at 2e-3 has no part beside it"
    assert table.column("mirror step on")[::2] == ["", "all", "", "", "norm gains"]
    assert table.column("pruned by") == ["magnitude", "SparseGPT"] * 5
    assert set(table.column("lr")) == {"0.008"}
    assert "norms" not in str(frontier.tuned_table([parts]).rows), "an ablation is no contender"
    assert any("One part" in str(table.caption) for table in frontier.language([parts]).tables)


def test_a_file_of_parts_alone_has_their_table_and_no_figure(parts):
    alone = dataclasses.replace(parts, rows=[row for row in parts.rows if not is_whole(row)])
    content = frontier.language([alone])
    assert (len(content.tables), content.figures, content.summary) == (1, (), ())


def test_a_dense_model_is_in_a_row_with_the_seeds_that_were_pruned_so():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and row["sparsity"] in (0.0, 0.5)]
    again = [{**row, "seed": 1, "perplexity": 2 * row["perplexity"]} for row in own]
    solved = {**own[1], "method": "sparsegpt"}
    table = quality_table([dataclasses.replace(WIKIPEDIA, rows=[*own, *again, solved])])
    assert table.column("pruned by") == ["magnitude", "SparseGPT"]
    assert table.column("seeds") == ["2", "1"]
    assert table.column("dense")[1] == f"{own[0]['perplexity']:.2f}"


# --- what is free -----------------------------------------------------------------------------------------------------


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


FREE = "no worse than the best dense AdamW up to"


def test_what_is_free_is_measured_in_actual_zeros_of_one_model():
    """AdamW's dense model is in one file, HORST with l1 in another."""
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] == "horst"]
    better = [{**row, "alpha": "auto", "perplexity": 0.9 * row["perplexity"]} for row in own]
    dense = next(row["perplexity"] for row in WIKIPEDIA.rows if row["optimizer"] == "adamw" and not row["sparsity"])
    levels = {row["sparsity"]: row["perplexity"] for row in better}
    assert levels[0.4] < dense < levels[0.5]
    free = 0.4 + 0.1 * (dense - levels[0.4]) / (levels[0.5] - levels[0.4])
    table = quality_table([WIKIPEDIA, dataclasses.replace(WIKIPEDIA, rows=better)], free=True)
    assert rows_of(table, name="AdamW")[0][FREE] == "0%"
    assert rows_of(table, name="HORST, alpha auto")[0][FREE] == f"{free:.0%}"
    shifted = [{**row, "sparsity_of_pruned_layers": row["sparsity"] + 0.1} for row in better]
    table = quality_table([WIKIPEDIA, dataclasses.replace(WIKIPEDIA, rows=shifted)], free=True)
    assert rows_of(table, name="HORST, alpha auto")[0][FREE] == f"{free + 0.1:.0%}"


def test_a_model_of_adamw_itself_is_beside_its_own_seeds():
    """Seed 1 alone was pruned, and is better than the mean of the two."""
    base = {"optimizer": "adamw", "alpha": 0.0, "beta": 0.0, "loss": 1.0}
    found = [(0, "dense", 0.0, 12.0), (1, "dense", 0.0, 10.0), (1, "magnitude", 0.5, 10.5), (1, "magnitude", 0.9, 20.0)]
    keys = ("seed", "method", "sparsity", "perplexity")
    rows = [{**base, **dict(zip(keys, each, strict=True)), "sparsity_of_pruned_layers": each[2]} for each in found]
    (line,) = rows_of(quality_table([dataclasses.replace(WIKIPEDIA, rows=rows)], free=True), name="AdamW")
    assert line[FREE] == "0%"  # not 52%, as beside 11.0, the mean of both


def test_nothing_is_free_if_the_dense_model_is_worse(studies):
    where = {"optimizer": "horst", "alpha": "auto"}
    bad = changed(studies["frontier_language"], lambda row: {"perplexity": 99.0}, **where)
    assert {row[FREE] for row in rows_of(frontier.tuned_table([bad]), name="HORST, alpha auto")} == {"not even dense"}
    good = changed(studies["frontier_language"], lambda row: {"perplexity": 1.5}, **where)
    assert {row[FREE] for row in rows_of(frontier.tuned_table([good]), name="HORST, alpha auto")} == {"at least 80%"}


def broken_down(result, **where):
    """The result with these runs as a study writes those that broke down."""
    numbers = ("perplexity", "top1", "largest", "std", "kurtosis")

    def without_numbers(row):
        return {**{key: None for key in numbers if key in row}, "broke_down": "the loss is nan at step 50"}

    return changed(result, without_numbers, **where)


def test_where_all_dense_adamw_broke_down_nothing_is_compared_with_it(studies):
    language = broken_down(studies["frontier_language"], optimizer="adamw", width=64)
    table = frontier.tuned_table([language])
    lost = rows_of(table, budget="width 64, 400 steps")
    assert {row[FREE] for row in lost} == {""}
    assert lost[0]["dense"] == "broke down"
    whole = frontier.tuned_table([studies["frontier_language"]])
    wide = {"budget": "width 128, 400 steps"}
    assert rows_of(table, **wide) == rows_of(whole, **wide)


@pytest.mark.parametrize("where", [{"method": "dense"}, {"optimizer": "adamw"}, {}])
@pytest.mark.parametrize("study", ["language", "vision"])
@pytest.mark.filterwarnings("error")
def test_a_study_of_which_runs_broke_down_has_its_report(studies, study, where, tmp_path):
    content = getattr(frontier, study)([broken_down(studies[f"frontier_{study}"], **where)])
    assert "broke down" in str([table.rows for table in content.tables])
    for figure in content.figures:
        save_figure(figure.draw(), tmp_path / "figure.svg")


@pytest.mark.parametrize("study", ["language", "vision"])
def test_a_study_without_adamw_shows_every_rate_alone(studies, study):
    whole = studies[f"frontier_{study}"]
    rows = [row for row in whole.rows if row["optimizer"] == "horst" and row["alpha"] in (5.0, "auto")]
    content = getattr(frontier, study)([dataclasses.replace(whole, rows=rows)])
    assert len(content.tables) == 1
    assert not content.figures
    assert "AdamW" not in content.summary[0]
    assert {row[0] for row in content.tables[0].rows} == {"HORST, alpha 5", "HORST, alpha auto"}


# --- figures ----------------------------------------------------------------------------------------------------------


def test_quality_is_drawn_against_alpha_times_the_rate(studies):
    language = studies["frontier_language"]
    figure = against_product([language], (0.0, 0.5, 0.7))
    assert len(figure.axes) == 9
    dense, _, at_70 = figure.axes[:3]
    assert at_70.get_title() == "width 64, 400 steps, 70%"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    stars = [line for line in dense.lines if line.get_marker() == "*"]
    auto = dense.get_xticks()[-1]
    assert [tick.get_text() for tick in dense.get_xticklabels()][-1] == "auto"
    assert [line.get_xdata()[0] for line in stars] == [auto] * 4
    assert auto > max(row["alpha_lr"] or 0.0 for row in language.rows)
    drawn = {line.get_label(): line for line in at_70.lines}
    tuned = min(cell.mean for cell in cells_of([language]) if cell.row["optimizer"] == "adamw"
                and (cell.row["width"], cell.row["steps"], cell.row["sparsity"]) == (64, 400, 0.7))  # fmt: skip
    assert drawn["AdamW at its best"].get_ydata()[0] == pytest.approx(tuned)
    assert list(drawn["lr 0.002"].get_xdata()[1:]) == pytest.approx([0.005, 0.01, 0.02, 0.05, 0.1, 0.2])


def test_runs_that_broke_down_are_marked_and_those_far_off_are_cropped(studies):
    language = studies["frontier_language"]
    where = {"optimizer": "horst", "alpha": "auto", "width": 64, "steps": 400, "sparsity": 0.0}
    lost = changed(language, lambda row: {"perplexity": None}, **where, lr=2e-3)
    axes = against_product([lost], (0.0,)).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"] == [[axes.get_xticks()[-1]]]
    far = changed(language, lambda row: {"perplexity": 1e4}, **where, lr=2e-3)
    axes = against_product([far], (0.0,)).axes[0]
    tuned = next(line for line in axes.lines if line.get_label() == "AdamW at its best").get_ydata()[0]
    assert axes.get_ylim()[1] == pytest.approx(CROPPED * tuned)


def test_the_size_of_the_weights_is_drawn(studies):
    language = changed(studies["frontier_language"], lambda row: {"largest": 77.0}, alpha="auto")
    axes = against_product([language], (0.0,), "largest").axes
    assert len(axes) == 3
    assert {line.get_ydata()[0] for line in axes[0].lines if line.get_marker() == "*"} == {77.0}


def test_perplexity_is_drawn_against_actual_zeros_with_dense_adamw_across():
    own = [row for row in WIKIPEDIA.rows if row["optimizer"] != "ham"]
    sparse = [
        {**row, "optimizer": "horst-l1", "l1": 0.1, "sparsity_of_pruned_layers": max(0.3, row["sparsity"])}
        for row in own
        if row["optimizer"] == "horst"
    ]
    figure = against_zeros([dataclasses.replace(WIKIPEDIA, rows=[*own, *sparse])])
    (axes,) = figure.axes
    drawn = {line.get_label(): line for line in axes.lines}
    dense = next(row["perplexity"] for row in own if row["optimizer"] == "adamw" and not row["sparsity"])
    assert drawn["dense AdamW"].get_ydata()[0] == drawn["AdamW"].get_ydata()[0] == dense
    assert list(drawn["HORST, alpha 5"].get_xdata()) == pytest.approx([0, 10, 20, 30, 40, 50, 60, 70], abs=0.1)
    assert drawn["HORST, alpha 5, l1 0.1"].get_xdata()[0] == 30
    assert figure.get_figwidth() <= 7.3, "100 pixels per inch: readable at 700"


@pytest.mark.parametrize("name", ["frontier_language", "frontier_vision"])
def test_every_figure_of_a_section_can_be_drawn(studies, name):
    content = getattr(frontier, name.removeprefix("frontier_"))([studies[name]])
    for figure in content.figures:
        assert all(axes.get_xlabel() and axes.lines for axes in figure.draw().axes)
    assert content.figures
    assert all(table.rows for table in content.tables)
