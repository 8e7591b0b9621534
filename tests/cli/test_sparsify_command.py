"""``horst sparsify``: real models through all stages; bad calls end in one line and leave nothing."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal

import pytest
import torch
import transformers
from safetensors.torch import load_file

from horst.cli import recovery_data
from horst.sparsity import find_layers

QUICK = ("--steps", 12, "--batch-size", 4, "--context", 32, "--samples", 4, "--lr", "1e-3")


def pruned_weights(folder):
    model = transformers.AutoModel.from_pretrained(folder)
    return {layer.name: layer.param for layer in find_layers(model, "blocks")}


def test_a_language_model_goes_through_all_stages(horst, gpt2, texts):
    out = pathlib.Path("sparse")
    found = horst("sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.7, "--out", out, *QUICK)
    assert found.code == 0, found.err
    rows = json.loads((out / "sparsify.json").read_text())["rows"]
    assert [row["stage"] for row in rows] == ["dense", *["pruned", "trained"] * 3]
    assert [row["sparsity"] for row in rows[2::2]] == [0.493, 0.674, 0.7]
    assert rows[-1]["perplexity"] < rows[-2]["perplexity"]
    for weight in pruned_weights(out).values():
        assert int((weight == 0).sum()) == int(0.7 * weight.numel())
    assert "Perplexity" in (out / "sparsify.html").read_text()
    assert "70% zeros, trained" in found.out
    assert os.listdir() == ["sparse"]


def test_little_text_is_warned_of_before_and_after(horst, gpt2, texts):
    words = ["sparsify", gpt2, "--data", texts / "held_out.txt", "--sparsity", 0.5, "--out", "sparse", *QUICK]
    found = horst(*words)
    assert found.code == 0, found.err
    assert "training for 12 steps of 4 rows: 1,536 tokens, 2.8 times this text" in found.err
    judged = "Judged on 32 tokens: fewer than 10,000 say little about other text."
    assert judged in found.err
    assert judged in found.out
    assert "no worse than dense" not in found.out
    long = horst(*words[:-1], "1e-3", "--overwrite", "--steps", 24)
    assert "The training text is read about 6 times" in long.err
    assert "The training text is read about 6 times" in pathlib.Path("sparse/sparsify.html").read_text()


def test_tokens_that_are_no_whole_steps_are_named(horst, gpt2, texts):
    words = ["--sparsity", 0.5, "--tokens", 5, "--context", 32, "--batch-size", 4, "--method", "magnitude"]
    found = horst("sparsify", gpt2, "--data", texts / "text.jsonl", "--out", "sparse", *words)
    assert found.code == 0, found.err
    assert "training for 1 step of 4 rows: 128 tokens, " in found.err


def test_a_model_trained_with_l1_has_one_threshold_and_the_layers_of_the_paper(horst, gpt2, texts):
    words = ["--distribution", "global", "--layers", "paper", "--sparsity", 0.6, "--out", "sparse", *QUICK]
    found = horst("sparsify", gpt2, "--data", texts / "text.jsonl", *words)
    assert found.code == 0, found.err
    shares = {name: float((weight == 0).float().mean()) for name, weight in pruned_weights("sparse").items()}
    inside = [share for name, share in shares.items() if name.startswith("h.1.")]
    assert len(inside) == 4
    assert len(set(inside)) > 1
    assert {share for name, share in shares.items() if not name.startswith("h.1.")} == {0.0}


@pytest.mark.parametrize("train", ["fixed", "refresh", "admm", "ast", "cast"])
def test_every_way_to_train_writes_a_model_and_a_page(horst, gpt2, texts, train):
    more = ["--optimizer", "adams"] if train == "cast" else []
    found = horst(
        "sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.5, "--out", "sparse", "--train", train,
        "--steps", 12, "--batch-size", 4, "--context", 32, *more,
    )  # fmt: skip
    assert found.code == 0, found.err
    starts_dense = train in ("admm", "ast", "cast")
    stages = [row["stage"] for row in json.loads(pathlib.Path("sparse/sparsify.json").read_text())["rows"]]
    assert stages == (["dense", "trained"] if starts_dense else ["dense", "pruned", "trained"])
    for weight in pruned_weights("sparse").values():
        assert int((weight == 0).sum()) == weight.numel() // 2
    assert "Perplexity while training" in pathlib.Path("sparse/sparsify.html").read_text()


def test_a_page_that_cannot_be_drawn_does_not_lose_the_model(horst, gpt2, texts, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr("horst.lab.report.html.build", fails)
    found = horst("sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.5, "--out", "sparse", *QUICK)
    assert found.code == 0, found.err
    assert "the page could not be drawn: ZeroDivisionError: no ink. The model is saved." in found.err
    assert "sparsify.html" not in found.out
    assert len(pruned_weights("sparse")) == 12


def test_two_of_four_and_the_sparse_file(horst, gpt2, texts, tmp_path):
    words = ["sparsify", gpt2, "--data", texts / "text.jsonl", "--pattern", "2:4", "--out", tmp_path / "sparse"]
    made = horst(*words, "--sparse", *QUICK)
    assert made.code == 0, made.err
    assert ".tmp" not in made.err  # where it was written before it was renamed
    load = f'Load it with horst.export.load_pretrained("{tmp_path / "sparse"}"); transformers does not read it.'
    assert made.out.splitlines()[-1] == load
    assert (tmp_path / "sparse" / "model.sparse.safetensors").is_file()
    assert horst("export", tmp_path / "sparse", "--to", "hugging-face", "--out", tmp_path / "dense").code == 0
    for weight in pruned_weights(tmp_path / "dense").values():  # GPT-2 stores its weights inputs first
        assert torch.equal((weight.T.reshape(-1, 4) != 0).sum(1), torch.full((weight.numel() // 4,), 2))
    again = horst(*words, *QUICK)
    assert again.code == 2
    assert "exists. Add --overwrite" in again.err
    assert horst(*words, "--overwrite", *QUICK).code == 0  # the page is one of the files that horst wrote


@pytest.fixture
def stopped_once(monkeypatch):
    """The first run is sent SIGTERM at its fourth evaluation: dense, pruned, step 4, step 8."""
    whole, calls = recovery_data.read_data, []

    def stopping(*args, **options):
        data = whole(*args, **options)

        def evaluate(model):
            calls.append(1)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return data.evaluate(model)

        return dataclasses.replace(data, evaluate=evaluate)

    monkeypatch.setattr(recovery_data, "read_data", stopping)


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(horst, gpt2, texts, tmp_path, stopped_once):
    words = ["sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.5, "--eval-every", 4, *QUICK]
    stopped = horst(*words, "--out", tmp_path / "other")
    assert stopped.code == 143
    assert not (tmp_path / "other").exists()
    resumed = horst(*words, "--out", tmp_path / "other", "--overwrite")  # which discards other runs only
    assert resumed.code == 0
    assert f"going on with the run in {tmp_path / '.other.sparsify'}" in resumed.err
    assert horst(*words, "--out", tmp_path / "whole").code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "other"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(os.listdir(tmp_path)) == ["here", "other", "whole"]


def test_a_stopped_run_with_other_settings_is_refused_or_discarded(horst, gpt2, texts, stopped_once):
    words = ["sparsify", gpt2, "--data", texts / "text.jsonl", "--eval-every", 4, "--out", "sparse", *QUICK]
    assert horst(*words, "--sparsity", 0.5).code == 143
    refused = horst(*words, "--sparsity", 0.6)
    assert refused.code == 2
    assert "going on" not in refused.err
    assert (
        ".sparse.sparsify holds an interrupted run: sparsity was 0.5, now 0.6. Give 0.5 to go on, another --out, or "
        "--overwrite to begin anew." in refused.err
    )
    foreign = pathlib.Path(".sparse.sparsify/thesis.txt")
    foreign.write_text("years of work")
    kept = horst(*words, "--sparsity", 0.6, "--overwrite")
    assert kept.code == 2
    assert "holds thesis.txt, which horst did not write" in kept.err
    assert foreign.exists()
    foreign.unlink()
    anew = horst(*words, "--sparsity", 0.6, "--overwrite")
    assert anew.code == 0, anew.err
    assert "60% zeros, trained" in anew.out
    assert os.listdir() == ["sparse"]


def test_an_encoder_learns_its_hidden_states(horst, texts, tmp_path):
    torch.manual_seed(0)
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "for",
        "on",
        "with",
        "as",
        "by",
        "at",
        "from",
        "this",
        "that",
        "it",
        "be",
        "are",
        "or",
        "an",
    ]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    transformers.BertTokenizerFast(str(tmp_path / "bert" / "vocab.txt")).save_pretrained(tmp_path / "bert")
    config = transformers.BertConfig(
        vocab_size=25, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config)
    for layer in find_layers(model, "blocks"):
        layer.param.data.normal_(std=0.3)  # larger than at initialisation, so that they matter
    model.save_pretrained(tmp_path / "bert")
    lines = [" ".join(words[(i * j) % 20] for j in range(1, 9)) for i in range(1, 81)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    found = horst(
        "sparsify", tmp_path / "bert", "--data", tmp_path / "lines.txt", "--sparsity", 0.6, "--out", "sparse",
        "--steps", 40, "--batch-size", 16, "--samples", 16, "--lr", "3e-3", "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    dense, pruned, trained = (row["cosine"] for row in found.json["rows"])
    assert dense == pytest.approx(1.0)
    assert pruned < trained < 1.0


def test_an_image_model(horst, vit, tmp_path):
    found = horst(
        "sparsify", vit, "--data", "digits", "--sparsity", 0.5, "--out", tmp_path / "sparse", "--method", "magnitude",
        "--steps", 6, "--batch-size", 16, "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert [row["stage"] for row in found.json["rows"]] == ["dense", "pruned", "trained"]
    assert all(layer["sparsity"] == pytest.approx(0.5, abs=1e-3) for layer in found.json["layers"])


def test_no_zeros_and_more_zeros_than_asked_for_are_named(horst, gpt2, texts):
    words = ["--data", texts / "text.jsonl", "--context", 32, "--batch-size", 4, "--steps", 2, "--method", "magnitude"]
    none = horst("sparsify", gpt2, *words, "--sparsity", 0, "--out", "none")
    assert none.code == 0, none.err
    assert "0% zeros, pruned" in none.out
    assert "dense zeros" not in none.out
    assert horst("sparsify", gpt2, *words, "--sparsity", 0.7, "--stages", "--out", "more").code == 0
    more = horst("sparsify", "more", *words, "--sparsity", 0.5, "--out", "half")
    assert more.code == 0, more.err
    assert "70 % of the weights to prune are zero already, more than the 50 % asked for" in more.err.replace(
        "69.99", "70"
    )
    assert "with 70 % zeros (the model had more than the 50 % asked for)" in more.out
    assert "zeros of all weights" in horst("eval", "half", "--data", texts / "held_out.txt").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel", "fsdp"], "--parallel fsdp divides the model among several processes, and there is one"),
        (["--alpha", "7", "--optimizer", "adamw"], "alpha 7.0 is an option of HORST, and the optimizer is adamw"),
        (["--samples", "999", "--method", "magnitude"], "--samples 999 has no effect with --method magnitude"),
        (["--samples", "999", "--train", "admm"], "--samples 999 has no effect with --train admm"),
        (["--method", "wanda", "--train", "ast"], "--method wanda has no effect with --train ast"),
    ],
)
def test_options_without_effect_are_refused(horst, gpt2, texts, words, message):
    found = horst("sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.5, "--out", "sparse", *words)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.splitlines()) == 1
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sparsity", "0.5", "--data", ""], "give the data to train on: --data text.jsonl"),
        ([], "give the share of weights to remove, --sparsity 0.7, or a pattern"),
        (["--sparsity", "70"], "sparsity"),
        (["--sparsity", "0.5", "--pattern", "2:4", "--stages", "0.3"], "stages"),
        (["--sparsity", "0.5", "--tokens", "20X"], "--tokens must be a number such as 500k, 20M or 1B"),
        (["--sparsity", "0.5", "--steps", "0"], "steps must be a whole number of at least 1"),
        (["--sparsity", "0.7", "--steps", "2"], "steps are too few for 3 stages"),
        (["--sparsity", "0.5", "--context", "4096"], "--context must lie between 1 and the model's 64"),
        (["--sparsity", "0.5", "--teacher", "nowhere"], "there is no model nowhere"),
        (["--sparsity", "0.5", "--distill", "none", "--teacher", "."], "is no model"),
    ],
)
def test_a_bad_call_is_one_line_and_leaves_nothing(horst, gpt2, texts, words, message):
    data = [] if "--data" in words else ["--data", texts / "text.jsonl"]
    found = horst("sparsify", gpt2, *data, "--out", "sparse", *words)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.splitlines()) == 1
    assert os.listdir() == []


def test_a_teacher_with_another_vocabulary_is_refused(horst, gpt2, texts, tmp_path):
    config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "teacher")
    found = horst(
        "sparsify", gpt2, "--data", texts / "text.jsonl", "--sparsity", 0.5, "--out", tmp_path / "sparse",
        "--teacher", tmp_path / "teacher", *QUICK,
    )  # fmt: skip
    assert found.code == 2
    assert "300" in found.err
    assert not (tmp_path / "sparse").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sparsity", "70%"], "--sparsity must be a number in [0, 1), got '70%'. Write 0.7."),
        (["--sparsity", "0.5", "--steps", "2.5"], "--steps must be a whole number, got '2.5'."),
        (["--sparsity", "0.5", "--lr", "small"], "--lr must be a number, got 'small'."),
        (["--sparsity", "0.5", "--batch-size", "2.5"], "--batch-size must be a whole number, got '2.5'."),
        (
            ["--pattern", "2/4"],
            "--pattern must be N:M such as 2:4, or a block of rows x columns such as 4x4, got '2/4'.",
        ),
        (
            ["--sparsity", "0.5", "--data", "short.tx"],
            "no file short.tx. Did you mean short.txt? Text is a .txt, .jsonl",
        ),
        (["--sparsity", "0.5", "--data", "digits"], "digits are images, and this model reads text."),
        (["--sparsity", "0.5", "--data", "short.txt"], "Give more text, or --context 3 or less."),
        (["--sparsity", "0.5", "--data", "short.txt", "--eval-data", "short.txt"], "or --context 7 or less."),
        (
            ["--sparsity", "0.5", "--data", "other.jsonl"],
            "line 1 has no field 'text' (it has 'content'). Rename the field",
        ),
        (["--sparsity", "0.5", "--data", "plain.jsonl"], 'is {"text": "..."}. Is it plain text? Name it .txt.'),
        (["--sparsity", "0.7", "--steps", "2"], "prunes at once (stages=(), on the command line a bare --stages)."),
        (["--sparsity", "0.5", "--out", "model"], "--out model is the model itself, which this command reads."),
        (["--sparsity", "0.7", "--stages", "0.8"], "got 0.8. To reach 0.7 in two steps give the one stage 0.5."),
    ],
)
def test_a_mistake_says_what_to_do_in_the_words_of_the_command_line(horst, gpt2, texts, words, message):
    shutil.copytree(gpt2, "model")
    pathlib.Path("short.txt").write_text("hello ")
    pathlib.Path("plain.jsonl").write_text("It was a dark and stormy night.\n")
    pathlib.Path("other.jsonl").write_text('{"content": "hello"}\n')
    data = [] if "--data" in words else ["--data", texts / "text.jsonl"]
    found = horst("sparsify", "model", *data, *words)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "fetched"), [("../my-lama", False), ("here/my-lama", False), ("owner/my-lama", True), ("my-lama", True)]
)
def test_only_a_name_of_the_hub_is_to_be_fetched(horst, texts, model, fetched):
    pathlib.Path("here").mkdir()
    found = horst("sparsify", model, "--data", texts / "text.jsonl", "--sparsity", 0.5)
    assert "there is no model" in found.err
    assert (f"hf download {model} --local-dir my-lama" in found.err) == fetched
    assert ("hf download" in found.err) == fetched
