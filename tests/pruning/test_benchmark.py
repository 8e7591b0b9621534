"""The benchmark of pruning runs on a CPU with a tiny model."""

import json
import pathlib
import runpy
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_pruning.py"


def test_the_benchmark_writes_its_rows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pruning.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(out.read_text())
    assert [row["what"] for row in result["rows"]] == [
        "magnitude", "wanda", "sparsegpt", "magnitude, the paper's rule at nine levels",
    ]  # fmt: skip
    assert all(row["seconds"] > 0 for row in result["rows"])
    assert len(capsys.readouterr().out.splitlines()) == 4
