"""The documentation against the code: every key, every error code, every decision, every link."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farspan.cli.main import command_names
from farspan.domain.config import RunConfig
from farspan.domain.problems import EXIT_CODES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page that begins with a cell in code style."""
    lines = re.findall(r"^\| (`.+) \|$", (DOCS / page).read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def struct_of(kind: msgspec.inspect.Type) -> msgspec.inspect.StructType | None:
    options = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return next(
        (option for option in options if isinstance(option, msgspec.inspect.StructType)), None
    )


def written_type(kind: msgspec.inspect.Type) -> str:
    """A type as run-yaml.md writes it; None is "left out", so it is not named."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            found = [
                written_type(option)
                for option in types
                if not isinstance(option, msgspec.inspect.NoneType)
            ]
            return (
                "quantity"
                if set(found) == {"text", "whole number", "number"}
                else " or ".join(sorted(found))
            )
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case msgspec.inspect.BoolType():
            return "`true` or `false`"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            word = "whole number" if isinstance(kind, msgspec.inspect.IntType) else "number"
            signs = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
            # Upper bounds beyond a thousand million only catch slips; the page says so once.
            bounds = [
                f"{sign} {bound:,}" for sign, bound in signs if bound is not None and bound < 1e9
            ]
            return " ".join([word, ", ".join(bounds)]).strip()
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"list of {written_type(item)}"
        case msgspec.inspect.Metadata(type=inner):
            return written_type(inner)
        case msgspec.inspect.StructType():
            return "keys"
        case msgspec.inspect.DictType(value_type=value):
            return f"{written_type(value)} by name"
    raise AssertionError(f"run-yaml.md has no word for {kind}")


def written_default(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "must be given"
    if struct_of(field.type) is not None:
        return "as below"
    value: Any = field.default
    return (
        "none"
        if value is None or value == () or field.default_factory is dict
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def keys(struct: msgspec.inspect.StructType, prefix: str = "") -> list[list[str]]:
    """Dotted key, type and default of every key that run.yaml can have, in the order of
    config.py."""
    found = []
    for field in struct.fields:
        name = f"{prefix}{field.encode_name}"
        inner = struct_of(field.type)
        if inner is None or written_type(field.type) != "keys":
            found.append([f"`{name}`", written_type(field.type), written_default(field)])
        if inner is not None:
            found += keys(inner, f"{name}.")
    return found


def test_every_key_of_run_yaml_is_documented_with_its_type_and_default() -> None:
    top = msgspec.inspect.type_info(RunConfig)
    assert isinstance(top, msgspec.inspect.StructType)
    assert [row[:3] for row in rows("run-yaml.md")] == keys(top)
    assert all(len(row) == 4 and len(row[3]) > 10 for row in rows("run-yaml.md"))


def test_every_example_of_run_yaml_is_one_that_loads() -> None:
    from farspan.domain.struct_files import convert, parse_yaml

    examples = re.findall(r"```yaml\n(.+?)```", (DOCS / "run-yaml.md").read_text(), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        convert(parse_yaml(example, "run-yaml.md"), RunConfig, "run-yaml.md", example)


def test_every_error_code_is_documented_with_its_exit_code() -> None:
    assert [(row[0].strip("`"), int(row[1])) for row in rows("errors.md")] == list(
        EXIT_CODES.items()
    )
    assert all(len(row) == 4 and len(row[2]) > 10 and len(row[3]) > 10 for row in rows("errors.md"))


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions/README.md").read_text()
    there = {path.name for path in (DOCS / "decisions").glob("[0-9]*.md")}
    assert set(re.findall(r"\((\d{4}-[^)]+\.md)\)", index)) == there
    numbers = [name[:4] for name in there]
    assert len(set(numbers)) == len(numbers)


def test_every_command_is_named_on_the_first_page_or_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text() + (DOCS / "index.md").read_text()
    assert [name for name in command_names() if f"farspan {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [
        target
        for target in targets
        if target and not target.startswith(("http:", "https:", "mailto:"))
    ]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_map_has_every_file_as_it_is_now():
    spec = importlib.util.spec_from_file_location("file_map", ROOT / "tools" / "file_map.py")
    assert spec is not None and spec.loader is not None
    file_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file_map)
    assert file_map.PAGE.read_text() == file_map.page(), "python tools/file_map.py"
