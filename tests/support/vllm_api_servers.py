"""``vllm serve`` with the arguments of vLLM's API server, which is one process and knows no ``--api-server-count``.

In builds of vLLM that have another name the command itself does not start. Run in vLLM's environment.
"""

from __future__ import annotations

import sys

from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    at = sys.argv.index("--model")
    sys.argv = ["vllm", "serve", sys.argv[at + 1], *sys.argv[1:at], *sys.argv[at + 2 :]]
    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(required=True, dest="subparser")
    [command] = serve.cmd_init()
    command.subparser_init(commands)
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)
