"""Makes ``sparse_methods``, the table of methods that the battery runs through, importable from the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
