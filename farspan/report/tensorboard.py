"""TensorBoard event files, written from a run's events while it trains.

A file is TFRecords (length, masked CRC-32C of it, data, masked CRC-32C of that) of
`tensorboard.Event` messages in protobuf's wire format; field numbers are those of
tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from farspan.domain.own_files import open_own
from farspan.domain.run_events import Event, Sampled, Started, Step, Validated

_CASTAGNOLI = 0x82F63B78
#: The largest float32: scalars hold no more.
_LARGEST = 3.4028234663852886e38


class TensorBoard:
    """Writes one file a start into `folder`; every event is with the operating system when `show`
    returns.

    File names follow from the events, so that showing the same events again writes the same files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Path | None = None

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._folder.mkdir(exist_ok=True)
            self._file = self._folder / f"events.out.tfevents.{event.at:017.6f}.farspan"
            # A session that starts at a step tells TensorBoard to forget what it read of that step
            # and later ones.
            version = _bytes_field(3, b"brain.Event:2")
            session = _bytes_field(7, _int_field(1, 1))
            with open_own(self._file, "wb") as file:
                file.write(_event_record(event.at, 0, version))
                file.write(_event_record(event.at, event.step + 1, session))
        elif isinstance(event, Step | Validated | Sampled) and self._file is not None:
            summary = _bytes_field(5, b"".join(_event_values(event)))
            with open_own(self._file, "ab") as file:
                file.write(_event_record(event.at, event.step, summary))


def _event_values(event: Step | Validated | Sampled) -> Iterator[bytes]:
    match event:
        case Step():
            yield _scalar_value("train/loss", event.loss)
            yield _scalar_value("train/lr", event.lr)
            if event.grad_norm is not None:
                yield _scalar_value("train/grad_norm", event.grad_norm)
            yield _scalar_value("train/tokens_per_s", event.tokens / event.step_s)
            yield _scalar_value("memory/bytes", event.memory_bytes)
        case Validated():
            yield _scalar_value("val/loss", event.loss)
            yield _scalar_value("val/bits_per_byte", event.bits_per_byte)
        case Sampled():
            # TensorBoard shows Markdown; indented lines are shown as they are.
            lines = [f"    {line}" for line in f"{event.prompt}{event.text}".splitlines()]
            yield _text_value(f"samples/{event.prompt or 'no prompt'}", "\n".join(lines))


def _scalar_value(tag: str, value: float) -> bytes:
    if not abs(value) <= _LARGEST:
        value = math.copysign(math.inf, value)
    simple_value = _varint(2 << 3 | 5) + struct.pack("<f", value)
    return _bytes_field(1, _bytes_field(1, tag.encode()) + simple_value)


def _text_value(tag: str, text: str) -> bytes:
    metadata = _bytes_field(9, _bytes_field(1, _bytes_field(1, b"text")))
    dtype_string = _int_field(1, 7)
    shape = _bytes_field(2, _bytes_field(2, _int_field(1, 1)))
    tensor = dtype_string + shape + _bytes_field(8, text.encode())
    return _bytes_field(1, _bytes_field(1, tag.encode()) + metadata + _bytes_field(8, tensor))


def _event_record(at: float, step: int, content: bytes) -> bytes:
    wall_time = _varint(1 << 3 | 1) + struct.pack("<d", at)
    return tfrecord(wall_time + _int_field(2, step) + content)


def _int_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def tfrecord(data: bytes) -> bytes:
    """Return one TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = crc >> 15 | crc << 17
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_crc_of, range(256)))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli), as in RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
