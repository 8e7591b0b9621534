"""The command line ``horst``: a table of commands, each a module of this folder that is loaded when it is asked for.

A command's module holds ``Options``, a frozen dataclass whose fields tyro turns into options and whose docstrings are
the help text, and ``main(options)``, which prints, and returns an exit code or nothing. A module may have
``parse(arguments, prog)`` of its own, where the options depend on the words, and ``completion()``, a type that stands
for them in a completion script.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from horst import __version__
from horst.cli.output import nearest, write
from horst.cli.parsing import config, parse
from horst.cli.progress import logging_to_stderr
from horst.extras import load_extra

COMMANDS = {
    "quickstart": "train and prune small models with AdamW and HORST, in minutes, on any machine",
    "list": "recipes, optimizers, sparsity and pruning methods, exports",
    "run": "run a recipe: a table or figure of the paper, or a training of your own",
    "data": "turn text into token files",
    "prune": "prune a trained model in one shot",
    "sparsify": "prune a model and train it further, with the dense model as its teacher",
    "eval": "perplexity or accuracy of a model",
    "export": "save a model, pruned or not, in fewer bytes or for another tool: sparse or int8 safetensors, ONNX",
    "sweep": "run a recipe over seeds, optimizers and sparsities",
    "report": "one HTML page from result files",
    "bench": "time the optimizer, pruning and export on this machine",
    "doctor": "versions, device, and which backends work here and why not",
}
USAGE = 2  # the exit code of every mistake in the call
INTERRUPTED = 130
SHELLS = ("bash", "zsh", "fish")

# Mistakes of the caller's, or of the machine: one line without a traceback. Anything else is a bug and shows one.
EXPECTED = (OSError, ValueError, LookupError, ImportError, RuntimeError, TypeError, ArithmeticError, MemoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 2 for a mistake in the call, 1 for a failed check, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with logging_to_stderr():
            return _run(arguments)
    except SystemExit as stop:  # help was asked for; or a run was told to stop, has saved, and says where
        if type(stop) is not SystemExit:
            write(f"{_name(arguments)}: {stop}", sys.stderr)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else USAGE
    except KeyboardInterrupt:
        write(f"\n{_name(arguments)}: interrupted.", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `horst list | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else the interpreter complains when it flushes
        return 0
    except EXPECTED as error:
        if os.environ.get("HORST_TRACEBACK"):
            raise
        write(f"{_name(arguments)}: {_one_line(error)}", sys.stderr)
        return USAGE


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        return _show_help()
    if name in ("-V", "--version"):
        write(f"horst {__version__}")
        return 0
    if name == "--completion":
        return _print_completion(rest)
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}.{nearest(name, COMMANDS)} See horst --help.")
    module = _module(name)
    prog = f"horst {name}"
    if hasattr(module, "parse"):
        options = module.parse(rest, prog)
    else:
        about = COMMANDS[name]
        options = parse(module.Options, rest, prog=prog, description=f"{about[0].upper()}{about[1:]}.")
    return module.main(options) or 0


def _module(command: str) -> Any:
    # Two commands have the names of built-in functions, which a module of ours should not.
    return importlib.import_module("horst.cli." + {"eval": "evaluate", "list": "listing"}.get(command, command))


def _name(arguments: Sequence[str]) -> str:
    return f"horst {arguments[0]}" if arguments and arguments[0] in COMMANDS else "horst"


def _show_help() -> int:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: horst COMMAND [options]",
        "",
        "Train transformers that survive pruning.",
        "",
        *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
        "",
        "horst COMMAND --help shows a command's options; horst --completion bash|zsh|fish prints a completion script.",
        "HORST_TRACEBACK=1 in the environment shows where an error comes from.",
    ]
    write("\n".join(lines))
    return 0


def _print_completion(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise ValueError(f"--completion takes one of {', '.join(SHELLS)}, got {' '.join(arguments) or 'nothing'}.")
    commands = {}
    for name in COMMANDS:
        module = _module(name)
        commands[name] = module.completion() if hasattr(module, "completion") else module.Options
    load_extra("tyro").extras.subcommand_cli_from_dict(
        commands, prog="horst", args=["--tyro-print-completion", arguments[0]], config=config()
    )
    return 0


def _one_line(error: BaseException) -> str:
    # A KeyError's own text is the quoted key.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
