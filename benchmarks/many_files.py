"""``python -m benchmarks.many_files NBYTES COMMAND ...``: the command line, for models that are laid out in files of so
many bytes.

A model of 0.5 GB has one file, and one of 300 GB has sixty: who writes which of them is measured on a small model cut
like a large one.
"""

from __future__ import annotations

import sys

from weighbridge._cli import main
from weighbridge._formats.safetensors_files import lay_out_files

if __name__ == "__main__":
    lay_out_files.__defaults__ = (int(sys.argv[1]),)
    sys.exit(main(sys.argv[2:]))
