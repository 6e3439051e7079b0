"""Layouts that the ranks of one version have declared.

They are kept until the plan is made, even if the model forgets them earlier.
"""

from __future__ import annotations

from collections.abc import Callable

from weighbridge._core.layouts import Layout
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge.errors import FailedPrecondition
from weighbridge_service.models.registered_model import DeclaredLayout, RegisteredModel


class DeclaredLayouts:
    """Layouts of one version, and those that its model remembers. Thread-safe.

    Args:
        model: remembers the layouts that were declared last, for the next versions.
    """

    def __init__(self, model: RegisteredModel) -> None:
        self._model = model
        self._held: dict[str, DeclaredLayout] = {}

    def knows(self, digest: str) -> bool:
        """Whether a layout was declared. If so, this object keeps it from now on."""
        found = self._held.get(digest) or self._model.declared_layout(digest)
        if found is None:
            return False
        self._held[digest] = found
        return True

    def add(self, space: TensorSpace, layout: Layout) -> None:
        """Add a declared layout. Raises the same errors as `RegisteredModel.add_layout`."""
        self._model.add_layout(space, layout)
        self._held[layout.digest] = (space, layout)

    def find(self, digest: str) -> DeclaredLayout:
        """A declared layout, by its digest.

        Raises:
            FailedPrecondition: the layout was released, and the model does not remember it either.
        """
        found = self._held.get(digest) or self._model.declared_layout(digest)
        if found is None:
            raise FailedPrecondition("the service no longer has a declared layout", fix="push again")
        return found

    def let_go(self, needed: Callable[[str], bool]) -> None:
        """Release all layouts, except those whose digests are still needed. The model may still remember them."""
        for digest in list(self._held):
            if not needed(digest):
                self._held.pop(digest, None)
