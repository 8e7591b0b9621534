"""The benchmarks of the kernels run on a CPU with tiny shapes."""

import importlib.util
import json
import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "bench_model_kernels.py"


def test_the_benchmark_writes_a_time_for_each_contender_and_direction(tmp_path, monkeypatch, capsys):
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny", "--rounds", "2", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 2 + 3  # attention: contenders, directions; cross-entropy: contenders
    assert all(row["microseconds"] > 0 and row["floor_microseconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_the_benchmark_of_the_step_has_rows_with_l1(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("bench_optimizer_step", FOLDER / "bench_optimizer_step.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "tests_pass", lambda: True)  # they run in this suite anyway
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.delitem(bench.CONTENDERS["cpu"], "HORST compiled")
    out = tmp_path / "step.json"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_optimizer_step.py", *arguments])
    bench.main()
    rows = {row["optimizer"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == bench.CONTENDERS["cpu"].keys()
    assert {"HORST (default), l1", "AdamW fused + l1 hook"} <= rows.keys()
    assert "HORST fused, l1" in bench.CONTENDERS["cuda"]
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert "HORST (default), l1" in capsys.readouterr().out
