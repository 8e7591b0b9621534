"""What a run leaves in its file: read back, told to be damaged, the same on every rank."""

import dataclasses
import json
import logging
import subprocess
import sys

import pytest

from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, provenance
from horst.lab.models.deit import DeiTConfig
from horst.lab.report.tables import origin


@pytest.mark.parametrize(
    "content",
    ['{"config": {"lr": 0.1}, "outc', "[1, 2]", '"text"', "", '{"config": {"lr": 0.1}, "outcome": [1]}', "\x00\xff"],
    ids=["truncated", "list", "text", "empty", "outcome", "bytes"],
)
def test_a_damaged_outcome_is_named_and_computed_again(tmp_path, caplog, content):
    path = tmp_path / "run" / "outcome.json"
    path.parent.mkdir()
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert load_or_run(path, {"lr": 0.1}, lambda: {"value": 1})["value"] == 1
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert json.loads(path.read_text())["outcome"] == {"value": 1}
    assert load_or_run(path, {"lr": 0.1}, lambda: pytest.fail("computed again"))["value"] == 1


RANKS = """
import os, pathlib, sys
from horst.lab.experiments.outcomes import load_or_run
from horst.training import processes

with processes("cpu") as world:
    # a folder that each rank has for itself, as on hosts that share none: only the first one's is looked into
    path = pathlib.Path(sys.argv[1]) / str(world.rank) / "outcome.json"
    for _ in range(2):
        found = load_or_run(path, {"lr": 0.1, "host": world.rank}, lambda: {"rank": world.rank})
        (pathlib.Path(sys.argv[1]) / f"rank-{world.rank}.txt").open("a").write(f"{found['rank']}\\n")
os._exit(0)  # gloo's threads abort the interpreter's own exit now and then
"""


def test_all_ranks_get_the_outcome_of_the_first(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(tmp_path / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"rank-{rank}.txt").read_text().split() for rank in (0, 1)] == [["0", "0"], ["0", "0"]]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["0"]


def tiny_table1(folder, **changes):
    config = RECIPES["table1"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=8, depth=1, heads=2)
    run = dataclasses.replace(config.run, model=model, epochs=1)
    return dataclasses.replace(config, run=run, directory=folder, **changes)


def test_a_table_says_where_its_runs_were_made_and_not_where_it_was_put_together(tmp_path, monkeypatch):
    config = tiny_table1(tmp_path / "runs")
    monkeypatch.setenv("HORST_COMMIT", "a" * 40)
    made = RECIPES["table1"].run(config)
    assert (made.environment["commit"], made.environments) == ("a" * 40, [])
    monkeypatch.setenv("HORST_COMMIT", "b" * 40)
    files = sorted((tmp_path / "runs").rglob("outcome.json"))
    for file in files:
        saved = json.loads(file.read_text())
        assert 0 < saved["origin"]["seconds"] <= made.seconds
        file.write_text(json.dumps({**saved, "origin": {**saved["origin"], "seconds": 1000.0}}))
    gathered = RECIPES["table1"].run(config)
    assert gathered.rows == made.rows
    assert gathered.environment == made.environment
    assert gathered.seconds == 2000.0

    files[0].unlink()  # this run is made here and now
    mixed = Result.load(RECIPES["table1"].run(config).save(tmp_path / "mixed.json"))
    assert [each["commit"] for each in mixed.environments] == ["b" * 40, "a" * 40]
    assert mixed.environment == {**made.environment, "commit": "various"}
    assert 1000.0 < mixed.seconds < 2000.0
    assert "commit various" in origin("mixed.json", mixed)


def test_a_result_has_the_time_of_its_runs():
    runs = [{"environment": {"device": "H200"}, "seconds": seconds} for seconds in (60.0, 90.0)]
    found = provenance(runs, {"device": "x86_64"}, 0.5)
    assert found == {"environment": {"device": "H200"}, "environments": [], "seconds": 150.0}
    assert provenance([], {"device": "x86_64"}, 0.5)["environment"] == {"device": "x86_64"}
    # made one after the other in this process, their time is in its own
    assert provenance(runs, {"device": "H200"}, 151.0)["seconds"] == 151.0
