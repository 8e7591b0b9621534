"""The images of a recipe and its model: the right size, and a refusal where they do not fit."""

import dataclasses

import numpy as np
import PIL.Image
import pytest
import torch

from horst.lab.experiments import vision_model
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.vision_model import VisionConfig, open_source
from horst.lab.models.deit import DeiTConfig
from horst.training import World

HERE = World(0, 1, torch.device("cpu"))


def imagenet(folder, **model):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (60, 40)).save(folder / name / "1.png")
    shape = {"image_size": 32, "patch_size": 16, "classes": 2, "width": 8, "depth": 1, "heads": 2}
    model = DeiTConfig(**{**shape, **model})
    return VisionConfig(data=folder, model=model, batch_size=2, workers=0)


@pytest.mark.parametrize("size", [32, 48])
def test_imagenet_comes_in_the_models_size(tmp_path, size):
    source = open_source(imagenet(tmp_path, image_size=size), 0, HERE)
    images, _ = next(source.batches(0))
    assert images.shape == (2, 3, size, size)
    images, _ = next(source.evaluation_batches())
    assert images.shape == (2, 3, size, size)


def test_the_papers_images_are_cut_as_before(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(vision_model, "_check_fit", lambda *_: None)
    monkeypatch.setattr(vision_model, "ImageNet", lambda *_, **given: asked.update(given) or FakeSource())
    open_source(VisionConfig(data=tmp_path), 0, HERE)
    assert (asked["image_size"], asked["resize"]) == (224, 256)


class FakeSource:
    classes = 1000


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"classes": 1000}, r"does not fit imagenet: classes is 2 in the data, 1000 in the model\. Use --classes 2\."),
        ({"channels": 1}, r"channels is 3 in the data, 1 in the model\. Use --channels 3\."),
    ],
)
def test_a_model_for_other_images_than_imagenets_is_refused(tmp_path, model, message):
    with pytest.raises(ValueError, match=message):
        open_source(imagenet(tmp_path, **model), 0, HERE)


def test_a_model_for_other_images_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_model, "train", lambda *_, **__: pytest.fail("trained"))
    config = RECIPES["table1"].scales["cpu"]()
    shape = {"image_size": 16, "patch_size": 4, "channels": 3, "classes": 5, "width": 8, "depth": 1, "heads": 2}
    config = dataclasses.replace(
        config, run=dataclasses.replace(config.run, model=DeiTConfig(**shape)), directory=tmp_path
    )
    with pytest.raises(ValueError, match="Use --classes 10 --channels 1 --image-size 8"):
        RECIPES["table1"].run(config)


def test_images_that_are_no_squares_are_refused(tmp_path):
    images, labels = np.zeros((4, 8, 6), dtype=np.uint8), np.arange(4) % 2
    file = tmp_path / "images.npz"
    np.savez(file, images=images, labels=labels, test_images=images, test_labels=labels)
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=2, width=8, depth=1, heads=2)
    with pytest.raises(ValueError, match="npz are 8 x 6 pixels; the models are for squares"):
        open_source(VisionConfig(dataset="npz", data=file, model=model, batch_size=2), 0, HERE)
