"""A prepared corpus: one folder of token files, described by its manifest `corpus.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Literal

import msgspec

from farspan.domain.struct_files import ContentHash
from farspan.domain.units import counted

#: The files of both splits, as `Split` describes them.
TOKEN_FILES = ("train.bin", "train.idx", "val.bin", "val.idx")
#: The folder of a copy that another host sent has the corpus's hash after this.
SENT = "sent-"
#: A block of a token file has this many bytes and a checksum of CHECKSUM_BYTES. A window of 1,024
#: tokens has 2 KiB: larger blocks would make its first read cost more than a step's 1 %.
BLOCK_BYTES = 1 << 14
CHECKSUM_BYTES = 6


def make_encodable(text: str) -> str:
    """Return the text with halves of surrogate pairs joined, and those without their other half as
    U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Skipped(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A file or row that was left out and why, or the number of several by their endings."""

    reason: str
    path: str | None = None
    #: What is particular to this one; entries of one reason are counted together.
    detail: str = ""
    kinds: dict[str, int] = {}
    #: The first of several by name.
    first: tuple[str, ...] = ()
    #: True if the file or row should have been read: `data.bad: refuse` refuses it.
    bad: bool = False

    @classmethod
    def file(cls, path: object, reason: str, detail: str = "", *, bad: bool = False) -> Skipped:
        return cls(reason=reason, path=str(path), detail=detail, bad=bad)

    @classmethod
    def row(
        cls, file: PurePath, number: int, reason: str, detail: str = "", *, count: int = 1
    ) -> Skipped:
        """Row `number` of a file, from 1; with `count` that many rows from there on."""
        kind = f"{_describe_ending(file)} (rows)"
        path = f"{file}:{number}"
        return cls(reason=reason, path=path, detail=detail, kinds={kind: count}, bad=True)

    @property
    def counts(self) -> dict[str, int]:
        """The number of files or rows by their endings."""
        return self.kinds or {_describe_ending(PurePath(self.path or "")): 1}

    def __str__(self) -> str:
        if self.path is not None:
            detail = f" ({self.detail})" if self.detail else ""
            return f"{self.path}: {self.reason}{detail}"
        several = sorted(self.kinds.items(), key=lambda kind: -kind[1])
        counts = ", ".join([f"{number} {kind}" for kind, number in several[:KINDS_SHOWN]])
        rest = several[KINDS_SHOWN:]
        if rest:
            counts += f", {sum(number for _, number in rest)} of {len(rest)} other kinds"
        named = f" ({', '.join(self.first)})" if self.first else ""
        return f"{counts}: {self.reason}{named}"


def _describe_ending(path: PurePath) -> str:
    return path.suffix.lower() or "without an extension"


#: Entries that a report names for each reason; a corpus's manifest names more.
NAMES_SHOWN = 3
NAMES_KEPT = 20
#: Kinds of files that a line of a report names, and characters of what is particular to one.
KINDS_SHOWN = 6
DETAIL_CHARS = 120


def by_kind(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Files and rows by their endings: one entry for each reason, with the first names."""
    counts: dict[tuple[str, bool], Counter[str]] = {}
    first: dict[tuple[str, bool], list[str]] = {}
    for entry in skipped:
        key = (entry.reason, entry.bad)
        counts.setdefault(key, Counter()).update(entry.counts)
        first_names = first.setdefault(key, [])
        if entry.first:
            first_names += entry.first
        elif entry.path is not None:
            name = PurePath(entry.path).name
            detail = entry.detail
            if len(detail) > DETAIL_CHARS:
                detail = f"{detail[:DETAIL_CHARS].rstrip()}..."
            if detail and first_names and first_names[-1].endswith(f": {detail}"):
                # What several have in common stands behind the last of them.
                first_names[-1] = first_names[-1].removesuffix(f": {detail}")
            first_names.append(f"{name}: {detail}" if detail else name)
        del first_names[NAMES_SHOWN:]
    entries = []
    for key, kinds in counts.items():
        reason, bad = key
        entry = Skipped(reason=reason, bad=bad, kinds=dict(kinds), first=tuple(first[key]))
        entries.append(entry)
    return entries


class SkipLog:
    """The files and rows that a source left out: the first of each reason by name, the others
    counted.

    Its size does not grow with the number of rows.
    """

    def __init__(self) -> None:
        self._named: list[Skipped] = []
        self._names: Counter[str] = Counter()
        self._counted: list[Skipped] = []

    def add(self, entry: Skipped) -> None:
        # Names are bytes to the system, and not all of them UTF-8.
        path = make_encodable(entry.path or "")
        detail = make_encodable(entry.detail)
        entry = msgspec.structs.replace(entry, path=path or None, detail=detail)
        self._names[entry.reason] += 1
        if self._names[entry.reason] <= NAMES_KEPT:
            self._named.append(entry)
        else:
            nameless = Skipped(reason=entry.reason, bad=entry.bad, kinds=entry.counts)
            self._counted = by_kind([*self._counted, nameless])

    def clear(self) -> None:
        self._named.clear()
        self._names.clear()
        self._counted.clear()

    def entries(self) -> tuple[Skipped, ...]:
        """Return the named ones in the order they were met, then the others by kind."""
        return (*self._named, *self._counted)


SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, SplitName] = ("train", "val")


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token file: `NAME.bin`, tokens one after the other, a document's last followed by the
    end-of-text token.

    `NAME.idx` holds `documents + 1` little-endian int64 offsets (in tokens): document i is
    tokens[idx[i]:idx[i+1]].
    """

    tokens: int
    documents: int
    #: UTF-8 bytes of the text, without end-of-text tokens: what bits per byte divide by.
    text_bytes: int
    #: The checksums of the blocks of NAME.bin and of NAME.idx, one after the other: the first
    #: CHECKSUM_BYTES of each block's SHA-256. Left out by earlier versions.
    token_checksums: bytes | msgspec.UnsetType = msgspec.UNSET
    offset_checksums: bytes | msgspec.UnsetType = msgspec.UNSET


class PartSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a split belongs to one source."""

    tokens: int
    documents: int
    text_bytes: int


class CorpusPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of a mixture. In both splits its documents follow those of the parts before."""

    name: str
    source: str
    train: PartSize
    val: PartSize
    #: True for text that is trained on against forgetting: neither searched nor judged by.
    replay: bool = False


class CorpusManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hash` covers source content, split, tokenizer and format: equal hash, equal bytes.

    `documents.jsonl.zst` next to it holds every kept document (domain.corpus.Document) in the order
    of its split's token file: first all of train, then all of val. `copies.jsonl.zst` holds the
    others, which are searched and not trained on.
    """

    hash: ContentHash
    source: str
    vocab_size: int
    #: Id of the end-of-text token.
    end_of_text: int
    dtype: Literal["uint16", "uint32"]
    train: Split
    val: Split
    #: Entropy of the validation tokens under train-set counts, nats a token: unigram (add-one
    #: smoothed), and bigram (smoothed towards the unigram, see `farspan.corpus.entropy`).
    unigram_nats: float
    bigram_nats: float
    #: Documents that are not trained on as exact or near duplicates, and files and rows skipped:
    #: the first by name, the others by kind.
    exact_duplicates: int
    near_duplicates: int
    skipped: tuple[Skipped, ...] = ()
    #: Files that were read in another encoding than UTF-8, in the same form; left out without any.
    recoded: tuple[Skipped, ...] | msgspec.UnsetType = msgspec.UNSET
    #: The sources of a mixture in their order; unset for a single source.
    parts: tuple[CorpusPart, ...] | msgspec.UnsetType = msgspec.UNSET

    def without_checksums(self) -> CorpusManifest:
        """Return the manifest as people and programs read it."""
        bare = {"token_checksums": msgspec.UNSET, "offset_checksums": msgspec.UNSET}
        train = msgspec.structs.replace(self.train, **bare)
        val = msgspec.structs.replace(self.val, **bare)
        return msgspec.structs.replace(self, train=train, val=val)

    def epoch_tokens(self, shares: tuple[float, ...] | msgspec.UnsetType) -> int:
        """Return the tokens after which training has read as much of the text as there is.

        `shares` are those of a mixture's parts: what is replayed is read in addition.
        """
        if not self.parts or not shares:
            return self.train.tokens
        own_tokens = 0
        own_share = 0.0
        for part, share in zip(self.parts, shares, strict=True):
            if not part.replay:
                own_tokens += part.train.tokens
                own_share += share
        return round(own_tokens / own_share)

    def own_documents(self, split: SplitName) -> int:
        """Count the documents of a split that are not replayed; they come first."""
        is_train = split == "train"
        if not self.parts:
            return self.train.documents if is_train else self.val.documents
        own = [part for part in self.parts if not part.replay]
        return sum(part.train.documents if is_train else part.val.documents for part in own)

    @property
    def places(self) -> tuple[str, ...]:
        """Where the text is that the run is judged by: of a mixture the sources but for what is
        replayed."""
        own = [part.source for part in self.parts or () if not part.replay]
        return tuple(own) or (self.source,)

    @property
    def replays(self) -> bool:
        """True if a part of the corpus is trained on against forgetting only."""
        return any(part.replay for part in self.parts or ())

    @property
    def duplicates_line(self) -> str:
        """Documents of the source that are searched and not trained on, in words; "" for none."""
        exact = self.exact_duplicates
        near = self.near_duplicates
        if not exact and not near:
            return ""
        return f"searched, not trained on: {exact:,} exact and {counted(near, 'near duplicate')}"

    @property
    def skipped_kinds(self) -> list[str]:
        """`12 .bin, 3 .exe: REASON`, one line for each reason."""
        return list(map(str, by_kind(self.skipped)))

    @property
    def recoded_kinds(self) -> list[str]:
        """`3 .txt: read as cp1252 (NAMES)`, one line for each encoding."""
        return list(map(str, by_kind(self.recoded or ())))


def copies_line(documents: int, near: int, exact: int) -> str:
    """Count in words which of the distinct `documents` are near copies, and at how many more places
    exact copies stand; empty without copies."""
    lines = []
    if near:
        others = "a near copy of another" if near == 1 else "near copies of others"
        is_or_are = "is" if near == 1 else "are"
        lines.append(f"{near:,} {is_or_are} {others}, searched and not trained on")
    if exact:
        places = "place" if exact == 1 else "places"
        lines.append(f"{exact:,} more {places} with exactly the text of another")
    return f"{documents:,} documents: {'; '.join(lines)}" if lines else ""


def token_file_sizes(manifest: CorpusManifest) -> list[int]:
    """Bytes of each of TOKEN_FILES."""
    token_bytes = 2 if manifest.dtype == "uint16" else 4
    sizes = []
    for split in (manifest.train, manifest.val):
        sizes += [token_bytes * split.tokens, 8 * (split.documents + 1)]
    return sizes


class Heading(msgspec.Struct, frozen=True, array_like=True):
    """A heading of a text: its place there, its level from 1 on, and its words.

    The place is that of its first character, where line ends are one character each, or -1 for one
    that stands above the text.
    """

    start: int
    level: int
    title: str


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One text. `origin` is where it came from: a path, a dataset row, a qualified name.

    A form feed in the text begins a page.
    """

    title: str
    text: str
    origin: str
    metadata: dict[str, str] = {}
    #: Line and page of the source on which the text begins, from 1 on; 0 where it has none.
    line: int = 0
    page: int = 0
    #: In order, where the source knows the format; left out where it does not.
    headings: tuple[Heading, ...] | msgspec.UnsetType = msgspec.UNSET


def cite_place(origin: str, line: int, page: int) -> str:
    """Cite a place as one would in print: `notes/a.md:12` or `a.pdf, page 3`; 0 is unknown."""
    if page:
        return f"{origin}, page {page}"
    return f"{origin}:{line}" if line else origin


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an exact copy of a document stands, and what it is called there."""

    title: str
    origin: str
    metadata: dict[str, str] = {}
    line: int = 0
    page: int = 0

    def __str__(self) -> str:
        return cite_place(self.origin, self.line, self.page)
