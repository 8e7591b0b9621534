"""A second run in a directory is refused, and let in when the first has left in whatever way."""

import os
import re
import signal
import subprocess
import sys

import pytest
from toy_runs import ToyData, toy_run

from horst import files

HOLD = "from horst.files import locked\nwith locked({!r}): print(flush=True); input()"
pytestmark = pytest.mark.skipif(files.fcntl is None, reason="needs fcntl, which Windows has not")


def test_a_second_process_is_refused_and_touches_nothing_until_the_first_is_killed(other, tmp_path):
    with pytest.raises(RuntimeError, match=f"another process is writing to {re.escape(str(tmp_path))}. Wait for it"):
        toy_run(tmp_path)
    assert os.listdir(tmp_path) == [".lock"]
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert toy_run(tmp_path)[1].step == 30


def test_a_run_that_fails_lets_others_in(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyData, "batches", lambda self, start: iter(()))
    with pytest.raises(ValueError, match="the training batches ended"):
        toy_run(tmp_path)
    command = [sys.executable, "-c", HOLD.format(str(tmp_path))]
    subprocess.run(command, input=b"\n", check=True, timeout=120)
