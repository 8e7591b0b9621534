"""Compiled code is kept between processes: the second run of a short experiment does not compile again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = f"""
import dataclasses, json, sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import torch
from toy_runs import CONFIG, toy_run
toy_run(Path(sys.argv[1]), dataclasses.replace(CONFIG, compile="on", precision="bf16"), dropout=0.0)
counters = torch._dynamo.utils.counters
print(json.dumps({{name: dict(counters[name]) for name in ("inductor", "aot_autograd")}}))
"""


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    counts = []
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / name)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    # Forward and backward are one entry where the outer cache finds them, else one each in the inner one.
    found = [c["aot_autograd"].get("autograd_cache_hit", 0) + c["inductor"].get("fxgraph_cache_hit", 0) for c in counts]
    missed = [c["inductor"].get("fxgraph_cache_miss", 0) for c in counts]
    assert missed[0] > 0
    assert found[1] > 0
    assert missed[1] == 0
