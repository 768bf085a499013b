"""JSON and plain values as the types that they have to be, in any thread.

msgspec collects what a type consists of when it first decodes it. Threads that do so side by side
crash the process (msgspec 0.22, `tests/domain/test_decoding.py`): here one does at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_ready: set[Any] = set()


@overload
def decode_json(content: bytes | str, kind: type[T]) -> T: ...
@overload
def decode_json(content: bytes | str, kind: Any) -> Any: ...
def decode_json(content: bytes | str, kind: Any) -> Any:
    """Strictly decode JSON text. Raises msgspec.MsgspecError, UnicodeDecodeError."""
    prepare(kind)
    return msgspec.json.decode(content, type=kind)


@overload
def convert_value(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert_value(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert_value(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Convert plain dicts, lists and numbers. Raises msgspec.ValidationError."""
    prepare(kind)
    return msgspec.convert(value, kind, strict=strict)


@overload
def decode_msgpack(content: bytes, kind: type[T]) -> T: ...
@overload
def decode_msgpack(content: bytes, kind: Any) -> Any: ...
def decode_msgpack(content: bytes, kind: Any) -> Any:
    """Strictly decode MessagePack. Raises msgspec.MsgspecError."""
    prepare(kind)
    return msgspec.msgpack.decode(content, type=kind)


@overload
def decode_yaml(content: bytes | str, kind: type[T]) -> T: ...
@overload
def decode_yaml(content: bytes | str, kind: Any) -> Any: ...
def decode_yaml(content: bytes | str, kind: Any) -> Any:
    """Strictly decode YAML. Raises msgspec.MsgspecError."""
    prepare(kind)
    return msgspec.yaml.decode(content, type=kind)


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder for many JSON texts of a type."""
    prepare(kind)
    return msgspec.json.Decoder(kind)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a decoder for many MessagePack messages of a type."""
    prepare(kind)
    return msgspec.msgpack.Decoder(kind)


def prepare(kind: Any) -> None:
    """Have msgspec collect a type, with the types within it, once in a process."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
