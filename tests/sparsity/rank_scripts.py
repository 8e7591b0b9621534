"""A script of a few lines, run by several processes at once."""

import subprocess
import sys
from pathlib import Path

# Gloo's threads abort the interpreter's own exit now and then, even of a script without horst.
EXIT = """
sys.stdout.flush()
__import__("os")._exit(0)
"""


def run_script(script, tmp_path, world):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script + EXIT, str(rank), str(tmp_path / "store"), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    logs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(logs)
    return logs
