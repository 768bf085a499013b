"""The small files of a model that runs continue: its tokenizer, chat template, card and licence. A
run keeps them, as the model's folder may be gone when it is exported."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.escapes import shell_word
from farspan.domain.model import StoredType
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load, parse_yaml, read_bytes

#: The folder of further chat templates.
TEMPLATES = "additional_chat_templates"
#: What transformers reads a tokenizer from, its chat templates included.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    f"{TEMPLATES}/*.jinja",
)
GENERATION_CONFIG = "generation_config.json"
#: What a licence may consist of, whatever the case of its letters.
LICENCE_FILES = tuple(
    f"{name}*" for name in ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "USE-POLICY")
)
CARD = "README.md"
#: The file of a run that describes the model.
RECORD = "base.json"
KEPT_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG, "config.json", CARD, *LICENCE_FILES)
#: Bytes of a kept file, as many as of a tokenizer.json that is read, and of a card that is read.
MAX_KEPT_BYTES = 256 << 20
MAX_CARD_BYTES = 1 << 20
#: What is read of the front matter of a card.
_CARD_KEYS = ("license", "license_name", "license_link", "language", "base_model")
#: Characters of what a card states.
MAX_FACT_LENGTH = 200
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)\Z")


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`base/base.json` of a run: the model that it continues."""

    #: An id of the hub, or the name of a folder.
    name: str
    is_hub_id: bool
    #: The type of most of its weights.
    stored: StoredType
    #: The run uses the model's own tokenizer.
    keeps_tokenizer: bool


class BaseCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the card of a model states of its licence and its origin."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: tuple[str, ...] = ()
    base_models: tuple[str, ...] = ()


def load_base(folder: Path) -> BaseRecord | None:
    """Load the record of the model that a run continues from the run's folder of its files; None
    where the run continues none, or was made by a version that kept nothing of it."""
    record = folder / RECORD
    return load(record, BaseRecord) if record.is_file() else None


def keeps_tokenizer(folder: Path) -> bool:
    """Return whether a run continues a model with the model's own tokenizer."""
    base = load_base(folder)
    return base is not None and base.keeps_tokenizer


def name_base(asked: str, folder: Path, *, is_hub_id: bool) -> tuple[str, bool]:
    """Return the name of a model, and whether it is an id of the hub: as it was asked for, or as
    the hub's cache has it. Of other folders it is the last part of the path: paths are private."""
    if is_hub_id:
        return asked, True
    resolved = folder.resolve()
    if match := _HUB_CACHE.match(resolved.parent.parent.name):
        return f"{match[1]}/{match[2]}", True
    return resolved.name, False


def list_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """List the files of a folder that match patterns, whatever the case of their letters."""
    whole = re.compile("|".join(map(fnmatch.translate, patterns)), re.IGNORECASE)
    paths = [*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*")]
    matching = (path for path in paths if whole.match(path.relative_to(folder).as_posix()))
    return sorted(path for path in matching if path.is_file())


def copy_files(folder: Path, target: Path, patterns: Iterable[str]) -> None:
    """Copy the files of a folder that match patterns, byte by byte. Raises Refusal (path-unusable)
    for a link out of the folder, and (model-unsupported) for a file far too long."""
    for path in list_files(folder, patterns):
        real = resolve_inside(path, folder)
        if real.stat().st_size > MAX_KEPT_BYTES:
            raise Refusal(
                "model-unsupported",
                what="a file of the model is too long to be kept",
                where=path,
                fact=f"it has {real.stat().st_size:,} bytes, at most {MAX_KEPT_BYTES:,} are kept",
                remedy=f"move it away: mv {shell_word(path)} {shell_word(f'{path}.long')}",
            )
        to = target / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real, to)


def resolve_inside(path: Path, folder: Path) -> Path:
    """Resolve a file name in a model's folder. In the cache of Hugging Face all files are links to
    `blobs` of the same model. Raises Refusal (path-unusable) for a link out of the model, which
    would give away what is there."""
    real = path.resolve()
    whole = folder.resolve()
    snapshots = whole.parent
    in_cache = snapshots.name == "snapshots" and real.is_relative_to(snapshots.parent / "blobs")
    if not (in_cache or real.is_relative_to(whole)):
        raise Refusal(
            "path-unusable",
            what="a file of the model is a link that leads out of its folder",
            where=path,
            fact=f"it leads to {real}, which would leave this machine with the model",
            remedy=f"cp --remove-destination {shell_word(real)} {shell_word(path)}",
        )
    return real


def has_chat_template(folder: Path) -> bool:
    """Return whether a model's folder has a chat template: it was trained to follow
    instructions."""
    is_file = bool(list_files(folder, ("chat_template.*", f"{TEMPLATES}/*.jinja")))
    return is_file or bool(_read_value(folder / "tokenizer_config.json", "chat_template"))


def read_chat_template(folder: Path) -> str | None:
    """Return the default chat template of a model's folder, from where transformers takes it; None
    where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_bytes(file, most=MAX_KEPT_BYTES).decode()
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_value(folder / name, "chat_template")
        if isinstance(template, list):
            # Several of them, by name.
            by_name = {each.get("name"): each for each in template if isinstance(each, dict)}
            template = by_name.get("default", {}).get("template")
        if isinstance(template, str):
            return template
    return None


def _read_value(path: Path, key: str) -> Any:
    """Return the value of a key of a JSON file; None where it has none."""
    if not path.is_file():
        return None
    try:
        content = json.loads(read_bytes(path, most=MAX_KEPT_BYTES))
    except ValueError:  # What loads the tokenizer refuses it.
        return None
    return content.get(key) if isinstance(content, dict) else None


def read_card(folder: Path) -> BaseCard:
    """Read what the front matter of a model's card states; nothing of a card that has none."""
    path = folder / CARD
    if not path.is_file():
        return BaseCard()
    with path.open("rb") as file:
        text = file.read(MAX_CARD_BYTES).decode(errors="replace")
    match = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", text, re.DOTALL)
    if match is None:
        return BaseCard()
    try:
        facts = parse_yaml(match[1], path)
    except Refusal:  # Another's card is no reason to refuse a model.
        return BaseCard()
    if not isinstance(facts, dict):
        return BaseCard()
    texts = {key: _read_texts(facts.get(key)) for key in _CARD_KEYS}
    first = {key: next(iter(values), None) for key, values in texts.items()}
    return BaseCard(
        license=first["license"],
        license_name=first["license_name"],
        license_link=first["license_link"],
        languages=texts["language"],
        base_models=texts["base_model"],
    )


def _read_texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a value of a card, which may be one or a list."""
    values = value if isinstance(value, list) else [value]
    # In YAML 1.1 the language `no` is the value false.
    values = ["no" if each is False else each for each in values]
    texts = [each.strip() for each in values if isinstance(each, str)]
    return tuple(text[:MAX_FACT_LENGTH] for text in texts if text)
