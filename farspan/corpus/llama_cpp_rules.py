"""How llama.cpp calls the ways in which byte-level BPE tokenizers split text into pieces
(`tokenizer.ggml.pre`, src/llama-vocab.cpp)."""

from __future__ import annotations

from typing import Any

from farspan.corpus._tiktoken_ranks import GPT2_PATTERN, QWEN35_PATTERN
from farspan.corpus.patterns import (
    GPT2_LONG_PATTERN,
    GPT4_PATTERN,
    MARKS_PATTERN,
    QWEN2_PATTERN,
)

#: By the pattern of a tokenizer.json, where a text is split by it and then turned to bytes. Not
#: GPT-4o's: what llama.cpp has for it cuts letters from their combining marks.
_RULES = {
    GPT2_PATTERN: "gpt-2",
    GPT2_LONG_PATTERN: "gpt-2",
    GPT4_PATTERN: "dbrx",
    QWEN2_PATTERN: "qwen2",
    MARKS_PATTERN: "qwen35",
    QWEN35_PATTERN: "qwen35",
}
#: Rules whose pieces that are tokens are not merged (`ignore_merges`), in place of those that are.
_WHOLE_PIECES = {"dbrx": "llama-bpe"}


def find_rule(words: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for the way in which a tokenizer.json splits; None where it has none,
    or the tokenizer is of another kind."""
    model = words.get("model") or {}
    pre = words.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers") or [pre]
    normalizer = words.get("normalizer")
    # llama.cpp leaves text as it is: a normalizer for composed characters changes what few texts
    # have otherwise.
    is_plain = normalizer is None or normalizer.get("type") == "NFC"
    if model.get("type") != "BPE" or model.get("byte_fallback") or not is_plain:
        return None
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        return _own_rule(before)
    if len(before) != 1 or before[0].get("type") != "Split" or before[0].get("invert"):
        return None
    rule = _RULES.get((before[0].get("pattern") or {}).get("Regex", ""))
    if model.get("ignore_merges"):
        return _WHOLE_PIECES.get(rule or "")
    return rule


def _own_rule(before: list[dict[str, Any]]) -> str | None:
    """Return the rule of GPT-2's own expression after these steps: none, or each digit alone."""
    if not before:
        return "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    return "smollm" if before == [digits] else None
