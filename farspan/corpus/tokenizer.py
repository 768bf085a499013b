"""Tokenizers: train a byte-level BPE, or load any that `tokenizers` can read; encode through tiktoken where proven."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus._ranks import SEPARATOR, as_tiktoken
from farspan.domain.codec import missing_path, write_atomically
from farspan.domain.problems import Refusal

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer:
    """Text to ids and back. Special tokens written in a text are ordinary text: only code puts real ones there."""

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: int) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self.end_of_text = end_of_text
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._inner = inner
        self._fast: tuple[tiktoken.Encoding, npt.NDArray[np.uint32]] | None = as_tiktoken(inner, end_of_text)

    @property
    def engine(self) -> Literal["tiktoken", "tokenizers"]:
        return "tiktoken" if self._fast else "tokenizers"

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-text token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without end-of-text tokens."""
        tokens, lengths = self.encode_joined(texts)
        ends = np.cumsum(lengths)
        return [tokens[end - length : end - 1].tolist() for end, length in zip(ends, lengths, strict=True)]

    def encode_joined(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], list[int]]:
        """All texts' ids in one array, an end-of-text token after each, and the length of each with that token."""
        texts = [text if text.isascii() else _without_surrogates(text) for text in texts]
        if self._fast is None:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            ids = [part for encoding in encodings for part in (*encoding.ids, self.end_of_text)]
            return np.array(ids, np.uint32), [len(encoding) + 1 for encoding in encodings]
        fast, id_of_rank = self._fast
        if any(SEPARATOR in text for text in texts):
            pieces = [[*fast.encode_ordinary(text), len(id_of_rank) - 1] for text in texts]
            return id_of_rank[np.concatenate(pieces).astype(np.intp)], [len(piece) for piece in pieces]
        # One call for all texts, whose ids never become Python objects: half as long again as a call for each.
        whole = SEPARATOR.join([*texts, ""])
        ranks = fast.encode_to_numpy(whole, allowed_special={SEPARATOR})
        ends = np.flatnonzero(ranks == len(id_of_rank) - 1) + 1
        return id_of_rank[ranks], np.diff(ends, prepend=0).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` (in `path` if that is a folder), and `tokenizer_config.json` beside it."""
        path = path / "tokenizer.json" if path.is_dir() else path
        write_atomically(path, self._inner.to_str(pretty=True).encode())
        config = {"eos_token": self._inner.id_to_token(self.end_of_text), "tokenizer_class": "PreTrainedTokenizerFast"}
        write_atomically(path.with_name("tokenizer_config.json"), msgspec.json.encode(config))


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's splitting rule; fewer than `vocab_size` tokens where the texts run out of pairs."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, inner.get_vocab()[END_OF_TEXT])


@functools.lru_cache(maxsize=1)
def load_cached(path: Path) -> Tokenizer:
    """`load`, remembered: a worker process encodes many shards with one tokenizer."""
    return load(path)


def load(where: Path | str) -> Tokenizer:
    """A tokenizer.json, a folder with one or with GPT-2's vocab.json and merges.txt, or the id of a hub repository.

    Refuses a path that does not exist, a file that is no tokenizer, one without an end-of-text token, and a hub id
    that cannot be fetched.
    """
    path = Path(where).expanduser()
    try:
        if path.exists():
            inner = _read(path)
            end_of_text = _end_of_text(inner, path if path.is_dir() else path.parent)
        elif str(where).startswith((".", "/", "~")) or str(where).count("/") > 1 or path.suffix == ".json":
            raise missing_path(path)
        else:
            inner = _from_hub(str(where))
            end_of_text = _end_of_text(inner, None)
    except Refusal:
        raise
    except Exception as error:  # the Rust library raises bare Exception for everything
        raise Refusal(
            "tokenizer-unreadable",
            what="this is not a tokenizer that can be used",
            where=where,
            fact=" ".join(str(error).split())[:300],
            remedy="leave `tokenizer.use` out of run.yaml to train one on the corpus",
        ) from None
    return Tokenizer(inner, end_of_text)


def _read(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in ("vocab.json", "merges.txt"):
        return Inner.from_file(str(path))
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return Inner.from_file(str(path / "tokenizer.json"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise ValueError("the folder has neither tokenizer.json nor both vocab.json and merges.txt")
    inner = Inner(models.BPE.from_file(str(vocab), str(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return inner


def _from_hub(name: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_pretrained(name)
    except Exception as error:
        raise Refusal(
            "tokenizer-unreadable",
            what=f"there is no file {name!r}, and no tokenizer of that id could be fetched from the hub",
            where=name,
            fact=" ".join(str(error).split())[:300],
            remedy=f"fetch it where the hub can be reached, then name the folder: hf download {name} --local-dir DIR",
        ) from None


def _end_of_text(inner: tokenizers.Tokenizer, folder: Path | None) -> int:
    """Id of the token that ends a document: what tokenizer_config.json says, else the first well-known one."""
    config = folder / "tokenizer_config.json" if folder else None
    named: Any = msgspec.json.decode(config.read_bytes()).get("eos_token") if config and config.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    for token in (named, *_KNOWN_ENDS):
        if token is not None and (found := inner.token_to_id(token)) is not None:
            return int(found)
    raise ValueError(f"no token ends a document: no eos_token in tokenizer_config.json, none of {_KNOWN_ENDS} in it")
