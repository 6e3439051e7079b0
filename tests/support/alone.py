"""Tests that run in a process of their own.

A test that asks for the descriptors, threads, memory or logs of its process would otherwise judge what other tests have
left running in it: clients that reconnect, pools that shrink, garbage. Where it can be said which of them are the
test's own, that is cheaper: records of one logger, `new_threads.NewThreads`, files in one folder.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.support.disk import disk_without_wait
from tests.support.forked import forking


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own, which has imported torch and the service, and nothing of other tests.

    Its arguments have to be picklable: ``tmp_path`` and parameters are, a running service is not. The process has no
    fixtures of pytest, ``autouse`` ones included; flushes of files return at once here, too.

    Example:
        >>> @alone
        ... def test_closed_stores_hold_no_files(tmp_path: Path) -> None: ...
    """

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        receiver, sender = forking().Pipe(duplex=False)
        process = forking().Process(target=_run, args=(test.__module__, test.__qualname__, arguments, sender))
        process.start()
        sender.close()
        try:
            said: str | None = receiver.recv()
        except EOFError:
            process.join()
            said = f"its process has ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
            receiver.close()
        if said is not None:
            pytest.fail(said, pytrace=False)

    return run


def _run(module: str, name: str, arguments: Mapping[str, Any], sender: Connection) -> None:
    try:
        with disk_without_wait():
            getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    except BaseException:
        sender.send(traceback.format_exc())
    else:
        sender.send(None)
