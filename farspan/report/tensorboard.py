"""TensorBoard event files, written from a run's events while it goes on.

A file is TFRecords (length, masked CRC-32C of it, data, masked CRC-32C of that) of `tensorboard.Event` messages in
protobuf's wire format; field numbers are those of tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from farspan.domain.results import Event, Sampled, Started, Step, Validated

_CASTAGNOLI = 0x82F63B78
#: The largest float32: scalars hold no more.
_LARGEST = 3.4028234663852886e38


def _table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), as in RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _message(at: float, step: int, content: bytes) -> bytes:
    return record(_varint(1 << 3 | 1) + struct.pack("<d", at) + _number(2, step) + content)


def _scalar(tag: str, value: float) -> bytes:
    value = value if abs(value) <= _LARGEST else math.copysign(math.inf, value)
    return _bytes(1, _bytes(1, tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", value))


def _text(tag: str, text: str) -> bytes:
    metadata = _bytes(9, _bytes(1, _bytes(1, b"text")))
    dtype_string, one_value = _number(1, 7), _bytes(2, _bytes(2, _number(1, 1)))
    tensor = dtype_string + one_value + _bytes(8, text.encode())
    return _bytes(1, _bytes(1, tag.encode()) + metadata + _bytes(8, tensor))


class TensorBoard:
    """Writes one file a start into `folder`; every event is with the operating system when `show` returns.

    File names follow from the events, so that showing the same events again writes the same files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Step | Validated | Sampled) and self._file is not None:
            summary = b"".join(_values(event))
            self._file.write(_message(event.at, event.step, _bytes(5, summary)))
            self._file.flush()

    def _start(self, started: Started) -> None:
        if self._file is not None:
            self._file.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._folder / f"events.out.tfevents.{started.at:017.6f}.farspan", "wb")  # noqa: SIM115
        self._file.write(_message(started.at, 0, _bytes(3, b"brain.Event:2")))
        # A session that starts at a step tells TensorBoard to forget what it read of that step and later ones.
        self._file.write(_message(started.at, started.step + 1, _bytes(7, _number(1, 1))))
        self._file.flush()


def _values(event: Step | Validated | Sampled) -> Iterable[bytes]:
    if isinstance(event, Step):
        yield _scalar("train/loss", event.loss)
        yield _scalar("train/lr", event.lr)
        yield _scalar("train/grad_norm", event.grad_norm)
        yield _scalar("train/tokens_per_s", event.tokens / event.step_s)
        yield _scalar("memory/bytes", event.memory_bytes)
    elif isinstance(event, Validated):
        yield _scalar("val/loss", event.loss)
        yield _scalar("val/bits_per_byte", event.bits_per_byte)
    else:
        # TensorBoard shows Markdown; indented lines are shown as they are.
        lines = f"{event.prompt}{event.text}".splitlines()
        yield _text(f"samples/{event.prompt or 'no prompt'}", "\n".join(f"    {line}" for line in lines))
