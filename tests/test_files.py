"""Writes are whole or not at all, locks hold, and JSON that lies is refused."""

import contextlib
import errno
import os
import subprocess
import sys
import textwrap

import pytest

from horst import files
from horst.files import InvalidFileError, locked, read_json, whole_directory, whole_file, write_json

HOLD = "from horst.files import locked\nwith locked({!r}): print(flush=True); input()"
needs_locks = pytest.mark.skipif(files.fcntl is None, reason="needs fcntl, which Windows has not")


@needs_locks
def test_a_second_entry_in_the_same_process_is_refused_and_leaves_the_first_its_lock(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(folder)
    hold = [sys.executable, "-c", HOLD.format(str(folder))]
    with locked(folder):
        for name in (folder, link):
            with pytest.raises(RuntimeError, match=r"this process is writing to .*\. Wait for it"), locked(name):
                pytest.fail("the block ran")
        with locked(tmp_path / "other"):
            pass
        refused = subprocess.run(hold, input=b"\n", capture_output=True, timeout=120)
        assert b"another process is writing to" in refused.stderr
    with locked(link):
        pass
    subprocess.run(hold, input=b"\n", check=True, timeout=120)


@needs_locks
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(number, tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    with locked(tmp_path):
        pass


@needs_locks
def test_a_system_without_fcntl_keeps_nobody_out(other, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with locked(tmp_path):
        pass


@needs_locks
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path):
    program = f"""
        import os
        from horst.files import whole_directory
        with whole_directory({str(tmp_path / "model")!r}) as temporary:
            (temporary / "half").write_text("half")
            os._exit(9)
    """
    other = tmp_path / ".model.mine.tmp"
    other.mkdir()
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False).returncode == 9
    (left,) = set(tmp_path.iterdir()) - {other}
    with whole_directory(tmp_path / "model") as first:
        assert not left.exists()
        with contextlib.suppress(KeyError), whole_directory(tmp_path / "model") as second:
            assert set(tmp_path.iterdir()) == {first.parent, second.parent, other}
            raise KeyError
        assert first.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"model", other.name}


def test_a_folder_that_its_process_removes_while_another_looks_for_leftovers_is_passed_over(tmp_path, monkeypatch):
    left = tmp_path / ".model.0123abcd.tmp"
    left.mkdir()
    lock = files.locked

    def vanish(folder, **options):
        if folder == left:
            left.rmdir()
        return lock(folder, **options)

    monkeypatch.setattr(files, "locked", vanish)
    with whole_directory(tmp_path / "model") as temporary:
        assert list(tmp_path.iterdir()) == [temporary.parent]


def test_outputs_appear_whole_or_not_at_all(tmp_path):
    with contextlib.suppress(KeyError), whole_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise KeyError
    with contextlib.suppress(KeyError), whole_directory(tmp_path / "folder") as temporary:
        (temporary / "half").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with whole_directory(tmp_path / "empty") as temporary:
        (temporary / "a").write_text("a")
    with pytest.raises(FileExistsError, match="is not an empty directory"), whole_directory(tmp_path / "empty"):
        pytest.fail("the block ran")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["empty", "empty/a"]


def test_a_directory_is_replaced_only_where_that_is_asked_for_and_kept_where_the_block_fails(tmp_path):
    folder = tmp_path / "model"
    with whole_directory(folder) as new:
        (new / "old").write_text("old")
    with contextlib.suppress(KeyError), whole_directory(folder, overwrite=True):
        raise KeyError
    assert [p.name for p in folder.iterdir()] == ["old"]
    with whole_directory(folder, overwrite=True) as new:
        (new / "new").write_text("new")
    assert [p.name for p in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_system_without_locks_keeps_what_may_be_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    left = tmp_path / ".model.0123abcd.tmp"
    left.mkdir()
    with whole_directory(tmp_path / "model"):
        pass
    assert left.is_dir()


def test_json_is_written_whole_and_without_nan(tmp_path):
    path = write_json(tmp_path / "made" / "a.json", {"a": [1, 2.5, None]})
    assert read_json(path) == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": [1, 2.5, None]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ("[1]", "is list in JSON, not an object"),
    ],
)
def test_json_that_is_no_object_with_distinct_keys_is_refused(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InvalidFileError, match=message):
        read_json(path)


def test_json_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.json", {"a": 1})
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 5)
    with pytest.raises(InvalidFileError, match="at most 5 bytes"):
        read_json(path)


def test_checksums_are_those_of_the_standard_library(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"123456789")
    assert files.crc32(path) == 0xCBF43926  # the check value of CRC-32
    assert files.sha256(path).startswith("15e2b0d3c33891eb")
