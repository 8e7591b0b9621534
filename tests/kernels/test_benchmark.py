"""The benchmark of short attention runs on a CPU with tiny shapes."""

import json
import pathlib
import runpy
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_short_attention.py"


def test_the_benchmark_writes_a_time_for_each_contender_and_direction(tmp_path, monkeypatch, capsys):
    out = tmp_path / "short_attention.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny", "--rounds", "2", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 * 3 * 2  # tokens, contenders, directions
    assert all(row["microseconds"] > 0 and row["floor_microseconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 24
