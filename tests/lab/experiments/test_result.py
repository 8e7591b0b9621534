"""Result files: round trip, atomic writing, nothing that tells where they were made."""

import json
import math
import os
import pathlib
import socket
import subprocess

import pytest
import torch

from horst.lab.experiments import result as result_module
from horst.lab.experiments.result import Result, environment


def example(**changes):
    fields = {
        "experiment": "example",
        "config": {"p_values": (2.0, math.inf), "out": "x"},
        "rows": [{"a": 1.0, "b": float("nan"), "c": True, "d": None}],
        "curves": {"loss": torch.tensor([1.0, math.inf])},
        "notes": ["a note"],
        "environment": environment(),
        "seconds": 1.5,
    }
    return Result(**{**fields, **changes})


def test_round_trip(tmp_path):
    path = example().save(tmp_path / "deep" / "example.json")
    loaded = Result.load(path)
    assert loaded.config["p_values"] == [2.0, "inf"]
    assert loaded.rows == [{"a": 1.0, "b": None, "c": True, "d": None}]
    assert loaded.curves == {"loss": [1.0, "inf"]}
    assert loaded.save(tmp_path / "again.json").read_text() == path.read_text()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = example().save(tmp_path / "example.json")
    before = path.read_text()
    with pytest.raises(TypeError):
        example(rows=[{"a": object()}]).save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["example.json"]


def test_another_schema_is_refused(tmp_path):
    path = example().save(tmp_path / "example.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99, this code reads 1"):
        Result.load(path)


def test_the_environment_names_versions_and_no_place():
    found = environment()
    assert set(found) >= {"commit", "horst", "torch", "numpy", "timm", "device", "torch_threads"}
    text = json.dumps(found)
    assert socket.gethostname() not in text
    assert str(pathlib.Path.home()) not in text
    assert "/" not in text


def test_the_commit_is_unknown_outside_git(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(result_module.subprocess, "run", missing)
    assert environment()["commit"] == "unknown"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with this package in it, and git in it."""
    monkeypatch.delenv("HORST_COMMIT", raising=False)
    for name in ("src/horst/lab/experiments/result.py", "results/table.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1\n")

    def git(*words):
        given = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(["git", *given], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    monkeypatch.setattr(result_module, "__file__", str(tmp_path / "src/horst/lab/experiments/result.py"))
    return tmp_path, git("rev-parse", "HEAD")


def test_the_commit_tells_of_changed_code(repository, monkeypatch):
    root, head = repository
    assert environment()["commit"] == head
    (root / "results/table.json").write_text("2\n")  # as the run before this one has left it
    (root / "src/horst/new.py").write_text("2\n")
    assert environment()["commit"] == head
    (root / "src/horst/lab/experiments/result.py").write_text("2\n")
    assert environment()["commit"] == f"{head}-dirty"
    monkeypatch.setenv("HORST_COMMIT", "given")
    assert environment()["commit"] == "given"


def test_the_commit_of_a_repository_around_the_package_is_not_its_own(repository, monkeypatch):
    root, _ = repository
    installed = root / ".venv/lib/python3/site-packages/horst/lab/experiments/result.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("1\n")
    monkeypatch.setattr(result_module, "__file__", str(installed))
    assert environment()["commit"] == "unknown"


def test_committed_results_are_read():
    root = pathlib.Path(__file__).parents[3] / "results"
    files = [file for file in sorted(root.rglob("*.json")) if "schema_version" in json.loads(file.read_text())]
    assert len(files) > 20
    for file in files:
        result = Result.load(file)
        commits = {each["commit"] for each in result.environments}
        assert len(result.environments) != 1, "one environment stands in `environment`; several stand here"
        assert not commits or result.environment["commit"] in (*commits, "various")
