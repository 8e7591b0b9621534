"""Files of every kind that the package reads, damaged at random, each read in a fork.

    python damaged_files.py FOLDER COUNT SEED [NUMBER]

What is right: the file is refused with an error of ours (on the command line: one line and exit code 2), or what comes
out is what was written. What is wrong: a traceback, a hang, another error, another value. NUMBER repeats one case.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("export", "training"))
os.environ["HF_HUB_OFFLINE"] = "1"

import forks
import matplotlib.figure  # noqa: F401 - loaded here and not in every fork; so are the next
import torch
import transformers
import transformers.models.gpt2.modeling_gpt2
from kills import digest
from test_hostile_files import STATE, Holder
from toy_runs import toy_run

import horst.cli.evaluate
import horst.cli.export
import horst.cli.prune
import horst.cli.report  # noqa: F401
from horst.cli import main as horst_command
from horst.export import InvalidFileError, load_sparse, save_sparse
from horst.lab.data.token_files import open_tokens
from horst.lab.data.tokenization import write_token_files
from horst.lab.report import html  # noqa: F401
from horst.training.checkpoint import CheckpointError

HANG = 10.0
WRONG = 71  # exit code: something else came out than was written
ROOT = Path(__file__).parents[2]
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    7.5,
    1e8,
    10**8,
    10**30,
    float("nan"),
    "",
    "x",
    "../x",
    "/dev/zero",
    [],
    [[]],
    {},
    "\0",
)


def make_material(folder: Path) -> None:
    """One of each kind of file, whole."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (folder / "sparse").mkdir(parents=True)
    save_sparse(STATE, folder / "sparse" / "model.sparse.safetensors", metadata={"architecture": "toy"})
    texts = [("train", "some text " * 30), ("train", "more"), ("val", "held out " * 20)]
    write_token_files(iter(texts), folder / "tokens", tokenizer="bytes")
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    for words in (
        ["prune", folder / "model", "--sparsity", "0.5", "--method", "magnitude", "--out", folder / "pruned"],
        ["export", folder / "pruned", "--to", "sparse-safetensors", "--out", folder / "sparse_model"],
    ):
        assert horst_command([str(word) for word in words]) == 0
    toy_run(folder / "checkpoint", steps=30)
    for path in sorted((folder / "checkpoint" / "checkpoints").glob("step-*"))[-1:]:
        shutil.rmtree(path)  # so that there is something left to train
    weights, _ = toy_run(folder / "whole")
    (folder / "digest").write_text(digest(weights))
    (folder / "report").mkdir()
    results = sorted((ROOT / "results").rglob("*.json"), key=lambda path: path.stat().st_size)
    for path in results[:8]:
        shutil.copy(path, folder / "report" / path.name)


def read_sparse(place: Path, damaged: Path) -> int:
    model = Holder()
    try:
        load_sparse(damaged, model)
    except OSError:
        if damaged.is_file():  # only of a file that is gone, or is a folder, may the error be the system's
            raise
        return 0
    except InvalidFileError:
        return 0 if all(bool((tensor == 5).all()) for tensor in model.state_dict().values()) else WRONG
    return 0 if all(torch.equal(tensor, STATE[name]) for name, tensor in model.state_dict().items()) else WRONG


def read_tokens(place: Path, damaged: Path) -> int:
    try:
        for split in ("train", "val"):
            open_tokens(place / f"{split}.bin").tokens.sum()
    except (ValueError, OSError):
        pass
    return 0


def resume(place: Path, damaged: Path) -> int:
    torch.set_num_threads(1)
    try:
        weights, _ = toy_run(place)
    except (CheckpointError, ValueError, OSError):
        return 0
    return 0 if digest(weights) == (place.parent / "digest").read_text() else WRONG


def command(*words: str) -> Callable[[Path, Path], int]:
    def run(place: Path, damaged: Path) -> int:
        torch.set_num_threads(1)
        os.chdir(place.parent)
        return horst_command([word.format(place=place, damaged=damaged) for word in words])

    return run


# folder of the material, how often it is drawn, what reads it
READERS: list[tuple[str, int, list[Callable[[Path, Path], int]]]] = [
    ("sparse", 60, [read_sparse]),
    ("tokens", 15, [read_tokens]),
    ("report", 8, [command("report", "{damaged}", "--out", "new.html")]),
    ("model", 6, [
        command("prune", "{place}", "--sparsity", "0.5", "--method", "magnitude", "--out", "new"),
        command("export", "{place}", "--to", "sparse-safetensors", "--out", "new"),
    ]),
    ("sparse_model", 6, [
        command("export", "{place}", "--to", "hugging-face", "--out", "new"),
        command("prune", "{place}", "--sparsity", "0.9", "--method", "magnitude", "--out", "new"),
    ]),
    ("checkpoint", 5, [resume]),
]  # fmt: skip


def damage(path: Path, chance: random.Random) -> str:
    """Change the file; what was done, in words."""
    content = bytearray(path.read_bytes())
    ways = ["flip", "flip", "cut", "append", "zeros", "swap", "empty", "gone", "folder"]
    if path.suffix == ".json":
        ways += ["value"] * 8
    way = chance.choice(ways)
    span = len(content) if chance.random() < 0.5 else min(len(content), 400)  # headers come first
    if way == "value":
        done = _other_value(path, chance)
        if done:
            return done
        way = "flip"
    if way in ("gone", "folder"):
        path.unlink()
        if way == "folder":
            path.mkdir()
        return way
    if way == "flip":
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(span)] ^= chance.randint(1, 255)
    elif way == "cut":
        del content[chance.randrange(span) :]
    elif way == "append":
        content += chance.randbytes(chance.randint(1, 40))
    elif way == "zeros":
        begin = chance.randrange(span)
        content[begin : begin + 64] = bytes(len(content[begin : begin + 64]))
    elif way == "swap":
        a, b = sorted(chance.randrange(span) for _ in range(2))
        content[a:b] = content[a:b][::-1]
    else:
        content.clear()
    path.write_bytes(content)
    return way


def _other_value(path: Path, chance: random.Random) -> str:
    """Another value somewhere in a JSON file."""
    try:
        whole = json.loads(path.read_text())
    except ValueError:
        return ""
    places = []

    def visit(value: object, keys: list) -> None:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in list(inside)[:50]:
            places.append((value, key, [*keys, key]))
            visit(inner, [*keys, key])

    visit(whole, [])
    if not places:
        return ""
    holder, key, keys = chance.choice(places)
    holder[key] = chance.choice(VALUES)
    path.write_text(json.dumps(whole))
    return f"{keys} = {holder[key]!r}"


def one_case(number: int, seed: int, root: Path) -> tuple[str, str]:
    """A case by its number: what was done to which file, and what was wrong."""
    chance = random.Random(f"{seed} {number}")
    kind, _, readers = chance.choices(READERS, [weight for _, weight, _ in READERS])[0]
    reader = chance.choice(readers)
    case = root / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(root / "material" / kind, case / kind)
    shutil.copy(root / "material" / "digest", case / "digest")
    files = sorted(path for path in (case / kind).rglob("*") if path.is_file() and path.stat().st_size)
    damaged = chance.choice(files)
    done = damage(damaged, chance)
    about = f"{kind}/{damaged.relative_to(case / kind)}: {done}"
    ended = forks.call(lambda: reader(case / kind, damaged), case / "said", HANG)
    if ended.hung:
        return about, "hang"
    if ended.code == forks.CRASHED or "Traceback (most recent call last)" in ended.err:
        return about, f"traceback: {ended.err[-1500:]}"
    if ended.code not in (0, 2):
        said = "another value came out" if ended.code == WRONG else f"exit code {ended.code}"
        return about, f"{said}: {ended.err[-500:]}"
    return about, ""


def main() -> None:
    root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    made = forks.call(lambda: make_material(root / "material"), root / "made", 300.0)
    assert made.code == 0, made.err
    numbers = [int(sys.argv[4])] if len(sys.argv) > 4 else range(count)
    report = {"part": "damaged files", "cases": 0, "tracebacks": 0, "hangs": 0, "others": 0}
    failures = []
    for number in numbers:
        report["cases"] += 1
        about, wrong = one_case(number, seed, root)
        if wrong:
            report[{"hang": "hangs", "trac": "tracebacks"}.get(wrong[:4], "others")] += 1
            failures.append(
                {"part": "damaged files", "case": f"seed {seed}, number {number}", "damage": about, "what": wrong}
            )
    (root / "report.json").write_text(json.dumps({"rows": [report], "failures": failures}))


if __name__ == "__main__":
    main()
