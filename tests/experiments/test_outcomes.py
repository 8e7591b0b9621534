"""What a run leaves in its file: read back, told to be damaged, the same on every rank."""

import json
import logging
import subprocess
import sys

import pytest

from horst.experiments.outcomes import once


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
        assert once(path, {"lr": 0.1}, lambda: {"value": 1})["value"] == 1
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert json.loads(path.read_text())["outcome"] == {"value": 1}
    assert once(path, {"lr": 0.1}, lambda: pytest.fail("computed again"))["value"] == 1


RANKS = """
import json, pathlib, sys, tempfile
from horst.experiments.outcomes import once
from horst.training import processes

with processes("cpu") as world:
    # a folder that each rank has for itself, as on hosts that share none: only the first one's is looked into
    path = pathlib.Path(sys.argv[1]) / str(world.rank) / "outcome.json"
    for _ in range(2):
        found = once(path, {"lr": 0.1, "host": world.rank}, lambda: {"rank": world.rank})
        print(json.dumps([world.rank, found["rank"]]))
"""


def test_all_ranks_get_the_outcome_of_the_first(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(tmp_path / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(map(json.loads, done.stdout.split("\n")[:-1])) == [[0, 0], [0, 0], [1, 0], [1, 0]]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["0"]
