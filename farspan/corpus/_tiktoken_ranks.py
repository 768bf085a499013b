"""The same BPE for tiktoken, only where both give the same ids for every text.

tokenizers merges repeatedly the leftmost adjacent pair (A, B) with the lowest place in its
merge list. tiktoken merges the leftmost adjacent pair whose joined bytes AB are a token, lowest
rank first. With ranks in the order of the merge list they differ only if AB is the token T of
another merge (C, D), and then only if A and B can ever stand side by side. Checked here for every
token T: tokenizers' BPE of T's own bytes gives T.

That excludes it. Suppose A B were first adjacent at some moment, inside a longer piece. Up to there
no merge crossed their outer borders, so the merges inside are a prefix of the merges done on T's
bytes alone (both go by rank, then leftmost). On T alone that prefix ends in (A, B), which is not in
the merge list: BPE of T would stop there with two tokens, not one. So the two procedures choose the
same pair at every step. The whole-piece look-up that tiktoken does first returns T for T's bytes,
as BPE does.

Around the BPE the same pieces must be cut: a known expression, no normalizer, no added token that
is matched in text (special ones are switched off). The two regex engines sort all Unicode code
points alike: tests walk all of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

#: How text is cut into pieces that no token crosses: by GPT-2's expression, as in tokenizers'
#: ByteLevel.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
#: Qwen 3.5's, in the spelling of llama.cpp (src/llama-vocab.cpp), whose name for it is "qwen35".
#: Combining marks stay with letters: GPT-2's cuts before each vowel sign of Hindi and Thai.
QWEN35_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Stands between texts that are encoded in one call; its rank is the last. No cleaned text holds
#: it.
SEPARATOR = "\0"


def byte_characters() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for place, byte in enumerate(others):
        byte_of[chr(256 + place)] = byte
    return byte_of


def as_tiktoken(
    inner: tokenizers.Tokenizer, end_of_text: int
) -> tuple[tiktoken.Encoding, npt.NDArray[np.uint32]] | None:
    """Return tiktoken's encoding and the id of each rank, last that of `end_of_text`; None without
    a proof that it encodes alike."""
    from tokenizers import Tokenizer, models

    content = json.loads(inner.to_str())
    pattern = _find_pattern(content["pre_tokenizer"] or {})
    if pattern is None or not _is_plain_bpe(content):
        return None
    vocab: dict[str, int] = content["model"]["vocab"]
    merges = [tuple(pair) for pair in content["model"]["merges"]]
    byte_of = byte_characters()
    tokens = [*byte_of, *map("".join, merges)]
    if len(set(tokens)) < len(tokens):
        return None
    # The proof: BPE of each token's own bytes gives that token.
    bare = Tokenizer(models.BPE(vocab, merges))
    encodings = bare.encode_batch_fast(tokens, add_special_tokens=False)
    for token, encoding in zip(tokens, encodings, strict=True):
        if encoding.ids != [vocab.get(token)]:
            return None
    import tiktoken

    ranks = {}
    for rank, token in enumerate(tokens):
        ranks[bytes(map(byte_of.__getitem__, token))] = rank
    special = {SEPARATOR: len(ranks)}
    fast = tiktoken.Encoding(
        "farspan", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    ids = [vocab[token] for token in tokens]
    return fast, np.array([*ids, end_of_text], np.uint32)


def _find_pattern(splitter: dict[str, Any]) -> str | None:
    """Return the expression that a byte-level pre-tokenizer cuts by; None for an unknown one."""
    steps = splitter.get("pretokenizers", [splitter])
    bytes_step = steps[-1]
    if bytes_step.get("type") != "ByteLevel" or bytes_step["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if bytes_step.get("use_regex", True) else None
    split = {
        "type": "Split",
        "pattern": {"Regex": QWEN35_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    is_qwen35 = steps[:-1] == [split] and not bytes_step.get("use_regex", True)
    return QWEN35_PATTERN if is_qwen35 else None


def _is_plain_bpe(content: dict[str, Any]) -> bool:
    """Return True for BPE with nothing that changes the ids of pieces."""
    model = content["model"]
    changes = (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )
    if model["type"] != "BPE" or any(map(model.get, changes)):
        return False
    if content["normalizer"] is not None:
        return False
    return all(token["special"] for token in content["added_tokens"])
