"""Opening an encoder's folder: everything that can be wrong with it is found before anything is
embedded."""

from __future__ import annotations

from pathlib import Path

from farspan.retrieval.encoders.encoder import Encoder
from farspan.retrieval.encoders.layout import read_layout
from farspan.retrieval.encoders.static import StaticEncoder
from farspan.retrieval.encoders.transformer import TransformerEncoder


def open_encoder(folder: Path, made_with: str = "") -> Encoder:
    """Open the folder of a ready encoder.

    `made_with` is the id of the encoder that an index was made with: weights and tokenizer were
    checked then, and are not again.

    Refuses (path-missing) a folder or file that is not there, (file-unreadable) a file that is cut
    off or not of its format, (model-unsupported) an architecture, module or pooling that is not
    run here and weights of other sizes than in config.json, (tokenizer-mismatch) a tokenizer with
    more ids than the embedding has rows, (non-finite) weights with a NaN, (version-mismatch)
    another encoder than `made_with`.
    """
    layout = read_layout(folder)
    if layout.kind == "static":
        return StaticEncoder.open(folder, layout, made_with)
    return TransformerEncoder.open(folder, layout, made_with)
