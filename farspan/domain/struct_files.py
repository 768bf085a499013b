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

from farspan.domain.decoding import convert_value, decode_json
from farspan.domain.escapes import key_word, shell_line, shell_word
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_key, any_of, not_offered, suggest, suggest_key
from farspan.domain.units import counted

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
#: A file that a person writes has fewer values; aliases of aliases can make more than fit into
#: memory.
MAX_VALUES = 1_000_000
#: The distance of an offered number from a bound that is excluded.
BOUND_DISTANCE = 0.001
#: msgspec's names of types, and its signs, in words.
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of keys",
    "null": "nothing",
}
BOUND_WORDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
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
        # Keys as text first: a table by numbers, such as a probe's measurements, cannot be sorted.
        plain = msgspec.to_builtins(part, str_keys=True)
        digest.update(msgspec.json.encode(plain, order="sorted"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def to_json(value: object, *, indent: int = 2) -> bytes:
    """Return a struct as JSON text, ready for a file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


def write_atomically(path: Path, content: bytes) -> None:
    """Write next to `path`, flush to disk, rename into place: a reader sees the old file or the
    new one, whole."""
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
        return decode_json(content, kind)
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
        return convert_value({} if value is None else value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, where, text) from None
    except RecursionError as error:
        raise _malformed(where, "YAML", error) from None


def parse_yaml(text: str, where: object) -> Any:
    """Parse YAML text as plain values. Numbers such as 6e-4 are numbers, as in YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML reads YAML 1.1, in which 6e-4 is a string, and lets the last of equal keys win in
        silence."""

        def get_single_node(self) -> yaml.Node | None:
            node: yaml.Node | None = super().get_single_node()
            if node is not None:
                _count_values(node, {})
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                # In YAML 1.1 the key `on` is the value true.
                if key.tag == "tag:yaml.org,2002:bool":
                    key.tag = "tag:yaml.org,2002:str"
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    problem = f"{name!r} is set twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    Loader.add_constructor("tag:yaml.org,2002:int", _construct_number)
    Loader.add_constructor("tag:yaml.org,2002:float", _construct_number)
    try:
        return yaml.load(text, Loader)
    # ValueError: a date that is none, such as 2026-13-01. RecursionError: brackets in brackets,
    # hundreds deep.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _malformed(where, "YAML", error) from None


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float | str:
    """Return a number; a clock such as 12:00:00 as text, whose sixties YAML 1.1 counts."""
    if ":" in node.value:
        return str(node.value)
    if node.tag.endswith("int"):
        return loader.construct_yaml_int(node)
    return loader.construct_yaml_float(node)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values in a node, its aliases written out.

    `counts` has the numbers of nodes that are counted already, 0 while they are. Raises ValueError
    for a node that contains itself or too many values, and for text that no name or path can have.
    """
    known = counts.get(id(node))
    if known == 0:
        raise ValueError(f"an alias in its own anchor\n{node.start_mark}")
    if known is not None:
        return known

    counts[id(node)] = 0
    count = 1
    if isinstance(node.value, str):
        is_ascii = node.value.isascii()
        has_surrogate = not is_ascii and any("\ud800" <= c <= "\udfff" for c in node.value)
        if "\0" in node.value or has_surrogate:
            raise ValueError(f"{_NUL}\n{node.start_mark}")
    else:
        for part in node.value:
            # A mapping's parts are pairs of a key and a value.
            for inner in part if isinstance(part, tuple) else (part,):
                count += _count_values(inner, counts)
    if count > MAX_VALUES:
        raise ValueError(
            f"its aliases stand for more than {MAX_VALUES:,} values\n{node.start_mark}"
        )
    counts[id(node)] = count
    return count


def read_bytes(path: Path, *, most: int | None = None) -> bytes:
    """Read a file that must exist; of one of more than `most` bytes, `most` + 1."""
    try:
        with path.open("rb") as file:
            return file.read() if most is None else file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise missing_path(path) from None


def missing_path(path: Path, fix: str = "") -> Refusal:
    """Return the refusal for a path that does not exist, offering the nearest one that does; else
    `fix`, or to list the folder."""
    expanded = path.expanduser().absolute()
    parent = next((folder for folder in expanded.parents if folder.is_dir()), Path("/"))
    candidates = {entry.name: entry for entry in parent.iterdir()}
    missing_name = expanded.relative_to(parent).parts[0]
    likely = [candidates[name] for name in suggest(missing_name, candidates, synonyms=())]
    remedy = fix or f"see what is there: {shell_line('ls', parent)}"
    if likely:
        verb = "exists" if len(likely) == 1 else "exist"
        remedy = f"use {any_of(likely)}, the nearest that {verb}"
    return Refusal(
        "path-missing",
        what="there is no such file or folder",
        where=path,
        fact=f"{parent} has no {missing_name!r}",
        remedy=remedy,
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
    """Return the refusal for a value that msgspec does not accept."""
    message = str(error)
    path = _path_of(message)
    if match := re.search(r"unknown field `([^`]+)`", message):
        return _unknown_key(match[1], path, kind, file, text)
    problem = re.sub(r" - at `.*`$", "", message, flags=re.DOTALL)
    place = _type_at(kind, path)
    fact, remedy = _explain(problem, path or "it", place)
    description = _description_of(place)
    if description and "matching regex" in message and " - at `key` in " in message:
        fact = f"one of its names is not {description}"
        remedy = f"in {key_word(path)}, rename it to {description}"
    return Refusal(
        "out-of-range",
        what=f"{path or 'the file'} has a value that farspan cannot use",
        where=_locate(file, text, path.split(".")[-1]),
        fact=fact,
        remedy=remedy,
    )


def _unknown_key(key: str, path: str, kind: Any, file: str, text: str) -> Refusal:
    """Return the refusal for a key that the struct at `path` does not have."""
    struct = _struct_in(_type_at(kind, path))
    known = [field.encode_name for field in msgspec.structs.fields(struct)]
    full = f"{path}.{key}" if path else key
    # The path in the form of the keys that `_dotted_keys` yields.
    place = ANY_PLACE.sub("", path)
    own = {f"{place}.{name}" if place else name: name for name in known}
    elsewhere = {_without_places(dotted): dotted for dotted in _dotted_keys(kind)}
    likely = suggest_key(f"{place}.{key}" if place else key, {*own, *elsewhere})
    here = [own[dotted] for dotted in likely if dotted in own]
    remedy = f"remove {key_word(key)}"
    if here:
        folder = f"{path}." if path else ""
        keys = [f"{folder}{name}" for name in here]
        remedy = f"use {any_key(keys)} instead of {key_word(f'{folder}{key}')}"
    elif likely:
        keys = [elsewhere[dotted] for dotted in likely]
        remedy = _moving_remedy(key, full, keys, has_lines=bool(text))
    return Refusal(
        "unknown-key",
        what=f"unknown key {full!r}",
        where=_locate(file, text, key),
        fact=f"known here: {', '.join(known)}",
        remedy=remedy,
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


def _dotted_keys(kind: Any, folder: str = "", outer: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of a struct and of all structs in it.

    `[N]` stands for any place in a list, `.NAME` for any key of a table.
    """
    struct = _struct_in(kind)
    if struct is None or struct in outer:
        return
    for field in msgspec.structs.fields(struct):
        key = folder + field.encode_name
        yield key
        inner_folder = f"{key}{_place_in(field.type)}."
        yield from _dotted_keys(field.type, inner_folder, (*outer, struct))


def keys_of(kind: Any) -> tuple[str, ...]:
    """Return the dotted keys that hold values of a struct that a user writes."""
    keys = [key for key in _dotted_keys(kind) if "[" not in key and "NAME" not in key]
    folders = {key.rpartition(".")[0] for key in keys}
    return tuple(key for key in keys if key not in folders)


def _without_places(dotted: str) -> str:
    """Return a dotted key without places in lists and names in tables."""
    return dotted.replace("[N]", "").replace(".NAME", "")


def _path_of(message: str) -> str:
    match = re.search(r"(?:at|in) `\$\.?([^`]*)`", message)
    return match[1] if match else ""


def _type_at(kind: Any, path: str) -> Any:
    """Return the type of the value at `path`; values in a list or a dict count as the whole."""
    for step in ANY_PLACE.sub("", path).split("."):
        struct = _struct_in(kind)
        if struct is not None:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
            kind = fields.get(step, kind)
    return kind


def _struct_in(kind: Any) -> Any:
    """Return the struct inside a type such as `X | None`, `tuple[X, ...]` or `dict[str, X]`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _place_in(kind: Any) -> str:
    """Return the step to a struct that is one of many: a place in a list, a name in a table."""
    origin = get_origin(kind)
    own = ".NAME" if origin is dict else "[N]" if origin in (list, tuple) else ""
    for part in get_args(kind):
        if _struct_in(part) is not None:
            return own + _place_in(part)
    return own


def _description_of(kind: Any) -> str | None:
    """Return the description of a text that its type has."""
    for meta in getattr(kind, "__metadata__", ()):
        description = getattr(meta, "description", None)
        if description:
            return str(description)
    return next(filter(None, map(_description_of, get_args(kind))), None)


def _explain(problem: str, path: str, kind: Any) -> tuple[str, str]:
    """Return a value's fault and its remedy, by msgspec's message and the type.

    For a broken bound the remedy is the nearest value inside it.
    """
    path_word = key_word(path)
    allowed = _allowed_values(kind)
    if problem.startswith("Invalid enum value ") and allowed:
        value = problem.removeprefix("Invalid enum value ")
        return _explain_choice(value, allowed, path_word)
    description = _description_of(kind)
    if "matching regex" in problem and description:
        return f"it is not {description}", f"set {path_word} to {description}"
    if match := re.fullmatch(r"Object missing required field `(.+)`", problem):
        fact = f"the key `{match[1]}` is missing"
        return fact, f"add the key {key_word(match[1])} to {path_word}"
    if match := re.fullmatch(r"Expected `(\w+)` (of length )?(>=|<=|>|<) (\S+)", problem):
        noun, length, sign, bound = match.groups()
        bound = bound.removesuffix(".0")
        if length:
            part = {"str": "letter", "object": "key"}.get(noun, "value")
            size = f"{BOUND_WORDS[sign]} {counted(int(bound), part)}"
            return f"it must have {size}", f"give {path_word} {size}"
        if sign in (">", "<"):
            distance = BOUND_DISTANCE if sign == ">" else -BOUND_DISTANCE
            nearest = f"{float(bound) + distance:g}"
        else:
            nearest = bound
        return f"it must be {BOUND_WORDS[sign]} {bound}", f"set {path_word}: {nearest}"
    if match := re.fullmatch(r"Expected `([\w |]+)`, got `(\w+)`", problem):
        types = [word for word in match[1].split(" | ") if word != "null"]
        expected = " or ".join(TYPE_NAMES.get(word, word) for word in types)
        actual = TYPE_NAMES.get(match[2], match[2])
        return f"it is {actual}, and must be {expected}", f"set {path_word} to {expected}"
    better = "a smaller number" if "out of range" in problem else "a value that fits"
    return problem, f"set {path_word} to {better}"


def _explain_choice(value: str, allowed: list[str], path_word: str) -> tuple[str, str]:
    """Return the fault of a value that is none of `allowed`, and its remedy."""
    word = value.strip("'")
    missing = not_offered(word, allowed)
    reason = "" if missing is None else f"; {missing.reason}"
    fact = f"{value} is not one of {', '.join(allowed)}{reason}"
    likely = suggest(word, allowed) if len(allowed) > 1 else allowed
    if likely:
        return fact, f"set {path_word}: {any_of(likely)}"
    return fact, f"set {path_word} to one of {', '.join(map(shell_word, allowed))}"


def _allowed_values(kind: Any) -> list[str]:
    """Return the values that a type spells out: its literals, and a number if it takes any.

    Of a table, these are its keys.
    """
    if get_origin(kind) is dict:
        return _allowed_values(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if kind in (int, float):
        return ["a number"]
    return list(itertools.chain.from_iterable(map(_allowed_values, get_args(kind))))


def _locate(file: str, text: str, key: str) -> str:
    """Return `file:line` of the first line that sets `key`."""
    pattern = re.compile(rf"(^|[\s{{,]){re.escape(key)}\s*:")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            return f"{file}:{number}"
    return file
