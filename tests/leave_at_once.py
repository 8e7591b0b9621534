"""Runs a script, or a module, as ``python`` does, but without the interpreter's own exit.

Gloo's threads abort that now and then, even of a script without horst.

    torchrun --nproc-per-node 2 leave_at_once.py SCRIPT|MODULE [WORD...]
"""

import os
import runpy
import sys


def main() -> None:
    code: object = 0
    del sys.argv[0]
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
