"""Models pruned in several ways, from several files: nothing is mixed, and what was not measured stays empty."""

import dataclasses
import pathlib

from horst.lab.report.frontier.page import gpt2_table

from horst.lab.experiments.result import Result
from horst.lab.report.tables import parse
from horst.lab.report.transformer_tables import methods_table, one_shot_table, short_attention_table

FOLDER = pathlib.Path(__file__).parents[3] / "results/transformers"
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


def with_optimization(result, **changes):
    run = result.config["run"]
    optimization = {**run["optimization"], **changes}
    return dataclasses.replace(result, config={**result.config, "run": {**run, "optimization": optimization}})


def test_runs_with_another_learning_rate_are_not_averaged_and_seeds_are():
    other = with_optimization(AUTO, lr=8e-3)
    columns, lines = parse(methods_table([AUTO, other]))
    assert columns[:2] == ["trained by", "lr"]
    assert [line[1] for line in lines] == ["0.001", "0.001", "0.008", "0.008"]
    again = dataclasses.replace(AUTO, rows=[{**row, "seed": 1} for row in AUTO.rows])
    lines = parse(methods_table([AUTO, again]))[1]
    assert len(lines) == 2
    assert all("± 0.00" in line[2] for line in lines)


def test_table_6_tells_settings_apart_and_shows_the_papers_line_once():
    everywhere = with_optimization(WIKIPEDIA, mirror="all", betas=[0.9, 0.999])
    columns, lines = parse(one_shot_table([everywhere, WIKIPEDIA]))
    assert columns[:4] == ["perplexity", "beta2", "mirror step on", "dense"]
    assert lines[0][:3] == ["HORST, alpha 5", "0.999", "all"]
    assert lines[1][:3] == ["*the paper's*", "", ""]
    names = [line[0] for line in lines]
    assert names.count("*the paper's*") == len({row["optimizer"] for row in WIKIPEDIA.rows})
    assert [line[1:3] for line in lines if line[0] == "AdamW"] == [["0.999", ""], ["0.95", ""]]
    assert parse(one_shot_table([WIKIPEDIA]))[0][:2] == ["perplexity", "dense"]  # all the same: no column


def test_the_times_of_short_attention_stand_beside_their_floor():
    shape = {"batch": 2, "tokens": 4, "heads": 1, "head_width": 8, "floor_microseconds": 10.0}
    rows = [
        {**shape, "contender": name, "direction": direction, "microseconds": time, "times_floor": time / 10}
        for name, direction, time in (
            ("ours", "forwards", 12.0),
            ("ours", "backwards", 20.0),
            ("theirs", "forwards", 30.0),
            ("theirs", "backwards", 44.0),
        )
    ]
    columns, lines = parse(short_attention_table([dataclasses.replace(AUTO, rows=rows)]))
    assert columns[2:] == ["floor, us", "ours", "theirs"]
    assert lines == [
        ["2 x 4 x 1 x 8", "forwards", "10", "12 (1.2 x)", "30 (3.0 x)"],
        ["2 x 4 x 1 x 8", "backwards", "10", "20 (2.0 x)", "44 (4.4 x)"],
    ]
    newer = [{**row, "kernel": "attention", "shape": "2 x 4 x 1 x 8"} for row in rows]
    newer.append({**newer[0], "kernel": "cross_entropy", "shape": "8 x 100", "direction": "both"})
    assert parse(short_attention_table([dataclasses.replace(AUTO, rows=newer)]))[1] == lines


def test_table_6_shows_one_way_of_pruning():
    assert parse(one_shot_table([AUTO]))[1][0][-1] == perplexity(AUTO, method="magnitude", sparsity=0.8)
    solved = parse(one_shot_table([AUTO], "sparsegpt"))[1][0]
    assert solved[-1] == perplexity(AUTO, method="sparsegpt", sparsity=0.8)
    assert solved[1] == perplexity(AUTO, sparsity=0.0)


def test_the_frontiers_table_of_gpt2_has_adamw_and_horst():
    names = [line[0] for line in parse(gpt2_table([WIKIPEDIA, AUTO]))[1]]
    assert names == ["HORST, alpha 5", "AdamW", "HORST, alpha auto", "HORST, alpha auto"]
