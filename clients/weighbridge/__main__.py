"""``python -m weighbridge`` is the command line."""

import sys

from weighbridge._cli import main

sys.exit(main())
