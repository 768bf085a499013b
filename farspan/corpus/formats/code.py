"""Source code: text, titled by the name of its file, with what it defines as headings."""

from __future__ import annotations

import re

from farspan.corpus.formats._format import Format
from farspan.corpus.formats._plain import plain_reader
from farspan.corpus.outline import Outline

#: A line that defines something by a word for it, in most languages that have such a word.
_DEFINITION = re.compile(
    r"(?P<indent>[ \t]{0,12})"
    r"(?:(?:export|default|pub(?:\(\w{1,9}\))?|public|private|protected|internal|static|abstract"
    r"|final|sealed|async|unsafe|open|override|data|recursive|pure|elemental|local)[ ]){0,5}"
    r"(?P<title>(?:def|class|fn|func|fun|function|struct|enum|trait|impl|interface|module|object"
    r"|namespace|subroutine|package|sub|macro)[ ]+[A-Za-z_$][\w$:.<>]{0,120})"
    r"(?:\s*[({:=\[].*|\s+(?:extends|implements|for|is|where)\b.*)?"
)
#: Columns of indentation of a level.
_INDENT = 4
_TABS = str.maketrans({"\t": " " * _INDENT})
#: A longer line is data, or was made by a program.
_MAX_LINE_CHARS = 300

_ENDINGS = (
    ".py .pyi .pyx .r .jl .m .wl .sas .do .stan",
    ".js .mjs .cjs .jsx .ts .mts .tsx .vue .svelte .php .css .scss",
    ".c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .cl .glsl .hlsl .metal .rs .go .zig .d .nim",
    ".java .kt .kts .scala .groovy .cs .fs .fsx .vb .swift .dart .mm",
    ".sh .bash .zsh .fish .ps1 .bat .sql .pl .pm .rb .lua .tcl .awk .sed",
    ".f .for .f77 .f90 .f95 .f03 .f08 .pas .ada .adb .ads .cob .asm .v .sv .vhd .vhdl",
    ".hs .lhs .ml .mli .ex .exs .erl .hrl .clj .cljs .lisp .lsp .el .scm .rkt .lean .agda",
    ".proto .thrift .graphql .cmake .bzl .nix .tf .yaml .yml .toml .ini .cfg",
)


class CodeOutline(Outline):
    """Functions, classes and modules, each below those that it is indented in."""

    def _read_line(self, line: str, start: int) -> None:
        if len(line) > _MAX_LINE_CHARS:
            return
        definition = _DEFINITION.fullmatch(line)
        if definition is not None:
            indent = len(definition["indent"].translate(_TABS))
            place = start + len(definition["indent"])
            self._add_heading(place, 1 + -(-indent // _INDENT), definition["title"])

    def _decide_pending(self) -> None:
        """Settle nothing: each line stands for itself."""


FORMATS = (
    Format(
        tuple(" ".join(_ENDINGS).split()),
        plain_reader(CodeOutline, keep_name=True),
        packed=True,
    ),
)
