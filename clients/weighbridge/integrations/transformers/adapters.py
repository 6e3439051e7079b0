"""Adapter from the service on a transformers model: on the base version that the adapter names, or on an existing
model.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from weighbridge._clients.client import manifest_of
from weighbridge._clients.engine import EngineClient
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import Version
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound


@dataclass
class AttachedAdapter:
    """An adapter that was attached to a model.

    Attributes:
        client: of the service.
        version: version of the adapter that the model has.
        base: version of the base model, if it came from the service.
    """

    client: EngineClient
    version: Version
    base: BaseVersion | None

    def update(self, model: Any, adapter_name: str, version: str | int) -> Version:
        """Fill the adapter in place from another version on the same base.

        Raises:
            FailedPrecondition: that version has a different base; names both.
            WeighbridgeError: as for `Pull.into`.
        """
        pull = self.client.pull(self.version.model, version)
        asked, ours = (
            BaseVersion.of(pull.version.metadata),
            self.base or BaseVersion.of(self.version.metadata),
        )
        if asked is None or ours is None or (asked.model, asked.number) != (ours.model, ours.number):
            raise FailedPrecondition(
                f"{pull.version.model}@{pull.version.number} is on {asked}, and this model is {ours}",
                fix="load it again, with its base: from_weighbridge",
            )
        pull.into(model, adapter_name=adapter_name)
        self.version = pull.version
        return pull.version


def check_base(client: EngineClient, version: Version, base: BaseVersion) -> None:
    """Refuse an adapter if its base no longer exists, or if its name now refers to a different version.

    Raises:
        NotFound: the base was deleted, or its model was deleted and registered again under the same name.
    """
    named = f"{version.model}@{version.number}"
    fix = (
        "push the adapter on a version that exists, or attach it to a model that you have: "
        f"from_weighbridge({named!r}, base=model)"
    )
    try:
        found = client.version(base.model, base.number)
        # a deleted version stays readable until its objects are removed
        there = found.state.stored and not found.error
        digest = manifest_of(client, base.model, base.number).digest if there else ""
    except NotFound:
        there, digest = False, ""
    if not there:
        raise NotFound(f"{named} is on {base}, which was deleted", fix=fix)
    if base.digest and digest != base.digest:
        raise NotFound(
            (
                f"{named} is on {base} with the digest {base.digest}, but the version that has "
                f"this name now has the digest {digest}"
            ),
            fix=fix,
        )


def check_attachable(base: Any, adapter_name: str) -> None:
    """Refuse a model to which an adapter cannot be attached. Raises InvalidArgument."""
    import torch
    from peft import PeftModel

    if not isinstance(base, torch.nn.Module):
        raise InvalidArgument(f"base is a {type(base).__name__}", fix="pass a model of transformers or peft")
    if isinstance(base, PeftModel) and adapter_name in base.peft_config:
        raise InvalidArgument(
            f"the model has an adapter {adapter_name!r} already",
            fix=(
                "name another adapter_name; to fill the existing one again: "
                "client.pull(name).into(model, adapter_name=...)"
            ),
        )


def attached(client: EngineClient, version: Version, base: Any, adapter_name: str) -> Any:
    """A peft model with the adapter of a version.

    peft itself loads the adapter from the version's folder. Returns ``base`` if that is already a peft model.
    """
    from peft import PeftModel

    with tempfile.TemporaryDirectory(prefix="weighbridge-") as made:
        folder = f"{made}/adapter"
        client.export(version.model, version.number, folder)
        if isinstance(base, PeftModel):
            base.load_adapter(folder, adapter_name)
            base.set_adapter(adapter_name)
            return base
        return PeftModel.from_pretrained(base, folder, adapter_name=adapter_name)
