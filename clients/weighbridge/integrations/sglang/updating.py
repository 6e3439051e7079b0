"""Update of a running engine to a version, by all of its ranks or by none.

SGLang sends each request to every rank. They tell each other how it went before the first parameter is touched.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.sglang.agreeing import everybody, parallel, together
from weighbridge.integrations.sglang.bringing import Incoming, Rank
from weighbridge.integrations.sglang.wanted import Wanted, label

_UPDATES = "_weighbridge_updates"


def updates_of(model: torch.nn.Module) -> Updates:
    """The updates of a model of this process."""
    if not hasattr(model, _UPDATES):
        setattr(model, _UPDATES, Updates(model))
    return cast("Updates", getattr(model, _UPDATES))


class Updates:
    """Takes one rank's model from version to version. Every tensor-parallel rank calls the same methods in the same order.

    Attributes:
        rank: the model, and what is known of it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.rank = Rank(model)
        self._incoming: Incoming | None = None
        self._thread: threading.Thread | None = None
        self._error = ""

    def prepare(self, wanted: Wanted) -> None:
        """Begin to bring a version to this machine while the engine serves; `state` tells how it goes.

        Raises:
            FailedPrecondition: another one is on its way, or a rank cannot take this one.
        """
        number = self._number(wanted)
        busy = any(everybody(parallel().tp_group, self._busy))
        if busy and self._is(wanted.model, number):
            return
        self._refuse_if(busy)
        self._drop()
        self._incoming = together(parallel().tp_group, lambda: self.rank.plan(wanted, number))
        self._thread = threading.Thread(target=self._bring, args=(self._incoming,), daemon=True)
        self._thread.start()

    def apply(self, wanted: Wanted) -> None:
        """Put a version into the parameters; if it has not been prepared, it is brought now.

        Raises:
            FailedPrecondition: a rank cannot take it, or its bytes have not come; nothing has been touched.
        """
        number = self._number(wanted)
        try:
            incoming = together(parallel().tp_group, lambda: self._brought(wanted, number))
        except FailedPrecondition:
            self._drop()
            raise
        self._incoming = None
        self.rank.put(incoming)

    def discard(self) -> None:
        """Forget what has been brought.

        Raises:
            FailedPrecondition: it is on its way; to wait for it would hold the engine up.
        """
        self._refuse_if(any(everybody(parallel().tp_group, self._busy)))
        self._drop()

    def state(self) -> dict[str, Any]:
        """How it stands with this rank, as JSON values.

        ``served``, ``preparing`` and ``prepared`` are versions as ``namespace/name@number``, or empty; ``error`` says why the last one
        could not be prepared, ``broken`` why the parameters are of no version.
        """
        served, incoming = self.rank.served, self._incoming
        coming = label(incoming.version.model, incoming.version.number) if incoming is not None else ""
        return {
            "served": label(served.model, served.number) if served is not None else "",
            "preparing": coming if self._busy else "",
            "prepared": "" if self._busy or self._error else coming,
            "nbytes": incoming.nbytes if incoming is not None else 0,
            "error": "" if self._busy else self._error,
            "broken": self.rank.broken,
        }

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _refuse_if(self, busy: bool) -> None:
        if busy and self._incoming is not None:
            raise FailedPrecondition(
                f"{self._incoming.version} is on its way to this engine", fix="wait until it is there"
            )

    def _is(self, model: str, number: int) -> bool:
        version = self._incoming.version if self._incoming is not None else None
        return version is not None and (version.model, version.number) == (model, number)

    def _number(self, wanted: Wanted) -> int:
        """Which version is meant; of a ref that moves meanwhile, all ranks take what the first one found."""
        here = parallel()
        if here.pp_size > 1:
            raise FailedPrecondition(
                "pipeline stages of SGLang cannot take over a version together",
                fix="start the engine without --pp-size, or start it again from the new version",
            )
        return everybody(here.tp_group, together(here.tp_group, lambda: self.rank.number(wanted)))[0]

    def _brought(self, wanted: Wanted, number: int) -> Incoming:
        if self._thread is not None:
            self._thread.join()
        if self._error or not self._is(wanted.model, number):
            self._drop()
            self._incoming = self.rank.plan(wanted, number)
            self._incoming.bring(pin=self.rank.on_gpu)
        incoming = cast("Incoming", self._incoming)
        incoming.check(self.rank.model)
        return incoming

    def _bring(self, incoming: Incoming) -> None:
        try:
            incoming.bring(pin=self.rank.on_gpu)
        except Exception as error:
            self._error = str(error) or repr(error)

    def _drop(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._incoming is not None:
            self._incoming.close()
        self._thread, self._incoming, self._error = None, None, ""
