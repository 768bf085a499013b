"""What the web application needs of an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from farspan.retrieval.browse import Documents, Surrounded
    from farspan.retrieval.filters import Where
    from farspan.retrieval.hybrid_ranking import System
    from farspan.retrieval.index import IndexManifest
    from farspan.retrieval.search import Answer, Result
    from farspan.retrieval.topics import Topics

Kind = Literal["query", "document"]


class WrittenPiece(NamedTuple):
    """A part of a text that is written: what it adds, the tokens of the prompt and those written so
    far, and whether the model has ended the text."""

    text: str
    prompt_tokens: int
    tokens: int
    ended: bool = False


class Searcher(Protocol):
    """An index that is open, and its model. Several threads may ask at once.

    `search`, `similar`, `passage`, `surround` and `documents` raise Refusal (usage) for a field or
    an id that there is not; `embed`, `generate` and `write` (no-model) where only an index is open.
    """

    @property
    def manifest(self) -> IndexManifest: ...

    @property
    def fields(self) -> tuple[str, ...]:
        """What a search can be narrowed by."""

    def search(
        self,
        query: str,
        k: int,
        system: System | None = None,
        where: Where = None,
        offset: int = 0,
        topic: int | None = None,
    ) -> Answer:
        """Return the best documents; with `topic` of this topic alone."""

    def topics(self) -> Topics: ...

    def passage(self, chunk_id: str) -> Result: ...

    def surround(self, chunk_id: str, before: int, after: int) -> Surrounded:
        """Return a passage with up to `before` and `after` passages of its document around it."""

    def documents(
        self, k: int, offset: int = 0, where: Where = None, topic: int | None = None
    ) -> Documents:
        """Return documents in the order of the source."""

    def similar(self, chunk_id: str, k: int) -> tuple[Result, ...]: ...

    @property
    def dim(self) -> int:
        """Numbers of a vector that `embed` makes. Raises Refusal (no-model) where it makes none."""

    def embed(self, texts: list[str], kind: Kind) -> tuple[npt.NDArray[np.float32], list[int], int]:
        """Return unit vectors (N x E), the tokens that each text was cut by, and the tokens that
        were read."""

    def generate(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> str:
        """Generate text after the prompt; stop early once it is `enough`."""

    def write(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[WrittenPiece]:
        """Yield the text after a prompt as it is written, in pieces; stop early once it is
        `enough`."""

    def stamp(self) -> object:
        """Another value once a new index has taken this one's place on disk."""

    def close(self) -> None: ...
