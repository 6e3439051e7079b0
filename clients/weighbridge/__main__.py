"""``python -m weighbridge`` is the command line."""

from weighbridge.cli import main

main()
