"""Ids through tiktoken are those of `tokenizers`; where that is not proven, tiktoken is not
used."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from farspan.corpus import patterns, tokenizer
from farspan.corpus._tiktoken_ranks import (
    GPT2_PATTERN,
    QWEN35_PATTERN,
    as_tiktoken,
    byte_characters,
)
from farspan.corpus.patterns import unsafe_pattern
from farspan.domain.problems import Problem, Refusal
from tests.waiting import LIMIT_S

TEXT = "\n".join(text for _, text in sorted(topics.items()))
PIECES = [
    *(
        "aZé ß中文字日本語한국어٣४½²\t\n"
        "\r\x00\x1c\u00a0\u2003\u200b\u3000\u0301'’.,;!?#=_-/\\(){}😀👩‍👩‍👧🇩🇪\U0001f3fd"
    ),
    *[
        " ",
        "  ",
        "   ",
        "\n\n",
        "\r\n",
        "'s",
        "'LL",
        "'ve",
        "don't",
        "<|endoftext|>",
        "<|",
        "3.14",
        "100000",
        "____",
    ],
    *[
        "def ",
        " return",
        "the ",
        "aaaaaaaaaaaaaaaa",
        "==========",
        "\ud800",
        "\udc00",
        "\ufffd",
        "\ufeff",
    ],
]


@pytest.fixture(scope="module")
def trained() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe_tokenizer([TEXT], 3000)


def by_tokenizers(words: tokenizer.Tokenizer, text: str) -> list[int]:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return list(words._inner.encode(text, add_special_tokens=False).ids)


def test_a_trained_tokenizer_is_fast_and_reads_back_what_it_writes(
    trained: tokenizer.Tokenizer,
) -> None:
    assert trained.engine == "tiktoken"
    assert trained.vocab_size == 3000
    assert trained.decode(trained.encode(TEXT)) == TEXT
    assert trained.decode([trained.end_of_text]) == tokenizer.END_OF_TEXT
    assert trained.end_of_text not in trained.encode("a <|endoftext|> in text is text")


def test_ids_are_those_of_tokenizers_on_random_slices(trained: tokenizer.Tokenizer) -> None:
    rng = random.Random(0)
    slices = []
    for _ in range(400):
        start = rng.randrange(len(TEXT))
        length = int(10 ** rng.uniform(0, 3.5))
        noise = "".join(rng.choices(PIECES, k=rng.randrange(20)))
        slices.append(noise + TEXT[start : start + length] + noise)
    assert trained.encode_batch(slices) == [by_tokenizers(trained, text) for text in slices]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_ids_are_those_of_tokenizers_on_any_text(trained: tokenizer.Tokenizer, text: str) -> None:
    assert trained.encode(text) == by_tokenizers(trained, text)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=25),
    st.lists(st.sampled_from("abc"), max_size=40),
    st.randoms(),
)
def test_any_merge_list_either_gives_equal_ids_or_is_refused(
    picks: list[tuple[int, int]], letters: list[str], order: random.Random
) -> None:
    """Random merges over three letters, in any order: many are no BPE that tiktoken could
    follow."""
    tokens = ["a", "b", "c"]
    merges = []
    for left, right in picks:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    order.shuffle(merges)
    inner = hand_made(merges)
    text = "".join(letters)
    words = tokenizer.Tokenizer(inner, 0)
    assert words.encode(text) == inner.encode(text).ids


def hand_made(merges: list[tuple[str, str]], **changes: object) -> Inner:
    characters = ["<|endoftext|>", *byte_characters(), *(left + right for left, right in merges)]
    inner = Inner(models.BPE({token: i for i, token in enumerate(characters)}, merges, **changes))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return inner


def test_a_token_that_does_not_encode_to_itself_is_refused() -> None:
    """`abcd` is made of ab+cd, but bc merges first: tiktoken would find `abcd`, tokenizers never
    does."""
    merges = [("b", "c"), ("a", "b"), ("c", "d"), ("ab", "cd")]
    inner = hand_made(merges)
    assert as_tiktoken(inner, 0) is None
    ranks = {
        bytes(byte_characters()[c] for c in t): r
        for r, t in enumerate([*byte_characters(), *map("".join, merges)])
    }
    direct = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert len(direct.encode_ordinary("abcd")) == 1 != len(inner.encode("abcd").ids)
    assert tokenizer.Tokenizer(inner, 0).engine == "tokenizers"


def test_ids_out_of_merge_order_are_mapped() -> None:
    merges = [("a", "b"), ("ab", "c")]
    vocab = {token: 1000 - i for i, token in enumerate([*byte_characters(), "ab", "abc"])}
    inner = Inner(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = tokenizer.Tokenizer(inner, 1000)
    assert words.engine == "tiktoken"
    assert (
        words.encode("abcab a")
        == inner.encode("abcab a").ids
        == [vocab["abc"], vocab["ab"], vocab["Ġ"], vocab["a"]]
    )


def test_marks_stay_with_their_letters() -> None:
    words = ["कि", "की", "कु", "ที่", "กั้น", "ชี้", "naïve".replace("ï", "i\u0308"), "the"]
    texts = [" ".join(random.Random(number).choices(words, k=200)) for number in range(40)]
    trained = tokenizer.train_bpe_tokenizer(texts, 400)
    assert trained.engine == "tiktoken"
    assert sum(map(len, trained.encode_batch(texts))) < 1.1 * 200 * 40
    assert trained.encode_batch(texts) == [by_tokenizers(trained, text) for text in texts]


def test_tokenizers_that_split_as_gpt2_encode_as_before(tmp_path: Path) -> None:
    inner = hand_made([("t", "h"), ("th", "e")])
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_tokenizer(tmp_path)
    assert loaded.engine == "tiktoken"
    assert loaded.encode("the क्षि, 100") == by_tokenizers(loaded, "the क्षि, 100")


def test_tokenizer_with_unsupported_encoding_options_is_not_converted_to_tiktoken() -> None:
    merges = [("a", "b")]
    assert as_tiktoken(hand_made(merges), 0) is not None
    prefixed, normalized, unsplit, added = (hand_made(merges) for _ in range(4))
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    normalized.normalizer = normalizers.NFC()
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added.add_tokens(["ab"])
    dropout = hand_made(merges, dropout=0.1)
    ignoring = hand_made(merges, ignore_merges=True)
    for inner in (prefixed, normalized, unsplit, added, dropout, ignoring):
        assert as_tiktoken(inner, 0) is None


def split_as(pattern: str) -> pre_tokenizers.PreTokenizer:
    """What cuts by an expression, and turns pieces into bytes."""
    if pattern == GPT2_PATTERN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [GPT2_PATTERN, QWEN35_PATTERN], ids=["gpt2", "qwen35"])
def test_both_regex_engines_sort_all_code_points_alike(pattern: str) -> None:
    """The letter, digit, mark and other classes of every code point; a space is what is none of
    these."""
    byte_of = byte_characters()
    character = {byte: char for char, byte in byte_of.items()}
    probes = "a1!"
    merges = [(probe, character[b]) for probe in probes for b in range(256)]
    # Qwen 3.5's takes most characters to the letter behind them, but no digit.
    merges += [(character[b], "a") for b in range(256) if character[b] not in probes]
    vocab = {t: i for i, t in enumerate([*byte_of, *map("".join, merges)])}
    inner = Inner(models.BPE(vocab, merges))
    inner.pre_tokenizer = split_as(pattern)
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocab.items()}
    direct = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(points), 1 << 16):
        texts = [
            "".join(
                f"\n{probe}{point}\n{point}a" for probe in probes for point in points[i : i + 256]
            )
            for i in range(start, min(start + (1 << 16), len(points)), 256)
        ]
        expected = [
            encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=False)
        ]
        assert direct.encode_ordinary_batch(texts) == expected


def test_load_reads_a_file_a_folder_and_gpt2_files(
    trained: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    trained.save(tmp_path / "tokenizer.json")
    expected = trained.encode(TEXT[:5000])
    for where in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert tokenizer.load_tokenizer(where).encode(TEXT[:5000]) == expected
    old = tmp_path / "gpt2"
    old.mkdir()
    content = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in content["merges"])
    (old / "merges.txt").write_text("#version: 0.2\n" + merges)
    # These two files are GPT-2's, and so is how they split.
    loaded = tokenizer.load_tokenizer(old)
    assert loaded.encode(TEXT[:5000]) == by_tokenizers(loaded, TEXT[:5000])
    assert loaded.decode(loaded.encode("it's 100")) == "it's 100"
    assert loaded.engine == "tiktoken"
    assert loaded.end_of_text == trained.end_of_text


def test_the_end_of_text_token_named_by_the_config_wins_and_is_kept(tmp_path: Path) -> None:
    inner = hand_made([("a", "b")])
    inner.add_special_tokens(["<stop>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    loaded = tokenizer.load_tokenizer(tmp_path)
    assert loaded.decode([loaded.end_of_text]) == "<stop>"
    (tmp_path / "again").mkdir()
    loaded.save(tmp_path / "again" / "tokenizer.json")
    assert tokenizer.load_tokenizer(tmp_path / "again").end_of_text == loaded.end_of_text


def test_a_tokenizer_of_another_kind_works_through_tokenizers(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_tokenizer(tmp_path)
    assert loaded.engine == "tokenizers"
    assert loaded.encode_batch(["a b", "b zzz"]) == [[2, 3], [3, 0]]
    assert loaded.end_of_text == 1


def refusal(where: object) -> str:
    with pytest.raises(Refusal) as caught:
        tokenizer.load_tokenizer(where)  # type: ignore[arg-type]
    assert caught.value.problem.remedy
    return caught.value.problem.code


def test_tokenizer_load_refuses_missing_unreadable_or_unsuitable_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json")
    assert refusal(tmp_path) == "tokenizer-unreadable"
    assert refusal(tmp_path / "tokenizer.jsn") == "path-missing"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == "tokenizer-unreadable"
    endless = Inner(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    endless.save(str(tmp_path / "endless.json"))
    assert refusal(tmp_path / "endless.json") == "tokenizer-unreadable"


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [split | {"invert": False}]}


def refusal_of(content: dict[str, Any], folder: Path) -> Problem:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refusal) as caught:
        tokenizer.load_tokenizer(folder)
    return caught.value.problem


@pytest.fixture
def content(trained: tokenizer.Tokenizer) -> dict[str, Any]:
    """A tokenizer.json, to be changed."""
    made: dict[str, Any] = json.loads(trained._inner.to_str())
    return made


@pytest.mark.parametrize("last_id", [3600, 5_000_000, 2**32 - 2])
def test_gaps_in_the_ids_of_a_tokenizer_are_refused(
    last_id: int, content: dict[str, Any], tmp_path: Path
) -> None:
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    missing = len(vocab) - 1
    content["model"]["vocab"] = vocab | {last: last_id}
    problem = refusal_of(content, tmp_path)
    assert problem.code == "tokenizer-unreadable"
    assert f"up to {last_id:,}, but none of its tokens has id {missing:,}" in problem.fact


def test_a_tokenizer_without_tokens_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    content["model"] |= {"vocab": {}, "merges": []}
    assert refusal_of(content, tmp_path).code == "tokenizer-unreadable"


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(\w+\s?)+$", r"(\s|\s\s)+x", r"(.*)*,"])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_does_not_end_on_some_texts_is_refused(
    pattern: str, part: str, content: dict[str, Any], tmp_path: Path
) -> None:
    replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "}
    content[part] = replace if part == "normalizer" else split_by(pattern)
    problem = refusal_of(content, tmp_path)
    assert problem.code == "tokenizer-unreadable"
    assert repr(pattern) in problem.fact and "does not end" in problem.fact


def test_a_pattern_of_quadratic_time_is_refused_by_what_it_computes() -> None:
    quadratic = r"\p{L}+\d|\s+\d|[\p{P}\p{S}]+\d|."
    assert unsafe_pattern({"pre_tokenizer": split_by(quadratic)}, cpu_s=1) == quadratic


def test_patterns_that_end_are_used(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in (r"\d{1,3}|\D+", r"[^\s]+|\s+"):
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(content | {"pre_tokenizer": split_by(pattern)})
        )
        assert tokenizer.load_tokenizer(tmp_path).encode("12 words")
    # Known ones are not tried at all.
    monkeypatch.setattr(patterns, "start_beside", None)
    for pattern in patterns.KNOWN_PATTERNS:
        assert unsafe_pattern({"pre_tokenizer": split_by(pattern)}) is None


@pytest.mark.parametrize("pattern", sorted(patterns.KNOWN_PATTERNS))
def test_known_patterns_end_on_hard_texts(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "KNOWN_PATTERNS", frozenset())
    assert unsafe_pattern({"pre_tokenizer": split_by(pattern)}) is None


def test_a_hub_that_cannot_be_reached_is_a_refusal() -> None:
    code = (
        "from farspan.corpus import tokenizer; tokenizer.load_tokenizer('nobody/no-such-tokenizer')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "error[tokenizer-unreadable]" in done.stderr
    assert "hf download nobody/no-such-tokenizer" in done.stderr
