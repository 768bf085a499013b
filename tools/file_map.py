"""Write docs/files.md: every file of the four packages with the first sentence of its docstring.

python tools/file_map.py            # writes the page; a test compares it with the files
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
HEAD = """\
# Every file, in a line

Made by `tools/file_map.py` from the first sentence of each file. [How it is built](architecture.md) says how the
folders depend on each other.
"""  # noqa: E501


def sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<!al)\.\s", paragraph)[0].rstrip(".")


def page() -> str:
    lines = [HEAD]
    for package in ("farspan", "farspan_exports", "farspan_studies", "farspan_lab"):
        files = sorted(
            (ROOT / package).rglob("*.py"), key=lambda path: (path.parent.parts, path.name)
        )
        for folder in dict.fromkeys(path.parent for path in files):
            told = [
                (path.name, sentence(path))
                for path in files
                if path.parent == folder and sentence(path)
            ]
            if told:
                lines.append(f"\n## `{folder.relative_to(ROOT)}/`\n")
                lines += [f"- `{name}`: {text}" for name, text in told]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
