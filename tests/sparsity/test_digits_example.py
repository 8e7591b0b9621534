"""The example's claim: a ViT trained with AC/DC ends exactly sparse, and at rate 5e-3 HORST is ahead of AdamW."""

import importlib.util
import statistics
from pathlib import Path

import pytest


@pytest.mark.slow
def test_at_the_papers_rate_horst_beats_adamw_at_ninety_percent_on_digits():
    path = Path(__file__).parents[2] / "examples" / "acdc_digits_vit.py"
    spec = importlib.util.spec_from_file_location("acdc_digits_vit", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    accuracy = {}
    for name in ("AdamW", "HORST"):
        rows = [example.run(name, seed=seed, lr=5e-3, epochs=60, sparsity=0.9) for seed in range(3)]
        assert all(row["zeros"] == row["masked_weights"] * 9 // 10 for row in rows)
        accuracy[name] = statistics.mean(row["accuracy"] for row in rows)
    assert accuracy["HORST"] > accuracy["AdamW"] > 0.8
