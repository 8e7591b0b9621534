"""Mistakes: one clear line, exit code 2, nothing written, nothing lost."""

import json
import os
import pathlib
import pickle
import shutil

import pytest

MISSING = "nothing-here"


def listing():
    return sorted(str(path) for path in pathlib.Path().rglob("*"))


def refused(found, *parts):
    """Exit code 2, one line that begins with the command, and says what it must."""
    assert found.code == 2, (found.out, found.err)
    lines = [line for line in found.err.splitlines() if line.startswith("horst")]
    assert len(lines) == 1, found.err
    assert found.err.splitlines()[-1] == lines[0]
    assert "Traceback" not in found.err
    for part in parts:
        assert part in lines[0], lines[0]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["runn", "table1"], ["no command 'runn'", "Did you mean run?"]),
        (["--completion", "powershell"], ["bash, zsh, fish"]),
        # an unknown recipe, scale, field; a wrong type
        (["run", "tabel6"], ["no recipe 'tabel6'", "Did you mean table6?"]),
        (["run"], ["name a recipe", "table1"]),
        (["run", "--scale", "cpu"], ["name a recipe"]),
        (["run", "table6", "--scale", "gpuu"], ["'gpuu'", "Did you mean gpu?"]),
        (["run", "table6", "--scale", "cpu", "--steps", "many"], ["--steps", "many"]),
        (["run", "table6", "--scale", "cpu", "--step", "5"], ["--step", "Did you mean --steps?"]),
        (["run", "table6", "--scale", "cpu", "--optimizers", "adam"], ["adam"]),
        (["run", "table6", "--scale", "cpu", "--heads", "5"], ["heads"]),
        (["run", "table6", "--scale", "cpu", "--data", MISSING], [f"no token file {MISSING}", "horst data tokenize"]),
        (["run", "table6", "--scale", "cpu", "--sparsities", "50"], ["0.9, not 90", "50"]),
        (["run", "table1", "--scale", "cpu", "--sparsities", "0.5", "90"], ["0.9, not 90", "90"]),
        (["sweep", "table4", "--scale", "cpu", "--sparsities", "70"], ["0.9, not 90", "70"]),
        (["sweep", "table6", "--scale", "cpu", "--jobs", "0"], ["--jobs"]),
        (["sweep", "figure6"], ["use horst run figure6"]),
        # lists that leave no run, options without effect, pruning that cannot work: all before the first step
        (["run", "table1", "--scale", "cpu", "--seeds"], ["--seeds needs at least one value"]),
        (["run", "table1", "--scale", "cpu", "--optimizers"], ["--optimizers needs at least one value"]),
        (["sweep", "table6", "--scale", "cpu", "--sparsities"], ["--sparsities needs at least one value"]),
        (["run", "frontier_vision", "--scale", "cpu", "--points"], ["--points needs at least one value"]),
        (["run", "figure6", "--seeds"], ["--seeds needs at least one value"]),
        (["quickstart", "--seeds"], ["horst quickstart: seeds must be at least one value"]),
        (["run", "table1", "--scale", "cpu", "--data", "x"], ["--data has no effect", "--dataset", "--scale"]),
        (["sweep", "table4", "--scale", "cpu", "--data", "x"], ["--data has no effect", "digits"]),
        (["run", "table1", "--scale", "cpu", "--workers", "2"], ["--workers has no effect", "digits"]),
        (["run", "table1", "--padding", "2"], ["--padding has no effect", "ImageNet"]),
        (["run", "table1", "--scale", "cpu", "--l1", "0.1"], ["--l1 has no effect", "adamw-l1, horst-l1"]),
        (["run", "table1", "--scale", "cpu", "--ham-betas", "0.1"], ["--ham-betas has no effect", "no ham"]),
        (["run", "table6", "--scale", "cpu", "--calibration-samples", "9"], ["--calibration-samples has no effect"]),
        (["run", "table6", "--scale", "cpu", "--layers", "2"], ["layers=2", "--prune-layers blocks"]),
        (["run", "one_shot_methods", "--scale", "cpu", "--calibration-samples", "0"], ["at least 1, got 0"]),
        (["run", "table6", "--scale", "cpu", "--eval-batches", "0"], ["eval_batches", "at least 1"]),
        (["sweep", "tabel6"], ["Did you mean table6?"]),
        # files that are not there
        (["prune", MISSING, "--sparsity", "0.5"], [f"no model {MISSING}"]),
        (["eval", MISSING, "--data", "digits"], [f"no model {MISSING}"]),
        (["export", MISSING], [f"no model {MISSING}"]),
        (["eval", "GPT2", "--data", f"{MISSING}.txt"], [f"no file {MISSING}.txt"]),
        (["eval", "GPT2", "--data", MISSING], [f"no file {MISSING}"]),
        (["eval", "GPT2", "--data", "here.bin"], ["meta.json is missing", "horst data tokenize"]),
        (["eval", "GPT2", "--data", "blank.txt"], ["no text in blank.txt"]),
        (["prune", "GPT2", "--method", "wanda", "--sparsity", "0.5", "--data", "blank.txt"], ["no text in blank.txt"]),
        (["data", "tokenize", "blank.txt", "--tokenizer", "bytes"], ["no text in blank.txt"]),
        (["eval", "GPT2", "--data", "empty"], ["no val.bin"]),
        (["eval", "VIT", "--data", MISSING], [f"no {MISSING}"]),
        (["eval", "VIT", "--data", "empty"], ["neither a folder with train and val"]),
        (["eval", "GPT2"], ["--data"]),
        (["prune", "GPT2", "--method", "wanda", "--sparsity", "0.5", "--data", "a.jsonl"], ["no file a.jsonl"]),
        (["data", "tokenize", f"{MISSING}.txt"], [f"no file {MISSING}.txt"]),
        (["data", "tokenize", MISSING], [MISSING]),
        (["data", "tokenize"], ["sources is empty"]),
        (["data", "tokenise", "a.txt"], ["tokenise", "tokenize"]),
        (["data", "tokenize", "hub:nobody"], ["hub:owner/name"]),
        (["report", MISSING], [f"no {MISSING}"]),
        (["report"], ["name result files"]),
        (["report", "empty"], ["holds no result"]),
        # wrong types and values
        (["prune", "GPT2", "--sparsity", "half"], ["--sparsity", "half"]),
        (["prune", "GPT2", "--sparsity", "50"], ["0.9, not 90"]),
        (["prune", "GPT2", "--sparsity", "nan"], ["[0, 1)"]),
        (["prune", "GPT2"], ["--sparsity 0.5"]),
        (["prune"], ["model"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--method", "magic"], ["magic", "wanda"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--method", "wanda"], ["--data"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--samples", "0"], ["--samples"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--pattern", "two"], ["2:4"]),
        (["prune", "GPT2", "--sparsity", "0.4", "--pattern", "2:4"], ["fixes the sparsity"]),
        (["prune", "GPT2", "--pattern", "2:5"], ["multiple", "5"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--exclude", "*"], ["--exclude * leaves nothing", "all 12 layers"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--exclude", "*.h.*"], ["--exclude *.h.* leaves nothing"]),
        (["sparsify"], ["the model is missing: a directory of Hugging Face or timm, or of a finished run. See horst"]),
        (["prune"], ["the model is missing: a directory"]),
        (["sparsify", "GPT2", "--learning-rate", "1"], ["--learning-rate", "Did you mean --lr? See"]),
        (["prune", "gpt2", "--sparsity", "0.5"], ["no model gpt2. A model is a directory. Fetch", "hf download gpt2"]),
        (["eval", "owner/name", "--data", "x"], ["hf download owner/name --local-dir name"]),
        (["export", "GPT2", "--seconds", "nan"], ["--seconds", "nan"]),
        (["export", "GPT2", "--seconds", "inf"], ["--seconds", "inf"]),
        (["bench", "--seconds", "nan"], ["--seconds", "nan"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--device", "tpu"], ["cpu, cuda"]),
        (["prune", "GPT2", "--sparsity", "0.5", "--device", "cuda:99"], ["cuda:99", "--device cpu"]),
        (["eval", "GPT2", "--data", "TEXT", "--context", "65"], ["--context", "64"]),
        (["eval", "GPT2", "--data", "TEXT", "--context", "0"], ["--context"]),
        (["eval", "GPT2", "--data", "TEXT", "--stride", "65"], ["stride"]),
        (["eval", "GPT2", "--data", "TEXT", "--stride", "0"], ["stride"]),
        (["eval", "GPT2", "--data", "TEXT", "--batch-size", "0"], ["--batch-size"]),
        (["eval", "GPT2", "--data", "TEXT", "--tokenizer", "gpt2"], ["vocabulary"]),
        (["eval", "TEXT", "--data", "TEXT"], ["is a file"]),
        (["export", "GPT2", "--to", "gguf"], ["gguf", "onnx"]),
        (["export", "GPT2", "--tokens", "0"], ["--tokens"]),
        (["data", "tokenize", "TEXT", "--tokenizer", "bytes", "--validation", "1.5"], ["validation"]),
        (["data", "tokenize", "TEXT", "--tokenizer", "bytes", "--workers", "0"], ["workers"]),
        (["data", "tokenize", "TEXT", "--tokenizer", "bytes", "--validation", "1"], ["train.bin"]),
        (["quickstart", "--steps", "many"], ["--steps", "many"]),
        (["quickstart", "--seeds", "0", "0"], ["seeds", "twice"]),
        (["quickstart", "--report", "empty"], ["empty exists and is a directory"]),
        (["bench", "--width", "65"], ["--width"]),
        (["bench", "--only", "everything"], ["everything"]),
        (["bench", "--device", "cuda:99"], ["cuda:99"]),
        (["list", "--yaml"], ["--yaml"]),
        (["doctor", "please"], ["please"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes(horst, gpt2, vit, texts, words, parts):
    pathlib.Path("empty").mkdir()
    pathlib.Path("here.bin").write_bytes(b"\0" * 64)
    pathlib.Path("blank.txt").touch()
    before = listing()
    places = {"GPT2": gpt2, "VIT": vit, "TEXT": texts / "held_out.txt"}
    refused(horst(*(places.get(word, word) for word in words)), *parts)
    assert listing() == before
    assert not list(gpt2.parent.glob("my-gpt2-*"))


def test_a_misspelt_model_is_suggested(horst, gpt2):
    refused(horst("eval", gpt2.parent / "my-gtp2", "--data", "x"), "Did you mean my-gpt2?")


OUTPUTS = {
    "prune": lambda gpt2, texts: ["prune", gpt2, "--sparsity", "0.5"],
    "export": lambda gpt2, texts: ["export", gpt2],
    "data": lambda gpt2, texts: [
        "data", "tokenize", texts / "text.jsonl", "--tokenizer", "bytes", "--validation", "1",
    ],
    "run": lambda gpt2, texts: ["run", "figure6"],
    "sweep": lambda gpt2, texts: ["sweep", "table6", "--scale", "cpu"],
}  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS)
def test_output_that_is_there_or_cannot_be_written_is_refused_before_the_work(horst, gpt2, texts, command, monkeypatch):
    words = OUTPUTS[command](gpt2, texts)
    pathlib.Path("taken").mkdir()
    pathlib.Path("taken/precious").write_text("keep me")
    pathlib.Path("file").write_text("keep me")
    before = listing()
    makes_a_file = command in ("run", "sweep")
    right, wrong = ("file", "taken") if makes_a_file else ("taken", "file")
    refused(horst(*words, "--out", right), f"{right} exists", "--overwrite")
    refused(horst(*words, "--out", wrong, "--overwrite"), f"{wrong} exists and is a")
    refused(horst(*words, "--out", "file/below"), "not a directory")
    refused(horst(*words, "--out", "/"), "--out")
    # A folder without permission; root may write anywhere, so the system is asked in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(horst(*words, "--out", "new/place"), "no permission")
    assert listing() == before
    assert pathlib.Path("file").read_text() == "keep me"


@pytest.mark.parametrize("command", ["prune", "export", "data"])
def test_a_failure_while_writing_leaves_what_was_there(horst, made_by_horst, gpt2, texts, command, monkeypatch):
    """The disk is full when the new directory shall take the old one's place."""
    made_by_horst("old", precious="keep me")
    before, replace = listing(), os.replace

    def full(source, target):
        if pathlib.Path(target).name == "old" and pathlib.Path(target).parent == pathlib.Path():
            if (pathlib.Path(source) / "precious").exists():  # the old one is put back
                return replace(source, target)
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    words = OUTPUTS[command](gpt2, texts)
    refused(horst(*words, "--out", "old", "--overwrite"), "No space left")
    assert listing() == before
    assert pathlib.Path("old/precious").read_text() == "keep me"


def tree():
    return {path: path.read_bytes() for path in sorted(pathlib.Path().rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", ["prune", "export", "data"])
def test_overwrite_replaces_only_what_horst_wrote(horst, gpt2, texts, command):
    words = OUTPUTS[command](gpt2, texts)
    for name in ("project/src/main.py", "project/.git/config"):
        pathlib.Path(name).parent.mkdir(parents=True)
        pathlib.Path(name).write_text("keep me")
    assert horst(*words, "--out", "out").code == 0
    assert horst(*words, "--out", "out", "--overwrite").code == 0
    pathlib.Path("out/notes.txt").write_text("keep me")
    before = tree()
    refused(horst(*words, "--out", "project", "--overwrite"), "project was not made by horst", "another name")
    refused(horst(*words, "--out", "out", "--overwrite"), "notes.txt", "did not write")
    assert tree() == before


def test_overwrite_never_replaces_the_source(horst, vit, texts):
    shutil.copytree(vit, "vict")
    shutil.copy(texts / "held_out.txt", "vict/text.txt")
    assert horst("prune", "vict", "--sparsity", "0.5", "--out", "pruned").code == 0
    pathlib.Path("link").symlink_to("pruned")
    before = tree()
    for model, out in [("vict", "vict"), ("pruned", "pruned"), ("pruned", "link"), ("link", "pruned")]:
        refused(horst("export", model, "--to", "onnx", "--out", out, "--overwrite"), f"{out} is the model itself")
        refused(horst("prune", model, "--sparsity", "0.5", "--out", out, "--overwrite"), f"{out} is the model itself")
    refused(horst("data", "tokenize", "vict/text.txt", "--out", "vict", "--overwrite"), "vict holds vict/text.txt")
    assert tree() == before


def test_overwrite_replaces_no_file_of_another_kind(horst):
    assert horst("run", "figure6", "--steps", "2", "--out", "result.json", "--no-figures").code == 0
    pathlib.Path("main.py").write_text("keep me")
    before = tree()
    refused(horst("run", "figure6", "--out", "main.py", "--overwrite"), "neither a result file nor a report")
    refused(horst("report", "result.json", "--out", "main.py", "--overwrite"), "neither a result file nor a report")
    refused(horst("report", "result.json", "--out", "result.json", "--overwrite"), "which this command reads")
    assert tree() == before
    assert horst("report", "result.json").code == horst("report", "result.json", "--overwrite").code == 0


def test_an_unreadable_file_is_one_line(horst, gpt2, texts, monkeypatch):
    """Root reads anything, so the refusal is the system's, put in by hand."""

    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "read_bytes", denied)
    refused(horst("eval", gpt2, "--data", texts / "held_out.txt"), "Permission denied", "config.json")


class Bomb:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("exploded"),)


@pytest.mark.parametrize("command", ["prune", "eval", "export"])
def test_a_pickle_is_never_loaded(horst, gpt2, texts, command):
    words = {"prune": ["--sparsity", "0.5"], "eval": ["--data", texts / "held_out.txt"], "export": []}[command]
    pathlib.Path("weights.pt").write_bytes(pickle.dumps(Bomb()))
    refused(horst(command, "weights.pt", *words), "pickles")
    pathlib.Path("model").mkdir()
    shutil.copy(gpt2 / "config.json", "model/config.json")
    pathlib.Path("model/pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(horst(command, "model", *words), "pickles")
    pathlib.Path("model/model.safetensors").write_bytes(pickle.dumps(Bomb()))
    refused(horst(command, "model", *words), "model.safetensors")
    refused(horst("eval", gpt2, "--data", "weights.pt"), "weights.pt")
    assert not pathlib.Path("exploded").exists()


def damaged(gpt2, name, content):
    shutil.copytree(gpt2, "model")
    pathlib.Path("model", name).write_bytes(content(pathlib.Path("model", name).read_bytes()))
    return "model"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", lambda old: old[: len(old) // 2]),
        ("model.safetensors", lambda old: b""),
        ("model.safetensors", lambda old: b"\xff" * len(old)),
        ("config.json", lambda old: old[: len(old) // 2]),
        ("config.json", lambda old: b"[]"),
        ("config.json", lambda old: b"{}"),
        ("config.json", lambda old: json.dumps({**json.loads(old), "architectures": ["Evil"]}).encode()),
        ("config.json", lambda old: json.dumps({**json.loads(old), "n_layer": "three"}).encode()),
        ("config.json", lambda old: json.dumps({**json.loads(old), "n_layer": 7}).encode()),
        ("config.json", lambda old: json.dumps({**json.loads(old), "n_head": 0}).encode()),
        ("config.json", lambda old: json.dumps({**json.loads(old), "n_embd": 33}).encode()),
        ("config.json", lambda old: json.dumps({**json.loads(old), "model_type": ["gpt2"]}).encode()),
    ],
)
def test_a_damaged_model_is_refused(horst, gpt2, texts, name, content):
    model = damaged(gpt2, name, content)
    before = listing()
    refused(horst("eval", model, "--data", texts / "held_out.txt"))
    refused(horst("prune", model, "--sparsity", "0.5"))
    assert listing() == before


def test_a_run_that_did_not_finish_or_is_damaged_is_refused(horst):
    step = pathlib.Path("run/checkpoints/step-00000004")
    step.mkdir(parents=True)
    refused(horst("eval", "run", "--data", "x.txt"), "is no model")
    (step / "checkpoint.json").write_text('{"format": 1, "fingerprint": {}, "state"')
    refused(horst("eval", "run", "--data", "x.txt"), "is no model")
    pathlib.Path("run/outcome.json").write_text("{}")
    refused(horst("eval", "run", "--data", "x.txt"), "JSON")
    (step / "checkpoint.json").write_text('{"format": 9, "fingerprint": {}}')
    refused(horst("eval", "run", "--data", "x.txt"), "format 9")
    shutil.rmtree("run/checkpoints")
    refused(horst("eval", "run", "--data", "x.txt"), "kept no checkpoint", "--checkpoint-every")


@pytest.mark.parametrize(
    "content",
    [
        '{"experiment": "table6", "rows": [', "", "[]", "7", '{"rows": []}', '{"schema_version": 99}',
        '{"schema_version": 1, "surprise": 1}', "[" * 100_000,
    ],
    ids=range(8),
)  # fmt: skip
def test_a_result_that_is_half_written_is_refused(horst, content):
    pathlib.Path("half.json").write_text(content)
    refused(horst("report", "half.json"), "half.json is no", "result file")
    assert listing() == ["half.json"]


def test_a_half_written_result_in_a_folder_is_not_passed_over(horst):
    pathlib.Path("half.json").write_text('{"experiment": "table6", "rows": [')
    refused(horst("report", "."), "half.json is no whole result file")


def test_text_that_is_damaged_is_refused(horst, gpt2, texts):
    pathlib.Path("broken.jsonl").write_text('{"text": "fine"}\n{"text": "cut')
    refused(horst("eval", gpt2, "--data", "broken.jsonl"), "line 2")
    pathlib.Path("fields.jsonl").write_text('{"content": "other name"}')
    refused(horst("prune", gpt2, "--data", "fields.jsonl", "--sparsity", "0.5", "--method", "wanda"), "content")
    pathlib.Path("latin.txt").write_bytes(b"caf\xe9")
    found = horst("data", "tokenize", "latin.txt", "--tokenizer", "bytes")
    refused(found, "latin.txt is not UTF-8", "0xe9 at position 3", "iconv -f latin1")
    assert "damaged" not in found.err
    pathlib.Path("short.txt").write_text("hi")
    refused(
        horst("prune", gpt2, "--data", "short.txt", "--sparsity", "0.5", "--method", "wanda"), "3 tokens", "context"
    )


def test_errors_name_the_users_file_and_no_option_that_the_command_lacks(horst, gpt2, texts):
    pathlib.Path("short.txt").write_text("hi")
    refused(horst("prune", gpt2, "--data", "short.txt", "--sparsity", "0.5", "--method", "wanda"), "short.txt has 3")
    found = horst("eval", gpt2, "--data", texts / "held_out.txt", "--tokenizer", "gpt2")
    refused(found, f"{texts / 'held_out.txt'} has tokens of 'gpt2'")
    assert "--vocabulary" not in found.err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "outcome.json"])
def test_a_pipe_in_a_model_is_refused_at_once(horst, gpt2, name):
    shutil.copytree(gpt2, "model")
    pathlib.Path("model", name).unlink(missing_ok=True)
    if name == "outcome.json":
        pathlib.Path("model/config.json").unlink()
    os.mkfifo(pathlib.Path("model", name))
    refused(horst("export", "model"))


def test_a_pipe_among_results_is_refused_at_once(horst):
    os.mkfifo("pipe.json")
    refused(horst("report", "pipe.json"), "pipe.json")
    refused(horst("report", "."), "holds no result")


def test_a_forged_number_of_blocks_is_refused_at_once(horst, gpt2, vit):
    for source, change in [(gpt2, {"n_layer": 10**8}), (vit, {"model_args": {"depth": 10**8}})]:
        shutil.copytree(source, "model")
        config = json.loads((source / "config.json").read_text())
        pathlib.Path("model/config.json").write_text(json.dumps(config | change))
        refused(horst("export", "model"), "forged", "1e+08")
        shutil.rmtree("model")
    pathlib.Path("run/checkpoints/step-00000004").mkdir(parents=True)
    pathlib.Path("run/checkpoints/step-00000004/checkpoint.json").write_text('{"format": 1, "fingerprint": {}}')
    shape = {"layers": 1e8, "vocabulary": 257}
    pathlib.Path("run/outcome.json").write_text(json.dumps({"config": {"run": {"model": shape}}}))
    refused(horst("export", "run"), "forged", "1e+08")


def test_a_model_of_another_kind_is_refused_by_name(horst, texts):
    import transformers

    config = transformers.BertConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained("bert")
    refused(horst("eval", "bert", "--data", texts / "held_out.txt"), "BertModel", "no perplexity")
