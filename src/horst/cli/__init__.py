"""The command line ``horst``: a table of commands, each a module of this folder that is loaded when it is asked for.

A command's module holds ``Options``, a frozen dataclass whose fields tyro turns into options and whose docstrings are
the help text, and ``main(options)``, which prints, and returns an exit code or nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from horst import __version__
from horst.cli.output import nearest
from horst.extras import load_extra

COMMANDS = {
    "quickstart": "train and prune two small models with AdamW and HORST, in minutes, on any machine",
    "list": "recipes, optimizers, sparsity and pruning methods",
    "run": "run a recipe: a table or figure of the paper, or a training of your own",
    "data": "turn text into token files",
    "prune": "prune a trained model in one shot",
    "eval": "perplexity or accuracy of a model",
    "export": "write a pruned model so that it pays: sparse safetensors, Hugging Face, ONNX",
    "sweep": "run a recipe over seeds, optimizers and sparsities",
    "report": "one HTML page from result files",
    "bench": "time the optimizer, pruning and export on this machine",
    "doctor": "versions, device, and which backends work here and why not",
}
USAGE = 2  # the exit code of every mistake in the call
INTERRUPTED = 130

# Mistakes of the caller's, or of the machine: one line without a traceback. Anything else is a bug and shows one.
EXPECTED = (OSError, ValueError, LookupError, ImportError, RuntimeError, TypeError, ArithmeticError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 2 for a mistake in the call, 1 for a failed check, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _show_help()
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        sys.stdout.write(f"horst {__version__}\n")
        return 0
    if name == "--completion":
        return _print_completion(rest)
    if name not in COMMANDS:
        return _mistake(f"there is no command {name!r}.{nearest(name, COMMANDS)} See horst --help.")
    try:
        module = importlib.import_module(f"horst.cli.{_module_name(name)}")
        own_parse = getattr(module, "parse", None)
        options = own_parse(rest, f"horst {name}") if own_parse else parse(module.Options, rest, name)
        code = module.main(options)
    except SystemExit as stop:  # from tyro: --help is 0, a mistake 2
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"\nhorst {name}: interrupted.\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `horst list | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else the interpreter complains when it flushes
        return 0
    except EXPECTED as error:
        if os.environ.get("HORST_TRACEBACK"):
            raise
        return _mistake(f"{_one_line(error)}", name)
    return code or 0


def parse(options: Any, arguments: Sequence[str], name: str) -> Any:
    """The command's options from the words after its name."""
    tyro = load_extra("tyro")
    return tyro.cli(
        options,
        args=list(arguments),
        prog=f"horst {name}",
        description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _module_name(command: str) -> str:
    return {"eval": "evaluate", "list": "listing"}.get(command, command)


def _show_help() -> None:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: horst COMMAND [options]",
        "",
        "Train transformers that survive pruning.",
        "",
        *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
        "",
        "horst COMMAND --help shows a command's options; horst --completion bash|zsh|tcsh prints a completion script.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _print_completion(arguments: Sequence[str]) -> int:
    shells = ("bash", "zsh", "tcsh")
    if len(arguments) != 1 or arguments[0] not in shells:
        return _mistake(f"--completion takes one of {', '.join(shells)}, got {' '.join(arguments) or 'nothing'}.")
    tyro = load_extra("tyro")
    commands = {name: importlib.import_module(f"horst.cli.{_module_name(name)}").Options for name in COMMANDS}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="horst", args=["--tyro-print-completion", arguments[0]], config=(tyro.conf.OmitArgPrefixes,)
        )
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = text.strip("'\"")
    return text or type(error).__name__


def _mistake(text: str, name: str | None = None) -> int:
    sys.stderr.write(f"horst{f' {name}' if name else ''}: {text}\n")
    return USAGE
