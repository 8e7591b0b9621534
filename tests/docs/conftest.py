"""The tools that write generated tables into the docs are scripts: their folder is put on the path."""

import pathlib
import sys

TOOLS = pathlib.Path(__file__).parents[2] / "docs/build_tools"
sys.path.append(str(TOOLS))  # at the end, since a module there is named as one of Python's is
