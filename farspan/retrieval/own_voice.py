"""The run's own vectors: its embedder fitted to a corpus' passages and the texts that belong to
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import torch

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.struct_files import content_hash
from farspan.domain.units import counted, format_seconds
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.contrastive_fit import steps_to_fit
from farspan.retrieval.embed import Embedder, Read
from farspan.retrieval.evaluate import SideName, SideVectors
from farspan.retrieval.evaluation_text import EvaluationText
from farspan.retrieval.index import FITTED, OWN_VECTORS, Index, Origin
from farspan.retrieval.index_task import FittedVoice, Task
from farspan.retrieval.kept_vectors import KeptVectors
from farspan.retrieval.pairs import mine_pairs
from farspan.retrieval.pooling import Processes, bf16_is_fast
from farspan.runtime.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A run's model as a voice. On a CPU `processes` embed."""

    model: Decoder
    tokenizer: Tokenizer
    origin: Origin
    processes: Processes | None = None
    name: Literal["own"] = OWN_VECTORS

    @property
    def identity(self) -> str:
        return content_hash(self.origin)

    @property
    def cache_key(self) -> str:
        device = self.model.tok.weight.device
        return content_hash(self.origin, str(torch.__version__), device.type, bf16_is_fast(device))

    def fit(
        self, task: Task, text: EvaluationText, chunks: Sequence[Chunk], old: Index | None
    ) -> FittedVoice:
        """Fit the embedder to titles, openings and headings with the passages below them.

        Near copies are candidates, and nothing is fitted to them.
        """
        recipe = task.recipe
        bodies = [chunks[row] for row in text.fitted_rows]
        pairs = mine_pairs(
            task.documents[: task.train], bodies, text.passages, text.queries.relevant
        )
        # What is fitted to is read first; then passages with their heads, as the index holds them,
        # and candidates that are neither.
        place = {row: number for number, row in enumerate(text.fitted_rows)}
        fitted = dict(zip(text.fitted_rows, text.passages, strict=True))
        indexed = [row for row, chunk in enumerate(chunks) if chunk.indexed != fitted.get(row)]
        measured = recipe.evaluate and bool(text.queries.reported)
        asked = [*text.reported, *text.tuning] if measured else []
        changed = text.changed(chunks) if measured else []
        lone = [row for row in changed if text.texts[row] != fitted.get(row)]
        texts = [*text.passages, *(chunks[row].indexed for row in indexed)]
        texts += [text.texts[row] for row in lone]

        to_embed = [*texts, *pairs.asked, *asked]
        task.work.add_expected("embedding", sum(map(len, to_embed)))
        task.work.add_expected("fitting", steps_to_fit(len(pairs.texts), recipe.fit))
        is_limited = task.fit_s < math.inf
        limit = f", for {format_seconds(task.fit_s)} at most" if is_limited else ""
        task.write_line(
            f"fitting to {counted(len(pairs.texts), 'pair')} of a title, opening or heading and a "
            f"passage{limit}"
        )
        start = Embedder.unfitted(
            self.model, self.tokenizer, text.passages, task.work, self.processes
        )
        read = start.read(texts)
        belonging = start.read(pairs.asked)
        fitted_to = read.select(range(len(text.passages)))
        embedder = start.fitted(fitted_to, belonging, pairs, recipe.fit, task.fit_s)

        # The number in `texts` of what the index holds of each chunk, and of what is found of it.
        indexed_at = dict(place)
        indexed_at |= {row: len(text.passages) + number for number, row in enumerate(indexed)}
        sides: dict[SideName, SideVectors] = {}
        if measured:
            found_at = dict(indexed_at)
            found_at |= {row: place[row] for row in changed if row in place}
            found_at |= {row: len(texts) - len(lone) + number for number, row in enumerate(lone)}
            candidates = read.select([found_at[row] for row in text.candidates])
            no_steps = msgspec.structs.replace(recipe.fit, steps=0)
            untuned = start.fitted(fitted_to, belonging, pairs, no_steps)
            sides = sides_of({"untuned": untuned, "model": embedder}, candidates, text)
        passages = read.select([indexed_at[row] for row in range(len(chunks))])
        vectors_NE = embedder.vectors(passages, "passage")
        return FittedVoice(
            dim=recipe.fit.size,
            vectors=vectors_NE.__getitem__,
            save=lambda files: embedder.save(files / FITTED),
            sides=sides,
        )

    def extend(self, task: Task, chunks: Sequence[Chunk], old: Index) -> FittedVoice:
        """Embed new passages under the old fit."""
        embedder = Embedder.load(
            self.model, self.tokenizer, old.files / FITTED, task.work, self.processes
        )
        kept = KeptVectors(old, OWN_VECTORS, [chunk.indexed for chunk in chunks])
        task.work.add_expected("embedding", sum(map(len, kept.new_texts)))
        new_ME = embedder.passages(kept.new_texts)
        return FittedVoice(
            dim=kept.dim,
            vectors=partial(kept.vectors, new_ME=new_ME),
            save=lambda files: embedder.save(files / FITTED),
        )


def sides_of(
    embedders: Mapping[SideName, Embedder], passages: Read, text: EvaluationText
) -> dict[SideName, SideVectors]:
    """Return each embedder's vectors of passages and of queries in their query form.

    All embedders are of one model, so the texts are read once.
    """
    reader = next(iter(embedders.values()))
    reported = reader.read(text.reported)
    tuning = reader.read(text.tuning)
    sides: dict[SideName, SideVectors] = {}
    for name, embedder in embedders.items():
        chunks = embedder.vectors(passages, "passage")
        reported_vectors = embedder.vectors(reported, "query")
        tuning_vectors = embedder.vectors(tuning, "query")
        sides[name] = SideVectors(chunks, reported_vectors, tuning_vectors)
    return sides
