"""Text files as UTF-8: unpacked, their encoding found, read by pieces of bounded size.

A file is gone through once before anything is taken from it, so that a damaged one is left out
whole and never taken for a shorter one.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import zstandard

from farspan.corpus.documents import open_zst
from farspan.domain.config import FieldsConfig

#: The longest line, row, page of HTML or text of a PDF that is read: five times War and Peace.
#: What is longer is left out, and never held in memory. Plain text is read by parts of any file.
MAX_DOCUMENT_BYTES = 16 << 20
TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
#: Bytes that are read, and text that an encoding is guessed from, at a time.
CHUNK_BYTES = 1 << 18
SAMPLE_BYTES = 1 << 16

UTF8 = "utf-8"
#: UTF-8 with damaged bytes, which become U+FFFD.
DAMAGED_UTF8 = "utf-8, damaged bytes replaced"
#: Damaged bytes that a text in UTF-8 may have for each that is whole.
MAX_DAMAGED_SHARE = 0.1
#: What a file in another encoding begins with. The longer marks come first: one begins like a
#: shorter one.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
#: The most that an archive may unpack to, as a multiple of its size: text packs to a tenth, logs
#: and tables to a fiftieth, and deflate makes a thousandth of zeros.
MAX_UNPACKED_RATIO = 200
#: What unpacks to no more than this is read whatever its ratio.
UNSUSPICIOUS_BYTES = 1 << 20
UNPACKS_TOO_FAR = f"unpacks to more than {MAX_UNPACKED_RATIO} times its size"
UNKNOWN_ENCODING = "in an unknown encoding"
#: The encodings that are guessed, those of the web (WHATWG Encoding Standard) in Python's names.
#: Of two that fit a text alike the earlier one is taken.
_GUESSED = (
    "cp1252",
    "cp1251",
    "gb18030",
    "cp932",
    "euc_jp",
    "big5",
    "cp949",
    "koi8_r",
    "cp1250",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
)
#: What pages that declare one of these are read as, as browsers do.
_DECLARED = {"iso8859-1": "cp1252", "ascii": "cp1252", "shift_jis": "cp932", "gb2312": "gb18030"}
_DECLARATION = re.compile(
    rb"<meta[^>]{0,200}?charset\s*+=\s*+[\"']?\s*+([\w.:-]{1,40})"
    rb"|<\?xml[^>]{0,200}?encoding\s*+=\s*+[\"']([\w.:-]{1,40})",
    re.IGNORECASE,
)


class ReadOptions(msgspec.Struct, frozen=True):
    """What a reader is given with its file: its ending and encoding, and the columns of rows."""

    ending: str = ""
    encoding: str = UTF8
    fields: FieldsConfig = FieldsConfig()

    def stem(self, file: Path) -> str:
        """Return the name of a file without the ending that decides its format."""
        return file.name[: len(file.name) - len(self.ending)] or file.name


class UnreadableFile(Exception):
    """A file that cannot be read as what its name promises. `reason` is the same for all of a
    kind."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def find_encoding(file: Path, *, page: bool = False, max_ratio: int = 0) -> str:
    """Detect the encoding of a text file, which is read to its end for this.

    `page`: an HTML page, which may declare its encoding. Raises UnreadableFile for a damaged
    archive, for one that unpacks to more than `max_ratio` times its size, and for what is no text.
    """
    decoder = codecs.getincrementaldecoder(UTF8)()
    most = max(UNSUSPICIOUS_BYTES, max_ratio * file.stat().st_size) if max_ratio else 0
    with refusing_damage(), open_unpacked(file) as stream:
        head = chunk = stream.read(CHUNK_BYTES)
        is_utf8 = True
        size = 0
        while chunk:
            size += len(chunk)
            if most and size > most:
                raise UnreadableFile(UNPACKS_TOO_FAR)
            try:
                # Most text is ASCII, which takes no decoding.
                if is_utf8 and not (chunk.isascii() and not decoder.getstate()[0]):
                    decoder.decode(chunk)
            except UnicodeDecodeError:
                is_utf8 = False
                if size == len(head) and b"\0" in head and not _has_mark(head):
                    # Such as a film: the rest decides nothing.
                    break
            chunk = stream.read(CHUNK_BYTES)
    if head.startswith(b"%PDF-"):
        raise UnreadableFile("a PDF by its content, not a text")
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if is_utf8 and not decoder.getstate()[0]:
        return UTF8
    if b"\0" in head:
        raise UnreadableFile("binary data, not text")
    declared = _declared_encoding(head) if page else None
    return declared or _guess_encoding(file)


def _has_mark(head: bytes) -> bool:
    return any(map(head.startswith, _MARKS))


def check_packed(file: Path, max_ratio: int) -> None:
    """Go through a packed file. Raises UnreadableFile for a damaged one, and for one that unpacks
    to more than `max_ratio` times its size."""
    most = max(UNSUSPICIOUS_BYTES, max_ratio * file.stat().st_size)
    with refusing_damage(), open_unpacked(file) as stream:
        size = 0
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            if size > most:
                raise UnreadableFile(UNPACKS_TOO_FAR)


def open_utf8(file: Path, encoding: str) -> IO[bytes]:
    """Open the text of a file as a stream of valid UTF-8 bytes."""
    stream = open_unpacked(file)
    if encoding == UTF8:
        return stream
    return io.BufferedReader(_Recoded(stream, encoding), CHUNK_BYTES)


def read_text(file: Path, encoding: str) -> Iterator[str]:
    """Yield a text file in pieces of bounded size."""
    decoder = codecs.getincrementaldecoder(UTF8)()
    with open_utf8(file, encoding) as stream:
        for chunk in iter(partial(stream.read, CHUNK_BYTES), b""):
            yield decoder.decode(chunk)


def read_whole(file: Path, encoding: str) -> str:
    """All of a text file. Raises UnreadableFile if it is longer than a document may be."""
    with open_utf8(file, encoding) as stream:
        content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise UnreadableFile(TOO_LONG)
    return content.decode()


def bounded_lines(stream: IO[bytes], most: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes | None]:
    """Yield the lines of a stream; None for a line of more than `most` bytes, which is dropped."""
    while line := stream.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(most)
        yield None


def open_unpacked(file: Path) -> IO[bytes]:
    """Open the bytes of a file, unpacked where its name ends in .gz or .zst."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(file, "rb"))
    return _open_whole_zst(file) if suffix == ".zst" else file.open("rb")


def _open_whole_zst(file: Path) -> IO[bytes]:
    """Raise EOFError for a file that ends within a frame, which the library reads as its end."""
    with file.open("rb") as packed:
        size = packed.seek(0, io.SEEK_END)
        packed.seek(0)
        while packed.tell() < size:
            _skip_frame(packed)
        if packed.tell() > size:
            raise EOFError("the file ends within a zstd frame")
    return open_zst(file)


def _skip_frame(packed: IO[bytes]) -> None:
    """Go to where a zstd frame ends, which may be beyond the end of the file (RFC 8878, 3.1)."""
    start = packed.tell()
    head = packed.read(18)  # The longest header of a frame.
    magic = int.from_bytes(head[:4], "little")
    if magic & 0xFFFFFFF0 == 0x184D2A50:  # A frame of the user's own, to be skipped.
        packed.seek(start + 8 + int.from_bytes(head[4:8], "little"))
        return
    try:
        packed.seek(start + zstandard.frame_header_size(head))
        has_checksum = zstandard.get_frame_parameters(head).has_checksum
    except zstandard.ZstdError:
        if len(head) < 18:
            raise EOFError("the file ends within a zstd frame") from None
        raise
    is_last = False
    while not is_last:
        block = packed.read(3)
        if len(block) < 3:
            raise EOFError("the file ends within a zstd frame")
        fields = int.from_bytes(block, "little")
        is_last = bool(fields & 1)
        kind = fields >> 1 & 3
        size = fields >> 3
        # A block of kind 1 holds one byte, which stands for `size` bytes.
        packed.seek(1 if kind == 1 else size, io.SEEK_CUR)
    packed.seek(4 if has_checksum else 0, io.SEEK_CUR)


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Turn what the readers of archives raise for a damaged one into UnreadableFile."""
    try:
        yield
    except EOFError:
        raise UnreadableFile("cut off: ends before its end") from None
    except OSError as error:
        if error.errno is not None:
            raise UnreadableFile("cannot be opened", error.strerror or "") from None
        raise UnreadableFile("damaged", first_words(error)) from None
    except (zlib.error, zstandard.ZstdError, ValueError) as error:
        raise UnreadableFile("damaged", first_words(error)) from None


def first_words(error: Exception) -> str:
    """Return an error's message in one line of bounded length."""
    return " ".join(str(error).split())[:300]


class _Recoded(io.RawIOBase):
    """A stream of text in some encoding as UTF-8, what cannot be decoded as U+FFFD."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self._stream = stream
        codec = UTF8 if encoding == DAMAGED_UTF8 else encoding
        self._decoder = codecs.getincrementaldecoder(codec)("replace")
        self._encoded = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._encoded and not self._ended:
            chunk = self._stream.read(CHUNK_BYTES)
            self._ended = not chunk
            # A decoder may give halves of surrogate pairs, which UTF-8 cannot hold.
            text = self._decoder.decode(chunk, final=self._ended)
            self._encoded = text.encode(UTF8, "replace")
        count = min(len(buffer), len(self._encoded))
        buffer[:count] = self._encoded[:count]
        self._encoded = self._encoded[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _declared_encoding(head: bytes) -> str | None:
    """Return the encoding that a page declares, if Python has it."""
    declaration = _DECLARATION.search(head[:4096])
    if declaration is None:
        return None
    name = (declaration[1] or declaration[2]).decode("ascii", "replace")
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    # Such as rot13 and zlib, which are no encodings of text.
    if not getattr(codec, "_is_text_encoding", True):
        return None
    # The page is not UTF-8, whatever it says.
    return None if codec.name.startswith("utf") else _DECLARED.get(codec.name, codec.name)


def _guess_encoding(file: Path) -> str:
    """Guess the encoding of a text that is not UTF-8, by its lines that are not ASCII."""
    from charset_normalizer import from_bytes

    sample = _read_sample(file)
    text = sample.decode(UTF8, "replace")
    damaged = text.count("\ufffd")
    whole = sum(not character.isascii() for character in text) - damaged
    if damaged <= MAX_DAMAGED_SHARE * whole:
        return DAMAGED_UTF8
    matches = from_bytes(sample, cp_isolation=list(_GUESSED))
    ranked = []
    for match in matches:
        for name in match.could_be_from_charset:
            if name in _GUESSED:
                ranked.append((match.chaos, -match.coherence, _GUESSED.index(name)))
    if not ranked:
        raise UnreadableFile(UNKNOWN_ENCODING)
    return _GUESSED[min(ranked)[2]]


def _read_sample(file: Path) -> bytes:
    """Return the first lines of a file that are not ASCII."""
    lines: list[bytes] = []
    size = 0
    with open_unpacked(file) as stream:
        while size < SAMPLE_BYTES and (line := stream.readline(SAMPLE_BYTES)):
            if not line.isascii():
                lines.append(line)
                size += len(line)
    sample = b"".join(lines)
    if size < SAMPLE_BYTES:
        return sample
    # No character is cut in two at a blank, which is a byte of its own in all these encodings.
    end = max(sample.rfind(b" "), sample.rfind(b"\n"))
    return sample[: end if end > 0 else None]
