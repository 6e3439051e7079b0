"""``python -m weighbridge`` is the command line."""

import sys

from weighbridge.cli import main

sys.exit(main())
