"""Reference to a version of a model, as ``namespace/name@version`` or as model and version separately; and the name of
the model's training state.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument

TRAINING = "training"
"""The part of a model that contains training states.

It follows the model's name after a colon: ``acme/smol:training``.
"""
_MOST_DIGITS = 20


def training_of(model: str) -> str:
    """Return the name of the part that contains a model's training states: ``acme/smol:training`` for ``acme/smol`` and
    for ``acme/smol:training``.
    """
    return model if is_training(model) else f"{model}:{TRAINING}"


def is_training(model: str) -> bool:
    """Whether a name, or a reference such as ``acme/smol:training@17``, belongs to a model's training states."""
    return model.partition("@")[0].endswith(f":{TRAINING}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a model and one of its versions.

    Attributes:
        model: ``namespace/name``.
        version: a number or a ref; empty if the reference does not name a version.
    """

    model: str
    version: str

    @property
    def number(self) -> int:
        """The version's number. Raises InvalidArgument if the version is a ref or is not named."""
        if (
            not (self.version.isascii() and self.version.isdigit() and len(self.version) <= _MOST_DIGITS)
            or not 0 < int(self.version) < 1 << 64
        ):
            said = (
                f"{self.version[:80]!r} is not a version number"
                if self.version
                else f"no version of {self.model} is named"
            )
            raise InvalidArgument(said, fix=f"name it by its number, like {self.model}@17")
        return int(self.version)

    @staticmethod
    def of(model: str, version: str | int | None = None, default: str = "") -> Reference:
        """Return the reference that a caller names: ``"acme/smol", 17``, ``"acme/smol@17"``, or both, if they agree.

        Args:
            model: with or without ``@version``.
            version: number or ref; None if the caller omitted it.
            default: the version if the caller does not name one.

        Raises:
            InvalidArgument: the two contradict each other, or ``model`` is not MODEL@VERSION.
        """
        if "@" not in model:
            return Reference(model, default if version is None else str(version))
        found = parse_reference(model)
        if version is not None and str(version) != found.version:
            raise InvalidArgument(
                f"{model!r} names version {found.version}, and version {version} was given besides",
                fix="name the version once",
            )
        return found


def parse_reference(text: str, *, need_version: bool = True, by_number: bool = False) -> Reference:
    """Parse ``namespace/name@version`` into a model and a version.

    Only the service knows whether the model and version exist, and whether the name is allowed.

    Args:
        text: text that a user typed.
        need_version: whether the text must name a version.
        by_number: whether the error tells the user to name the version by its number.

    Raises:
        InvalidArgument: the text does not contain ``@`` although a version is needed, contains more than one ``@``, or
            has nothing on one side of it.
    """
    model, at, version = text.partition("@")
    if not at and need_version:
        raise InvalidArgument(
            f"{text!r} names no version",
            fix=f"write its number, like {text}@17"
            if by_number
            else f"write {text}@latest, or a number or another ref",
        )
    if not model or "@" in version or (at and not version):
        raise InvalidArgument(f"{text!r} is not MODEL@VERSION", fix="write it like acme/smol@latest or acme/smol@17")
    return Reference(model, version)
