"""What an encoder offers, and what all of them share: tokens, and the steps behind pooling.

Shapes: N texts, S positions, D size of a state, E size of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash
from farspan.retrieval.encoders.layout import (
    TOKENIZER,
    UNLIMITED_TOKENS,
    WEIGHTS,
    Dense,
    Layout,
    Normalize,
    Pooling,
    unsupported,
)
from farspan.retrieval.encoders.numpy_forward import activate
from farspan.retrieval.encoders.tensors import (
    Floats,
    another_encoder,
    missing_file,
    read_tensors,
    require_finite,
    unreadable,
)
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.stores import Vectors

Ids = npt.NDArray[np.int64]

#: Activations of a Dense module, by the class's name.
_DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")


class Encoder(Protocol):
    """A ready encoder: it makes unit vectors of texts, those of queries without torch."""

    #: all-MiniLM-L6-v2, or what the folder is called.
    name: str
    #: A hash of all that changes vectors: weights, tokenizer, pooling, prompts, limits.
    id: str
    dim: int
    #: Tokens of a text that are read, special ones and the prompt included.
    max_tokens: int
    #: ("en",) of a model that is known to be English; () where nothing is known.
    languages: tuple[str, ...]
    folder: Path
    tokenizer: Tokenizer

    def passages(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return unit vectors (N, E); zeros for a text without tokens. `work` counts characters,
        and keeps what is embedded."""

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors (N, E) of queries, by numpy alone; zeros for one without tokens."""

    def many_queries(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        """Return the vectors (N, E) of queries, computed as those of passages are."""


class KnownEncoder(NamedTuple):
    """An encoder that is known by the hashes of its files."""

    name: str
    weights: str
    tokenizer: str
    languages: tuple[str, ...]


MINILM = KnownEncoder(
    name="all-MiniLM-L6-v2",
    weights="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    tokenizer="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    languages=("en",),
)


class Identity(NamedTuple):
    """Who an encoder is."""

    name: str
    id: str
    languages: tuple[str, ...]


def identify(folder: Path, layout: Layout, settings: object) -> Identity:
    """Hash all that changes an encoder's vectors; `settings` are those of its architecture."""
    weights = hash_file(folder / layout.model / WEIGHTS)
    tokenizer = hash_file(folder / layout.model / TOKENIZER)
    dense = [
        hash_file(folder / step.folder / WEIGHTS)
        for step in layout.steps
        if isinstance(step, Dense)
    ]
    plain_layout = layout_facts(layout)
    hashed = content_hash(weights, tokenizer, dense, plain_layout, settings)
    if (weights, tokenizer) == (MINILM.weights, MINILM.tokenizer):
        return Identity(MINILM.name, hashed, MINILM.languages)
    return Identity(_folder_name(folder), hashed, ())


def layout_facts(layout: Layout) -> list[object]:
    """Return a layout without the names of its folders, which change no vector."""
    steps: list[object] = []
    for step in layout.steps:
        steps.append(step.config if isinstance(step, Dense) else "normalize")
    pooling = layout.pooling
    pooled = None if pooling is None else [pooling.modes, pooling.include_prompt]
    return [layout.kind, pooled, steps, layout.prompts, layout.max_tokens, layout.lowercase]


def _folder_name(folder: Path) -> str:
    """Return a folder's name; in the Hugging Face cache, where a commit names it, the model's."""
    path = folder.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def hash_file(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise unreadable(path, str(error)) from None


def require_same(identity: Identity, made_with: str, folder: Path) -> None:
    """Refuse (version-mismatch) an encoder that is not the one an index was made with."""
    if made_with in ("", identity.id):
        return
    raise Refusal(
        "version-mismatch",
        what=f"the encoder {identity.name} is not the one that the index was made with",
        where=folder,
        fact=f"its files have the hash {identity.id}, and the index was made with {made_with}",
        remedy="put the old files back, or make the index again with this one",
    )


def load_tokenizer(path: Path, layout: Layout, rows: int, *, checked: bool) -> Tokenizer:
    """Load a tokenizer.json that neither pads nor cuts; refuse (tokenizer-mismatch) ids for which
    the encoder has no row, unless that was `checked` before."""
    if not path.exists():
        raise missing_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more precise.
        raise unreadable(path, str(error)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if layout.lowercase:
        given = tokenizer.normalizer
        both = [Lowercase()] if given is None else [Lowercase(), given]
        tokenizer.normalizer = NormalizerSequence(both)
    if checked:
        return tokenizer
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= rows:
        raise Refusal(
            "tokenizer-mismatch",
            what="the encoder's tokenizer and weights are of different models",
            where=path,
            fact=f"the tokenizer has ids up to {highest}, the embedding {rows} rows",
            remedy=another_encoder(),
            key="index.encoder",
        )
    return tokenizer


def limit_tokens(tokenizer: Tokenizer, max_tokens: int) -> None:
    """Make the tokenizer cut texts, special tokens included."""
    if max_tokens < UNLIMITED_TOKENS:
        tokenizer.enable_truncation(max_tokens)


class DenseStep(NamedTuple):
    """A linear map of vectors, and its activation."""

    weight: Floats
    bias: Floats | None
    activation: str


Steps = tuple[DenseStep | Normalize, ...]


def load_steps(folder: Path, layout: Layout, dim: int) -> tuple[Steps, int]:
    """Load the modules behind pooling, and return them with the numbers of a vector behind them.

    Refuses (model-unsupported) one that does not take vectors of `dim` numbers.
    """
    steps: list[DenseStep | Normalize] = []
    for step in layout.steps:
        if isinstance(step, Normalize):
            steps.append(step)
            continue
        config = step.config
        path = folder / step.folder / WEIGHTS
        tensors = read_tensors(path)
        require_finite(path, tensors)
        activation = config.activation_function.rpartition(".")[2]
        if activation not in _DENSE_ACTIVATIONS:
            raise unsupported(folder, f"its Dense module has the activation {activation}")
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (config.out_features, dim)}
        if config.bias:
            expected["linear.bias"] = (config.out_features,)
        if config.in_features != dim or shapes != expected:
            raise unsupported(
                folder, f"its Dense module takes {config.in_features} numbers and is given {dim}"
            )
        bias = tensors["linear.bias"].floats() if config.bias else None
        steps.append(DenseStep(tensors["linear.weight"].floats(), bias, activation))
        dim = config.out_features
    return tuple(steps), dim


def apply_steps(pooled_ND: Floats, steps: Steps) -> Vectors:
    """Apply the modules behind pooling, and scale to unit length."""
    vectors: Floats = pooled_ND
    for step in steps:
        if isinstance(step, Normalize):
            vectors = scale_to_unit(vectors)
            continue
        vectors = vectors @ step.weight.T
        if step.bias is not None:
            vectors = vectors + step.bias
        vectors = _activate_dense(vectors, step.activation)
    return scale_to_unit(vectors)


def _activate_dense(vectors: Floats, activation: str) -> Floats:
    if activation == "Tanh":
        return np.tanh(vectors)
    if activation == "Sigmoid":
        exponentials: Floats = np.exp(-vectors)
        return np.reciprocal(1 + exponentials)
    if activation == "Identity":
        return vectors
    return activate(vectors, activation.lower())


def scale_to_unit(vectors_NE: Floats) -> Vectors:
    """Scale rows to unit length; zeros stay."""
    norms_N1 = np.linalg.norm(vectors_NE, axis=-1, keepdims=True)
    return vectors_NE / np.maximum(norms_N1, np.float32(1e-12))


def pool_states(states_SD: Floats, pooling: Pooling, prompt_tokens: int) -> Floats:
    """Pool the states of one text's tokens; the first `prompt_tokens` are left out of a
    pooling without the prompt."""
    skipped = 0 if pooling.include_prompt else min(prompt_tokens, len(states_SD) - 1)
    positions_S = np.arange(skipped + 1, len(states_SD) + 1, dtype=np.float32)
    states_SD = states_SD[skipped:]
    parts: list[Floats] = []
    for mode in pooling.modes:
        if mode == "cls":
            part = states_SD[0]
        elif mode == "lasttoken":
            part = states_SD[-1]
        elif mode == "max":
            part = states_SD.max(0)
        elif mode == "mean":
            part = states_SD.mean(0)
        elif mode == "mean_sqrt_len_tokens":
            part = states_SD.sum(0) / np.sqrt(np.float32(len(states_SD)))
        else:  # weightedmean: by the position, from 1 on.
            part = positions_S @ states_SD / positions_S.sum()
        parts.append(part)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
