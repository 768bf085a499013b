"""The page's files, read once: what a request names leads to none of them on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farspan.report.page import TEMPLATES, template_environment

PAGE_FOLDER = Path(__file__).parent
_KINDS = {".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The page, what a browser sees without the token, and what both load: content and type by
    name."""

    page: bytes
    locked: bytes
    static: dict[str, tuple[bytes, str]]


def read_files(name: str) -> Files:
    """Return the files for a run of this name. Colours and type are those of the run's report."""
    jinja = template_environment(PAGE_FOLDER)
    look = "".join((TEMPLATES / style).read_text() for style in ("chart.css", "page.css"))
    static = {
        path.name: (path.read_bytes(), _KINDS[path.suffix])
        for path in PAGE_FOLDER.iterdir()
        if path.suffix in _KINDS
    }
    return Files(
        page=jinja.get_template("search.html").render(name=name).encode(),
        locked=jinja.get_template("locked.html").render(name=name).encode(),
        static={**static, "look.css": (look.encode(), "text/css")},
    )
