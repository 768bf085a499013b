"""A folder of an index that belongs to no run: `index.yaml` names its text, `index/` is the
index."""

from __future__ import annotations

from pathlib import Path

INDEX_CONFIG = "index.yaml"
#: Where `farspan index` makes such folders, as runs are made under `runs/`.
INDEXES = Path("indexes")


class IndexFolder:
    """Paths inside one such folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / INDEX_CONFIG
        self.index = path / "index"
