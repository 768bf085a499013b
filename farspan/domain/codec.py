"""Strict load and save of frozen structs, and their content hash.

Unknown keys and values out of range are refused with the file, the line, the key, and the nearest
key that exists.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from farspan.domain.escapes import key_word, shell_line, shell_word
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_key, any_of, not_offered, suggest, suggest_key
from farspan.domain.units import counted

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
#: A file that a person writes has fewer values; aliases of aliases make more than a computer can
#: hold.
MAX_VALUES = 1_000_000
#: A number that a bound itself may not be is offered so near to it.
NEAR = 0.001
#: msgspec's names of types, and its signs, in words.
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of keys",
    "null": "nothing",
}
BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
#: A place in a list or a table, in msgspec's paths.
ANY_PLACE = re.compile(r"\[[^\]]*\]")
_NUL = "a text holds a NUL or half of a surrogate pair, which no name can have"
#: A NUL in JSON text: behind a backslash that is not itself behind one.
_JSON_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


#: What `content_hash` returns: files and folders are named after it, so other text is refused.
_HASH_FORM = r"[0-9a-f]{16}"
ContentHash = Annotated[
    str,
    msgspec.Meta(pattern=rf"^{_HASH_FORM}\Z", description="a hash of 16 hexadecimal digits"),
]
ContentHashOrNone = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^({_HASH_FORM})?\Z", description="a hash of 16 hexadecimal digits, or empty"
    ),
]


def is_content_hash(text: str) -> bool:
    """Whether a text can name what `content_hash` named."""
    return re.fullmatch(_HASH_FORM, text) is not None


def content_hash(*parts: object) -> str:
    """Return a stable 16-digit hash of any structs, strings and numbers: same content, same hash,
    on any machine."""
    digest = hashlib.sha256()
    for part in parts:
        # Keys as text first: tables by a number, as of what a probe measured, cannot be sorted
        # otherwise.
        digest.update(msgspec.json.encode(msgspec.to_builtins(part, str_keys=True), order="sorted"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def to_json(value: object, *, indent: int = 2) -> bytes:
    """Return a struct as JSON text, ready for a file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, flush to disk, rename into place: a reader sees the old file or the new
    one, whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        # Left by a killed process, or a link that somebody has put there.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def cut_unfinished_line(path: Path) -> None:
    """Cut off what a killed process left of a last line, in a file of one value a line."""
    with open_own(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        tail_start = max(0, size - 2**20)
        file.seek(tail_start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(tail_start + tail.rfind(b"\n") + 1)


def save(value: object, path: Path) -> None:
    """Save a struct as JSON, atomically."""
    write_atomically(path, to_json(value))


def load(path: Path, kind: type[T]) -> T:
    """Load a struct that farspan saved as JSON; refuses what does not fit it."""
    return parse_json(read_bytes(path), kind, path)


def parse_json(content: bytes, kind: type[T], where: object) -> T:
    """Strictly decode JSON text as `kind`."""
    if _JSON_NUL.search(content):
        raise _malformed(where, "JSON", ValueError(_NUL))
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, str(where), "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(where, "JSON", error) from None


def load_yaml(path: Path, kind: type[T]) -> T:
    """Load a YAML file that a user wrote; refusals name file and line."""
    content = read_bytes(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _malformed(path, "UTF-8 text", error) from None
    return convert(parse_yaml(text, path), kind, str(path), text)


def convert(value: Any, kind: type[T], where: str, text: str = "") -> T:
    """Strictly convert plain values to `kind`; refusals name `where`, and the line in `text` that
    they came from."""
    try:
        return msgspec.convert({} if value is None else value, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, where, text) from None
    except RecursionError as error:
        raise _malformed(where, "YAML", error) from None


def parse_yaml(text: str, where: object) -> Any:
    """YAML text as plain values. Numbers such as 6e-4 are numbers, as YAML 1.2 has it and people
    mean it."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML reads YAML 1.1, in which 6e-4 is a string, and lets the last of equal keys win in
        silence."""

        def get_single_node(self) -> yaml.Node | None:
            node: yaml.Node | None = super().get_single_node()
            if node is not None:
                _values(node, {})
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                # In YAML 1.1 the key `on` is the value true.
                if key.tag == "tag:yaml.org,2002:bool":
                    key.tag = "tag:yaml.org,2002:str"
            for name, mark in ((str(key.value), key.start_mark) for key, _ in node.value):
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{name!r} is set twice", mark
                    )
                seen.add(name)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    try:
        return yaml.load(text, Loader)
    # ValueError: a date that is none, such as 2026-13-01. RecursionError: brackets in brackets,
    # hundreds deep.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _malformed(where, "YAML", error) from None


def _values(node: yaml.Node, counts: dict[int, int]) -> int:
    """How many values a node holds, its aliases written out, those of nodes that are counted
    already from `counts`.

    Raises ValueError for one that holds itself or holds too many, and for text that can be no name
    or path.
    """
    if (known := counts.get(id(node))) is not None:
        if not known:
            raise ValueError(f"an alias in its own anchor\n{node.start_mark}")
        return known
    counts[id(node)] = 0
    count = 1
    if isinstance(node.value, str):
        if "\0" in node.value or (
            not node.value.isascii() and any("\ud800" <= c <= "\udfff" for c in node.value)
        ):
            raise ValueError(f"{_NUL}\n{node.start_mark}")
    else:
        # A mapping's are pairs of a key and a value.
        parts = itertools.chain.from_iterable(
            part if isinstance(part, tuple) else (part,) for part in node.value
        )
        count += sum(_values(part, counts) for part in parts)
    if count > MAX_VALUES:
        raise ValueError(
            f"its aliases stand for more than {MAX_VALUES:,} values\n{node.start_mark}"
        )
    counts[id(node)] = count
    return count


def read_bytes(path: Path, *, most: int | None = None) -> bytes:
    """Return the bytes of a file that must exist; of one of more than `most` one byte more than
    that."""
    try:
        with path.open("rb") as file:
            return file.read() if most is None else file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise missing_path(path) from None


def missing_path(path: Path) -> Refusal:
    """Return the refusal for a path that does not exist, offering the nearest one that does."""
    expanded = path.expanduser()
    parent = next((p for p in expanded.absolute().parents if p.is_dir()), Path("/"))
    candidates = {p.name: p for p in parent.iterdir()}
    missing_name = expanded.absolute().relative_to(parent).parts[0]
    likely = [candidates[name] for name in suggest(missing_name, candidates, synonyms=())]
    return Refusal(
        "path-missing",
        what="there is no such file or folder",
        where=path,
        fact=f"{parent} has no {missing_name!r}",
        remedy=(
            f"use {any_of(likely)}, the nearest that {'exists' if len(likely) == 1 else 'exist'}"
            if likely
            else f"see what is there: {shell_line('ls', parent)}"
        ),
    )


def _malformed(where: object, expected: str, error: Exception) -> Refusal:
    return Refusal(
        "file-unreadable",
        what=f"this cannot be read as {expected}",
        where=where,
        fact=" ".join(str(error).split()),
        remedy="mend it there, or put back a copy that is whole",
    )


def _refusal(error: msgspec.ValidationError, kind: Any, file: str, text: str) -> Refusal:
    message = str(error)
    path = _path_of(message)
    if match := re.search(r"unknown field `([^`]+)`", message):
        return _unknown_key(match[1], path, kind, file, text)
    said = re.sub(r" - at `.*`$", "", message, flags=re.DOTALL)
    fact, remedy = _explained(said, path or "it", _type_at(kind, path))
    return Refusal(
        "out-of-range",
        what=f"{path or 'the file'} has a value that farspan cannot use",
        where=_located(file, text, path.split(".")[-1]),
        fact=fact,
        remedy=remedy,
    )


def _unknown_key(key: str, path: str, kind: Any, file: str, text: str) -> Refusal:
    known = [
        field.encode_name for field in msgspec.structs.fields(_struct_in(_type_at(kind, path)))
    ]
    full = f"{path}.{key}" if path else key
    # Where it was written, in the form of the keys that `_dotted` lists.
    place = ANY_PLACE.sub("", path)
    own = {f"{place}.{name}" if place else name: name for name in known}
    elsewhere = {_plain(dotted): dotted for dotted in _dotted(kind)}
    likely = suggest_key(f"{place}.{key}" if place else key, {*own, *elsewhere})
    here = [own[dotted] for dotted in likely if dotted in own]
    if here:
        folder = f"{path}." if path else ""
        keys = [f"{folder}{name}" for name in here]
        fix = f"use {any_key(keys)} instead of {key_word(f'{folder}{key}')}"
    elif likely:
        fix = _moving_remedy(
            key, full, [elsewhere[dotted] for dotted in likely], has_lines=bool(text)
        )
    else:
        fix = f"remove {key_word(key)}"
    return Refusal(
        "unknown-key",
        what=f"unknown key {full!r}",
        where=_located(file, text, key),
        fact=f"known here: {', '.join(known)}",
        remedy=fix,
    )


def _moving_remedy(key: str, full: str, keys: list[str], *, has_lines: bool) -> str:
    """Return the fix for a key that is right at other places: which these are."""
    if not has_lines:
        return f"use {any_key(keys)} instead of {key_word(full)}"
    # How the lines of a file have it: they have no dots.
    if len(keys) == 1 and "[" not in keys[0] and "NAME" not in keys[0]:
        *folders, last = keys[0].split(".")
        opened = "".join(f"{key_word(name)}: {{" for name in folders)
        return f"move it to {key_word(keys[0])}: {opened}{key_word(last)}: ..." + "}" * len(folders)
    return f"move it to {any_key(keys)}"


def _dotted(kind: Any, folder: str = "", outer: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of a struct and of all structs in it: `[N]` for any place in a list,
    `.NAME` for any key of a table."""
    struct = _struct_in(kind)
    if struct is None or struct in outer:
        return
    for field in msgspec.structs.fields(struct):
        key = folder + field.encode_name
        yield key
        yield from _dotted(field.type, f"{key}{_many(field.type)}.", (*outer, struct))


def keys_of(kind: Any) -> tuple[str, ...]:
    """Return the dotted keys that hold values of a struct that a user writes."""
    everything = [key for key in _dotted(kind) if "[" not in key and "NAME" not in key]
    return tuple(key for key in everything if not any(k.startswith(f"{key}.") for k in everything))


def _plain(dotted: str) -> str:
    """Return a dotted key without places in lists and names in tables."""
    return dotted.replace("[N]", "").replace(".NAME", "")


def _path_of(message: str) -> str:
    match = re.search(r"(?:at|in) `\$\.?([^`]*)`", message)
    return match[1] if match else ""


def _type_at(kind: Any, path: str) -> Any:
    """Return the type of the value that `path` leads to from `kind`; what is in a list or a dict
    counts as the whole."""
    for step in ANY_PLACE.sub("", path).split("."):
        if (struct := _struct_in(kind)) is not None:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
            kind = fields.get(step, kind)
    return kind


def _struct_in(kind: Any) -> Any:
    """Return the struct inside a type such as `X | None`, `tuple[X, ...]` or `dict[str, X]`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _many(kind: Any) -> str:
    """Return what leads to the struct inside a type where it is one of many: a place in a list, a
    name in a table."""
    origin = get_origin(kind)
    own = ".NAME" if origin is dict else "[N]" if origin in (list, tuple) else ""
    inner = (_many(part) for part in get_args(kind) if _struct_in(part) is not None)
    return own + next(inner, "")


def _described(kind: Any) -> str | None:
    """Return what the type says in words that a text must be."""
    said = (getattr(meta, "description", None) for meta in getattr(kind, "__metadata__", ()))
    return next(filter(None, (*said, *map(_described, get_args(kind)))), None)


def _explained(said: str, path: str, kind: Any) -> tuple[str, str]:
    """Return what is wrong with a value, and how to mend it, by what msgspec says and by its type;
    of a bound that is broken the nearest value that is not."""
    path_word = key_word(path)
    if said.startswith("Invalid enum value ") and (allowed := _allowed(kind)):
        value = said.removeprefix("Invalid enum value ")
        word = value.strip("'")
        missing = not_offered(word, allowed)
        reason = "" if missing is None else f"; {missing.reason}"
        fact = f"{value} is not one of {', '.join(allowed)}{reason}"
        meant = suggest(word, allowed) if len(allowed) > 1 else allowed
        fix = f": {any_of(meant)}" if meant else f" to one of {', '.join(map(shell_word, allowed))}"
        return fact, f"set {path_word}{fix}"
    if "matching regex" in said and (description := _described(kind)):
        return f"it is not {description}", f"set {path_word} to {description}"
    if match := re.fullmatch(r"Object missing required field `(.+)`", said):
        return (
            f"the key `{match[1]}` is missing",
            f"add the key {key_word(match[1])} to {path_word}",
        )
    if match := re.fullmatch(r"Expected `(\w+)` (of length )?(>=|<=|>|<) (\S+)", said):
        noun, length, sign, bound = match.groups()
        bound = bound.removesuffix(".0")
        if length:
            size = (
                f"{BOUNDS[sign]} "
                f"{counted(int(bound), {'str': 'letter', 'object': 'key'}.get(noun, 'value'))}"
            )
            return f"it must have {size}", f"give {path_word} {size}"
        beyond = {">": NEAR, "<": -NEAR}.get(sign)
        return (
            f"it must be {BOUNDS[sign]} {bound}",
            f"set {path_word}: {f'{float(bound) + beyond:g}' if beyond else bound}",
        )
    if match := re.fullmatch(r"Expected `([\w |]+)`, got `(\w+)`", said):
        wanted = " or ".join(
            TYPES.get(word, word) for word in match[1].split(" | ") if word != "null"
        )
        return (
            f"it is {TYPES.get(match[2], match[2])}, and must be {wanted}",
            f"set {path_word} to {wanted}",
        )
    better = "a smaller number" if "out of range" in said else "a value that fits"
    return said, f"set {path_word} to {better}"


def _allowed(kind: Any) -> list[str]:
    """Return what may stand where a type spells out its values: those of its literals, and a number
    if it takes any; of a table of keys which keys."""
    if get_origin(kind) is dict:
        return _allowed(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if kind in (int, float):
        return ["a number"]
    return [word for part in get_args(kind) for word in _allowed(part)]


def _located(file: str, text: str, key: str) -> str:
    """`file:line` of the first line that sets `key`."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(rf"(^|[\s{{,]){re.escape(key)}\s*:", line):
            return f"{file}:{number}"
    return file
