"""Models pruned in several ways, from several files: nothing is mixed, and what was not measured stays empty."""

import dataclasses
import pathlib

from horst.lab.experiments.result import Result
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.transformer_tables import one_shot_table

FOLDER = pathlib.Path(__file__).parents[3] / "results/transformers"
WIKIPEDIA = Result.load(FOLDER / "table6_gpt2_wikipedia.json")
AUTO = Result.load(FOLDER / "table6_gpt2_auto.json")


def perplexity(result, **where):
    (found,) = [row["perplexity"] for row in result.rows if all(row[name] == value for name, value in where.items())]
    return f"{found:.2f}"


def columns_and_rows(table):
    return list(table.columns), table.rows


def test_a_level_that_a_contender_lacks_is_left_empty():
    columns, lines = columns_and_rows(quality_table([WIKIPEDIA, AUTO]))
    assert columns[:5] == ["perplexity", "mirror step on", "pruned by", "seeds", "dense"]
    assert columns[5:] == ["10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%"]
    by_name = {tuple(line[:3]): dict(zip(columns[3:], line[3:], strict=True)) for line in lines}
    assert list(by_name) == [
        ("HORST, alpha 5", "matrices", "magnitude"),
        ("AdamW", "", "magnitude"),
        ("HAM, alpha 200", "matrices", "magnitude"),
        ("HORST, alpha auto", "all", "magnitude"),
        ("HORST, alpha auto", "all", "SparseGPT"),
    ]
    auto = by_name["HORST, alpha auto", "all", "SparseGPT"]
    assert auto["10%"] == auto["40%"] == by_name["AdamW", "", "magnitude"]["80%"] == ""
    assert auto["70%"] == perplexity(AUTO, method="sparsegpt", sparsity=0.7)
    assert auto["dense"] == by_name["HORST, alpha auto", "all", "magnitude"]["dense"] == perplexity(AUTO, sparsity=0.0)
    assert by_name["AdamW", "", "magnitude"]["60%"] == perplexity(WIKIPEDIA, optimizer="adamw", sparsity=0.6)
    assert {line["seeds"] for line in by_name.values()} == {"1"}


def with_optimization(result, **changes):
    run = result.config["run"]
    optimization = {**run["optimization"], **changes}
    return dataclasses.replace(result, config={**result.config, "run": {**run, "optimization": optimization}})


def test_runs_with_other_tensors_are_not_averaged():
    other = with_optimization(AUTO, mirror="blocks")
    table = quality_table([AUTO, other])
    assert table.column("mirror step on") == ["all", "all", "blocks", "blocks"]
    assert set(table.column("seeds")) == {"1"}
    assert "mirror step on" not in quality_table([AUTO]).columns  # all the same: no column


def test_runs_with_another_learning_rate_are_not_averaged_and_seeds_are():
    table = quality_table([AUTO, with_optimization(AUTO, lr=8e-3)])
    assert table.column("lr") == ["0.001", "0.001", "0.008", "0.008"]
    again = dataclasses.replace(AUTO, rows=[{**row, "seed": 1} for row in AUTO.rows])
    table = quality_table([AUTO, again])
    assert table.column("seeds") == ["2", "2"]
    assert all(cell.endswith("± 0.00") for cell in table.column("dense"))
    assert quality_table([AUTO, AUTO]).column("seeds") == ["1", "1"], "a run that is there twice counts once"


def test_table_6_tells_settings_apart_and_shows_the_papers_line_once():
    everywhere = with_optimization(WIKIPEDIA, mirror="all", betas=[0.9, 0.999])
    table = one_shot_table([everywhere, WIKIPEDIA])
    assert list(table.columns)[:5] == ["perplexity", "beta2", "mirror step on", "seeds", "dense"]
    assert table.rows[0][:3] == ["HORST, alpha 5", "0.999", "all"]
    assert table.rows[1][:4] == ["the paper's", "", "", ""]
    names = [row[0] for row in table.rows]
    assert [i for i, name in enumerate(names) if name == "the paper's"] == list(table.paper)
    assert len(table.paper) == len({row["optimizer"] for row in WIKIPEDIA.rows})
    assert [row[1:3] for row in table.rows if row[0] == "AdamW"] == [["0.999", ""], ["0.95", ""]]
    assert list(one_shot_table([WIKIPEDIA]).columns)[:3] == ["perplexity", "seeds", "dense"]  # all the same: no column


def test_table_6_shows_pruning_by_magnitude():
    table = one_shot_table([AUTO])
    assert table.rows[0][-1] == perplexity(AUTO, method="magnitude", sparsity=0.8)
    assert table.column("dense")[0] == perplexity(AUTO, sparsity=0.0)
    assert table.rows[-1][0] == "zeros among all weights"
    assert table.column("50%")[-1] == "28.5%"


def test_actual_zeros_are_shown_where_they_are_not_those_asked_for():
    rows = [{**row, "sparsity_of_pruned_layers": max(0.416, row["sparsity"] + 0.0004)} for row in AUTO.rows]
    table = one_shot_table([dataclasses.replace(AUTO, rows=rows)])
    assert table.column("dense")[0] == f"{perplexity(AUTO, sparsity=0.0)} (42% zeros)"
    assert table.column("30%")[0].endswith(" (42% zeros)")
    assert table.column("50%")[0] == perplexity(AUTO, method="magnitude", sparsity=0.5)
    assert table.column("dense")[-1] == "", "of no row the dense model has no zeros"
