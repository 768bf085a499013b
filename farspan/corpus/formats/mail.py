"""Mail: messages (.eml) and mailboxes (.mbox); each message is a document."""

from __future__ import annotations

import email.header
import email.message
import email.parser
import email.policy
import email.utils
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

from farspan.corpus.formats._format import Format, Runs
from farspan.corpus.reading import (
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    ReadOptions,
    bounded_lines,
    open_unpacked,
    refusing_damage,
)
from farspan.domain.corpus import Document, Skipped

#: With attachments, which are not read. Most servers take no more than half of this.
MAX_MESSAGE_BYTES = 64 << 20
MESSAGE_TOO_LONG = f"longer than {MAX_MESSAGE_BYTES >> 20} MiB with its attachments"
NO_MESSAGE_TEXT = "a message without text"
#: Parts that are looked at, and attachments that are named.
_MAX_PARTS = 1000
_MAX_NAMED = 20
#: Of a longer header the rest is left out.
_MAX_HEADER_CHARS = 1000
_ESCAPED_FROM = re.compile(rb"(?m)^>(>*From )")
_HEADERS = {"from": "From", "to": "To", "cc": "Cc", "list": "List-Id"}
#: What is tried of a text whose declared charset does not fit.
_CHARSETS = ("utf-8", "cp1252")
#: Charsets that are read as the larger ones that programs mean by them.
_MEANT = {"us-ascii": "utf-8", "ascii": "utf-8", "iso-8859-1": "cp1252", "gb2312": "gb18030"}


def read_message(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read a file that is one message."""
    with refusing_damage(), closing(open_unpacked(file)) as stream:
        content = stream.read(MAX_MESSAGE_BYTES + 1)
    if len(content) > MAX_MESSAGE_BYTES:
        yield Skipped.file(file, MESSAGE_TOO_LONG, bad=True)
    else:
        yield _read_content(content, file, 0, options.stem(file))


def read_mailbox(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read the messages of a mailbox, numbered from 1."""
    with refusing_damage(), closing(open_unpacked(file)) as stream:
        for number, content in enumerate(_split_messages(stream), 1):
            if content is None:
                yield Skipped.row(file, number, MESSAGE_TOO_LONG)
            else:
                yield _read_content(content, file, number, f"{file.name}:{number}")


def _split_messages(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield messages, which begin behind lines `From ...`; None for one that is too long."""
    lines: list[bytes] = []
    size = 0
    has_begun = False
    is_blank = True
    for line in bounded_lines(stream):
        if line is not None and is_blank and line.startswith(b"From "):
            if has_begun:
                yield None if size > MAX_MESSAGE_BYTES else b"".join(lines)
            lines = []
            size = 0
            has_begun = True
            is_blank = False
            continue
        is_blank = line is not None and not line.strip()
        has_begun = has_begun or not is_blank
        size += MAX_DOCUMENT_BYTES if line is None else len(line)
        if size > MAX_MESSAGE_BYTES:
            lines.clear()
        elif line is not None:
            lines.append(line)
    if has_begun:
        yield None if size > MAX_MESSAGE_BYTES else b"".join(lines)


def _read_content(content: bytes, file: Path, number: int, name: str) -> Document | Skipped:
    """Return a message as a document, titled by its subject."""
    content = _ESCAPED_FROM.sub(rb"\1", content) if number else content
    message = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(content)
    text, attachments = _read_parts(message)
    metadata = {}
    for key, header in _HEADERS.items():
        if value := _header(message, header):
            metadata[key] = value
    date = _date_of(message)
    if date:
        metadata["date"] = date
    if attachments:
        more = f" and {len(attachments) - _MAX_NAMED} more" * (len(attachments) > _MAX_NAMED)
        metadata["attachments"] = ", ".join(attachments[:_MAX_NAMED]) + more
    if len(text) > MAX_DOCUMENT_BYTES or not text.strip():
        reason = TOO_LONG if text.strip() else NO_MESSAGE_TEXT
        if number:
            return Skipped.row(file, number, reason, metadata.get("attachments", ""))
        return Skipped.file(file, reason, metadata.get("attachments", ""), bad=bool(text.strip()))
    origin = f"{file}:{number}" if number else str(file)
    title = _header(message, "Subject") or name
    return Document(title=title, text=text, origin=origin, metadata=metadata)


def _read_parts(message: email.message.Message) -> tuple[str, list[str]]:
    """Return the text of a message and the names of what is attached. Text that is there
    as HTML too is taken from its plain part."""
    plain: list[str] = []
    pages: list[str] = []
    attachments: list[str] = []
    for number, part in enumerate(message.walk()):
        if number >= _MAX_PARTS:
            break
        if part.is_multipart():
            continue
        kind = part.get_content_type()
        name = " ".join(_decode_header(part.get_filename() or "").split())[:_MAX_HEADER_CHARS]
        is_attached = part.get_content_disposition() == "attachment" or bool(name)
        if is_attached or not kind.startswith("text/"):
            attachments.append(name or kind)
        elif kind == "text/html":
            pages.append(_decode_part(part))
        elif kind == "text/plain" or not plain:
            plain.append(_decode_part(part))
    text = "\n\n".join(filter(str.strip, plain))
    if not text:
        from farspan.corpus._html import read_html

        text = "\n\n".join(read_html(page[:MAX_DOCUMENT_BYTES]).text for page in pages)
    return text, attachments


def _decode_part(part: email.message.Message) -> str:
    """Return the text of a part, in the charset that it names if that fits."""
    payload = part.get_payload(decode=True)
    content = payload if isinstance(payload, bytes) else b""
    return _decode_bytes(content, str(part.get_content_charset() or "utf-8"))


def _header(message: email.message.Message, name: str) -> str:
    """Return a header; bytes that stand in it as they are, against the rules, are decoded too."""
    name = name.lower()
    values = (value for key, value in message.raw_items() if key.lower() == name)
    raw = str(next(values, ""))[: 4 * _MAX_HEADER_CHARS]
    value = _decode_bytes(raw.encode("utf-8", "surrogateescape"), "utf-8")
    return " ".join(_decode_header(value).split())[:_MAX_HEADER_CHARS]


def _decode_bytes(content: bytes, charset: str) -> str:
    """Return bytes as text, in the charset that is named if that fits."""
    charset = charset.lower()
    for known in (_MEANT.get(charset, charset), *_CHARSETS):
        try:
            return content.decode(known)
        except (LookupError, ValueError):
            continue
    return content.decode("utf-8", "replace")


def _decode_header(value: str) -> str:
    """Return a header as text; bytes and words whose charset does not fit are kept as they can
    be."""
    try:
        parts = email.header.decode_header(value)
    except Exception:  # The library raises what its decoders do.
        return value
    words = []
    for content, charset in parts:
        is_text = isinstance(content, str)
        words.append(content if is_text else _decode_bytes(content, str(charset or "utf-8")))
    return "".join(words)


def _date_of(message: email.message.Message) -> str:
    """Return the date of a message as ISO 8601 has it, empty where it has none."""
    try:
        return email.utils.parsedate_to_datetime(str(message.get("Date") or "")).isoformat()
    except (ValueError, TypeError, OverflowError, IndexError):
        return ""


FORMATS = (
    Format((".eml",), read_message, runs=Runs.GUARDED, is_text=False, packed=True),
    Format((".mbox", ".mbx"), read_mailbox, runs=Runs.GUARDED, is_text=False, packed=True),
)
