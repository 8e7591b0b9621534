"""Image arrays: reading CIFAR-10, .npz and the digits, and batches that are augmented where they lie."""

import logging
import sys
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from horst.lab.data.image_arrays import ImageArrays
from horst.lab.data.image_data import (
    RECORD,
    TEST_FILE,
    TRAIN_FILES,
    ImageData,
    channel_statistics,
    normalise,
    read_cifar10,
    read_digits,
    read_npz,
)
from horst.lab.data.mixing import Mixing


def image_data(samples=24, tests=7, height=5, width=6, channels=2, classes=4):
    generator = torch.Generator().manual_seed(0)
    # Byte values from 1: none can be taken for the black frame.
    draw = lambda n: torch.randint(1, 256, (n, height, width, channels), generator=generator, dtype=torch.uint8)  # noqa: E731
    images = draw(samples)
    mean, std = channel_statistics(images)
    return ImageData(
        images=images,
        labels=torch.arange(samples) % classes,
        test_images=draw(tests),
        test_labels=torch.arange(tests) % classes,
        classes=classes,
        mean=mean,
        std=std,
    )


DATA = image_data()


def take(source, count, start=0):
    return list(islice(source.batches(start), count))


def bytes_of(images, data):
    """Undo the normalisation: exact, as bytes are far apart."""
    mean, std = (torch.tensor(values) for values in (data.mean, data.std))
    return (images.permute(0, 2, 3, 1) * std + mean).round().to(torch.uint8)


def test_every_image_is_a_crop_or_a_mirrored_crop_of_its_own_and_all_crops_come():
    data = image_data(samples=8)
    source = ImageArrays(data, batch_size=4, padding=1, seed=3)
    framed = torch.nn.functional.pad(data.images, (0, 0, 1, 1, 1, 1))
    seen = set()
    for (_, _, index), (images, labels) in zip(source.order.batches(0), take(source, 120), strict=False):
        assert torch.equal(labels, data.labels[index])
        for image, i in zip(bytes_of(images, data), index.tolist(), strict=True):
            crops = {
                (top, left, flip): crop.flip(1) if flip else crop
                for top in range(3)
                for left in range(3)
                for crop in [framed[i, top : top + 5, left : left + 6]]
                for flip in (False, True)
            }
            matches = [key for key, crop in crops.items() if torch.equal(crop, image)]
            assert len(matches) == 1
            seen.add(matches[0])
    assert len(seen) == 18


def test_without_augmentation_images_are_normalised_and_that_is_all():
    source = ImageArrays(DATA, batch_size=6, padding=0, flip=False)
    _, _, index = next(source.order.batches(2))
    images, labels = next(source.batches(2))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (DATA.mean, DATA.std))
    assert_close(images, (DATA.images[index].permute(0, 3, 1, 2) - mean) / std)
    assert torch.equal(labels, DATA.labels[index])
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)


@given(start=st.integers(0, 30), seed=st.integers(0, 2**40), world_size=st.sampled_from([2, 3, 6]), mix=st.booleans())
@settings(max_examples=30)
def test_processes_together_see_what_one_would(start, seed, world_size, mix):
    shared = {"batch_size": 12, "seed": seed, "padding": 2, "mixing": Mixing() if mix else None}
    whole = take(ImageArrays(DATA, **shared), 2, start)
    sources = [ImageArrays(DATA, **shared, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [take(source, 2, start) for source in sources]
    for k, (images, targets) in enumerate(whole):
        assert torch.equal(torch.cat([part[k][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[k][1] for part in parts]), targets)


@given(start=st.integers(0, 20), further=st.integers(0, 10))
@settings(max_examples=20)
def test_a_resumed_run_sees_what_the_uninterrupted_one_does(start, further):
    make = lambda: ImageArrays(DATA, batch_size=8, seed=5, mixing=Mixing())  # noqa: E731
    (expected_x, expected_y), (x, y) = take(make(), further + 1, start)[-1], take(make(), 1, start + further)[0]
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)


def test_two_iterators_of_one_source_do_not_disturb_each_other():
    source = ImageArrays(DATA, batch_size=8, mixing=Mixing())
    expected = take(source, 4)
    first, second = source.batches(0), source.batches(2)
    next(first), next(second), list(source.evaluation_batches())
    assert torch.equal(next(first)[0], expected[1][0])
    assert torch.equal(next(second)[0], expected[3][0])


def test_epochs_are_augmented_anew_and_seeds_differ():
    source = ImageArrays(DATA, batch_size=24, padding=2)
    (first, _), (second, _) = take(source, 2)
    assert sorted(first.sum((1, 2, 3)).tolist()) != sorted(second.sum((1, 2, 3)).tolist())
    other = ImageArrays(DATA, batch_size=24, padding=2, seed=1)
    assert not torch.equal(next(other.batches())[0], first)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    take(ImageArrays(DATA, batch_size=8, mixing=Mixing()), 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_evaluation_sees_every_test_image_once_as_it_is(world_size):
    batches = [
        batch
        for rank in range(world_size)
        for batch in ImageArrays(
            DATA, batch_size=6, rank=rank, world_size=world_size, evaluation_batch_size=2
        ).evaluation_batches()
    ]
    images = torch.cat([bytes_of(x, DATA) for x, _ in batches])
    labels = torch.cat([y for _, y in batches])
    order = torch.cat([torch.arange(rank, 7, world_size) for rank in range(world_size)])
    assert torch.equal(images, DATA.test_images[order])
    assert torch.equal(labels, DATA.test_labels[order])


def test_mixing_gives_rows_of_shares():
    _, targets = next(ImageArrays(DATA, batch_size=8, mixing=Mixing()).batches())
    assert targets.shape == (8, DATA.classes)
    assert_close(targets.sum(1), torch.ones(8))


@pytest.mark.gpu
def test_on_a_gpu_the_host_never_waits_and_batches_repeat():
    source = ImageArrays(DATA, batch_size=8, device="cuda", mixing=Mixing())
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = take(source, 9)  # three epochs: their orders are copied without waiting too
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (x, y), (again_x, again_y) in zip(batches, take(source, 9), strict=True):
        assert x.device.type == "cuda"
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)
    cpu = next(ImageArrays(DATA, batch_size=8, padding=0, flip=False).batches())
    gpu = next(ImageArrays(DATA, batch_size=8, padding=0, flip=False, device="cuda").batches())
    assert_close(gpu[0].cpu(), cpu[0])
    assert torch.equal(gpu[1].cpu(), cpu[1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"padding": -1}, "padding must be at least 0, got -1"),
        ({"batch_size": 25}, "24 training samples make no batch of 25"),
        ({"world_size": 3}, "multiple of their number"),
        ({"world_size": 8, "batch_size": 8}, "7 test samples do not give each of 8 processes one"),
        ({"evaluation_batch_size": 0}, "at least 1, got 0"),
    ],
)
def test_bad_sources_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ImageArrays(DATA, **{"batch_size": 8, **arguments})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": torch.zeros(2, 5, 6, 2)}, "images must be bytes of shape"),
        ({"images": torch.zeros(2, 5, 6, dtype=torch.uint8)}, r"got torch.uint8 of shape \(2, 5, 6\)"),
        ({"test_labels": torch.zeros(3, dtype=torch.int64)}, "labels of 7 test_images must be as many int64"),
        ({"labels": torch.zeros(24)}, "int64 numbers, got torch.float32"),
        ({"classes": 3}, r"labels must lie in \[0, classes=3\), images have 0 to 3"),
        ({"labels": torch.full((24,), -1)}, "images have -1 to -1"),
        ({"test_images": torch.zeros(7, 5, 5, 2, dtype=torch.uint8)}, "do not go together"),
        ({"mean": (1.0,)}, "one number for each of 2 channels"),
        ({"std": (1.0, 0.0)}, "std a positive one"),
    ],
)
def test_bad_data_are_refused(changes, text):
    fields = {name: getattr(DATA, name) for name in DATA.__dataclass_fields__}
    with pytest.raises(ValueError, match=text):
        ImageData(**{**fields, **changes})


def test_statistics_are_those_of_float64():
    images = torch.randint(256, (9, 4, 5, 3), dtype=torch.uint8)
    mean, std = channel_statistics(images)
    values = images.double().flatten(0, 2)
    assert_close(torch.tensor(mean, dtype=torch.float64), values.mean(0))
    assert_close(torch.tensor(std, dtype=torch.float64), values.std(0, correction=0))
    floats = normalise(images, torch.tensor(mean), torch.tensor(std))
    assert_close(floats.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-6)
    assert channel_statistics(torch.full((2, 2, 2, 1), 9, dtype=torch.uint8)) == ((9.0,), (1.0,))


@pytest.fixture
def cifar_folder(tmp_path):
    """Three records a file; labels count up, and a pixel tells its place: red rows, green columns, blue the sample."""
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        records = torch.zeros(3, RECORD, dtype=torch.uint8)
        for k in range(3):
            sample = 3 * number + k
            records[k, 0] = sample % 10
            planes = records[k, 1:].view(3, 32, 32)
            planes[0] = torch.arange(32).view(32, 1)
            planes[1] = torch.arange(32)
            planes[2] = sample
        (tmp_path / name).write_bytes(records.numpy().tobytes())
    return tmp_path


def test_cifar10_is_read_file_by_file_with_channels_last(cifar_folder, caplog):
    with caplog.at_level(logging.WARNING):
        data = read_cifar10(cifar_folder)
    assert "holds 15 training and 3 test images; CIFAR-10 has 50,000 and 10,000" in caplog.text
    assert data.images.shape == (15, 32, 32, 3)
    assert data.images[7, 4, 9].tolist() == [4, 9, 7]
    assert data.labels.tolist() == [i % 10 for i in range(15)]
    assert data.test_images[2, 31, 0].tolist() == [31, 0, 17]
    assert data.test_labels.tolist() == [5, 6, 7]
    images, labels = next(ImageArrays(data, batch_size=5).batches())
    assert images.shape == (5, 3, 32, 32)
    assert labels.max() < data.classes == 10


def test_missing_files_are_named(cifar_folder):
    (cifar_folder / "data_batch_3.bin").unlink()
    (cifar_folder / TEST_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3.bin, test_batch.bin. Name the folder.*kriz"):
        read_cifar10(cifar_folder)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (bytes(RECORD + 1), "test_batch.bin has 3074 bytes, which is no whole number of records of 3073 bytes"),
        (b"", "test_batch.bin has 0 bytes"),
        (b"\x0b" + bytes(RECORD - 1), "has a label of 11; CIFAR-10's are 0 to 9"),
    ],
)
def test_damaged_files_are_refused(cifar_folder, content, text):
    (cifar_folder / TEST_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        read_cifar10(cifar_folder)


def arrays(**changes):
    rng = np.random.default_rng(0)
    named = {
        "images": rng.integers(256, size=(6, 4, 4, 3), dtype=np.uint8),
        "labels": np.arange(6, dtype=np.int32) % 3,
        "test_images": rng.integers(256, size=(2, 4, 4, 3), dtype=np.uint8),
        "test_labels": np.array([0, 3], dtype=np.uint8),
    }
    return {**named, **changes}


def test_an_npz_is_read(tmp_path):
    np.savez(tmp_path / "data.npz", **arrays())
    data = read_npz(tmp_path / "data.npz")
    assert np.array_equal(data.images.numpy(), arrays()["images"])
    assert data.test_labels.tolist() == [0, 3]
    assert data.labels.dtype == torch.int64
    assert data.classes == 4
    assert data.mean == pytest.approx(tuple(arrays()["images"].mean((0, 1, 2))))


def test_an_npz_may_leave_out_the_channels(tmp_path):
    grey = arrays(images=arrays()["images"][..., 0], test_images=arrays()["test_images"][..., 0])
    np.savez_compressed(tmp_path / "data.npz", **grey)
    assert read_npz(str(tmp_path / "data.npz")).images.shape == (6, 4, 4, 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"images": np.zeros((6, 4, 4, 3), dtype=np.float32)},
            r"images of data.npz must be bytes \(uint8\) of 3 or 4 dimensions, got float32",
        ),
        ({"labels": np.zeros(6)}, "labels of data.npz must be integers, got float64"),
        ({"labels": np.zeros(5, dtype=np.int64)}, "labels of 6 images must be as many"),
        ({"labels": np.array([None] * 6)}, "labels of data.npz cannot be read: .*allow_pickle=False"),
        ({"images": np.zeros(6, dtype=np.uint8)}, r"got uint8 of shape \(6,\)"),
    ],
)
def test_bad_npz_files_are_refused(tmp_path, changes, text):
    np.savez(tmp_path / "data.npz", **arrays(**changes))
    with pytest.raises(ValueError, match=text):
        read_npz(tmp_path / "data.npz")


def test_an_npz_that_lacks_an_array_says_so(tmp_path):
    np.savez(tmp_path / "data.npz", images=np.zeros(3), extra=np.zeros(1))
    with pytest.raises(ValueError, match=r"lacks labels, test_images, test_labels: .* and has images, extra"):
        read_npz(tmp_path / "data.npz")


@pytest.mark.parametrize("content", ["text", "npy", "cut"])
def test_what_is_no_npz_says_so(tmp_path, content):
    path = tmp_path / "data.npz"
    if content == "text":
        path.write_text("hello")
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        np.savez(path, **arrays())
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"data.npz is no whole .npz archive"):
        read_npz(path)


def test_a_missing_npz_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*data.npz"):
        read_npz(tmp_path / "data.npz")


def test_the_digits_are_split_alike_every_time():
    data, again = read_digits(), read_digits()
    assert data.images.shape == (1348, 8, 8, 1)
    assert data.test_images.shape == (449, 8, 8, 1)
    assert int(data.images.max()) == 16
    assert torch.equal(data.images, again.images)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[lab\]"'):
        read_digits()
