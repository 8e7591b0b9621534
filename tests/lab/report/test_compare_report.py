"""The comparisons' tables and figure, from results made by hand."""

import dataclasses

import pytest

from horst.lab.report import compare, compare_figures
from horst.lab.report.sections import sections


def test_the_best_comes_first_and_breakdowns_last(compared_language):
    table = compare.compare_table([compared_language])
    assert table.column("perplexity, pruned by SparseGPT") == ["`horst`", "`muon`", "`adamw`", "`spred`", "`ham`"]
    assert table.column("best try") == [*["lr 0.002, weight decay 0.1"] * 4, ""]
    assert table.column("tries") == ["2", "2", "2", "1 of 2", "2"]
    assert table.column("seeds") == ["2", "2", "2", "0 of 2", "0 of 2"]
    assert table.column("state, bytes per weight") == ["8", "4", "8", "8", "8"]
    assert table.column("time per step") == ["1.0", "1.5", "1.0", "1.0", "n/a"]


def test_a_row_has_means_over_fresh_seeds_large_spreads_and_actual_zeros(compared_language):
    table = compare.compare_table([compared_language])
    assert table.column("dense") == [
        "**10.50 ± 0.71**",
        "**10.55 ± 0.49**",
        "12.20",
        "14.00 (60% zeros)",
        "broke down: the loss is nan at step 7",
    ]
    assert table.column("70%") == ["**10.50 ± 0.71**", "**10.55 ± 0.49**", "12.20", "14.00", ""]
    assert table.column("50%")[3] == "14.00 (60% zeros)", "it had more zeros than were asked for"
    assert compare.zeros_words(compared_language) == "70% of the pruned layers is 63% of all weights."


def test_another_way_of_pruning_has_a_brief_table(compared_language):
    table = compare.compare_table([compared_language], way="magnitude", levels=(0.7,), brief=True)
    assert table.columns == ["perplexity, pruned by magnitude", "tries", "seeds", "dense", "70%"]
    assert table.column("70%") == ["**17.50 ± 0.71**", "**17.55**", "19.20", "21.00", ""]


def test_tries_and_seeds_are_said_only_if_some_are_missing(compared_vision):
    assert compare.compare_table([compared_vision]).columns[:3] == ["accuracy in %", "best try", "dense"]


def test_the_mirror_step_is_compared_seed_by_seed(compared_language, compared_vision):
    table = compare.pairs_table([compared_language])
    assert table.rows == [["`adamw` → `horst`", *["12.20 → 10.50 (2/2)"] * 3]]
    assert compare.pairs_table([compared_vision]).rows == []


def test_a_best_try_at_the_edge_of_its_grid_has_a_dagger(compared_language):
    entry = compare.entries(compared_language)[0]
    tries = [
        {"settings": {"lr": lr, "alpha": alpha, "mirror": "all"}, "chosen": (lr, alpha) == (0.3, "auto")}
        for lr in (0.1, 0.2, 0.3)
        for alpha in (5.0, "auto")
    ]
    assert dataclasses.replace(entry, tries=tries).chosen == "lr 0.3†, alpha auto"


def test_the_setting_is_told_without_the_learning_rate_that_tries_replace(compared_vision):
    config = {**compared_vision.config, "setting": "a DeiT on digits, 40 epochs, learning rate 0.005 (cosine)"}
    told = compare.setting_words(dataclasses.replace(compared_vision, config=config))
    assert told == "a DeiT on digits, 40 epochs, betas (0.9, 0.95)"


def test_a_winner_must_win_in_every_seed(compared_language):
    found = compare.entries(compared_language)
    place = ("sparsegpt", 0.7)
    assert compare.criterion(compared_language) == place
    assert compare.not_told_apart(found, place) == ["horst", "muon"]
    assert compare.words(compared_language).startswith(
        "At 70% by SparseGPT, `horst` has the best mean, 10.50. It does not beat `muon` in every seed. Before pruning,"
    )
    better = {"horst": 1.0}
    rows = [{**row, "perplexity": row["perplexity"] - better.get(row["contender"], 0.0)}
            for row in compared_language.rows if row["contender"] != "ham"]  # fmt: skip
    clear = dataclasses.replace(compared_language, rows=rows)
    assert compare.not_told_apart(compare.entries(clear), place) == ["horst"]
    assert compare.words(clear).startswith("At 70% by SparseGPT, `horst` has the best mean, 9.50, in every seed.")


def test_one_seed_makes_no_winner(compared_language):
    rows = [row for row in compared_language.rows if row["seed"] < 2]
    one = dataclasses.replace(compared_language, rows=rows)
    assert compare.not_told_apart(compare.entries(one), ("sparsegpt", 0.7)) == []
    assert compare.words(one) == ""
    assert "**" not in compare.compare_table([one]).markdown()


def test_the_tries_are_listed_with_their_winners(compared_language):
    table = compare.tries_table([compared_language])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["`horst`"] == ["lr, weight decay", "0.002, 0.1: **10.00**", "0.004, 0.1: 20.00"]
    assert rows["`spred`"][2].endswith(": not run")
    assert [cell.rpartition(": ")[2] for cell in rows["`ham`"][1:]] == ["broke down", "broke down"]


def test_accuracy_counts_upwards_and_guessing_is_said(compared_vision):
    table = compare.compare_table([compared_vision])
    assert table.column("accuracy in %") == ["`horst+acdc`", "`adamw+one-shot`", "`adamw+rigl`"]
    assert table.column("90%") == ["**91.50**", "81.00", "9.50 ± 0.71 (no better than guessing)"]
    assert table.column("dense") == ["", "**97.00**", ""]
    assert compare.words(compared_vision).startswith("At 90%, `horst+acdc` has the best mean, 91.50, in every seed.")


def test_the_figure_has_the_mirror_step_and_the_best(compared_language):
    figure = compare_figures.against_zeros([compared_language])
    assert [axes.get_title() for axes in figure.axes] == [
        "without (dashed) and with the mirror step",
        "the best at some level",
    ]
    labels = [[line.get_label() for line in axes.get_lines()] for axes in figure.axes]
    assert labels == [["adamw", "horst"], ["horst", "muon", "adamw"]]
    assert [line.get_linestyle() for line in figure.axes[0].get_lines()] == ["--", "-"]
    assert list(figure.axes[1].get_lines()[0].get_xdata()) == pytest.approx([0.0, 50.0, 70.0])
    assert list(figure.axes[1].get_lines()[0].get_ydata()) == pytest.approx([10.5, 10.5, 10.5])
    figure.draw_without_rendering()
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0", "50", "70"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [
        "10",
        "12",
        "15",
        "20",
        "25",
        "30",
        "40",
        "50",
    ]


def test_without_seeds_the_figure_has_the_best_tries_at_their_actual_zeros(compared_language):
    rows = [row for row in compared_language.rows if row["seed"] == 0]
    figure = compare_figures.against_zeros([dataclasses.replace(compared_language, rows=rows)])
    lines = {line.get_label(): line for line in figure.axes[-1].get_lines()}
    assert set(lines) == {"horst", "muon", "adamw", "spred"}
    assert list(lines["spred"].get_xdata()) == pytest.approx([60.0, 60.0, 70.0])


def test_the_report_has_a_section_that_says_what_is_missing(compared_language, compared_vision, tmp_path):
    found = sections([(tmp_path / "l.json", compared_language), (tmp_path / "v.json", compared_vision)])
    assert [section.title for section in found] == [
        "Every contender with equal tries, language",
        "Every contender with equal tries, vision",
    ]
    assert found[0].missing == "This result is partial: 14 of 20 runs were done when it was interrupted."
    assert [len(section.content.figures) for section in found] == [1, 0]
    assert found[0].content.tables[0].rows == compare.compare_table([compared_language]).rows
