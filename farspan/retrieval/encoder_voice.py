"""A ready encoder's vectors of an index's passages, and a table that stands in for it at
queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.encoders.distillation import (
    ENGLISH_QUESTIONS,
    TEXTS,
    distill_query_table,
)
from farspan.retrieval.encoders.encoder import Encoder
from farspan.retrieval.encoders.query_table import QueryTable
from farspan.retrieval.encoders.static import StaticEncoder
from farspan.retrieval.evaluate import SideName, SideVectors
from farspan.retrieval.evaluation_text import EvaluationText
from farspan.retrieval.index import ENCODER_VECTORS, QUERY_TABLE, EncoderIdentity, Index
from farspan.retrieval.index_task import FittedVoice, Task
from farspan.retrieval.kept_vectors import KeptVectors
from farspan.retrieval.stores import Ids, Vectors
from farspan.retrieval.words import detect_languages

#: Short texts that a table is fitted to for each passage, and at least; at most `TEXTS`. Of 20,000
#: it found .03 less on perl's manual than of 50,000, which take 100 s of a core.
TEXTS_PER_PASSAGE = 4
MIN_TEXTS = 20_000
#: Passages whose language is looked at.
MAX_LOOKED_AT = 200


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
        embedded_by = old.manifest.encoder if old is not None else None
        is_same = embedded_by is not None and embedded_by.id == self.encoder.id
        kept = KeptVectors(old if is_same else None, ENCODER_VECTORS, _indexed(chunks))
        new_ME = self._embed(task, kept)
        indexed_NE = kept.vectors(np.arange(len(chunks)), new_ME)

        # Candidates are without what queries were taken from.
        candidates_CE = indexed_NE[text.candidates]
        changed = text.changed(chunks)
        if changed:
            places = np.searchsorted(text.candidates, changed)
            changed_texts = [text.texts[row] for row in changed]
            candidates_CE[places] = self.encoder.passages(changed_texts, task.work)

        titles = [
            task.documents[number].title
            for number in range(task.train)
            if number not in text.queries.relevant
        ]
        table = self._distill(task, text, titles)
        sides: dict[SideName, SideVectors] = {}
        if task.recipe.evaluate and text.queries.reported:
            reported = [query.text for query in text.queries.reported]
            tuning = [query.text for query in text.queries.tuning]
            asked = self.encoder.many_queries([*reported, *tuning], task.work)
            sides["encoder"] = SideVectors(
                candidates_CE, asked[: len(reported)], asked[len(reported) :]
            )
            if table is not None:
                by_table = table.queries([*reported, *tuning])
                sides["table"] = SideVectors(
                    candidates_CE, by_table[: len(reported)], by_table[len(reported) :]
                )
        return _fitted_voice(self.encoder.dim, indexed_NE.__getitem__, table, sides)

    def extend(self, task: Task, chunks: Sequence[Chunk], old: Index) -> FittedVoice:
        """Embed new passages; the table of queries stays."""
        kept = KeptVectors(old, ENCODER_VECTORS, _indexed(chunks))
        new_ME = self._embed(task, kept)
        vectors = partial(kept.vectors, new_ME=new_ME)
        return _fitted_voice(kept.dim, vectors, old.query_table, {})

    def _distill(
        self, task: Task, text: EvaluationText, titles: Sequence[str]
    ) -> QueryTable | None:
        """Return the table that stands in for the encoder; a static encoder is one itself."""
        if isinstance(self.encoder, StaticEncoder):
            return None
        candidate_texts = [text.texts[row] for row in text.candidates]
        num_texts = min(max(TEXTS_PER_PASSAGE * len(candidate_texts), MIN_TEXTS), TEXTS)
        languages = Counter(detect_languages(candidate_texts[:MAX_LOOKED_AT]))
        is_english = languages["en"] > languages.total() / 2
        task.write_line(f"fitting a table of queries to {num_texts:,} short texts")
        return distill_query_table(
            self.encoder,
            candidate_texts,
            titles,
            task.work,
            texts=num_texts,
            questions=ENGLISH_QUESTIONS if is_english else (),
            seed=task.recipe.seed,
        )

    def _embed(self, task: Task, kept: KeptVectors) -> Vectors:
        """Return the vectors (M, E) of the texts that an index lacks."""
        num_texts = counted(len(kept.new_texts), "passage")
        task.write_line(f"embedding {num_texts} by {self.encoder.name}")
        task.work.add_expected("embedding", sum(map(len, kept.new_texts)))
        return self.encoder.passages(kept.new_texts, task.work)


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
        vectors = partial(kept.vectors, new_ME=np.empty((0, kept.dim), np.float32))
        return _fitted_voice(kept.dim, vectors, old.query_table, {})

    def _refusal(self, fact: str) -> Refusal:
        return Refusal(
            "encoder-missing",
            what=f"the index has vectors by {self.known.name}, which is not on this machine",
            where=self.known.folder,
            fact=fact,
            remedy="bring it there, or leave it out: --encoder own",
        )


def _fitted_voice(
    dim: int,
    vectors: Callable[[Ids], Vectors],
    table: QueryTable | None,
    sides: Mapping[SideName, SideVectors],
) -> FittedVoice:
    """Return an encoder's vectors, with the table that is saved with them, if there is one."""

    def save(files: Path) -> None:
        if table is not None:
            table.save(files / QUERY_TABLE)

    return FittedVoice(dim=dim, vectors=vectors, save=save, sides=sides)


def _indexed(chunks: Sequence[Chunk]) -> list[str]:
    return [chunk.indexed for chunk in chunks]
