"""Which ready encoder an index gets, and where searches find it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farspan.domain.problems import Refusal

if TYPE_CHECKING:
    from farspan.retrieval.encoders.encoder import Encoder
    from farspan.retrieval.index import EncoderIdentity
    from farspan.retrieval.index_task import VoiceModel

#: The share of the documents that are to be in a language that the encoder reads.
MIN_READABLE = 0.5
#: Documents whose language is looked at.
MAX_SAMPLED_DOCUMENTS = 1000


class ReadyEncoder(NamedTuple):
    """The encoder of an index, or why it has none."""

    model: VoiceModel | None = None
    identity: EncoderIdentity | None = None
    why_none: str = ""
    #: Tokens of a text that it reads.
    max_tokens: int = 0


def choose_encoder(
    spec: str, known: EncoderIdentity | None, texts: Sequence[str], report: Callable[[str], None]
) -> ReadyEncoder:
    """Return the encoder that `index.encoder` asks for; `known` is the one the index has.

    Raises Refusal for a folder that holds none, and for `minilm` where it cannot be had.
    """
    from farspan.retrieval.encoders.finding import NotFound, find_encoder

    if spec == "own":
        return ReadyEncoder()
    if known is not None and (spec == "auto" or _is_gone(spec, known)):
        encoder = find_known_encoder(known)
        if encoder is None:
            return _missing_encoder(known)
        return _as_voice(encoder)
    sought = find_encoder(spec, fetch=spec == "minilm")
    if isinstance(sought, NotFound):
        if spec != "auto":
            raise Refusal(
                "encoder-missing",
                what=f"the encoder {spec} cannot be had",
                where="index.encoder",
                fact=sought.reason,
                remedy=sought.remedy,
                key="index.encoder",
            )
        report(f"no ready encoder is on this machine; one would find more: {sought.remedy}")
        return ReadyEncoder(why_none=sought.reason)
    if spec == "auto":
        share = _share_in(sought.languages, texts)
        if share < MIN_READABLE:
            languages = ", ".join(sought.languages)
            why = f"{sought.name} reads {languages}, and {share:.0%} of the text is"
            report(f"the encoder is left out: {why}")
            return ReadyEncoder(why_none=why)
    return _as_voice(sought)


def _is_gone(spec: str, known: EncoderIdentity) -> bool:
    """Return whether `spec` is the folder of a known encoder, which is not there any more."""
    folder = Path(spec).expanduser()
    return not folder.exists() and str(folder.resolve()) == known.folder


def find_known_encoder(identity: EncoderIdentity) -> Encoder | None:
    """Return the encoder with these files, wherever it is on this machine; None if it is not."""
    from farspan.retrieval.encoders.finding import NotFound, find_encoder
    from farspan.retrieval.encoders.opening import open_encoder

    folder = Path(identity.folder)
    if folder.is_dir():
        with suppress(Refusal):
            return open_encoder(folder, identity.id)
    sought = find_encoder("auto", fetch=False)
    if isinstance(sought, NotFound) or sought.id != identity.id:
        return None
    return sought


def _as_voice(encoder: Encoder) -> ReadyEncoder:
    from farspan.retrieval.encoder_voice import EncoderModel
    from farspan.retrieval.index import EncoderIdentity

    identity = EncoderIdentity(
        id=encoder.id, name=encoder.name, folder=str(encoder.folder.resolve())
    )
    model = EncoderModel(encoder=encoder)
    return ReadyEncoder(model, identity, max_tokens=encoder.max_tokens)


def _missing_encoder(known: EncoderIdentity) -> ReadyEncoder:
    from farspan.retrieval.encoder_voice import MissingEncoder

    return ReadyEncoder(MissingEncoder(known), known)


def _share_in(languages: Sequence[str], texts: Sequence[str]) -> float:
    """Return the share of the texts that are in these languages; 1 where the encoder reads any."""
    if not languages or not texts:
        return 1.0
    from farspan.retrieval.words import detect_languages

    step = len(texts) // MAX_SAMPLED_DOCUMENTS + 1
    counts = Counter(detect_languages(texts[::step]))
    return sum(counts[language] for language in languages) / counts.total()
