"""The shell lines of docs/command_line.md, as they stand there and in its order, on small models and short runs."""

import gzip
import json
import pathlib
import re
import shlex
import shutil

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "command_line.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
SHORT = "--steps 8 --batch-size 2 --warmup-steps 1 --layers 3 --heads 2 --width 16 --context 16 --eval-batch-size 8"


def lines(section):
    """The words after ``horst`` of each line of a section."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    found = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in found if line.startswith("horst ")]


def succeeds(horst, words):
    found = horst(*words)
    assert found.code == 0, (words, found.err)


def test_a_model_is_pruned_evaluated_and_exported(horst, gpt2, vit, texts):
    for model in (gpt2, vit):
        shutil.copytree(model, model.name)
    shutil.copy(texts / "text.jsonl", "text.jsonl")
    tokenize = ["data", "tokenize", "text.jsonl", "--tokenizer", "bytes", "--validation", "2"]
    succeeds(horst, [*tokenize, "--out", "wikitext"])  # a folder of that name stands for what would be fetched
    shown = lines("A smaller model in three commands")
    assert [words[0] for words in shown] == ["sparsify", "eval", "export", *["prune"] * 3, *["export"] * 3]
    shown[0][shown[0].index("5M")] = "1k"
    for words in shown:
        if "onnx" not in words:  # which has its own test, and takes long
            succeeds(horst, [*words, *(["--seconds", "0.01", "--tokens", "8"] if "--report" in words else [])])
    assert pathlib.Path("my-gpt2-70-sparse-safetensors/report.html").is_file()


@pytest.mark.usefixtures("_documents")
def test_the_data_fit_the_recipe_and_its_model_is_kept(horst):
    (words,) = [words for words in lines("Data") if "a.jsonl" in words]
    words[words.index("--workers") + 1] = "1"
    succeeds(horst, words)
    shown = [words for words in lines("Recipes") if "cpu" in words or words[0] == "eval"]
    assert [words[0] for words in shown] == ["run", "eval"]
    shown[0][shown[0].index("--checkpoint-every") + 1] = "4"
    succeeds(horst, [*shown[0], *SHORT.split()])
    succeeds(horst, shown[1])


@pytest.fixture
def _documents():
    """As many that half a per cent is some."""
    texts = [f"{i} is followed by {i + 1}, and {i + 1} by {i + 2}." for i in range(2000)]
    pathlib.Path("a.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    with gzip.open("b.txt.gz", "wt") as file:
        file.write("One more, of another kind.")
