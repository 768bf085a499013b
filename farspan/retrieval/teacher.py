"""Vectors of words from somebody else's model, which a fit may begin at: a folder on this machine,
never fetched.

A static model is a table of vectors with its tokenizer, as model2vec writes it: `model.safetensors`
with `embeddings` (V, E), and `tokenizer.json`. Any other is one that sentence-transformers loads,
which must be installed for the fit. Searches need neither: what the words' vectors say goes into
the index's own table.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from farspan.corpus.tokenizer import checked_json
from farspan.domain.codec import missing_path
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal

_STATIC, _TOKENIZER, _MODULES = "model.safetensors", "tokenizer.json", "modules.json"
_TABLE = "embeddings"
_ROWS = 256


def digest(folder: Path) -> str:
    """What the folder's model is known by: 16 hexadecimal digits of its files. Raises Refusal
    (path-missing)."""
    if not folder.is_dir():
        raise missing_path(folder)
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            found.update(
                str(path.relative_to(folder)).encode()
                + hashlib.file_digest(file, "sha256").digest()
            )
    return found.hexdigest()[:16]


def word_vectors(folder: Path, words: Sequence[str]) -> Tensor:
    """Unit vectors (N, E) of words around their mean, float32; zeros for a blank one.

    Raises Refusal: path-missing, model-unsupported for a folder that holds no such model,
    extra-missing where sentence-transformers is not installed.
    """
    if not folder.is_dir():
        raise missing_path(folder)
    given = [row for row, word in enumerate(words) if word.strip()]
    texts = [words[row].strip() for row in given]
    static = not (folder / _MODULES).exists() and (folder / _STATIC).exists()
    vectors_GE = _static(folder, texts) if static else _encoded(folder, texts)
    vectors_NE = torch.zeros(len(words), vectors_GE.shape[1])
    # Most models put all words into one corner; around their mean they differ by what they mean.
    vectors_NE[given] = F.normalize(vectors_GE - vectors_GE.mean(0), dim=1)
    return vectors_NE


def _static(folder: Path, texts: Sequence[str]) -> Tensor:
    """Means of the tokens' rows; a text without tokens stands at 0."""
    from tokenizers import Tokenizer

    try:
        table_VE = load_file(folder / _STATIC)[_TABLE].float()
        tokenizer = Tokenizer.from_str(checked_json(folder / _TOKENIZER))
        encoded = [
            encoding.ids
            for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]
        lengths = torch.tensor([0, *map(len, encoded[:-1])]).cumsum(0)
        tokens = torch.tensor([token for ids in encoded for token in ids], dtype=torch.long)
        return F.embedding_bag(tokens, table_VE, lengths, mode="mean")
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library of tokenizers raises bare Exception for everything, BaseException where it panics.
    except BaseException as error:
        raise _unsupported(folder, f"{type(error).__name__}: {error}") from None


def _encoded(folder: Path, texts: Sequence[str]) -> Tensor:
    if not (folder / _MODULES).exists():
        raise _unsupported(folder, f"it has neither {_STATIC} nor {_MODULES}")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise Refusal(
            "extra-missing",
            what="this teacher needs a library that is not installed",
            where=f"run.yaml, key index.teacher: {folder}",
            fact="there is no module named sentence_transformers",
            remedy=install_command("st"),
            key="index.teacher",
        )
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    try:
        model = sentence_transformers.SentenceTransformer(
            str(folder), device="cpu", local_files_only=True
        )
        encoded = model.encode(
            list(texts), batch_size=_ROWS, convert_to_tensor=True, show_progress_bar=False
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _unsupported(folder, f"{type(error).__name__}: {error}") from None
    return torch.as_tensor(encoded).float().cpu()


def _unsupported(folder: Path, fact: str) -> Refusal:
    return Refusal(
        "model-unsupported",
        what="this folder holds no model that can be a teacher",
        where=f"run.yaml, key index.teacher: {folder}",
        fact=" ".join(fact.split())[:300],
        remedy=(
            "name a folder of model2vec's or of sentence-transformers', or leave index.teacher out"
        ),
        key="index.teacher",
    )
