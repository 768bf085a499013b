"""Tokenizers: train a byte-level BPE, or load any that `tokenizers` can read; encode through
tiktoken where proven."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus._hub import use_cache_if_unreachable
from farspan.corpus._tiktoken_ranks import QWEN35_PATTERN, SEPARATOR, as_tiktoken
from farspan.corpus.patterns import unsafe_pattern
from farspan.domain.corpus import make_encodable
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path, write_atomically

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
#: How text is split before tokens are learned, by llama.cpp's name: what writes a GGUF file calls
#: it so in `tokenizer.ggml.pre`. Tokenizers of earlier runs split as "gpt-2".
SPLITTING_RULE = "qwen35"
#: Bytes of a tokenizer.json and tokens in it: the largest published ones have 35 MB and 262,144.
MAX_FILE_BYTES = 256 << 20
MAX_VOCAB_SIZE = 1_000_000
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer:
    """Text to ids and back. Special tokens written in a text are ordinary text: only code puts real
    ones there."""

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: int) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self.end_of_text = end_of_text
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._inner = inner
        self._fast = as_tiktoken(inner, end_of_text)
        self.engine = "tiktoken" if self._fast else "tokenizers"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end-of-text token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without end-of-text tokens."""
        tokens, lengths = self.encode_joined(texts)
        batch = []
        start = 0
        for length in lengths:
            end = start + length
            batch.append(tokens[start : end - 1].tolist())
            start = end
        return batch

    def encode_joined(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], list[int]]:
        """Return all texts' ids in one array, an end-of-text token after each, and the length of
        each with that token."""
        texts = [make_encodable(text) for text in texts]
        if self._fast is None or any(SEPARATOR in text for text in texts):
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            ids: list[int] = []
            for encoding in encodings:
                ids += encoding.ids
                ids.append(self.end_of_text)
            return np.array(ids, np.uint32), [len(encoding) + 1 for encoding in encodings]
        # One call for all texts, whose ids never become Python objects: half as long again as a
        # call for each.
        fast, id_of_rank = self._fast
        ranks = fast.encode_to_numpy(SEPARATOR.join([*texts, ""]), allowed_special={SEPARATOR})
        ends = np.flatnonzero(ranks == len(id_of_rank) - 1) + 1
        return id_of_rank[ranks], np.diff(ends, prepend=0).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def save(self, file: Path) -> None:
        """Write a tokenizer file, and next to it `tokenizer_config.json`."""
        write_atomically(file, self._inner.to_str(pretty=True).encode())
        config = {
            "eos_token": self._inner.id_to_token(self.end_of_text),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        write_atomically(file.with_name("tokenizer_config.json"), msgspec.json.encode(config))


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE that splits by SPLITTING_RULE; it has fewer than `vocab_size` tokens
    where the texts run out of pairs."""
    from tokenizers import Regex, models, pre_tokenizers, trainers

    inner = _byte_level(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN35_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, inner.get_vocab()[END_OF_TEXT])


def load_tokenizer(where: Path | str) -> Tokenizer:
    """Load a tokenizer.json, a folder with one or with GPT-2's vocab.json and merges.txt, or the id
    of a hub repository.

    Refuses a path that does not exist, a file that is no tokenizer, one without an end-of-text
    token, and a hub id that cannot be fetched.
    """
    path = Path(where).expanduser()
    local = path.exists()
    name = str(where)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".json"
    if is_path and not local:
        raise missing_path(path)
    fault = None
    try:
        if local:
            inner = _read_tokenizer(path)
        else:
            with use_cache_if_unreachable() as fault:
                from huggingface_hub import hf_hub_download

                inner = _read_tokenizer(Path(hf_hub_download(name, "tokenizer.json")))
        end_of_text = _end_of_text(inner, path if local else None)
        _check_ids(inner)
        return Tokenizer(inner, end_of_text)
    except (KeyboardInterrupt, SystemExit, Refusal):
        raise
    # The Rust library raises bare Exception for everything, and BaseException where it panics.
    except BaseException as error:
        raise Refusal(
            "tokenizer-unreadable",
            where=where,
            fact=fault or " ".join(str(error).split())[:300],
            what="this is not a tokenizer that can be used"
            if local
            else "there is neither a file of this name nor a tokenizer on the hub that can be used",
            remedy="leave `tokenizer.use` out of run.yaml to train one on the corpus"
            if local
            else (
                "fetch it where the hub can be reached, then name the folder: hf download "
                f"{shell_word(where)} --local-dir DIR"
            ),
        ) from None


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return Inner.from_str(checked_json(file))
    vocab = path / "vocab.json"
    merges = path / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise ValueError("the folder has neither tokenizer.json nor both vocab.json and merges.txt")
    for part in (vocab, merges):
        if part.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{part.name} is longer than {MAX_FILE_BYTES >> 20} MiB")
    inner = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
    inner.add_special_tokens([END_OF_TEXT])
    return inner


def checked_json(file: Path) -> str:
    """Return the text of a tokenizer.json; raises ValueError for one that is too long, or whose
    regular expressions may not end."""
    with file.open("rb") as content:
        text = content.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"the file is longer than {MAX_FILE_BYTES >> 20} MiB")
    parts = json.loads(text)
    if isinstance(parts, dict) and (pattern := unsafe_pattern(parts)) is not None:
        raise ValueError(f"its pattern {pattern[:100]!r} does not end on some texts")
    return text.decode()


def _check_ids(inner: tokenizers.Tokenizer) -> None:
    """Raise ValueError unless the ids are 0, 1, 2 and so on, as those of a model's table are."""
    if not inner.get_vocab_size(with_added_tokens=False):
        raise ValueError("it has no tokens for text")
    ids = sorted(set(inner.get_vocab(with_added_tokens=True).values()))
    if len(ids) > MAX_VOCAB_SIZE:
        raise ValueError(f"it has {len(ids):,} tokens; at most {MAX_VOCAB_SIZE:,} are read")
    if ids and ids[-1] >= len(ids):
        missing = next(number for number, token_id in enumerate(ids) if number != token_id)
        raise ValueError(f"its ids go up to {ids[-1]:,}, but none of its tokens has id {missing:,}")


def _end_of_text(inner: tokenizers.Tokenizer, path: Path | None) -> int:
    """Return the id of the token that ends a document: the one in tokenizer_config.json, else the
    first well-known one."""
    named: Any = None
    if path:
        folder = path if path.is_dir() else path.parent
        config = folder / "tokenizer_config.json"
        if config.is_file():
            named = msgspec.json.decode(config.read_bytes()).get("eos_token")
    if isinstance(named, dict):
        named = named["content"]
    for token in (named, *_KNOWN_ENDS):
        if token is not None and (token_id := inner.token_to_id(token)) is not None:
            return int(token_id)
    raise ValueError(
        f"no token ends a document: no eos_token in tokenizer_config.json, none of {_KNOWN_ENDS} "
        "in it"
    )
