"""The CIFAR-10 example on a few made-up images: exact counts in its result file, its budget, its errors."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from horst.experiments.result import Result
from horst.sparsity import exact_floor

SIZES = {"--epochs": 10, "--batch-size": 8, "--patch-size": 8, "--width": 16, "--depth": 2, "--heads": 2}
TINY = ["--device", "cpu", "--no-compile", *(str(word) for flag in SIZES.items() for word in flag)]
BLOCK_WEIGHTS = 2 * 12 * 16 * 16  # in each of two blocks: qkv 3, projection 1, feed-forward 4 + 4 squares


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "acdc_cifar10_vit.py"
    spec = importlib.util.spec_from_file_location("acdc_cifar10_vit", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def cifar(tmp_path, example):
    """Four images a training file, six test images; image i has label i mod 10 and pixels of its own."""
    for name, count in [*((name, 4) for name in example.TRAIN_FILES), (example.TEST_FILE, 6)]:
        records = torch.randint(256, (count, example.RECORD), dtype=torch.uint8)
        records[:, 0] = torch.arange(count)
        (tmp_path / name).write_bytes(records.numpy().tobytes())
    return tmp_path


def test_every_run_ends_with_exactly_the_sparsity_asked_for(example, cifar, tmp_path):
    out = tmp_path / "result.json"
    example.main(["--data", str(cifar), "--out", str(out), "--alpha", "5", "20", "--sparsity", "0.83", *TINY])
    result = Result.load(out)
    assert [(row["optimizer"], row["alpha"]) for row in result.rows] == [("adamw", 0), ("horst", 5), ("horst", 20)]
    for row in result.rows:
        assert (row["masked_weights"], row["pruned"]) == (BLOCK_WEIGHTS, exact_floor(0.83, BLOCK_WEIGHTS))
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["dense_phase_accuracy"] <= 1
    assert len({row["train_loss"] for row in result.rows}) == 3
    assert not {"data", "out"} & result.config.keys()
    assert all(len(curves["train_loss"]) == 10 for curves in result.curves.values())


def test_a_run_does_not_depend_on_those_before_it(example, cifar, tmp_path):
    losses = []
    for optimizers in (["adamw", "horst"], ["horst"]):
        out = tmp_path / "result.json"
        mixed = ["--mixup", "0.8", "--cutmix", "1", "--label-smoothing", "0.1", "--schedule", "triangular"]
        example.main(["--data", str(cifar), "--out", str(out), "--optimizers", *optimizers, *mixed, *TINY])
        losses.append(Result.load(out).rows[-1]["train_loss"])
    assert losses[0] == losses[1]


def test_a_spent_budget_keeps_what_is_done(example, cifar, tmp_path, capsys):
    out = tmp_path / "result.json"
    example.main(["--data", str(cifar), "--out", str(out), "--minutes", "0", *TINY])
    assert [row["optimizer"] for row in Result.load(out).rows] == ["adamw"]
    assert "1 of 2 runs are left out" in capsys.readouterr().out


def test_crops_and_flips_are_windows_of_the_padded_image(example, cifar):
    data = example.Data.load(cifar, torch.device("cpu"))
    images, labels = data.training_batch(torch.tensor([7, 2]))
    assert labels.tolist() == [3, 2]
    for image, index in zip(images, (7, 2), strict=True):
        windows = data.train_images[index].unfold(0, 32, 1).unfold(1, 32, 1)  # 9 x 9 windows of 3 x 32 x 32
        windows = data.normalise(windows.reshape(-1, 3, 32, 32).permute(0, 2, 3, 1))
        assert sum(bool((window == image).all()) for window in (*windows, *windows.flip(3))) == 1


def test_the_lr_schedules_at_their_corners(example):
    assert [example.cosine(p) for p in (0.0, 0.05, 0.1, 1.0)] == pytest.approx([0.0, 0.5, 1.0, 0.0])
    assert [example.triangular(p) for p in (0.0, 0.2, 1.0)] == pytest.approx([0.2, 1.0, 0.0])


def test_missing_files_are_named(example, cifar):
    (cifar / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3\.bin\. --data must name the folder with the six"):
        example.main(["--data", str(cifar), *TINY])


def test_a_cut_file_is_refused(example, cifar):
    (cifar / "test_batch.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(ValueError, match=r"test_batch\.bin has 5000 bytes, which is no whole number of records"):
        example.main(["--data", str(cifar), *TINY])
