"""Reference to a version of a model: ``namespace/name@version``, or model and version apart; and the name of its training state."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument

TRAINING = "training"
"""The part of a model that holds training states, as its name has it behind a colon: ``acme/smol:training``."""
_MOST_DIGITS = 20


def training_of(model: str) -> str:
    """The name of the part that holds a model's training states: ``acme/smol:training`` of ``acme/smol``, and of itself."""
    return model if is_training(model) else f"{model}:{TRAINING}"


def is_training(model: str) -> bool:
    """Whether a name, or a reference such as ``acme/smol:training@17``, is that of a model's training states."""
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
        """What a caller has named: ``"acme/smol", 17``, ``"acme/smol@17"``, or both, if they agree.

        Args:
            model: with or without ``@version``.
            version: None if it was left out.
            default: the version if none is named.

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

    Whether there are such a model and version, and whether the name is allowed, is for the service to say.

    Args:
        text: what was typed.
        need_version: whether a version must be named.
        by_number: whether it is advised to name it by its number.

    Raises:
        InvalidArgument: there is no ``@`` although a version is needed, more than one, or nothing on one side of it.
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
