"""A ready encoder's vectors of an index's passages, and a table that stands in for it at
queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.encoders.encoder import Encoder
from farspan.retrieval.encoders.query_table import QueryTable, distill_query_table
from farspan.retrieval.evaluate import SideName, SideVectors
from farspan.retrieval.evaluation_text import EvaluationText
from farspan.retrieval.index import ENCODER_VECTORS, QUERY_TABLE, EncoderIdentity, Index
from farspan.retrieval.index_task import FittedVoice, Task
from farspan.retrieval.kept_vectors import KeptVectors
from farspan.retrieval.stores import Ids, Vectors


@dataclass(frozen=True, kw_only=True)
class EncoderModel:
    """A ready encoder as a voice."""

    encoder: Encoder
    name: Literal["encoder"] = ENCODER_VECTORS

    @property
    def identity(self) -> str:
        return self.encoder.id

    @property
    def cache_key(self) -> str:
        return self.encoder.id

    def fit(
        self, task: Task, text: EvaluationText, chunks: Sequence[Chunk], old: Index | None
    ) -> FittedVoice:
        """Embed passages, and distill the table of queries on them.

        Vectors of the old index serve where its text is the same.
        """
        same = old is not None and old.manifest.encoder is not None
        same = same and old.manifest.encoder.id == self.encoder.id  # type: ignore[union-attr]
        kept = KeptVectors(old if same else None, ENCODER_VECTORS, _indexed(chunks))
        indexed_NE = self._embed(task, kept, chunks)

        # Candidates are without what queries were taken from.
        candidates_CE = indexed_NE[text.candidates]
        changed = text.changed(chunks)
        if changed:
            places = np.searchsorted(text.candidates, changed)
            changed_texts = [text.found[row] for row in changed]
            candidates_CE[places] = self.encoder.passages(changed_texts, task.work)

        titles = [
            task.documents[number].title
            for number in range(task.train)
            if number not in text.queries.relevant
        ]
        task.write_line("distilling a table for queries without the encoder")
        found_texts = [text.found[row] for row in text.candidates]
        table = distill_query_table(self.encoder, found_texts, candidates_CE, titles, task.work)
        sides: dict[SideName, SideVectors] = {}
        if task.recipe.evaluate and text.queries.reported:
            reported = [query.text for query in text.queries.reported]
            tuning = [query.text for query in text.queries.tuning]
            asked = self.encoder.queries([*reported, *tuning])
            sides["encoder"] = SideVectors(
                candidates_CE, asked[: len(reported)], asked[len(reported) :]
            )
            by_table = table.queries([*reported, *tuning])
            sides["table"] = SideVectors(
                candidates_CE, by_table[: len(reported)], by_table[len(reported) :]
            )
        return _EncoderVoice(indexed_NE, table, sides)

    def extend(self, task: Task, chunks: Sequence[Chunk], old: Index) -> FittedVoice:
        kept = KeptVectors(old, ENCODER_VECTORS, _indexed(chunks))
        new_ME = self.encoder.passages(kept.new_texts, task.work)
        vectors_NE = kept.vectors(np.arange(len(chunks)), new_ME)
        return _EncoderVoice(vectors_NE, QueryTable.load(old.files / QUERY_TABLE), {})

    def _embed(self, task: Task, kept: KeptVectors, chunks: Sequence[Chunk]) -> Vectors:
        task.write_line(
            f"embedding {counted(len(kept.new_texts), 'passage')} by {self.encoder.name}"
        )
        task.work.add_expected("embedding", sum(map(len, kept.new_texts)))
        new_ME = self.encoder.passages(kept.new_texts, task.work)
        return kept.vectors(np.arange(len(chunks)), new_ME)


@dataclass(frozen=True)
class MissingEncoder:
    """The encoder of an index, which is not on this machine: what has vectors keeps them."""

    known: EncoderIdentity
    name: Literal["encoder"] = ENCODER_VECTORS

    @property
    def identity(self) -> str:
        return self.known.id

    @property
    def cache_key(self) -> str:
        return self.known.id

    def fit(
        self, task: Task, text: EvaluationText, chunks: Sequence[Chunk], old: Index | None
    ) -> FittedVoice:
        raise self._refusal("the index is to be made again")

    def extend(self, task: Task, chunks: Sequence[Chunk], old: Index) -> FittedVoice:
        """Keep the vectors of an index whose passages are all known. Refuse new ones."""
        kept = KeptVectors(old, ENCODER_VECTORS, _indexed(chunks))
        if kept.new_texts:
            raise self._refusal(counted(len(kept.new_texts), "new passage"))
        vectors_NE = kept.vectors(np.arange(len(chunks)), np.empty((0, kept.dim), np.float32))
        return _EncoderVoice(vectors_NE, QueryTable.load(old.files / QUERY_TABLE), {})

    def _refusal(self, fact: str) -> Refusal:
        return Refusal(
            "encoder-missing",
            what=f"the index has vectors by {self.known.name}, which is not on this machine",
            where=self.known.folder,
            fact=fact,
            remedy="bring it there, or leave it out: --encoder own",
        )


def _indexed(chunks: Sequence[Chunk]) -> list[str]:
    return [chunk.indexed for chunk in chunks]


class _EncoderVoice:
    def __init__(
        self, vectors_NE: Vectors, table: QueryTable, sides: dict[SideName, SideVectors]
    ) -> None:
        self._vectors_NE = vectors_NE
        self._table = table
        self._sides = sides
        self.dim = vectors_NE.shape[1]

    def vectors(self, rows: Ids) -> Vectors:
        return self._vectors_NE[rows]

    def sides(self) -> dict[SideName, SideVectors]:
        return self._sides

    def save(self, files: Path) -> None:
        self._table.save(files / QUERY_TABLE)
