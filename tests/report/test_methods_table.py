"""Models pruned in several ways, from several files: nothing is mixed, and what was not measured stays empty."""

import dataclasses
import pathlib

import pytest

from horst.experiments.result import Result
from horst.report.frontier.page import gpt2_table
from horst.report.tables import parse
from horst.report.transformer_tables import methods_table, one_shot_table

FOLDER = pathlib.Path(__file__).parents[2] / "results/transformers"
WIKIPEDIA = Result.load(FOLDER / "table6_gpt2_wikipedia.json")
AUTO = Result.load(FOLDER / "table6_gpt2_auto.json")


def perplexity(result, **where):
    (found,) = [row["perplexity"] for row in result.rows if all(row[name] == value for name, value in where.items())]
    return f"{found:.2f}"


def test_a_level_that_a_contender_lacks_is_left_empty():
    columns, lines = parse(methods_table([WIKIPEDIA, AUTO]))
    assert columns[:4] == ["trained by", "mirror step on", "pruned by", "dense"]
    assert columns[4:] == ["10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%"]
    by_name = {tuple(line[:3]): dict(zip(columns[3:], line[3:], strict=True)) for line in lines}
    assert list(by_name) == [
        ("HORST, alpha 5", "matrices", "magnitude"),
        ("AdamW", "", "magnitude"),
        ("HAM, alpha 200", "matrices", "magnitude"),
        ("HORST, alpha auto", "all", "magnitude"),
        ("HORST, alpha auto", "all", "sparsegpt"),
    ]
    auto = by_name["HORST, alpha auto", "all", "sparsegpt"]
    assert auto["10%"] == auto["40%"] == by_name["AdamW", "", "magnitude"]["80%"] == ""
    assert auto["70%"] == perplexity(AUTO, method="sparsegpt", sparsity=0.7)
    assert auto["dense"] == by_name["HORST, alpha auto", "all", "magnitude"]["dense"] == perplexity(AUTO, sparsity=0.0)
    assert by_name["AdamW", "", "magnitude"]["60%"] == perplexity(WIKIPEDIA, optimizer="adamw", sparsity=0.6)


def test_runs_with_other_tensors_are_not_averaged():
    everywhere = {**AUTO.config["run"]["optimization"], "mirror": "blocks"}
    other = dataclasses.replace(
        AUTO,
        config={**AUTO.config, "run": {**AUTO.config["run"], "optimization": everywhere}},
        rows=[{**row, "perplexity": 2 * row["perplexity"]} for row in AUTO.rows],
    )
    lines = parse(methods_table([AUTO, other]))[1]
    assert [line[1] for line in lines] == ["all", "all", "blocks", "blocks"]
    assert not any("±" in cell for line in lines for cell in line)
    assert "mirror step on" not in methods_table([AUTO])  # all the same: no column


def test_the_table_of_one_method_refuses_two():
    with pytest.raises(ValueError, match=r"have magnitude, sparsegpt\. Use methods_table"):
        one_shot_table([AUTO])
    assert one_shot_table([WIKIPEDIA])


def test_the_frontiers_table_of_gpt2_has_adamw_and_horst():
    names = [line[0] for line in parse(gpt2_table([WIKIPEDIA, AUTO]))[1]]
    assert names == ["HORST, alpha 5", "AdamW", "HORST, alpha auto", "HORST, alpha auto"]
