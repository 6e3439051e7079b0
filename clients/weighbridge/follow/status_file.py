"""File with the status of an engine, for probes and people on its machine.

It exists from the agent's start, even if the service is unreachable.
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
    """Create a function that writes each status to a file as a JSON object. A reader always finds one complete status.

    Args:
        path: path of the file; a temporary file next to it is written first.

    Raises:
        OSError: this call cannot write the file. Later failures are logged, and the next status is written again.
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
