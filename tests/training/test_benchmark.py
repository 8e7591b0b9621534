"""The benchmark of the training loop runs on a CPU with tiny models."""

import json
import pathlib
import runpy
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_training.py"


def test_the_benchmark_writes_a_rate_for_each_loop(tmp_path, monkeypatch, capsys):
    out = tmp_path / "training.json"
    arguments = ["--device", "cpu", "--tiny", "--steps", "10", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 12  # two models, two settings, three loops
    assert all(row["rate"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 12
