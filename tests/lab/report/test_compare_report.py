"""The comparisons' tables and figure, from results made by hand."""

import dataclasses

import pytest

from horst.lab.report import compare
from horst.lab.report.sections import sections


def test_the_best_comes_first_and_breakdowns_last(compared_language):
    table = compare.compare_table([compared_language])
    assert table.column("perplexity, pruned by magnitude / sparsegpt") == [
        "`horst`", "`muon`", "`adamw`", "`spred`", "`ham`"
    ]  # fmt: skip
    assert table.column("best try") == [*["lr 0.002, weight decay 0.1"] * 4, ""]
    assert table.column("tries") == ["2", "2", "2", "1 of 2", "2"]
    assert table.column("seeds") == ["2", "2", "2", "0 of 2", "0 of 2"]
    assert table.column("state, bytes per weight") == ["8.0", "4.4", "8.0", "8.0", "8.0"]
    assert table.column("time per step") == ["1.00", "1.50", "1.00", "1.00", "n/a"]


def test_a_row_has_means_over_fresh_seeds_and_actual_zeros(compared_language):
    table = compare.compare_table([compared_language])
    assert table.column("dense") == [
        "**10.50**", "**10.55**", "12.20", "14.00", "broke down: the loss is nan at step 7"
    ]  # fmt: skip
    assert table.column("70%") == [
        "**17.50** / **10.50**", "**17.55** / **10.55**", "19.20 / 12.20", "21.00 / 14.00", ""
    ]  # fmt: skip
    assert table.column("50%")[3] == "19.00 / 14.00 (60% zeros)", "it had more zeros than were asked for"
    assert table.column("zeros at 70%: pruned layers / all weights")[:2] == ["70.0% / 63.0%"] * 2


def test_a_winner_must_win_in_every_seed(compared_language):
    found = compare.entries(compared_language)
    place = ("sparsegpt", 0.7)
    assert compare.criterion(compared_language) == place
    assert compare.not_told_apart(found, place) == ["horst", "muon"]
    assert compare.words(compared_language).startswith(
        "At 70% by sparsegpt, `horst` has the best mean, 10.50. It does not beat `muon` in every seed. Before pruning,"
    )
    better = {"horst": 1.0}
    rows = [{**row, "perplexity": row["perplexity"] - better.get(row["contender"], 0.0)}
            for row in compared_language.rows if row["contender"] != "ham"]  # fmt: skip
    clear = dataclasses.replace(compared_language, rows=rows)
    assert compare.not_told_apart(compare.entries(clear), place) == ["horst"]
    assert compare.words(clear).startswith("At 70% by sparsegpt, `horst` has the best mean, 9.50, in every seed.")


def test_one_seed_makes_no_winner(compared_language):
    rows = [row for row in compared_language.rows if row["seed"] < 2]
    one = dataclasses.replace(compared_language, rows=rows)
    assert compare.not_told_apart(compare.entries(one), ("sparsegpt", 0.7)) == []
    assert compare.words(one) == ""
    assert "**" not in compare.compare_table([one]).markdown()


def test_the_tries_are_listed_with_their_winners(compared_language):
    table = compare.tries_table([compared_language])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["`horst`"] == ["lr 0.002, weight decay 0.1: **10.00**", "lr 0.004, weight decay 0.1: 20.00"]
    assert rows["`spred`"][1].endswith(": not run")
    assert [cell.rpartition(": ")[2] for cell in rows["`ham`"]] == ["broke down", "broke down"]


def test_accuracy_counts_upwards_and_guessing_is_said(compared_vision):
    table = compare.compare_table([compared_vision])
    assert table.column("accuracy in %") == ["`horst+acdc`", "`adamw+one-shot`", "`adamw+rigl`"]
    assert table.column("90%") == ["**91.50**", "81.00", "9.50 (no better than guessing)"]
    assert table.column("dense") == ["", "**97.00**", ""]
    assert compare.words(compared_vision).startswith("At 90%, `horst+acdc` has the best mean, 91.50, in every seed.")


def test_the_figure_has_the_best_in_both_ways_of_pruning(compared_language):
    figure = compare.against_zeros([compared_language])
    assert [axes.get_title() for axes in figure.axes] == ["pruned by magnitude", "pruned by sparsegpt"]
    for axes in figure.axes:
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        assert [line.get_label() for line in lines] == ["horst", "muon", "adamw", "spred"]
        assert list(lines[0].get_xdata()) == pytest.approx([0.0, 50.0, 70.0])
        assert list(lines[3].get_xdata()) == pytest.approx([60.0, 60.0, 70.0])
    assert list(figure.axes[1].get_lines()[0].get_ydata()) == pytest.approx([10.5, 10.5, 10.5])


def test_the_report_has_a_section_that_says_what_is_missing(compared_language, compared_vision, tmp_path):
    found = sections([(tmp_path / "l.json", compared_language), (tmp_path / "v.json", compared_vision)])
    assert [section.title for section in found] == [
        "Every contender with equal tries, language",
        "Every contender with equal tries, vision",
    ]
    assert found[0].missing == "This result is partial: 14 of 20 runs were done when it was interrupted."
    assert [len(section.content.figures) for section in found] == [1, 0]
    assert found[0].content.tables[0].rows == compare.compare_table([compared_language]).rows
