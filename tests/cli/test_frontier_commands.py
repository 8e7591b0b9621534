"""The frontier studies from the command line."""

import json

from horst.lab.experiments.result import Result

TINY = [
    "--steps", 4, "--batch-size", 2, "--warmup-steps", 1, "--layers", 2, "--heads", 2, "--context", 16, "--seeds", 0,
    "--sparsities", 0.5,
]  # fmt: skip


def test_a_study_runs_from_one_command_and_is_not_run_twice(horst, texts):
    assert (
        horst("data", "tokenize", texts / "text.jsonl", "--tokenizer", "bytes", "--validation", "2", "--out", "t").code
        == 0
    )
    points = ["adamw lr=1e-3,2e-3 width=16", "horst lr=1e-3 width=16 alpha=5,auto"]
    words = ["run", "frontier_language", "--scale", "cpu", "--data", "t", *TINY, "--points", *points]
    ran = horst(*words, "--workers", 1, "--out", "f.json", "--json")
    assert ran.code == 0, ran.err
    assert [(row["optimizer"], row["alpha"], row["lr"]) for row in ran.json if row["sparsity"]] == [
        ("adamw", 0.0, 1e-3),
        ("adamw", 0.0, 2e-3),
        ("horst", 5.0, 1e-3),
        ("horst", "auto", 1e-3),
    ]
    assert "4 of 4" in ran.err
    assert Result.load("f.json").config["run"]["data"] == "t"
    again = horst(*words, "--out", "g.json", "--json")
    assert again.json == ran.json, "the second time every run is taken from its file, clocks and all"
    assert json.loads(ran.out)


def test_a_point_that_cannot_be_is_an_error_that_says_so(horst):
    ran = horst("run", "frontier_language", "--scale", "cpu", "--points", "sgd lr=1")
    assert ran.code != 0
    assert "a point begins with a contender" in ran.err
