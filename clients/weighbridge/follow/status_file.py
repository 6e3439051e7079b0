"""File with the status of an engine, for probes and people on its machine: there from the agent's start, whether the service can be
reached or not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from weighbridge._core.engines.status import AgentStatus

log = logging.getLogger(__name__)


def status_file(path: Path) -> Callable[[AgentStatus], None]:
    """Make a function that writes each status to a file, as JSON by the names of its fields. A reader always finds one whole status.

    Args:
        path: of the file; another one beside it is written first.

    Raises:
        OSError: this call cannot write the file. Later failures are logged, and the next status is tried again.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("")
    beside.unlink()
    told = False

    def write(status: AgentStatus) -> None:
        nonlocal told
        try:
            beside.write_text(json.dumps(status.to_json(), indent=2) + "\n")
            beside.replace(path)
            told = False
        except OSError as error:
            if not told:
                log.warning("the status file %s cannot be written: %s", path, error.strerror)
            told = True

    return write
