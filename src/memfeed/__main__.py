"""The command line as ``python -m memfeed``."""

import sys

from memfeed.cli import main

sys.exit(main())
