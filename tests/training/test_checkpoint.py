"""Checkpoints: what comes back, what is refused, and what a failure leaves behind."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import pickle
import random
import resource
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystem
from toy_runs import CONFIG, Toy, equal, read_metrics, toy_run

from horst.files import crc32
from horst.training import CheckpointError, checkpoint
from horst.training.run_state import named_tensors, random_state, set_random_state
from horst.training.tensor_files import MetadataUnpickler

short_run = functools.partial(toy_run, steps=14)
names = st.text("abcxyz.0_ ", min_size=1, max_size=6)
leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)


@settings(max_examples=40)
@given(
    plain=st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64]),
    shape=st.lists(st.integers(0, 3), max_size=3),
)
def test_any_nested_state_comes_back_as_it_was(tmp_path_factory, plain, dtype, shape):
    folder = tmp_path_factory.mktemp("any")
    tensor = torch.randint(0, 2, shape).to(dtype)
    path = checkpoint.save(folder, 3, {"plain": plain, "nested": [{"tensor": tensor}, 1.5]}, fingerprint={})
    back = checkpoint.load(path, fingerprint={})
    found = back["nested"][0]["tensor"]
    assert (back["plain"], back["nested"][1]) == (plain, 1.5)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_every_generator_goes_on_where_it_was():
    def draw():
        numpy = np.random.rand(), np.random.randn()  # noqa: NPY002 - the global generator is what is saved
        return random.random(), random.gauss(0, 1), numpy, torch.rand(2).tolist()

    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    draw()
    state = json.loads(json.dumps(random_state()))
    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first


def test_the_newest_are_kept_and_leftovers_of_killed_processes_go(tmp_path):
    (tmp_path / ".step-00000001.tmp").mkdir()
    (tmp_path / "step-00000007").mkdir()  # without its index: not complete, its deletion was broken off
    (tmp_path / "step-by-step").mkdir()  # the user's
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 10, 100_000_000):
        checkpoint.save(tmp_path, step, {"x": torch.zeros(1)}, fingerprint={}, keep=2)
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == ["step-00000010", "step-100000000", "step-by-step"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100000000"
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-00000010", "step-100000000"]


@pytest.mark.parametrize("state", [{1: 2}, {"x": {3: 4}}, {"x": object()}])
def test_what_json_cannot_hold_is_refused_by_name(state, tmp_path):
    with pytest.raises(TypeError, match=r"a checkpoint"):
        checkpoint.save(tmp_path, 1, state, fingerprint={})
    assert list(tmp_path.iterdir()) == []


# --- a run's checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("finished")
    weights, result = short_run(folder)
    return folder, weights, result


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_is_not_trained_again(finished, copied):
    _, weights, result = finished
    again, other = short_run(copied)
    assert equal(again, weights)
    assert other.metrics == result.metrics
    assert (copied / "metrics.jsonl").read_text() == (finished[0] / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 20}, r"config.steps was 14, is 20"),
        ({"config": {"clip_norm": None}}, r"config.clip_norm was 0.5, is None"),
        ({"config": {"ema_decay": 0.8, "precision": "bf16"}}, r"precision was 'float32', is 'bf16'; config.ema_decay"),
        ({"optimizer": "adamw"}, r"optimizer.class was 'HORST', is 'AdamW'; optimizer.group 0.alpha was 5.0, is None"),
        ({"method": None}, r"sparsifier was \{'method': 'ACDC'.*is None"),
        ({"method": "acdc-values"}, r"sparsifier.sparsity was 0.9, is 0.7"),
    ],
)
def test_a_checkpoint_of_another_run_says_what_differs(change, message, copied):
    options = {"optimizer": "horst", "method": "acdc", **change}
    config = dataclasses.replace(CONFIG, **options.pop("config", {}))
    with pytest.raises(CheckpointError, match="step-00000014 belongs to another run: .*" + message):
        short_run(copied, config, **options)


def test_what_does_not_change_the_result_may_differ(finished, copied):
    shutil.rmtree(copied / "checkpoints" / "step-00000014")
    config = dataclasses.replace(CONFIG, log_every=3, accumulate=1, keep_checkpoints=1, checkpoint_every=5)
    weights, _ = short_run(copied, config)
    assert equal(weights, finished[1])


def damage(folder, how):
    data = folder / "__0_0.distcp"
    if how == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing":
        data.unlink()
    elif how == "index":
        (folder / "checkpoint.json").write_text("{half")
    elif how == "metadata":
        (folder / ".metadata").write_bytes(b"nonsense")
    elif how == "renamed":
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "step-00000012", folder)
    else:
        change_index(folder, **how)


def change_index(folder, **changes):
    """Put other values into the index, at any depth; None removes a key."""

    def changed(value, changes):
        for key, new in changes.items():
            value[key] = changed(value[key], new) if isinstance(new, dict) else new
        return {key: entry for key, entry in value.items() if changes.get(key, 0) is not None}

    file = folder / "checkpoint.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), changes)))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"__0_0.distcp has \d+ bytes instead of \d+"),
        ("flipped", r"the checksum of __0_0.distcp is wrong"),
        ("missing", r"__0_0.distcp is missing"),
        ("index", r"checkpoint.json cannot be read"),
        ("metadata", r".metadata has 8 bytes instead of"),
        ("renamed", r"its checkpoint.json is of step 12"),
        ({"step": 19}, r"the checksum of checkpoint.json is wrong"),
        ({"state": {"step": 13}}, r"the checksum of checkpoint.json is wrong"),
        ({"state": None, "files": None}, r"the checksum of checkpoint.json is wrong"),
        ({"checksum": None}, r"the checksum of checkpoint.json is wrong"),
    ],
)
def test_a_corrupt_checkpoint_says_so_and_names_the_one_before(how, message, finished, copied):
    folder = copied / "checkpoints"
    damage(folder / "step-00000014", how)
    with pytest.raises(CheckpointError, match=r"step-00000014 is corrupt: " + message) as caught:
        short_run(copied)
    assert f"Delete it to resume from the one before, {folder / 'step-00000012'}" in str(caught.value)
    shutil.rmtree(folder / "step-00000014")
    weights, _ = short_run(copied)
    assert equal(weights, finished[1])
    assert read_metrics(copied) == read_metrics(finished[0])


def test_a_folder_without_an_index_is_told_passed_over_and_replaced(finished, copied, caplog):
    """As an interrupted copy or deletion leaves it: a run would come to that step again and again."""
    broken = copied / "checkpoints" / "step-00000014"
    (broken / "checkpoint.json").unlink()
    (broken / "leftover").touch()
    weights, result = short_run(copied)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"{broken} has no checkpoint.json and is passed over; a whole one will replace it."
    ]
    assert equal(weights, finished[1])
    assert read_metrics(copied) == read_metrics(finished[0])
    assert (result.checkpoint, (broken / "leftover").exists()) == (broken, False)
    again, _ = short_run(copied)
    assert equal(again, weights)


def test_a_checkpoint_of_a_later_format_is_refused(copied):
    change_index(copied / "checkpoints" / "step-00000014", format=99)
    with pytest.raises(CheckpointError, match="has format 99; this version of horst reads format 1"):
        short_run(copied)


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_metadata_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(tmp_path, 1, {"x": torch.zeros(2)}, fingerprint={})
    (path / ".metadata").write_bytes(pickle.dumps(Attack()))
    file = path / ".metadata"
    entry = [file.stat().st_size, crc32(file)]  # an attacker can sum, too
    change_index(path, files={".metadata": entry})
    index = json.loads((path / "checkpoint.json").read_text())
    change_index(path, checksum=checkpoint._checksum_of_index(index))
    with pytest.raises(CheckpointError, match=r"it names posix.system, which no checkpoint needs"):
        checkpoint.load(path, fingerprint={})
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path.write_text", "os.remove"]
)
def test_the_unpickler_makes_nothing_but_the_formats_classes(name, tmp_path):
    module, _, attribute = name.rpartition(".")
    file = tmp_path / "x"
    file.write_bytes(f"c{module}\n{attribute}\n.".encode())
    with open(file, "rb") as stream, pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        MetadataUnpickler(stream).load()


# --- failing disks ------------------------------------------------------------------------------------------------


def full_disk(monkeypatch, room):
    """Every file of a checkpoint's tensors breaks off after ``room`` bytes, as on a full disk."""
    create = FileSystem.create_stream

    class Stream:
        def __init__(self, inner):
            self.inner, self.left = inner, room

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.inner.write(data)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    @contextlib.contextmanager
    def limited(self, path, mode):
        with create(self, path, mode) as inner:
            yield Stream(inner) if "w" in mode else inner

    monkeypatch.setattr(FileSystem, "create_stream", limited)


@pytest.mark.parametrize("room", [0, 700])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_goes_on_from_it(room, finished, copied, monkeypatch):
    shutil.rmtree(copied / "checkpoints" / "step-00000014")
    with monkeypatch.context() as patch:
        full_disk(patch, room)
        with pytest.raises(CheckpointError, match=r"step 14 could not be written: .*No space left on device") as caught:
            short_run(copied)
    assert "Make room" in str(caught.value)
    assert f"The last good checkpoint, {copied / 'checkpoints' / 'step-00000012'}, is untouched" in str(caught.value)
    assert [p.name for p in (copied / "checkpoints").iterdir()] == ["step-00000012"]
    weights, _ = short_run(copied)
    assert equal(weights, finished[1])
    assert read_metrics(copied) == read_metrics(finished[0])


def no_room_to_write(monkeypatch):
    """Every write to the metrics fails, and so does that of what is left when the file is closed."""
    full = lambda path, mode: open("/dev/full", mode)  # noqa: E731, SIM115 - closed by the log
    monkeypatch.setattr("horst.training.metrics.open", full, raising=False)


def no_room_to_flush(monkeypatch):
    """The metrics' lines are taken, but do not reach the disk."""
    fsync = os.fsync

    def refuse(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(metrics)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    metrics = "metrics.jsonl"
    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("fault", [no_room_to_write, no_room_to_flush])
def test_metrics_that_fill_the_disk_stop_the_run_as_a_checkpoint_does(fault, finished, copied, monkeypatch):
    shutil.rmtree(copied / "checkpoints" / "step-00000014")
    monkeypatch.chdir(copied)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(
            CheckpointError, match=r"the metrics of step 1\d could not be written: .*No space"
        ) as caught:
            short_run(copied)
    assert "Make room, or keep fewer checkpoints, and run again" in str(caught.value)
    assert f"The last good checkpoint, {copied / 'checkpoints' / 'step-00000012'}, is untouched" in str(caught.value)
    weights, _ = short_run(copied)
    assert equal(weights, finished[1])
    assert read_metrics(copied) == read_metrics(finished[0])


def test_metrics_that_cannot_be_opened_are_told_as_those_that_cannot_be_written(copied):
    (copied / "metrics.jsonl").unlink()
    (copied / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"the metrics could not be written: .*Is a directory") as caught:
        short_run(copied)
    assert f"The last good checkpoint, {copied / 'checkpoints' / 'step-00000014'}, is untouched" in str(caught.value)


def test_room_is_asked_for_only_where_the_disk_is_known_to_lack_it(tmp_path, monkeypatch):
    def told(needed):
        return checkpoint.why_not_written("it", tmp_path / "none" / "checkpoints", RuntimeError("broken"), needed)

    assert told(1) == "it could not be written: broken. There is no earlier checkpoint."
    assert "Make room for its" in told(2**70)

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert "Make room" not in told(2**70)


@pytest.mark.parametrize("limit", [200, 3000])
def test_a_write_that_the_system_refuses_leaves_the_last_good_checkpoint(limit, tmp_path):
    """A real failure, by the limit on a file's size, in the index or in the tensors."""
    state = {"x": torch.arange(2000.0)}
    checkpoint.save(tmp_path, 1, state, fingerprint={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 could not be written") as caught:
            checkpoint.save(tmp_path, 2, state, fingerprint={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-00000001, is untouched" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(checkpoint.load(tmp_path / "step-00000001", fingerprint={})["x"], state["x"])


def test_the_same_step_is_not_written_over(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": 1}, fingerprint={})
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path, 1, {"x": 2}, fingerprint={})
    assert checkpoint.load(tmp_path / "step-00000001", fingerprint={}) == {"x": 1}


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    class Tied(Toy):
        def __init__(self):
            super().__init__()
            self.blocks[1].fc1.weight = self.blocks[0].fc1.weight

    model = Tied()
    tensors = named_tensors(model)
    assert "blocks.0.fc1.weight" in tensors
    assert "blocks.1.fc1.weight" not in tensors
    path = checkpoint.save(tmp_path, 1, {"model": tensors}, fingerprint={})
    saved = checkpoint.load(path, fingerprint={}, like=tensors)["model"]
    assert saved.keys() == tensors.keys()
    assert not saved["embed.weight"].requires_grad
