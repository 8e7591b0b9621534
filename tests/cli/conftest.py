"""Tiny real models on disk, real text, and the command line called in this process."""

import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import sysconfig

import pytest
import timm
import torch
import transformers

from horst.cli import main
from horst.cli.destination import MARKER
from horst.files import write_json

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_vit import VIT


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def call(*words):
    """``horst WORDS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.fixture
def horst():
    return call


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Source of the standard library: eight documents to calibrate on, one to evaluate on."""
    folder = tmp_path_factory.mktemp("texts")
    sources = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    documents = [source.read_text()[:2000] for source in sources if source.stat().st_size > 4000][:9]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:-1]))
    (folder / "held_out.txt").write_text(documents[-1][:600].encode("ascii", "replace").decode())
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """A GPT-2 over bytes, as transformers saves it; its weights are larger than at initialisation, so they matter."""
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=3, n_head=2, bos_token_id=256, eos_token_id=256
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ".h." in name:
            parameter.data.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("models") / "my-gpt2"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """A vision transformer for scikit-learn's digits, as timm saves it."""
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10, **VIT)
    folder = tmp_path_factory.mktemp("models") / "my-vit"
    timm.models.save_for_hf(model, folder, model_args=VIT, safe_serialization=True)
    return folder


@pytest.fixture
def made_by_horst():
    """Makes a directory with the files given, marked as our commands mark what they write."""

    def make(name, **files):
        pathlib.Path(name).mkdir()
        for file, content in files.items():
            pathlib.Path(name, file).write_text(content)
        write_json(pathlib.Path(name, MARKER), {"horst": "0", "files": list(files)})

    return make


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Whatever a command writes by default goes to a folder of the test's own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
