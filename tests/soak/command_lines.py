"""Command lines of random words, each in a fork: an exit code and at most one line, never a traceback, never a hang.

    python command_lines.py FOLDER COUNT SEED

The words and the stubs for all real work are those of tests/cli/test_any_words.py.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cli"))

import forks
import test_any_words as any_words
from hypothesis import HealthCheck, Phase, given, seed, settings

from horst.cli import main as horst

HANG = 10.0
CHUNK = 500  # of one hypothesis run, which remembers all its examples


def wrong_with(words: list[str], folder: Path) -> str:
    """What a command line did that it must not; nothing if it behaved."""
    place = folder / "here"
    shutil.rmtree(folder, ignore_errors=True)
    place.mkdir(parents=True)

    def run() -> int:
        os.chdir(place)
        any_words.make_the_broken_things()
        code = horst(words)
        (folder / "left.json").write_text(json.dumps(any_words.present() == any_words.BROKEN))
        return code

    ended = forks.call(run, folder, HANG)
    if ended.hung:
        return "hang"
    if "Traceback (most recent call last)" in ended.err:
        return f"traceback: {ended.err[-1500:]}"
    if ended.code not in (0, 2):
        return f"exit code {ended.code}: {ended.err[-500:]}"
    if ended.code == 2 and (len(ended.err.splitlines()) != 1 or ended.out or not ended.err.startswith("horst")):
        return f"a mistake that is not told in one line: {ended.err[-500:]}{ended.out[-200:]}"
    if ended.code == 2 and (folder / "left.json").read_text() != "true":
        return "a mistake left something behind"
    return ""


def warm_up(folder: Path) -> None:
    """Let every command refuse a broken model here, so that no fork spends its 10 s on importing libraries."""
    folder.mkdir()
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        any_words.make_the_broken_things()
        for command in any_words.COMMANDS:
            horst([command, "broken", "--out", "new"])
            horst([command, "broken"])
    os.chdir(folder.parent)


def main() -> None:
    root, count, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    root.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    report = {"part": "command lines", "cases": 0, "tracebacks": 0, "hangs": 0, "others": 0}
    failures = []

    def check(words: list[str]) -> None:
        if report["cases"] >= count:
            return
        report["cases"] += 1
        if wrong := wrong_with(words, root / "case"):
            kind = {"hang": "hangs", "trac": "tracebacks"}.get(wrong[:4], "others")
            report[kind] += 1
            failures.append({"part": "command lines", "words": words, "what": wrong})

    options = settings(
        max_examples=CHUNK,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    stubs = contextlib.contextmanager(any_words._nothing_does_real_work._get_wrapped_function())
    with stubs():
        warm_up(root / "warm")
        for chunk in range(10 * count):
            if report["cases"] >= count:
                break
            seed(1_000_003 * start + chunk)(options(given(words=any_words.words)(check)))()
    (root / "report.json").write_text(json.dumps({"rows": [report], "failures": failures}))


if __name__ == "__main__":
    main()
