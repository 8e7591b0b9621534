"""``python -m horst.cli`` is ``horst``."""

import sys

from horst.cli import main

if __name__ == "__main__":
    sys.exit(main())
