"""The benchmark of the models' kernels runs on a CPU with tiny shapes."""

import json
import pathlib
import runpy
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_model_kernels.py"


def test_the_benchmark_writes_a_time_for_each_contender_and_direction(tmp_path, monkeypatch, capsys):
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny", "--rounds", "2", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 2 + 3  # attention: contenders, directions; cross-entropy: contenders
    assert all(row["microseconds"] > 0 and row["floor_microseconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 9
