"""Mixup and cutmix: timm's formulas and distribution, from a seed."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import timm.data.mixup
import torch
from hypothesis import given
from torch.testing import assert_close

from horst.lab.data.mixing import Mixing, neighbours, soft_targets

CLASSES = 5
seeds = st.integers(0, 2**63)
sides = st.integers(1, 40)


def batch(n=6, height=7, width=9):
    return torch.randn(n, 2, height, width), torch.arange(n) % CLASSES


@given(seed=seeds, smoothing=st.floats(0.0, 0.9), mixup=st.sampled_from([0.0, 0.8]), cutmix=st.sampled_from([0.0, 1.0]))
def test_targets_are_shares(seed, smoothing, mixup, cutmix):
    mixing = Mixing(mixup=mixup, cutmix=cutmix, label_smoothing=smoothing)
    images, labels = batch()
    mixed, targets = mixing(images, labels, classes=CLASSES, seed=seed)
    assert mixed.shape == images.shape
    assert_close(targets.sum(dim=1), torch.ones(len(labels)))
    assert bool((targets >= smoothing / CLASSES - 1e-6).all())


@given(seed=seeds, height=sides, width=sides)
def test_lambda_is_the_share_that_the_box_leaves(seed, height, width):
    draw = Mixing(mixup=0.0).draw(seed, height, width)
    top, bottom, left, right = draw.box
    assert 0 <= top <= bottom <= height
    assert 0 <= left <= right <= width
    images = torch.zeros(2, 1, height, width)
    images[1] = 1.0
    mixed, targets = Mixing(mixup=0.0, label_smoothing=0.0)(images, torch.tensor([0, 1]), classes=2, seed=seed)
    assert_close(mixed[0].mean(), torch.tensor(1.0 - draw.lam), rtol=1e-5, atol=1e-6)
    assert_close(targets, torch.tensor([[draw.lam, 1 - draw.lam], [1 - draw.lam, draw.lam]]))


@given(seed=seeds, world_size=st.sampled_from([1, 2, 3]))
def test_processes_together_mix_as_one(seed, world_size):
    images, labels = batch(n=12)
    mixing = Mixing()
    whole = mixing(images, labels, classes=CLASSES, seed=seed)
    parts = [
        mixing(x, y, classes=CLASSES, seed=seed)
        for x, y in zip(images.chunk(world_size), labels.chunk(world_size), strict=True)
    ]
    assert torch.equal(torch.cat([x for x, _ in parts]), whole[0])
    assert torch.equal(torch.cat([y for _, y in parts]), whole[1])


@pytest.mark.parametrize("mode", ["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(5))
def test_the_formulas_are_timms(monkeypatch, mode, seed):
    mixing = Mixing(cutmix=0.0) if mode == "mixup" else Mixing(mixup=0.0)
    images, labels = batch(n=4)
    draw = mixing.draw(seed, 7, 9)
    assert (draw.box is None) == (mode == "mixup")
    reference = timm.data.mixup.Mixup(mixing.mixup, mixing.cutmix, label_smoothing=0.1, num_classes=CLASSES)
    monkeypatch.setattr(reference, "_params_per_batch", lambda: (draw.lam, mode == "cutmix"))
    monkeypatch.setattr(timm.data.mixup, "cutmix_bbox_and_lam", lambda *a, **k: (draw.box, draw.lam))
    order = torch.tensor([0, 2, 3, 1])  # timm mixes first with last: our neighbours stand so
    x, y = reference(images[order].clone(), labels[order])
    mixed, targets = mixing(images, labels, classes=CLASSES, seed=seed)
    assert_close(mixed[order], x)
    assert_close(targets[order], y)


@given(size=sides, lam=st.floats(0.0, 1.0), data=st.data())
def test_a_side_of_the_box_is_timms(size, lam, data):
    centre = data.draw(st.integers(0, size - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "randint", lambda low, high, size=None: centre)
        top, bottom, left, right = timm.data.mixup.rand_bbox((size, size), lam)
        patch.setattr(random.Random, "randrange", lambda self, stop: centre)
        patch.setattr(random.Random, "betavariate", lambda self, alpha, beta: lam)
        draw = Mixing(mixup=0.0).draw(0, size, size)
    assert draw.box == (top, bottom, left, right)


@pytest.mark.parametrize("changes", [{"cutmix": 0.0}, {"mixup": 0.0}, {}, {"mixup": 0.3}])
def test_lambda_is_distributed_as_timms(changes):
    mixing = Mixing(**changes)
    height, width, draws = 32, 24, 4000
    ours = [mixing.draw(seed, height, width) for seed in range(draws)]
    reference = timm.data.mixup.Mixup(mixing.mixup, mixing.cutmix)
    state = np.random.get_state()  # noqa: NPY002  # timm draws from NumPy's global state
    np.random.seed(0)  # noqa: NPY002
    theirs = []
    for _ in range(draws):
        lam, use_cutmix = reference._params_per_batch()
        theirs.append((timm.data.mixup.cutmix_bbox_and_lam((height, width), lam)[1] if use_cutmix else lam, use_cutmix))
    np.random.set_state(state)  # noqa: NPY002
    for cut in (False, True):
        a = [draw.lam for draw in ours if (draw.box is not None) == cut]
        b = [lam for lam, use_cutmix in theirs if use_cutmix == cut]
        assert abs(len(a) - len(b)) < 4 * draws**0.5
        if a and b:
            assert scipy.stats.ks_2samp(a, b).pvalue > 1e-3


@pytest.mark.parametrize("changes", [{"cutmix": 0.0}, {"mixup": 0.0}])
def test_the_inputs_stay_as_they_are_and_a_seed_repeats(changes):
    mixing = Mixing(**changes)
    images, labels = batch()
    for seed in range(8):
        kept = images.clone()
        first, second = (mixing(images, labels, classes=CLASSES, seed=seed) for _ in range(2))
        # A box may be empty.
        assert torch.equal(first[0], images) == (mixing.draw(seed, 7, 9).lam == 1.0)
        assert torch.equal(images, kept)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_smoothing_alone_mixes_nothing_and_takes_odd_batches():
    images, labels = batch(n=5)
    mixed, targets = Mixing(mixup=0.0, cutmix=0.0, label_smoothing=0.5)(images, labels, classes=CLASSES, seed=0)
    assert torch.equal(mixed, images)
    assert torch.equal(targets, soft_targets(labels, CLASSES, 0.5))
    logits = torch.randn(5, CLASSES)
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.5)
    assert_close(torch.nn.functional.cross_entropy(logits, targets), expected)


def test_memory_format_is_kept():
    images, labels = batch()
    images = images.contiguous(memory_format=torch.channels_last)
    for seed in range(6):
        mixed, _ = Mixing()(images, labels, classes=CLASSES, seed=seed)
        assert mixed.stride() == images.stride()


def test_every_sample_has_one_partner():
    assert neighbours(neighbours(torch.arange(8))).tolist() == list(range(8))
    assert not bool((neighbours(torch.arange(8)) == torch.arange(8)).any())


def test_an_odd_part_is_refused():
    images, labels = batch(n=5)
    with pytest.raises(
        ValueError, match=r"needs an even number of images, got 5. Choose a batch_size that 2 x world_size"
    ):
        Mixing()(images, labels, classes=CLASSES, seed=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mixup": -0.1}, "mixup must be a finite number of at least 0, got -0.1"),
        ({"cutmix": float("nan")}, "cutmix must be a finite number"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        Mixing(**changes)
