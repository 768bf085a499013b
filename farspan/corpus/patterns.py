"""Regular expressions of somebody else's tokenizer: known ones, or ones that end on hard text.

A backtracking engine may take a time that grows with a power of the text, or end the process. An
expression that is not known is first tried in a process of bounded computation.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

from farspan.corpus._tiktoken_ranks import QWEN35_PATTERN
from farspan.corpus.processes import (
    ProcessChannel,
    limit_cpu,
    limit_memory,
    silence_errors,
    start_beside,
)

#: The split patterns of GPT-2, of GPT-4 (Llama 3), of Qwen 2, of GPT-4o and of Qwen 3.5, with the
#: spelling of the last that tokenizers trained here have.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
GPT2_LONG_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_PATTERN = rf"{_WORDS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2_PATTERN = rf"{_WORDS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"
GPT4O_PATTERN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_WORDS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_WORDS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS_PATTERN = (
    rf"{_WORDS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = {
    GPT2_LONG_PATTERN,
    GPT4_PATTERN,
    QWEN2_PATTERN,
    GPT4O_PATTERN,
    MARKS_PATTERN,
    QWEN35_PATTERN,
}
#: Parts of a tokenizer that may hold expressions.
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
#: Characters of each text that expressions are tried on, and seconds of a core for all of them,
#: which known expressions go through in one.
PROBE_CHARS = 20_000
PROBE_CPU_S = 20
#: Memory for compiling and trying them.
_PROBE_BYTES = 1 << 30


def unsafe_pattern(content: dict[str, Any], *, cpu_s: int = PROBE_CPU_S) -> str | None:
    """Return the first unknown expression of a tokenizer.json whose expressions do not all end on
    hard texts; None if they do."""
    parts = {name: content.get(name) for name in _PARTS}
    unknown = [pattern for pattern in _find_patterns(parts) if pattern not in KNOWN_PATTERNS]
    if not unknown:
        return None
    # A tokenizer of one token, with these parts.
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "added_tokens": [],
        **parts,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    process, channel = start_beside(_try_patterns, json.dumps(tokenizer), cpu_s)
    try:
        has_ended = channel.receive() == b"ended"
    except (EOFError, OSError):
        has_ended = False
    finally:
        channel.close()
    process.join()
    return None if has_ended else unknown[0]


def _find_patterns(part: Any) -> Iterator[str]:
    """Yield every regular expression within a part of a tokenizer.json."""
    if isinstance(part, dict):
        if isinstance(part.get("Regex"), str):
            yield part["Regex"]
        part = list(part.values())
    if isinstance(part, list):
        for value in part:
            yield from _find_patterns(value)


def _try_patterns(channel: ProcessChannel, content: str, cpu_s: int) -> None:
    """Send "ended" once all texts are encoded; where one does not end, the system ends this
    process."""
    from tokenizers import Tokenizer

    silence_errors()
    limit_memory(_PROBE_BYTES)
    limit_cpu(cpu_s)
    tokenizer = Tokenizer.from_str(content)
    for text in _hard_texts():
        tokenizer.encode(text, add_special_tokens=False)
    tokenizer.decode([0] * PROBE_CHARS)
    channel.send(b"ended")


def _hard_texts() -> Iterator[str]:
    """Yield runs of a character or two and of sentences, alone and with other characters behind."""
    characters = f"{string.printable}é中\u3000\u0301"
    pairs = ("ab", "a ", "a1", "1.", "1,", "Aa", "\r\n", " \n", "'s", "a'", ".\n", "中a")
    sentences = "The quick brown fox, aged 12, didn't jump over 3.14 lazy dogs; see (a) and [b].\n"
    for piece in (*characters, *pairs, sentences):
        run = piece * (PROBE_CHARS // len(piece))
        yield run
        # An engine gives up at once where a character that the pattern needs is nowhere.
        yield f"{run}{'!' if '!' not in piece else 'a'}{string.printable}"
