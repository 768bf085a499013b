"""What an index is built from, and the voices that it is built with.

Nothing here imports PyTorch: words alone are indexed without a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farspan.corpus.distinct_texts import Copies
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.index import (
    EncoderIdentity,
    Index,
    Origin,
    QueryModels,
    Recipe,
    SetName,
)
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.queries import Query
from farspan.retrieval.stores import Ids, Vectors

if TYPE_CHECKING:
    from farspan.retrieval.evaluate import SideName, SideVectors
    from farspan.retrieval.evaluation_text import EvaluationText


@dataclass(frozen=True, kw_only=True)
class FittedVoice:
    """The vectors of an index's chunks by one model.

    `vectors` returns the unit vectors (N, E) of chunks by their rows, `save` writes what searches
    need into the index's folder, and `sides` are what an evaluation compares after a fit.
    """

    dim: int
    vectors: Callable[[Ids], Vectors]
    save: Callable[[Path], None]
    sides: Mapping[SideName, SideVectors] = field(default_factory=dict)


class VoiceModel(Protocol):
    """A model that gives an index a set of vectors."""

    @property
    def name(self) -> SetName: ...

    @property
    def identity(self) -> str:
        """A hash of all that the vectors depend on but the text."""

    @property
    def cache_key(self) -> str:
        """What else the last bits of a vector depend on: versions, device, precision."""

    def fit(
        self, task: Task, text: EvaluationText, chunks: Sequence[Chunk], old: Index | None
    ) -> FittedVoice:
        """Fit the voice to the documents of today; `old` is the index that is replaced."""

    def extend(self, task: Task, chunks: Sequence[Chunk], old: Index) -> FittedVoice:
        """Embed chunks that the old index lacks; the fit stays."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An index to be built at `path`, and its inputs.

    The first `train` documents are the training split; `write_line` writes lines for people, and
    `work` counts progress.
    """

    path: Path
    documents: Sequence[Document]
    train: int
    recipe: Recipe
    write_line: Callable[[str], None]
    work: IndexWork
    #: The models whose vectors the index is to have; words need none.
    voices: Sequence[VoiceModel] = ()
    origin: Origin | None = None
    encoder: EncoderIdentity | None = None
    #: Why no ready encoder is among the voices.
    no_encoder: str = ""
    #: Which of the documents are copies, and where exact copies stand; none without it.
    copies: Copies | None = None
    #: Fingerprint of where the documents were read from.
    source: str = ""
    #: Fit to the documents of today, whatever the old index was fitted to.
    refit: bool = False
    #: A person's queries, which a fit is judged by too, and the seconds that it takes at most.
    own: Sequence[Query] = ()
    fit_s: float = math.inf
    #: Models of queries that the old index is opened with.
    models: QueryModels | None = None

    def known_copies(self) -> Copies:
        return self.copies or Copies.none(len(self.documents))
