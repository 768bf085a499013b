"""A Hugging Face dataset, streamed: `hf:NAME[:CONFIG]` from the hub, `hf:/path/to/folder` from
disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.corpus._hub import use_cache_if_unreachable
from farspan.corpus.rows import TEXT_FIELDS, has_columns, row_document
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, SkipLog, Skipped
from farspan.domain.escapes import shell_word
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import missing_path


def open_source(location: str, fields: FieldsConfig = FieldsConfig()) -> HuggingFace:
    """Open the training split of a dataset; refuses if `datasets` is not installed or a local
    folder is not there."""
    if importlib.util.find_spec("datasets") is None:
        raise Refusal(
            "extra-missing",
            what="reading Hugging Face datasets needs a library that is not installed",
            where=f"hf:{location}",
            fact="there is no module named datasets",
            remedy=install_command("hf"),
        )
    name, _, config = location.partition(":")
    local = Path(name).expanduser() if name.startswith((".", "/", "~")) else None
    if local and not local.exists():
        raise missing_path(local)
    return HuggingFace(str(local or name), config or None, fields)


class HuggingFace:
    """Rows of the `train` split, or of the only one. A hub dataset is taken to be the same as long
    as its name is."""

    def __init__(self, name: str, config: str | None, fields: FieldsConfig) -> None:
        self.name = name
        self.config = config
        self.fields = fields
        self.skipped = SkipLog()
        self.recoded = SkipLog()
        #: (path, bytes, time) of the files of a local folder.
        self._files: list[tuple[str, int, int]] = []
        if Path(name).is_dir():
            for path in sorted(filter(Path.is_file, Path(name).rglob("*"))):
                stat = path.stat()
                self._files.append((str(path), stat.st_size, stat.st_mtime_ns))
        self.size_bytes = sum(size for _, size, _ in self._files)

    def fingerprint(self) -> str:
        marks: tuple[object, ...] = (self.name, self.config, self._files)
        return repr(marks if self.fields == FieldsConfig() else (*marks, self.fields))

    def documents(self) -> Iterator[Document]:
        self.skipped.clear()
        place = Path(f"hf:{self.name}")
        for number, row in enumerate(self._read_rows()):
            origin = f"hf:{self.name}:{number}"
            title = f"{self.name} {number}"
            document = row_document(
                row, place, number, origin=origin, title=title, fields=self.fields
            )
            if isinstance(document, Document):
                yield document
                continue
            if number == 0 and not has_columns(row, self.fields):
                # All rows have the same columns.
                raise self._no_column(document, origin)
            self.skipped.add(document)

    def _no_column(self, row: Skipped, origin: str) -> Refusal:
        looked_for = ", ".join(self.fields.texts or TEXT_FIELDS)
        return Refusal(
            "source-unreadable",
            what="the dataset has no known column of text",
            where=origin,
            fact=f"{row.detail}; farspan looks for {looked_for}",
            remedy=(
                "name the columns that hold the text: "
                f"{command('prepare', '--set', 'data.fields.text=COLUMN')}"
            ),
            key="data.fields.text",
        )

    def _read_rows(self) -> Iterator[dict[str, Any]]:
        import datasets  # type: ignore[import-untyped]

        fault = None
        folder = Path(self.name)
        saved = (folder / "dataset_info.json", folder / "dataset_dict.json")
        try:
            if any(map(Path.exists, saved)):
                splits = datasets.load_from_disk(self.name)
            elif folder.exists():
                splits = datasets.load_dataset(self.name, self.config, streaming=True)
            else:
                with use_cache_if_unreachable() as fault:
                    splits = datasets.load_dataset(self.name, self.config, streaming=True)
            if isinstance(splits, dict):
                first = next(iter(splits))
                splits = splits["train" if "train" in splits else first]
            yield from splits
        except ImportError:
            raise
        # The library passes on what those below it raise, as of a proxy that refuses.
        except Exception as error:
            raise Refusal(
                "source-unreadable",
                what="the dataset cannot be read",
                where=f"hf:{self.name}",
                fact=fault or " ".join(str(error).split())[:300],
                remedy=(
                    "where the hub can be reached: hf download --repo-type dataset "
                    f"{shell_word(self.name)} --local-dir DIR"
                ),
            ) from None
