"""Makes ``recovery_runs``, the small models and runs of these tests, importable from them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
