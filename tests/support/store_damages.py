"""Random damage to stores in folders: what disks, people and other programs do to one, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.heads import text_of, with_digest

Damage: TypeAlias = Callable[[random.Random, Path], str]
"""Spoils something below a folder, and says what."""

EVIL_TEXTS = (
    "", ".", "..", "../../escape", "a/b", "/etc/passwd", "a\0b", "a\nb", "\x7f", "-x", ".hidden", "x" * 300, "é" * 100, "\ud800",
    "999999999999", "latest", "live", "weighbridge.json", "nested/../../x", "0" * 64,
)  # fmt: skip
EVIL_NUMBERS = (
    -1, 0, 1, 2, 63, 64, 10**12 - 1, 10**12, 2**63 - 1, 2**63, 10**400, 1.5, 1e308, -0.0, True, False,
)  # fmt: skip
EVIL_NAMES = (
    b"plain.bin", b"a\nb", b"\xff\xfe", b"a\\b", b"...", b".hidden", b"-x", b" ", b"x" * 255, "é".encode(), b"a\x7fb", b"weighbridge.json",
    b"model.safetensors", b"head.json",
)  # fmt: skip


def files_below(folder: Path) -> list[Path]:
    """All files and links below a folder that belong to the store, in order."""
    return sorted(
        path
        for path in folder.rglob("*")
        if not path.relative_to(folder).parts[0].startswith(".") and (path.is_symlink() or path.is_file())
    )


def snapshot(folder: Path) -> dict[str, object]:
    """Everything below a folder but what a store keeps for itself: contents, targets of links, and which are
    folders.
    """
    found: dict[str, object] = {}
    for place, folders, files in os.walk(os.fsencode(folder)):
        relative = os.path.relpath(place, os.fsencode(folder))
        if relative == b".":
            folders[:] = [name for name in folders if not name.startswith(b".")]
        for name in (*folders, *files):
            path = os.path.join(place, name)
            key = os.fsdecode(os.path.relpath(path, os.fsencode(folder)))
            if os.path.islink(path):
                found[key] = ("link", os.readlink(path))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    found[key] = file.read()
            elif not os.path.isdir(path):
                found[key] = "special"
    return found


def spoil(randomness: random.Random, folder: Path) -> str:
    """Do one random damage to what lies below a folder; says which."""
    (damage,) = randomness.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return damage(randomness, folder)


def take_away(randomness: random.Random, folder: Path) -> str:
    """Remove an object or a folder; says which."""
    return randomness.choice((_remove, _remove, _remove_folder))(randomness, folder)


def write(path: Path, content: bytes) -> None:
    """Write a file that shares its bytes with no other one."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _some_file(randomness: random.Random, folder: Path) -> Path:
    """A file; heads, nodes of histories and manifests as often as all others together."""
    files = files_below(folder)
    documents = [path for path in files if path.suffix == ".json" and path.name != "config.json"]
    return randomness.choice(documents if documents and randomness.random() < 0.5 else files)


def _named(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


def _flip(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    content = bytearray(_content(path))
    places = [randomness.randrange(len(content)) for _ in range(randomness.choice((1, 1, 1, 4)))] if content else []
    for place in places:
        content[place] ^= 1 << randomness.randrange(8)
    write(path, bytes(content))
    return f"flip {places} of {_named(path, folder)}"


def _cut(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    content = _content(path)
    kept = randomness.choice((0, 1, len(content) // 2, max(len(content) - 1, 0)))
    write(path, content[:kept])
    return f"cut {_named(path, folder)} to {kept}"


def _extend(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    more = randomness.choice((b"\0", b"\n", b"}", randomness.randbytes(40)))
    write(path, _content(path) + more)
    return f"extend {_named(path, folder)} by {more!r}"


def _remove(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    path.unlink()
    return f"remove {_named(path, folder)}"


def _remove_folder(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder).parent
    if path == folder:
        return "nothing"
    shutil.rmtree(path)
    return f"remove the folder {_named(path, folder)}"


def _replace_by_folder(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    path.unlink()
    path.mkdir()
    if randomness.random() < 0.5:
        (path / "x").write_bytes(b"x")
    return f"a folder in the place of {_named(path, folder)}"


def _replace_by_link(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    moved = folder / f".moved-{randomness.getrandbits(32):08x}"
    what = randomness.choice(("its own content", "nothing", "itself", "its folder's content"))
    if what == "its folder's content":
        path = path.parent
        if path in (folder, folder / "models"):
            return "nothing"
    os.rename(path, moved)
    path.symlink_to({"nothing": Path("/nowhere"), "itself": path}.get(what, moved))
    return f"a link to {what} in the place of {_named(path, folder)}"


def _replace_by_pipe(randomness: random.Random, folder: Path) -> str:
    path = _some_file(randomness, folder)
    path.unlink()
    os.mkfifo(path)
    return f"a pipe in the place of {_named(path, folder)}"


def _copy_over(randomness: random.Random, folder: Path) -> str:
    source, target = _some_file(randomness, folder), _some_file(randomness, folder)
    if source != target:
        write(target, _content(source))
    return f"{_named(source, folder)} over {_named(target, folder)}"


def _stray(randomness: random.Random, folder: Path) -> str:
    """Write an object that Weighbridge never writes."""
    models = sorted(path.parent for path in folder.rglob("head.json")) or [folder]
    place = randomness.choice((
        randomness.choice(models), randomness.choice(models) / "versions", randomness.choice(models) / "history",
        *(randomness.choice(models) / f"{kind}/{number:012d}" for kind in ("versions", "incoming", "leases")
          for number in (randomness.choice((1, 4, 40, 1000, 10**9, 10**12 - 1)),)),
        randomness.choice(models) / "versions/000000000000", folder / "models", folder,
        randomness.choice(models) / "versions" / os.fsdecode(randomness.choice(EVIL_NAMES)),
    ))  # fmt: skip
    name = os.fsdecode(randomness.choice(EVIL_NAMES))
    if randomness.random() < 0.3:
        name = f"{randomness.choice((5, 10**15, 10**18, 10**19 - 1)):016d}-{'a' * 32}.json"
    if randomness.random() < 0.1:
        place = place.joinpath(*["d"] * 600)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not (place / name).exists():
            (place / name).write_bytes(randomness.choice((b"", b"{}", b"x" * 100)))
    except OSError as error:
        return f"no stray: {error.strerror}"
    return f"stray {str(place.relative_to(folder))[:80]!r}/{name!r}"


def _copy_version(randomness: random.Random, folder: Path) -> str:
    """A version's folder under another number, as it is or renamed in its manifest."""
    manifests = [path for path in files_below(folder) if path.name == "weighbridge.json"]
    if not manifests:
        return "nothing"
    source = randomness.choice(manifests).parent
    number = randomness.choice((4, 9, 70, 999, 10**12 - 1))
    target = source.parent / f"{number:012d}"
    if target.exists():
        return "nothing"
    shutil.copytree(source, target, symlinks=True, ignore=_pipes)
    if randomness.random() < 0.7:
        try:
            document = json.loads(_content(target / "weighbridge.json"))
            write(target / "weighbridge.json", text_of({**document, "version": number}))
        except (ValueError, TypeError):
            pass
    return f"copy {_named(source, folder)} to {number}"


def _pipes(place: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(place, name).is_fifo()]


def _edit_document(randomness: random.Random, folder: Path) -> str:
    documents = [path for path in files_below(folder) if path.suffix == ".json"]
    if not documents:
        return "nothing"
    heads = [path for path in documents if path.name == "head.json" or path.parent.name == "history"]
    path = randomness.choice(heads if heads and randomness.random() < 0.5 else documents)
    try:
        document = json.loads(_content(path))
    except (ValueError, RecursionError):
        return "nothing"
    places = list(_places(document))
    if not places:
        return "nothing"
    holder, key = randomness.choice(places)
    how = randomness.choice(("set", "set", "delete", "add", "rename", "double"))
    value = _evil_value(randomness, holder[key])
    if how == "set":
        holder[key] = value
    elif how == "delete":
        del holder[key]
    elif isinstance(holder, list):
        holder.append(holder[key])
    elif how == "rename":
        holder[randomness.choice(EVIL_TEXTS)] = holder.pop(key)
    else:
        holder[randomness.choice(("requires", "format", "future", "version", *EVIL_TEXTS))] = value
    signs = isinstance(document, dict) and "digest" in document and randomness.random() < 0.5
    if signs:
        del document["digest"]
    text = json.dumps(document)
    if how == "double" and text.startswith("{") and len(text) > 2:
        text = '{"format": 3, ' + text[1:]
    content = text.encode(errors="surrogatepass")
    if signs:
        content = with_digest(content)
    write(path, content)
    signed = ", with a right digest" if signs else ""
    return f"{how} {key!r} = {str(value)[:60]!r} in {_named(path, folder)}{signed}"


def _nest(randomness: random.Random, folder: Path) -> str:
    path = randomness.choice([path for path in files_below(folder) if path.suffix == ".json"] or [folder / "x.json"])
    depth = randomness.choice((500, 100_000))
    write(path, b'{"format":3,"x":' + b"[" * depth + b"]" * depth + b"}")
    return f"nest {depth} in {_named(path, folder)}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a JSON value: what holds it, and the key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _evil_value(randomness: random.Random, there: Any) -> Any:
    kind = randomness.choice(("like", "number", "text", "other"))
    if kind == "like" and type(there) is int:
        return there + randomness.choice((-1, 1, 10, 1000))
    if kind == "like" and isinstance(there, list) and there:
        return [*there, randomness.choice(there)]
    if kind == "number" or (kind == "like" and type(there) is not str):
        return randomness.choice(EVIL_NUMBERS)
    if kind in ("text", "like"):
        return randomness.choice(EVIL_TEXTS)
    return randomness.choice((None, [], {}, [None], {"": None}, [[]], {"version": 1}, "requires"))


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


_WEIGHTS: dict[Damage, int] = {
    _flip: 12, _cut: 6, _extend: 3, _remove: 8, _remove_folder: 4, _replace_by_folder: 4, _replace_by_link: 4, _replace_by_pipe: 2,
    _copy_over: 6, _stray: 8, _copy_version: 5, _edit_document: 20, _nest: 2,
}  # fmt: skip
