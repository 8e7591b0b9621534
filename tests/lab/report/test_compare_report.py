"""The comparisons' tables and figure, from results made by hand."""

import dataclasses

import pytest

from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, environment, to_json
from horst.lab.report import compare
from horst.lab.report.sections import sections

LEVELS = (0.5, 0.7)
# perplexity at every level by seed; 0 is the tuning seed
LANGUAGE = {
    "adamw": {0: 12.0, 1: 12.0, 2: 12.4},
    "horst": {0: 10.0, 1: 10.0, 2: 11.0},
    "muon": {0: 10.1, 1: 10.2, 2: 10.9},  # worse than horst in one seed, better in the other
    "spred": {0: 14.0},  # no fresh seed yet
    "ham": {0: None},
}


def made_up(name, rows, tries, costs, **changes):
    config = dataclasses.replace(RECIPES[name].scales["cpu"](), seeds=(1, 2), **changes)
    return Result(
        experiment=name,
        config=to_json(dataclasses.asdict(config)),
        rows=rows,
        curves={
            "tries": tries,
            "costs": costs,
            "runs": {"done": 14, "planned": 20},
            "less_is_better": name == "compare_language",
        },
        notes=[],
        environment=environment(),
        seconds=1.0,
    )


def attempt(name, criterion, *, chosen=False, **more):
    settings = {"lr": 0.002 if chosen else 0.004, "weight_decay": 0.1}
    return {"contender": name, "settings": settings, "chosen": chosen, "criterion": criterion, "done": True, **more}


@pytest.fixture
def language():
    rows, tries = [], []
    for name, seeds in LANGUAGE.items():
        for seed, value in seeds.items():
            stage = {"contender": name, "stage": "seed" if seed else "try", "seed": seed}
            for method, level in (("dense", 0.0), *((m, s) for m in ("magnitude", "sparsegpt") for s in LEVELS)):
                row = {**stage, "method": method, "sparsity": level, "perplexity": value}
                if value is None:
                    rows.append({**row, "broke_down": "the loss is nan at step 7"})
                    continue
                row["perplexity"] += 10 * level * (method == "magnitude")
                share = max(level, 0.6 if name == "spred" else 0.0)
                shares = {"sparsity_of_pruned_layers": share, "sparsity_of_all_weights": 0.9 * share}
                rows.append({**row, **shares})
        broke = {"broke_down": "the loss is nan at step 7"} if name == "ham" else {}
        tries += [attempt(name, seeds[0], chosen=name != "ham", **broke), attempt(name, 20.0, **broke)]
    tries[-3]["done"] = False  # one of spred's
    costs = {name: {"bytes_per_weight": 8.0, "milliseconds_per_step": 30.0} for name in LANGUAGE}
    costs["muon"] = {"bytes_per_weight": 4.39, "milliseconds_per_step": 45.0}
    costs["ham"]["milliseconds_per_step"] = None
    return made_up("compare_language", rows, tries, costs, sparsities=LEVELS)


@pytest.fixture
def vision():
    rows = []
    for name, values in {"adamw+one-shot": (0.8, 0.82), "horst+acdc": (0.9, 0.93), "adamw+rigl": (0.1, 0.09)}.items():
        for seed, value in enumerate(values, 1):
            row = {"contender": name, "stage": "seed", "seed": seed, "method": name.partition("+")[2]}
            share = {"sparsity_of_pruned_layers": 0.9, "sparsity_of_all_weights": 0.84}
            if name == "adamw+one-shot":
                rows.append({**row, "method": "dense", "sparsity": 0.0, "top1": 0.97, **dict.fromkeys(share, 0.0)})
            rows.append({**row, "sparsity": 0.9, "top1": value, **share})
    names = list(dict.fromkeys(row["contender"] for row in rows))
    tries = [attempt(name, 0.9, chosen=True) for name in names]
    costs = {name: {"bytes_per_weight": 8.0, "milliseconds_per_step": 10.0} for name in names}
    return made_up("compare_vision", rows, tries, costs)


def test_the_best_comes_first_and_breakdowns_last(language):
    table = compare.compare_table([language])
    assert table.column("perplexity, pruned by magnitude / sparsegpt") == [
        "`horst`", "`muon`", "`adamw`", "`spred`", "`ham`"
    ]  # fmt: skip
    assert table.column("best try") == [*["lr 0.002, weight decay 0.1"] * 4, ""]
    assert table.column("tries") == ["2", "2", "2", "1 of 2", "2"]
    assert table.column("seeds") == ["2", "2", "2", "0 of 2", "0 of 2"]
    assert table.column("state, bytes per weight") == ["8.0", "4.4", "8.0", "8.0", "8.0"]
    assert table.column("time per step") == ["1.00", "1.50", "1.00", "1.00", "n/a"]


def test_a_row_has_means_over_fresh_seeds_and_actual_zeros(language):
    table = compare.compare_table([language])
    assert table.column("dense") == [
        "**10.50**", "**10.55**", "12.20", "14.00", "broke down: the loss is nan at step 7"
    ]  # fmt: skip
    assert table.column("70%") == [
        "**17.50** / **10.50**", "**17.55** / **10.55**", "19.20 / 12.20", "21.00 / 14.00", ""
    ]  # fmt: skip
    assert table.column("50%")[3] == "19.00 / 14.00 (60% zeros)", "it had more zeros than were asked for"
    assert table.column("zeros at 70%: pruned layers / all weights")[:2] == ["70.0% / 63.0%"] * 2


def test_a_winner_must_win_in_every_seed(language):
    found = compare.entries(language)
    place = ("sparsegpt", 0.7)
    assert compare.criterion(language) == place
    assert compare.not_told_apart(found, place) == ["horst", "muon"]
    assert compare.words(language).startswith(
        "At 70% by sparsegpt, `horst` has the best mean, 10.50. It does not beat `muon` in every seed. Before pruning,"
    )
    rows = [
        {**row, "perplexity": row["perplexity"] - 1.0} if row["contender"] == "horst" else row for row in language.rows
    ]
    clear = dataclasses.replace(language, rows=rows)
    assert compare.not_told_apart(compare.entries(clear), place) == ["horst"]
    assert compare.words(clear).startswith("At 70% by sparsegpt, `horst` has the best mean, 9.50, in every seed.")


def test_one_seed_makes_no_winner(language):
    rows = [row for row in language.rows if row["seed"] < 2]
    one = dataclasses.replace(language, rows=rows)
    assert compare.not_told_apart(compare.entries(one), ("sparsegpt", 0.7)) == []
    assert compare.words(one) == ""
    assert "**" not in compare.compare_table([one]).markdown()


def test_the_tries_are_listed_with_their_winners(language):
    table = compare.tries_table([language])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["`horst`"] == ["lr 0.002, weight decay 0.1: **10.00**", "lr 0.004, weight decay 0.1: 20.00"]
    assert rows["`spred`"][1].endswith(": not run")
    assert [cell.rpartition(": ")[2] for cell in rows["`ham`"]] == ["broke down", "broke down"]


def test_accuracy_counts_upwards_and_guessing_is_said(vision):
    table = compare.compare_table([vision])
    assert table.column("accuracy in %") == ["`horst+acdc`", "`adamw+one-shot`", "`adamw+rigl`"]
    assert table.column("90%") == ["**91.50**", "81.00", "9.50 (no better than guessing)"]
    assert table.column("dense") == ["", "**97.00**", ""]
    assert compare.words(vision).startswith("At 90%, `horst+acdc` has the best mean, 91.50, in every seed.")


def test_the_figure_has_the_best_in_both_ways_of_pruning(language):
    figure = compare.against_zeros([language])
    assert [axes.get_title() for axes in figure.axes] == ["pruned by magnitude", "pruned by sparsegpt"]
    for axes in figure.axes:
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        assert [line.get_label() for line in lines] == ["horst", "muon", "adamw", "spred"]
        assert list(lines[0].get_xdata()) == pytest.approx([0.0, 50.0, 70.0])
        assert list(lines[3].get_xdata()) == pytest.approx([60.0, 60.0, 70.0])
    assert list(figure.axes[1].get_lines()[0].get_ydata()) == pytest.approx([10.5, 10.5, 10.5])


def test_the_report_has_a_section_that_says_what_is_missing(language, vision, tmp_path):
    found = sections([(tmp_path / "l.json", language), (tmp_path / "v.json", vision)])
    assert [section.title for section in found] == [
        "Every contender with equal tries, language",
        "Every contender with equal tries, vision",
    ]
    assert found[0].missing == "This result is partial: 14 of 20 runs were done when it was interrupted."
    assert [len(section.content.figures) for section in found] == [1, 0]
    assert found[0].content.tables[0].rows == compare.compare_table([language]).rows
