"""Folders of indexes that belong to no run: made for a source, and found again."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from farspan.app.preflight_checks import unused_path
from farspan.domain.config import IndexConfig, IndexFolderConfig
from farspan.domain.escapes import shell_word
from farspan.domain.index_folder import INDEX_CONFIG, INDEXES, IndexFolder
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml, write_atomically

#: Names of folders are kept as short as those of runs.
MAX_NAME_CHARS = 60


#: What has an index: a run, or a folder of its own.
IndexHome = RunFolder | IndexFolder


def open_home(path: Path) -> IndexHome:
    """Return the run, or the folder of an index, at `path`. Refuses (not-a-run) others."""
    folder = IndexFolder(path)
    return folder if folder.config.is_file() else RunFolder.existing(path)


def make_index_folder(
    source: str, into: Path | None, *, encoder: str | None = None, store: str | None = None
) -> IndexFolder:
    """Return the index folder of a source, made if need be; `source` may be such a folder itself.

    What else is given is kept in index.yaml. Raises Refusal (path-missing) for a
    source that is not there, and (run-exists) for a folder of another text.
    """
    given = IndexFolder(Path(source).expanduser())
    if given.config.is_file() and into is None:
        folder = given
        config = load_yaml(folder.config, IndexFolderConfig)
    else:
        from farspan.corpus.sources import open_source

        open_source(source)
        place = _absolute(source)
        folder = IndexFolder(into or _folder_for(place))
        config = IndexFolderConfig(data=place)
        if folder.config.is_file():
            config = load_yaml(folder.config, IndexFolderConfig)
            if config.data_config.source != place:
                raise _refuse_other_text(folder, config, source)
        elif folder.path.exists() and any(folder.path.iterdir()):
            raise Refusal(
                "run-exists",
                what="this folder holds something else",
                where=folder.path,
                fact=f"it has no {INDEX_CONFIG}",
                remedy=command("index", source, "--into", unused_path(folder.path)),
            )
    changed = _with_choices(config, encoder, store)
    folder.path.mkdir(parents=True, exist_ok=True)
    if changed != config or not folder.config.exists():
        write_atomically(folder.config, _as_yaml(changed))
    return folder


def _as_yaml(config: IndexFolderConfig) -> bytes:
    """Return an index.yaml that loads as the same configuration; defaults are left out."""
    import yaml

    values = msgspec.to_builtins(config)
    defaults = msgspec.to_builtins(IndexFolderConfig(data=config.data))
    plain = defaults["index"]
    index = {key: value for key, value in values["index"].items() if value != plain[key]}
    content = {"data": values["data"]} | ({"index": index} if index else {})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()


def _absolute(source: str) -> str:
    """Return a path as it is found from any folder; the name of another source as it is."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _folder_for(source: str) -> Path:
    """Return where the index of a source is made: `indexes/NAME`, or the next free `NAME-2`."""
    name = re.sub(r"[^\w.-]+", "-", Path(source).name).strip("-.")[:MAX_NAME_CHARS] or "text"
    number = 1
    while True:
        path = INDEXES / (name if number == 1 else f"{name}-{number}")
        folder = IndexFolder(path)
        if not path.exists():
            return path
        is_own = folder.config.is_file()
        if is_own and load_yaml(folder.config, IndexFolderConfig).data_config.source == source:
            return path
        number += 1


def _with_choices(
    config: IndexFolderConfig, encoder: str | None, store: str | None
) -> IndexFolderConfig:
    """Return the configuration with the options of the command line."""
    index: IndexConfig = config.index
    if encoder is not None:
        folder = Path(encoder).expanduser()
        named = str(folder.resolve()) if folder.is_dir() else encoder
        index = msgspec.structs.replace(index, encoder=named)
    if store is not None:
        index = msgspec.structs.replace(index, store=store)
    return msgspec.structs.replace(config, index=index)


def _refuse_other_text(folder: IndexFolder, config: IndexFolderConfig, source: str) -> Refusal:
    return Refusal(
        "run-exists",
        what="this is the index of another text",
        where=folder.path,
        fact=f"it is of {config.data_config.line}",
        remedy=f"name another folder: --into {shell_word(f'{folder.path}-2')}",
    )
