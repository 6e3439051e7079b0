"""List of a model's tensors from its registration, if no weight map exists for the model type.

The list may contain 100,000 tensors, and the head is rewritten with each version. So the list is a separate object that
is named by its digest and never changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import MAX_TENSORS, TensorSpec, check_spec
from weighbridge._core.text.counts import counted
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound
from weighbridge_service.plan.casting import ROUTER_BIASES, keeps_dtype
from weighbridge_service.plan.quantised_scales import scales_of
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.document_digests import digest_of
from weighbridge_storage.documents.names import ModelName, tensor_list_key
from weighbridge_storage.stores.objects import ObjectStore

_FORMAT = 1
_NUMBER = re.compile("([0-9]+)")
_NAMED = 20


@dataclass(frozen=True)
class ListedTensors:
    """Tensors of a model.

    Attributes:
        specs: the tensors, sorted by name, with numbers in names sorted as numbers. The order does not depend on the
            order in which the caller lists them.
    """

    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(found: Iterable[TensorSpec]) -> ListedTensors:
        """The list of these tensors.

        Raises:
            InvalidArgument: the list is empty, no tensor has elements, or two tensors have the same name.
        """
        specs = sorted(found, key=lambda spec: _order(spec.name))
        if not any(spec.nbytes for spec in specs):
            raise InvalidArgument("a model has at least one tensor with elements")
        twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
        if twice:
            raise InvalidArgument(
                counted(len(twice), "tensor is", "tensors are") + " listed more than once",
                details=twice[:_NAMED],
            )
        return ListedTensors(tuple(specs))

    @staticmethod
    def decode(data: bytes, where: str) -> ListedTensors:
        """The list in a stored document.

        Raises DataLoss if it is damaged, FailedPrecondition if another release wrote it.
        """
        document = strict_json.decode(data, where)
        document.check_format(_FORMAT)
        document.required(frozenset())
        rows = document.array("tensors")
        if len(rows) > MAX_TENSORS:
            raise DataLoss(f"{where} lists {len(rows)} tensors, more than {MAX_TENSORS}")
        try:
            return ListedTensors.of(specs_of_rows(rows))
        except (InvalidArgument, LayoutError) as error:
            raise DataLoss(f"{where} is damaged: {error.message}") from error

    @cached_property
    def encoded(self) -> bytes:
        """The list as a document for the store."""
        return strict_json.encode({"format": _FORMAT, "requires": [], "tensors": self.rows})

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the document, as 64 hex digits."""
        return digest_of(self.encoded)

    @property
    def rows(self) -> list[list[object]]:
        """The tensors as JSON: name, dtype, shape."""
        return [[spec.name, spec.dtype.name, list(spec.shape)] for spec in self.specs]

    def cast(self, dtype: DType, *, quantised: bool = False) -> ListedTensors:
        """The same tensors, with floating-point tensors in another dtype.

        fp8 tensors and scales, which belong to quantised weights, keep their dtype; biases of routers are not narrowed.
        """
        scales = scales_of(self.specs, quantised=quantised)

        def stays(spec: TensorSpec) -> bool:
            kept = keeps_dtype(spec, dtype, ROUTER_BIASES)
            return kept or not spec.dtype.is_float or spec.name in scales

        return ListedTensors(tuple(spec if stays(spec) else replace(spec, dtype=dtype) for spec in self.specs))


def specs_of_rows(rows: Sequence[object]) -> list[TensorSpec]:
    """Tensors from JSON. Raises InvalidArgument or LayoutError if a row is not a valid tensor."""
    specs = []
    for row in rows:
        match row:
            case [str(name), str(dtype), list(shape)] if all(type(n) is int for n in shape):
                spec = TensorSpec(name, dtypes.from_safetensors(dtype), tuple(shape))
                check_spec(spec)
                specs.append(spec)
            case _:
                raise InvalidArgument(f"{repr(row)[:80]} is not a tensor's name, dtype and shape")
    return specs


def read_tensor_list(store: ObjectStore, model: ModelName, digest: str, first_version: int) -> ListedTensors:
    """Read a registered list; ``first_version`` as for `files_id_of`. Raises DataLoss if it is missing or damaged."""
    key = tensor_list_key(model, digest, first_version)
    try:
        data, _ = store.get(key)
    except NotFound as error:
        raise DataLoss(
            f"{key}, the list of the model's tensors, is missing", fix="run `weighbridge fsck STORE --repair`"
        ) from error
    if digest_of(data) != digest:
        raise DataLoss(f"{key} does not agree with the digest in its name")
    return ListedTensors.decode(data, key)


def has_tensor_list(store: ObjectStore, model: ModelName, listed: ListedTensors, first_version: int) -> bool:
    """Whether a list is stored; its content is not read."""
    try:
        return store.size(tensor_list_key(model, listed.digest, first_version)) == len(listed.encoded)
    except NotFound:
        return False


def write_tensor_list(store: ObjectStore, model: ModelName, listed: ListedTensors, first_version: int) -> None:
    """Store a list, before the head names it."""
    store.put(tensor_list_key(model, listed.digest, first_version), listed.encoded, mode="overwrite")


def _order(name: str) -> tuple[list[str | int], str]:
    parts = _NUMBER.split(name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name
