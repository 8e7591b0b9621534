"""Image models from one end to the other."""

import json
import pathlib

import numpy
import onnxruntime
import PIL.Image
import pytest
import timm
import torch
import transformers
from tiny_vit import VIT

from horst.cli.models import load_model
from horst.lab.data.image_data import normalise, read_digits


def accuracy_by_hand(model, data):
    images = normalise(data.test_images, torch.tensor(data.mean), torch.tensor(data.std))
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == data.test_labels).double().mean())


def test_prune_evaluate_export(horst, vit):
    words = ["--method", "sparsegpt", "--sparsity", 0.5, "--data", "digits", "--samples", 40]
    pruned = horst("prune", vit, *words, "--out", "pruned", "--json")
    assert pruned.code == 0
    assert pruned.json["sparsity_of_pruned_layers"] == 0.5
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10, **VIT)
    model.load_state_dict(load_model(pathlib.Path("pruned")).model.state_dict())

    found = horst("eval", "pruned", "--data", "digits", "--batch-size", 100, "--json").json
    assert found["top1"] == pytest.approx(accuracy_by_hand(model, read_digits()))
    assert found["images"] == 449

    assert horst("export", "pruned", "--out", "sparse").code == 0
    assert horst("eval", "sparse", "--data", "digits", "--json").json["top1"] == found["top1"]


@pytest.mark.slow
def test_onnx_takes_any_number_of_images(horst, vit):
    assert horst("export", vit, "--to", "onnx", "--out", "graph").code == 0
    images = torch.randn(3, 1, 8, 8)
    (logits,) = onnxruntime.InferenceSession("graph/model.onnx").run(None, {"x": images.numpy()})
    with torch.no_grad():
        expected = load_model(vit).model(images)
    numpy.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_images_from_an_npz_file(horst, vit):
    data = read_digits()
    arrays = {name: getattr(data, name).numpy() for name in ("images", "labels", "test_images", "test_labels")}
    numpy.savez("digits.npz", **arrays)
    expected = horst("eval", vit, "--data", "digits", "--json").json
    assert horst("eval", vit, "--data", "digits.npz", "--json").json["top1"] == expected["top1"]


def test_image_files_are_scaled_by_the_models_own_statistics(horst, tmp_path):
    """A model of transformers whose preprocessor has other means than ImageNet's, on images of its size."""
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4,
        num_labels=2,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained("vit")
    mean, std = [0.1, 0.5, 0.9], [0.5, 0.25, 1.0]
    pathlib.Path("vit/preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    generator = numpy.random.default_rng(0)
    pixels = {}
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                pixels[split, name, i] = generator.integers(256, size=(18, 18, 3), dtype="uint8")
                PIL.Image.fromarray(pixels[split, name, i]).save(folder / f"{i}.png")
    found = horst("eval", "vit", "--data", tmp_path / "images", "--json")
    assert found.code == 0
    model = load_model(pathlib.Path("vit")).model
    losses = []
    for (split, name, _), image in pixels.items():
        if split == "val":
            middle = torch.from_numpy(image[1:17, 1:17].astype("float32") / 255).permute(2, 0, 1)
            scaled = (middle - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            with torch.no_grad():
                losses.append(-float(model(scaled[None]).logits.log_softmax(1)[0, ["cat", "dog"].index(name)]))
    assert found.json["loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "hf-hub:someone/model"}, "which timm"),
        ({"architecture": 7}, "which timm"),
        ({"model_args": {"checkpoint_path": "weights.pth"}}, "load nothing"),
        ({"model_args": {"pretrained": True}}, "load nothing"),
        ({"model_args": {"depth": 2}}, "blocks.2"),
        ({"model_args": {"depth": "many"}}, "cannot be loaded|interpreted|str"),
    ],
)
def test_a_config_that_does_not_build_this_model_is_refused(horst, vit, change, message):
    pathlib.Path("vit").mkdir()
    content = json.loads((vit / "config.json").read_text())
    pathlib.Path("vit/config.json").write_text(json.dumps({**content, **change}))
    pathlib.Path("vit/model.safetensors").write_bytes((vit / "model.safetensors").read_bytes())
    found = horst("eval", "vit", "--data", "digits")
    assert found.code == 2
    assert any(part in found.err for part in message.split("|")), found.err


@pytest.mark.parametrize("form", ["hugging-face", "sparse-safetensors"])
def test_a_model_saved_without_its_arguments_is_refused_with_what_to_add(horst, vit, form):
    """``timm.models.save_for_hf`` writes no model_args unless it is given them."""
    assert horst("export", vit, "--to", form, "--out", "vit").code == 0
    content = json.loads(pathlib.Path("vit/config.json").read_text())
    arguments = content.pop("model_args")
    pathlib.Path("vit/config.json").write_text(json.dumps(content))
    found = horst("prune", "vit", "--sparsity", "0.5")
    assert found.code == 2
    assert "model_args to config.json" in found.err
    assert len(found.err) < 800
    assert "in all)" in found.err
    pathlib.Path("vit/config.json").write_text(json.dumps({**content, "model_args": arguments}))
    assert horst("prune", "vit", "--sparsity", "0.5").code == 0


def test_images_that_do_not_fit_are_refused_with_both_sizes(horst, vit):
    arrays = {"images": numpy.zeros((4, 9, 9, 3), "uint8"), "labels": numpy.arange(4)}
    numpy.savez("large.npz", **arrays, **{f"test_{name}": array for name, array in arrays.items()})
    found = horst("eval", vit, "--data", "large.npz")
    assert found.code == 2
    assert "9 x 9 in 3 channels, the model takes 8 x 8 in 1 channel" in found.err
    arrays = {"images": numpy.zeros((4, 8, 8, 1), "uint8"), "labels": numpy.arange(4) + 8}
    numpy.savez("many.npz", **arrays, **{f"test_{name}": array for name, array in arrays.items()})
    found = horst("prune", vit, "--data", "many.npz", "--method", "wanda", "--sparsity", "0.5")
    assert found.code == 2
    assert "has 12 classes, the model has 10" in found.err
