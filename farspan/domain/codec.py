"""Strict load and save of frozen structs, and their content hash.

Unknown keys and values out of range are refused with the file, the line, the key, and the nearest key that exists.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farspan.domain.problems import Refusal, nearest

T = TypeVar("T")


def content_hash(*parts: object) -> str:
    """A stable 16-digit hash of any structs, strings and numbers: same content, same hash, on any machine."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(msgspec.json.encode(part, order="sorted"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def to_json(value: object, *, indent: int = 2) -> bytes:
    """A struct as JSON text, ready for a file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, flush to disk, rename into place: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def save(value: object, path: Path) -> None:
    """Save a struct as JSON, atomically."""
    write_atomically(path, to_json(value))


def load(path: Path, kind: type[T]) -> T:
    """Load a struct that farspan saved as JSON; refuses what does not fit it."""
    return parse_json(read_bytes(path), kind, path)


def parse_json(content: bytes, kind: type[T], where: object) -> T:
    """Strictly decode JSON text as `kind`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, str(where), "") from None
    except msgspec.DecodeError as error:
        raise _malformed(where, error) from None


def load_yaml(path: Path, kind: type[T]) -> T:
    """Load a YAML file that a user wrote; refusals name file and line."""
    content = read_bytes(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _malformed(path, error) from None
    return convert(parse_yaml(text, path), kind, str(path), text)


def convert(value: Any, kind: type[T], where: str, text: str = "") -> T:
    """Strictly convert plain values to `kind`; refusals name `where`, and the line in `text` that they came from."""
    try:
        return msgspec.convert({} if value is None else value, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, where, text) from None


def parse_yaml(text: str, where: object) -> Any:
    """YAML text as plain values. Numbers such as 6e-4 are numbers, as YAML 1.2 has it and people mean it."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML reads YAML 1.1, in which 6e-4 is a string, and lets the last of equal keys win in silence."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is set twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise _malformed(where, error) from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file that must exist."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise missing_path(path) if not path.exists() else _malformed(path, error) from None


def missing_path(path: Path) -> Refusal:
    """The refusal for a path that does not exist, offering the nearest one that does."""
    expanded = path.expanduser()
    parent = next((p for p in expanded.absolute().parents if p.is_dir()), Path("/"))
    candidates = {p.name: p for p in parent.iterdir()}
    missing_name = expanded.absolute().relative_to(parent).parts[0]
    match = nearest(missing_name, candidates)
    fix = f"use {candidates[match]}, the nearest that exists" if match else f"see what is there: ls {parent}"
    return Refusal(
        "path-missing", what="there is no such file or folder", where=path, fact=f"{parent} has no {missing_name!r}",
        remedy=fix,
    )  # fmt: skip


def _malformed(where: object, error: Exception) -> Refusal:
    return Refusal(
        "unknown-key",
        what="the file cannot be read as what it should be",
        where=where,
        fact=" ".join(str(error).split()),
        remedy="mend the file there, or put back a copy that is whole",
    )


def _refusal(error: msgspec.ValidationError, kind: Any, file: str, text: str) -> Refusal:
    message = str(error)
    if match := re.search(r"unknown field `([^`]+)`", message):
        return _unknown_key(match[1], _path_of(message), kind, file, text)
    path = _path_of(message)
    fact = re.sub(r" - at `.*`$", "", message, flags=re.DOTALL)
    return Refusal(
        "out-of-range",
        what=f"{path or 'the file'} has a value that farspan cannot use",
        where=_located(file, text, path.split(".")[-1]),
        fact=fact,
        remedy=f"set {path or 'it'} to a value that fits",
    )


def _unknown_key(key: str, path: str, kind: Any, file: str, text: str) -> Refusal:
    known = _known_keys(kind, path)
    match = nearest(key, known)
    full = f"{path}.{key}" if path else key
    return Refusal(
        "unknown-key",
        what=f"unknown key {full!r}",
        where=_located(file, text, key),
        fact=f"known here: {', '.join(known)}",
        remedy=f"rename {key!r} to {match!r}" if match else f"remove {key!r}",
    )


def _path_of(message: str) -> str:
    match = re.search(r"at `\$\.?([^`]*)`", message)
    return match[1] if match else ""


def _known_keys(kind: Any, path: str) -> list[str]:
    """The keys of the struct that `path` leads to from `kind`."""
    for step in [step for step in path.split(".") if step]:
        name = re.sub(r"\[.*\]", "", step)
        field = next((f for f in msgspec.structs.fields(kind) if f.encode_name == name), None) if name else None
        kind = _struct_in(field.type if field else kind)
    return [f.encode_name for f in msgspec.structs.fields(_struct_in(kind))]


def _struct_in(kind: Any) -> Any:
    """The struct inside a type such as `X | None`, `tuple[X, ...]` or `dict[str, X]`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    for part in getattr(kind, "__args__", ()):
        if (found := _struct_in(part)) is not None:
            return found
    return None


def _located(file: str, text: str, key: str) -> str:
    """`file:line` of the first line that sets `key`."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(rf"(^|[\s{{,]){re.escape(key)}\s*:", line):
            return f"{file}:{number}"
    return file
