"""The frontier studies from the command line."""

import json

from horst.lab.experiments.result import Result

TINY = [
    "--steps", 4, "--batch-size", 2, "--warmup-steps", 1, "--layers", 2, "--heads", 2, "--context", 16, "--seeds", 0,
    "--rule-seeds", 0, "--sparsities", 0.5,
]  # fmt: skip


def test_a_study_runs_from_one_command_and_is_not_run_twice(horst, texts):
    assert (
        horst("data", "tokenize", texts / "text.jsonl", "--tokenizer", "bytes", "--validation", "2", "--out", "t").code
        == 0
    )
    few = [
        "--lrs",
        "1e-3",
        "--tuning-lrs",
        "2e-3",
        "--alpha-lrs",
        "--weight-decays",
        0.1,
        "--widths",
        16,
        "--long-steps",
        "None",
    ]
    words = ["run", "frontier_language", "--scale", "cpu", "--data", "t", *TINY, *few]
    ran = horst(*words, "--workers", 1, "--out", "f.json", "--json")
    assert ran.code == 0, ran.err
    assert [(row["optimizer"], row["alpha"], row["lr"]) for row in ran.json if row["sparsity"]] == [
        ("adamw", 0.0, 1e-3),
        ("horst", 5.0, 1e-3),
        ("horst", "auto", 1e-3),
        ("adamw", 0.0, 2e-3),
    ]
    assert "4 of 4" in ran.err
    assert Result.load("f.json").config["run"]["data"] == "t"
    again = horst(*words, "--out", "g.json", "--json")
    assert again.json == ran.json, "the second time every run is taken from its file, clocks and all"
    assert json.loads(ran.out)
