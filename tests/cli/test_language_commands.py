"""Text models from one end to the other: tokenize, prune, evaluate, export."""

import json
import math
import pathlib

import numpy
import onnxruntime
import pytest
import torch
import transformers

from horst.cli.models import load_model
from horst.cli.texts import calibration_windows, token_file
from horst.export import load_pretrained
from horst.pruning import prune
from horst.sparsity import find_layers, magnitude_mask


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits


def perplexity_by_hand(model, tokens, context):
    """Windows one after the other, each token but the first scored once, in float64."""
    losses = []
    for begin in range(0, len(tokens) - 1, context):
        window = torch.tensor(tokens[begin : begin + context + 1])
        chances = logits(model, window[None, :-1])[0].double().log_softmax(-1)
        losses += [-float(chances[i, token]) for i, token in enumerate(window[1:])]
    return math.exp(sum(losses) / len(losses))


def test_the_three_commands_of_the_readme(horst, gpt2, texts, tmp_path):
    pruned = tmp_path / "my-gpt2-50"
    found = horst(
        "prune", gpt2, "--method", "sparsegpt", "--sparsity", 0.5, "--data", texts / "text.jsonl", "--samples", 8,
        "--context", 32, "--out", pruned, "--json",
    )  # fmt: skip
    assert found.code == 0
    assert found.json["sparsity_of_pruned_layers"] == 0.5
    assert len(found.json["pruned"]) == 12

    held_out = texts / "held_out.txt"
    words = ["--data", held_out, "--context", 48, "--batch-size", 3, "--json"]
    evaluated = horst("eval", pruned, *words).json
    tokens = [*held_out.read_bytes(), 256]
    model = transformers.AutoModelForCausalLM.from_pretrained(pruned)
    assert evaluated["perplexity"] == pytest.approx(perplexity_by_hand(model, tokens, 48), rel=1e-5)
    assert evaluated["tokens"] == len(tokens) - 1
    assert evaluated["zeros"] == pytest.approx(found.json["sparsity_of_all_weights"], abs=0.03)  # zero biases beside

    assert horst("export", pruned, "--to", "sparse-safetensors").code == 0
    exported = pathlib.Path(f"{pruned}-sparse-safetensors")
    assert (exported / "model.sparse.safetensors").stat().st_size < (pruned / "model.safetensors").stat().st_size
    again = load_pretrained(exported)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert horst("eval", exported, *words).json["loss"] == evaluated["loss"]


def test_roberta_is_calibrated_on_windows_of_the_length_that_it_takes(horst, texts, tmp_path):
    """It has two positions more, which its texts do not reach: of them one is the padding's."""
    config = transformers.RobertaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    words = ["--sparsity", 0.5, "--data", texts / "text.jsonl", "--samples", 4, "--out", "pruned", "--json"]
    found = horst("prune", tmp_path / "roberta", *words)
    assert found.code == 0, found.err
    assert found.json["context"] == 32


@pytest.mark.parametrize("command", ["prune", "sparsify"])
def test_text_alone_is_refused_for_an_encoder_decoder(horst, texts, tmp_path, command):
    config = transformers.T5Config(vocab_size=257, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    words = ["--sparsity", 0.5, "--out", "pruned"]
    found = horst(command, tmp_path / "t5", "--data", texts / "text.jsonl", *words)
    assert found.code == 2
    assert "T5ForConditionalGeneration, whose decoder needs inputs of its own" in found.err
    assert "--method magnitude" in found.err
    assert command == "sparsify" or horst("prune", tmp_path / "t5", *words).code == 0


def test_prune_is_the_librarys_on_the_same_windows(horst, gpt2, texts):
    words = ["--method", "wanda", "--sparsity", 0.6, "--data", texts / "text.jsonl", "--samples", 9, "--context", 16]
    assert horst("prune", gpt2, *words, "--distribution", "owl", "--seed", 3, "--out", "pruned").code == 0
    loaded = load_model(gpt2)
    with token_file(str(texts / "text.jsonl"), loaded, "auto", "train") as path:
        windows = calibration_windows(path, loaded, context=16, samples=9, seed=3)
    assert [len(batch) for batch in windows] == [8, 1]
    prune(loaded.model, 0.6, method="wanda", data=windows, distribution="owl")
    pruned = load_model(pathlib.Path("pruned")).model
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, pruned.state_dict()[name]), name


def test_shares_are_shown_in_per_cent_under_one_name(horst, gpt2, texts):
    words = ["--data", texts / "text.jsonl", "--samples", 4, "--context", 32]
    pruned = horst("prune", gpt2, "--sparsity", 0.5, "--out", "pruned", *words)
    head, first, *_ = pruned.out.splitlines()
    assert head.split() == ["layer", "shape", "weights", "zeros", "error"]
    assert first.split()[:4] == ["transformer.h.0.attn.c_attn.weight", "32x96", "3,072", "50.0%"]
    assert "\nerror: share of the energy of the layer's output that is lost on the calibration data\n" in pruned.out
    for found in (horst("eval", "pruned", "--data", texts / "held_out.txt"), horst("export", "pruned")):
        head, row = found.out.splitlines()[:2]
        assert "zeros of all weights" in head
        zeros = load_model(pathlib.Path("pruned")).zeros
        assert f" {zeros:.1%}" in row


def test_magnitude_needs_no_data_and_takes_the_smallest(horst, gpt2):
    found = horst("prune", gpt2, "--sparsity", 0.3, "--exclude", "*.h.1.*", "--out", "pruned")
    assert found.code == 0
    assert "error" not in found.out  # magnitude knows none
    assert "magnitude: 30.0 % of these layers, 15.2 % of all weights are zero -> pruned" in found.out
    dense, pruned = load_model(gpt2).model, load_model(pathlib.Path("pruned")).model
    layers = dict(pruned.named_parameters())
    for layer in find_layers(dense):
        kept = torch.ones_like(layer.param, dtype=torch.bool)
        if ".h.1." not in layer.name:
            kept = magnitude_mask(layer.param.data, 0.3)
        assert torch.equal(layers[layer.name], layer.param * kept), layer.name


@pytest.mark.parametrize(("pattern", "method"), [([], "sparsegpt"), (["--pattern", "4x4"], "wanda")])
def test_data_to_calibrate_on_are_used_where_no_method_is_named(horst, gpt2, texts, pattern, method):
    words = ["--data", texts / "text.jsonl", "--samples", 4, "--context", 32, *pattern]
    found = horst("prune", gpt2, "--sparsity", 0.5, "--out", "pruned", *words)
    assert found.code == 0, found.err
    assert json.loads(pathlib.Path("pruned/pruning.json").read_text())["method"] == method
    assert found.out.splitlines()[-1].startswith(f"{method}: 50.0 % of these layers")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "text.jsonl", "--method", "magnitude"], "--data has no effect with --method magnitude"),
        (["--data", "text.jsonl", "--method", "magnitude", "--samples", "9"], "--data, --samples have no effect"),
        (["--samples", "9"], "--samples has no effect with --method magnitude"),
        (["--context", "9", "--seed", "1"], "--context, --seed have no effect"),
        (["--tokenizer", "bytes"], "--tokenizer has no effect"),
        (["--distribution", "owl", "--seed", "1"], "--seed has no effect without --data"),
    ],
)
def test_magnitude_refuses_what_is_for_calibration(horst, gpt2, texts, words, named):
    found = horst("prune", gpt2, "--sparsity", 0.5, "--out", "pruned", *words)
    assert found.code == 2
    assert named in found.err
    assert len(found.err.splitlines()) == 1


def test_owl_may_read_data_for_magnitude(horst, gpt2, texts):
    words = ["--method", "magnitude", "--distribution", "owl", "--data", texts / "text.jsonl", "--samples", 4]
    found = horst("prune", gpt2, "--sparsity", 0.5, "--out", "pruned", *words)
    assert found.code == 0, found.err
    assert found.out.splitlines()[-1].startswith("magnitude: 50.0 % of these layers")


@pytest.mark.parametrize(
    ("words", "name", "share"),
    [(["--pattern", "2:4"], "my-gpt2-2-4", 0.5), (["--pattern", "4x4", "--sparsity", "0.25"], "my-gpt2-4x4", 0.25)],
)
def test_patterns_and_the_default_name(horst, gpt2, words, name, share):
    pathlib.Path("my-gpt2").symlink_to(gpt2)
    assert horst("prune", "my-gpt2", *words).code == 0
    weight = load_model(pathlib.Path(name)).model.transformer.h[0].mlp.c_fc.weight.T  # out x in
    groups = (
        weight.reshape(-1, 4) if "2:4" in words else weight.unfold(0, 4, 4).unfold(1, 4, 4).flatten(2).flatten(0, 1)
    )
    kept = groups.count_nonzero(1)
    if "2:4" in words:
        assert set(kept.tolist()) == {2}
    else:
        assert set(kept.tolist()) == {0, 16}
    assert 1 - kept.sum() / weight.numel() == share


def test_the_tokenizer_beside_the_model_is_used_and_goes_along(horst, gpt2, texts, tmp_path):
    folder = tmp_path / "with-tokenizer"
    load_model(gpt2).save(folder)
    letters = {chr(i): i for i in range(256)} | {"<end>": 256}
    backend = transformers.tokenizers if hasattr(transformers, "tokenizers") else __import__("tokenizers")
    raw = backend.Tokenizer(backend.models.WordLevel(letters, unk_token="\x00"))
    raw.pre_tokenizer = backend.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(folder)
    expected = horst("eval", gpt2, "--data", texts / "held_out.txt", "--tokenizer", "bytes", "--json").json
    found = horst("eval", folder, "--data", texts / "held_out.txt", "--json").json
    assert found["tokens"] == expected["tokens"]  # the text is ASCII: a character is a byte
    assert found["loss"] == expected["loss"]
    assert horst("prune", folder, "--sparsity", 0.5, "--out", "pruned").code == 0
    assert pathlib.Path("pruned/tokenizer.json").is_file()


def test_a_stride_gives_each_token_more_context(horst, gpt2, texts):
    words = ["eval", gpt2, "--data", texts / "held_out.txt", "--context", 32, "--json"]
    strided = horst(*words, "--stride", 8).json
    tokens = [*(texts / "held_out.txt").read_bytes(), 256]
    model = load_model(gpt2).model
    losses = {}
    for begin in range(0, len(tokens) - 1, 8):  # a window scores what those before it did not reach
        window = tokens[begin : begin + 33]
        chances = logits(model, torch.tensor([window[:-1]]))[0].double().log_softmax(-1)
        for i, token in enumerate(window[1:]):
            losses.setdefault(begin + i, -float(chances[i, token]))
    assert strided["tokens"] == len(losses) == len(tokens) - 1
    assert strided["loss"] == pytest.approx(sum(losses.values()) / len(losses), rel=1e-5)


def test_token_files_are_evaluated_as_they_are(horst, gpt2, texts):
    words = ["--tokenizer", "bytes", "--validation", "2", "--out", "tokens", "--json"]
    made = horst("data", "tokenize", texts / "text.jsonl", *words)
    assert made.code == 0
    assert [row["documents"] for row in made.json] == [6, 2]
    by_folder = horst("eval", gpt2, "--data", "tokens", "--json").json
    by_file = horst("eval", gpt2, "--data", "tokens/val.bin", "--json").json
    assert by_folder["loss"] == by_file["loss"]
    assert by_folder["tokens"] == made.json[1]["tokens"] - 1
    assert horst("eval", gpt2, "--data", "tokens/train.bin", "--json").json["loss"] != by_file["loss"]


def test_data_sets_of_the_hub_are_named_so(horst, monkeypatch):
    datasets = pytest.importorskip("datasets")

    asked = []

    def load(name, config=None, split=None):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"text": f"document {i}"} for i in range(40)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    words = ["--tokenizer", "bytes", "--validation", "4", "--json"]
    made = horst("data", "tokenize", "hub:me/prose", "hub:me/verse/sonnets:test", *words, "--out", "tokens")
    assert made.code == 0
    assert asked == [("me/prose", None, "train"), ("me/verse", "sonnets", "test")]
    made = horst("data", "slimpajama", "--tokenizer", "bytes", "--out", "slim", "--json")
    assert made.code == 0
    assert asked[2][0] == "DKYoon/SlimPajama-6B"
    assert [row["documents"] for row in made.json] == [39, 1]


def test_wikitext_is_one_text_of_all_its_lines(horst, gpt2, monkeypatch):
    datasets = pytest.importorskip("datasets")

    lines = ["", " = Title = \n", " A sentence . \n"] * 9

    def load(name, config=None, split=None):
        assert (name, config, split) == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
        return datasets.Dataset.from_dict({"text": lines})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = horst("eval", gpt2, "--data", "wikitext", "--json").json
    pathlib.Path("same.txt").write_text("\n\n".join(lines))
    assert found["loss"] == horst("eval", gpt2, "--data", "same.txt", "--json").json["loss"]
    pathlib.Path("wikitext").mkdir()  # a folder of that name comes first
    assert "no val.bin" in horst("eval", gpt2, "--data", "wikitext").err


def test_onnx_takes_any_number_of_sequences_and_tokens(horst, gpt2):
    assert horst("export", gpt2, "--to", "onnx", "--out", "graph").code == 0
    session = onnxruntime.InferenceSession("graph/model.onnx")
    tokens = torch.randint(257, (3, 21))
    (found,) = session.run(None, {"input_ids": tokens.numpy()})
    numpy.testing.assert_allclose(found, logits(load_model(gpt2).model, tokens).numpy(), rtol=1e-4, atol=1e-4)


def test_export_with_a_report(horst, gpt2, texts):
    assert horst("prune", gpt2, "--sparsity", 0.9, "--out", "pruned").code == 0
    words = ["--report", "--seconds", "0.01", "--tokens", "8", "--new-tokens", "2", "--device", "cpu"]
    judged = ["--data", texts / "held_out.txt", "--eval-tokens", "64"]
    shown = horst("export", "pruned", "--to", "hugging-face", "--out", "dense", *words, *judged)
    assert shown.code == 0, shown.err
    assert "sparse-linear-int8-head" in shown.out
    assert "new tokens per s" in shown.out
    assert "- 2:4 is left out: " in shown.out
    assert "- Perplexity is that of 64 tokens of held_out.txt; --eval-tokens takes more or fewer." in shown.out
    page = pathlib.Path("dense/report.html").read_text()
    assert "Smallest file: sparse file" in page
    assert ">perplexity<" in page
    transformers.AutoModelForCausalLM.from_pretrained("dense")
    found = horst("export", "pruned", "--out", "sparse", *words, "--json").json
    forms = {row["form"]: row for row in found["forms"]}
    assert forms["sparse-safetensors"]["file_bytes"] == found["bytes"]
    assert forms["dense"]["milliseconds"] > 0
    assert forms["dense"]["tokens_per_s"] > 0
    assert "perplexity" not in forms["dense"]
    speeds = [row["tokens_per_s"] for row in found["forms"] if row["tokens_per_s"] is not None]
    assert speeds == sorted(speeds, reverse=True)


def test_a_dense_model_is_not_exported_in_silence(horst, gpt2):
    words = ["export", gpt2, "--out", "sparse"]
    dense = horst(*words)
    assert "The file is not smaller: " in dense.out
    assert "Try --values int8, or prune first." in dense.out
    assert 'Load it with horst.export.load_pretrained("sparse"); transformers does not read it.' in dense.out
    assert "not smaller" not in horst(*words, "--overwrite", "--values", "int8").out
    assert "Load it with" not in horst("export", gpt2, "--to", "hugging-face", "--out", "dense").out


def test_data_of_an_export_are_for_its_report(horst, gpt2):
    refused = horst("export", gpt2, "--data", "text.txt")
    assert refused.code == 2
    assert "--data is what the report judges by: add --report." in refused.err


def test_an_existing_directory_is_replaced_only_when_asked(horst, gpt2):
    words = ["prune", gpt2, "--sparsity", 0.5, "--out", "pruned"]
    assert horst(*words).code == 0
    pathlib.Path("pruned/pruning.json").write_text("keep me")
    refused = horst(*words)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert pathlib.Path("pruned/pruning.json").read_text() == "keep me"
    assert horst(*words, "--overwrite").code == 0
    assert pathlib.Path("pruned/pruning.json").read_text() != "keep me"
    assert sorted(path.name for path in pathlib.Path().iterdir()) == ["pruned"]


def test_without_a_terminal_eval_says_how_far_it_is(horst, gpt2, vit, texts, monkeypatch):
    monkeypatch.setattr("horst.cli.progress._LINE_EVERY", 0.0)
    found = horst("eval", gpt2, "--data", texts / "held_out.txt", "--context", 8, "--batch-size", 8)
    assert found.err.splitlines()[0] == "perplexity: 10 batches"
    assert "perplexity: batch 5 of 10, about " in found.err
    assert "perplexity" in found.out
    assert horst("eval", vit, "--data", "digits").err == "accuracy ...\n"


def test_on_a_cpu_fewer_and_shorter_windows_are_drawn_and_the_time_left_is_shown(horst, gpt2, texts, monkeypatch):
    monkeypatch.setattr("horst.cli.texts.CPU_SAMPLES", 5)
    monkeypatch.setattr("horst.cli.texts.CPU_CONTEXT", 16)
    words = ["prune", gpt2, "--method", "wanda", "--sparsity", 0.5, "--data", texts / "text.jsonl", "--device", "cpu"]
    found = horst(*words, "--out", "few")
    assert "calibrating on 5 windows of 16 tokens (the default on a CPU" in found.err
    assert "block 2 of 3, about " in found.err
    record = json.loads(pathlib.Path("few/pruning.json").read_text())
    assert (record["samples"], record["context"]) == (5, 16)
    given = horst(*words, "--out", "given", "--samples", 7, "--context", 32)
    assert "calibrating on 7 windows of 32 tokens\n" in given.err


def test_on_a_gpu_the_defaults_are_those_of_the_papers(gpt2):
    from horst.cli.texts import choose_calibration

    loaded = load_model(gpt2)
    assert choose_calibration(loaded, None, None, cpu=False) == (128, 64)
    assert choose_calibration(loaded, None, None, cpu=True) == (64, 64)
    assert choose_calibration(loaded, 3, 5, cpu=True) == (3, 5)
