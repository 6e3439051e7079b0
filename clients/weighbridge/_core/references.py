"""Reference to a version of a model: ``namespace/name@version``, or model and version separately; and the name of its training state."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument

TRAINING = "training"
"""The part of a model that holds training states; it follows the model's name after a colon: ``acme/smol:training``."""
_MOST_DIGITS = 20


def training_of(model: str) -> str:
    """The name of the part that holds a model's training states: ``acme/smol:training`` for ``acme/smol``, and for itself."""
    return model if is_training(model) else f"{model}:{TRAINING}"


def is_training(model: str) -> bool:
    """Whether a name, or a reference such as ``acme/smol:training@17``, belongs to a model's training states."""
    return model.partition("@")[0].endswith(f":{TRAINING}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model, and which version of it.

    Attributes:
        model: ``namespace/name``.
        version: a number or a ref; empty if none was named.
    """

    model: str
    version: str

    @property
    def number(self) -> int:
        """The version's number. Raises InvalidArgument if it is a ref, or none is named."""
        if (
            not (self.version.isascii() and self.version.isdigit() and len(self.version) <= _MOST_DIGITS)
            or not 0 < int(self.version) < 1 << 64
        ):
            said = (
                f"{self.version[:80]!r} is no version number"
                if self.version
                else f"no version of {self.model} is named"
            )
            raise InvalidArgument(said, fix=f"name it by its number, like {self.model}@17")
        return int(self.version)

    @staticmethod
    def of(model: str, version: str | int | None = None, default: str = "") -> Reference:
        """The reference that a caller names: ``"acme/smol", 17``, ``"acme/smol@17"``, or both, if they agree.

        Args:
            model: with or without ``@version``.
            version: number or ref; None if the caller left it out.
            default: the version if the caller names none.

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
    """The model and version of ``namespace/name@version``.

    Only the service knows whether the model and version exist, and whether the name is allowed.

    Args:
        text: text that a user typed.
        need_version: whether the text must name a version.
        by_number: whether the error advises to name the version by its number.

    Raises:
        InvalidArgument: the text has no ``@`` although a version is needed, more than one ``@``, or nothing on one side of it.
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
        raise InvalidArgument(
            f"{text!r} is not MODEL@VERSION", fix="write it like acme/smol@latest or acme/smol@17"
        )
    return Reference(model, version)
