"""A second run in a directory is refused, and let in when the first has left in whatever way."""

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
from toy_runs import ToyData, toy_run

from horst.lab.training import directory_lock
from horst.lab.training.directory_lock import locked

HOLD = "from horst.lab.training.directory_lock import locked\nwith locked({!r}): print(flush=True); input()"
pytestmark = pytest.mark.skipif(directory_lock.fcntl is None, reason="needs fcntl, which Windows has not")


@pytest.fixture
def other(tmp_path):
    """A process that has locked ``tmp_path``."""
    command = [sys.executable, "-c", HOLD.format(str(tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def test_a_second_process_is_refused_and_touches_nothing_until_the_first_is_killed(other, tmp_path):
    with pytest.raises(RuntimeError, match=f"another process is training in {re.escape(str(tmp_path))}. Wait for it"):
        toy_run(tmp_path)
    assert os.listdir(tmp_path) == [".lock"]
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert toy_run(tmp_path)[1].step == 30


def test_a_second_entry_in_the_same_process_is_refused_and_leaves_the_first_its_lock(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(folder)
    hold = [sys.executable, "-c", HOLD.format(str(folder))]
    with locked(folder):
        for name in (folder, link):
            with pytest.raises(RuntimeError, match=r"this process is training in .*\. Wait for it"), locked(name):
                pytest.fail("the block ran")
        with locked(tmp_path / "other"):
            pass
        refused = subprocess.run(hold, input=b"\n", capture_output=True, timeout=120)
        assert b"another process is training" in refused.stderr
    with locked(link):
        pass
    subprocess.run(hold, input=b"\n", check=True, timeout=120)


def test_a_run_that_fails_lets_others_in(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyData, "batches", lambda self, start: iter(()))
    with pytest.raises(ValueError, match="the training batches ended"):
        toy_run(tmp_path)
    command = [sys.executable, "-c", HOLD.format(str(tmp_path))]
    subprocess.run(command, input=b"\n", check=True, timeout=120)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(number, tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_lock.fcntl, "lockf", refuse)
    with locked(tmp_path):
        pass


def test_a_system_without_fcntl_keeps_nobody_out(other, tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "fcntl", None)
    with locked(tmp_path):
        pass
