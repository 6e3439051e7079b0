"""Page of the gRPC contract: services, calls, messages and enums, with the comments that the .proto files have."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTOS = Path(__file__).parents[2] / "protos"
_PACKAGE = "weighbridge.v1"
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # numbers of fields of FileDescriptorProto
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4  # of DescriptorProto
_VALUES, _METHODS = 2, 2  # of EnumDescriptorProto and ServiceDescriptorProto
_TYPES = FieldDescriptorProto.Type

Path_ = tuple[int, ...]


def page() -> str:
    """The page, as Markdown."""
    described = _compiled(PROTOS)
    ours = [each for each in described.file if each.package == _PACKAGE]
    lines = [
        "# gRPC contract",
        "",
        (
            f"The package `{_PACKAGE}`, as `protos/weighbridge/v1` defines it. What each call asks "
            "of its caller's rights: [access](../access.md#identities-and-scopes)."
        ),
        "The service answers `grpc.reflection` and `grpc.health`, too.",
    ]
    files_ = [_File(each) for each in ours]
    for each in files_:
        lines += each.services()
    for each in files_:
        lines += ["", f"## {Path(each.described.name).name}", "", each.told(()) or each.head(), *each.types()]
    return "\n".join(lines) + "\n"


class _File:
    """One .proto file with its comments."""

    def __init__(self, described: FileDescriptorProto) -> None:
        self.described = described
        self._comments = {
            tuple(each.path): (
                each.leading_comments or each.trailing_comments,
                each.leading_detached_comments,
            )
            for each in described.source_code_info.location
        }

    def told(self, path: Path_) -> str:
        """The comment of what a path leads to, as one paragraph or more."""
        text, _ = self._comments.get(path, ("", ()))
        return "\n".join(line.strip() for line in text.strip().splitlines())

    def head(self) -> str:
        """The comment at the file's top: that of its first line."""
        return self.told((12,))

    def services(self) -> Iterator[str]:
        """The file's services, a table of calls for each."""
        for number, service in enumerate(self.described.service):
            path = (_SERVICES, number)
            yield from ("", f"## {service.name}", "", self.told(path) or self.head(), "")
            yield from self._methods(service, path)

    def types(self) -> Iterator[str]:
        """The file's messages and enums."""
        for number, message in enumerate(self.described.message_type):
            yield from self._message(message, message.name, (_MESSAGES, number))
        for number, enum in enumerate(self.described.enum_type):
            yield from self._enum(enum, enum.name, (_ENUMS, number))

    def _methods(self, service: ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield from ("| call | request | response | |", "|---|---|---|---|")
        for number, method in enumerate(service.method):
            asked = _streamed(method.client_streaming, method.input_type)
            answered = _streamed(method.server_streaming, method.output_type)
            yield f"| `{method.name}` | {asked} | {answered} | {_cell(self.told((*path, _METHODS, number)))} |"

    def _message(self, message: DescriptorProto, name: str, path: Path_) -> Iterator[str]:
        yield from _headed(name, self.told(path))
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
        for number, field in enumerate(message.field):
            in_oneof = field.HasField("oneof_index") and not field.proto3_optional
            choice = f"one of `{message.oneof_decl[field.oneof_index].name}`. " if in_oneof else ""
            told = choice + _cell(self.told((*path, _FIELDS, number)))
            yield f"| `{field.name}` = {field.number} | {_kind(field, message)} | {told} |"
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, f"{name}.{nested.name}", (*path, _NESTED, number))
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUMS, number))

    def _enum(self, enum: EnumDescriptorProto, name: str, path: Path_) -> Iterator[str]:
        yield from _headed(name, self.told(path))
        yield from ("| value | |", "|---|---|")
        for number, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {_cell(self.told((*path, _VALUES, number)))} |"


def _headed(name: str, told: str) -> Sequence[str]:
    return ("", f"### {name} {{ #{name.lower().replace('.', '-')} }}", "", *((told, "") if told else ()))


def _streamed(streaming: bool, type_name: str) -> str:
    return f"{'stream of ' if streaming else ''}{_linked(type_name)}"


def _linked(type_name: str) -> str:
    """A message's or enum's name, with a link if it is the contract's own."""
    name = type_name.removeprefix(f".{_PACKAGE}.")
    if name == type_name:
        return f"`{type_name.removeprefix('.')}`"
    return f"[`{name}`](#{name.lower().replace('.', '-')})"


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_kind(each, entry) for each in entry.field)
        return f"map of {key} to {value}"
    name = _linked(field.type_name) if field.type_name else f"`{_TYPES.Name(field.type).removeprefix('TYPE_').lower()}`"
    if field.label == FieldDescriptorProto.Label.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _compiled(protos: Path) -> FileDescriptorSet:
    sources = sorted(str(path.relative_to(protos)) for path in (protos / _PACKAGE.replace(".", "/")).glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "contract.binpb")
        options = (f"--descriptor_set_out={out}", "--include_source_info")
        where = (f"--proto_path={protos}", f"--proto_path={files('grpc_tools') / '_proto'}")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *where, *options, *sources], check=True)
        return FileDescriptorSet.FromString(out.read_bytes())
