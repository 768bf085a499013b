"""The sources of a corpus, read one after another: one, or the parts of a mixture."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from farspan.corpus.sources import Source, open_source
from farspan.domain.config import DataConfig, NamedPart
from farspan.domain.corpus import Skipped
from farspan.domain.escapes import shell_word, yaml_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash


class OpenedSources(NamedTuple):
    """The sources of a corpus in their order, with what run.yaml calls them."""

    parts: tuple[NamedPart, ...]
    sources: tuple[Source, ...]
    is_mixture: bool

    @property
    def size_bytes(self) -> int:
        """Bytes that will be read, as far as that is known before."""
        return sum(source.size_bytes for source in self.sources)

    def fingerprint(self) -> str:
        """Mark the present content of all sources, and which text belongs to which."""
        marks = [source.fingerprint() for source in self.sources]
        if not self.is_mixture:
            return marks[0]
        labels = [(part.name, part.replay) for part in self.parts]
        return content_hash("mixture", labels, marks)

    def skipped(self) -> tuple[Skipped, ...]:
        """Return the files and rows that were left out and why, complete once all is read."""
        logs = [source.skipped.entries() for source in self.sources]
        return tuple(itertools.chain.from_iterable(logs))

    def recoded(self) -> tuple[Skipped, ...]:
        """Return the files that were read in another encoding than UTF-8."""
        logs = [source.recoded.entries() for source in self.sources]
        return tuple(itertools.chain.from_iterable(logs))


def open_sources(data: DataConfig) -> OpenedSources:
    """Open the sources of a corpus. Raises Refusal for one that does not exist, and (out-of-range)
    for two of one name."""
    parts = data.parts
    for number, part in enumerate(parts):
        for other in parts[:number]:
            if part.name == other.name:
                raise _refuse_same_name(other, part)
    sources = tuple(open_source(part.source, part.fields) for part in parts)
    return OpenedSources(parts, sources, data.is_mixture)


def _refuse_same_name(first: NamedPart, second: NamedPart) -> Refusal:
    return Refusal(
        "out-of-range",
        what="two sources of the mixture have one name",
        where="run.yaml, key data.source",
        fact=f"{shell_word(first.source)} and {shell_word(second.source)} are both {first.name!r}",
        remedy=f"name one of them: {{source: {yaml_word(second.source)}, name: OTHER}}",
        key="data.source",
    )
