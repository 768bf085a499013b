"""What a remedy holds of names, paths, hosts and options is quoted: a shell runs nothing of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from farspan.app.preflight_checks import unused_file, unused_path

ROOT = Path(__file__).parents[1]
PACKAGES = ("farspan", "farspan_exports", "farspan_lab", "farspan_studies")
#: Functions whose answer a shell takes for words alone, whatever they are given.
QUOTERS = {"shell_word", "shell_line", "yaml_word", "key_word", "command", "any_of", "any_key"}
#: Functions whose answer is a number, or one with a unit.
NUMBERS = {"len", "format_bytes", "format_count", "format_seconds", "counted"}
#: Format specifications that text cannot have: Python refuses it.
NUMERIC_SPECS = ("d", ",", "g", "f", "%", "e")
#: Variables, parameters and attributes that hold a remedy or a quoted part of one: what is assigned
#: to them or given for them is checked like a remedy.
CHECKED_NAME = re.compile(r"_?remedy|fix|(path|host|family|site)_words?")
#: Functions that return a remedy or a part of one: what they return is checked.
CHECKED_FUNCTIONS = {
    "_choose_fix",
    "_init_command",
    "_listing",
    "_log_in",
    "_mending",
    "_missing_extra",
    "_moving_remedy",
    "_new_run_remedy",
    "_psql_command",
    "_remedy_after_stop",
    "_slurm_command",
    "_remedy",
    "advise",
    "advise_device",
    "install",
    "mending_command",
    "prepare_command",
    "probe_command",
    "another_encoder",
    "install_command",
    "install_command_there",
    "install_packages_command",
    "_pipx_command",
    "rebuild",
    "rebuild_command",
    "_setting_unit_remedy",
    "_upload_command",
    "doctor_command",
    "first_run_command",
    "resume_command",
    "serve_command",
    "setting_remedy",
}
#: Functions that return a fact and its remedy.
PAIR_FUNCTIONS = {
    "_cause",
    "_diagnose_failed_path",
    "_explain",
    "_explain_choice",
    "_explain_failure",
}
ALLOWED_FUNCTIONS = NUMBERS | CHECKED_FUNCTIONS | PAIR_FUNCTIONS
#: Words of farspan's own, from its tables and constants, by their file.
OWN_WORDS: dict[str, set[str]] = {
    "farspan/corpus/sources/folder.py": {"extra", "next"},
    "farspan/domain/clusterfile.py": {"example", "key"},
    "farspan/domain/struct_files.py": {
        "'}' * len(folders)",
        "opened",
        "better",
        "description",
        "expected",
        "nearest",
        "size",
        "verb",
    },
    "farspan/domain/gpus.py": {"tag", "cpu", "newer"},
    "farspan/domain/suggest.py": {"lead"},
    "farspan/launch/fabric_client.py": {"FAULTS[fault['kind']]"},
    "farspan/planning/selection_outcome.py": {"limit.typed"},
    "farspan/planning/quantities.py": {"example", "value"},
    "farspan/retrieval/relevance_judgements.py": {"wanted"},
    "farspan/retrieval/stores/_common.py": {"store"},
}


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Module:
    """A file: what it defines, imports, and calls by another name."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.tree = ast.parse(source)
        self.own_words = OWN_WORDS.get(name, set())
        #: Where callers give a remedy, by the names of functions, classes and methods.
        self.functions = dict[str, int]()
        self.methods = dict[str, int]()
        #: The file and the name there of what is imported.
        self.imported = dict[str, tuple[str, str]]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        self._take(inner, node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                file = node.module.replace(".", "/")
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (file, alias.name)
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self._take(node, None)

    def _take(self, function: ast.FunctionDef, owner: ast.ClassDef | None) -> None:
        words = [argument.arg for argument in function.args.args][owner is not None :]
        places = [place for place, word in enumerate(words) if CHECKED_NAME.fullmatch(word)]
        if places and owner is None:
            self.functions[function.name] = places[0]
        elif places and function.name == "__init__":
            self.functions[owner.name] = places[0]
        elif places:
            self.methods[function.name] = places[0]

    def is_quoter(self, name: str) -> bool:
        return self.imported.get(name, ("", name))[1] in QUOTERS


def raw_parts(node: ast.expr, module: Module) -> Iterator[ast.expr]:
    """Parts of a remedy that are not known to be quoted."""
    parts: list[ast.expr] = []
    match node:
        case ast.Constant():
            pass
        case ast.JoinedStr(values=parts) | ast.BoolOp(values=parts):
            pass
        case ast.FormattedValue(format_spec=ast.JoinedStr() as spec) if (
            ast.unparse(spec).rstrip("'\"").endswith(NUMERIC_SPECS)
        ):
            pass
        case ast.FormattedValue(value=part) | ast.GeneratorExp(elt=part) | ast.ListComp(elt=part):
            parts = [part]
        case ast.IfExp(body=body, orelse=orelse):
            parts = [body, orelse]
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            parts = [left, right]
        case ast.Subscript(value=ast.Dict(values=parts)):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[part]):
            parts = [part]
        case ast.Call(func=ast.Name(id="map"), args=[function, _]):
            if not module.is_quoter(last_name(function)):
                yield node
        case ast.Call(func=ast.Attribute(value=part, attr="replace"), args=[*more]):
            parts = [part, *more]
        case ast.Call(
            func=ast.Attribute(value=ast.Dict(values=values), attr="get"), args=[_, more]
        ):
            parts = [*values, more]
        case ast.Call(func=function):
            name = last_name(function)
            if not (module.is_quoter(name) or name in ALLOWED_FUNCTIONS):
                yield node
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if not name.isupper() and not CHECKED_NAME.fullmatch(name):
                yield node
        case _:
            yield node
    for part in parts:
        yield from raw_parts(part, module)


def remedies(
    module: Module, modules: dict[str, Module], methods: dict[str, set[int]]
) -> Iterator[ast.expr]:
    """Expressions that become a remedy or a quoted part of one."""
    for node in ast.walk(module.tree):
        match node:
            case ast.keyword(arg=str(name), value=value) if CHECKED_NAME.fullmatch(name):
                yield value
            case ast.Call(args=arguments):
                for place in positions(node, module, modules, methods):
                    yield from arguments[place : place + 1]
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from assigned(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from assigned(target, value)
            case ast.AugAssign(target=target, value=value):
                yield from assigned(target, value)
            case ast.NamedExpr(target=target, value=value):
                yield from assigned(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield from assigned(target, value)
            case ast.FunctionDef(name=name) if name in CHECKED_FUNCTIONS | PAIR_FUNCTIONS:
                for inner in ast.walk(node):
                    match inner:
                        case ast.Return(value=ast.Tuple(elts=[_, remedy])):
                            yield remedy
                        case ast.Return(value=ast.expr() as remedy) if name in CHECKED_FUNCTIONS:
                            yield remedy


def positions(
    call: ast.Call, module: Module, modules: dict[str, Module], methods: dict[str, set[int]]
) -> set[int]:
    """Where a call may give a remedy: one place where its name says which function it is."""
    name = last_name(call.func)
    if isinstance(call.func, ast.Name):
        file, there = module.imported.get(name, ("", name))
        owners = [modules[f] for f in (f"{file}.py", f"{file}/__init__.py") if f in modules]
        found = [owner.functions.get(there) for owner in owners or [module]]
    elif last_name(getattr(call.func, "value", call.func)) == "self":
        found = [module.methods.get(name)]
    else:
        return methods.get(name, set())
    return {place for place in found if place is not None}


def assigned(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """What is assigned to checked names."""
    match target, value:
        case ast.Tuple(), ast.IfExp(body=body, orelse=orelse):
            yield from assigned(target, body)
            yield from assigned(target, orelse)
        case ast.Tuple(elts=parts), ast.Tuple(elts=values) if len(parts) == len(values):
            for part, part_value in zip(parts, values, strict=True):
                yield from assigned(part, part_value)
        case ast.Tuple(elts=parts), _:
            for part in parts:
                yield from assigned(part, value)
        case _:
            if CHECKED_NAME.fullmatch(last_name(target)):
                yield value


def raw_in(sources: dict[str, str]) -> list[str]:
    """Parts of remedies in files that are not known to be quoted."""
    modules = {name: Module(name, source) for name, source in sources.items()}
    methods = dict[str, set[int]]()
    for module in modules.values():
        for name, place in module.methods.items():
            methods.setdefault(name, set()).add(place)
    return sorted(
        {
            f"{name}:{part.lineno}: {ast.unparse(part)}"
            for name, module in modules.items()
            for remedy in remedies(module, modules, methods)
            for part in raw_parts(remedy, module)
            if not {ast.unparse(part), last_name(getattr(part, "func", part))} & module.own_words
        }
    )


RAW = """
from farspan.domain.problems import Refusal, command as farspan
from farspan.domain.escapes import shell_word

def refuse(what, remedy):
    raise Refusal("usage", what=what, where="", fact="", remedy=remedy)

def take(path, count):
    refuse(f"{path}", f"mv '{path}' /tmp/")
    refuse(f"{path}", remedy=f"ls {path.parent!s}")
    refuse("", f"{farspan('logs', path)} {shell_word(path)} {count:d} {len(path)} ({path.name})")
    path_word = f"{path}.old"
    what, remedy = path, "rm " + path if count else path_word
    return Refusal("usage", remedy=" ".join(["rm", path]), **what)
"""


def test_raw_names_in_remedies_are_found():
    assert raw_in({"raw.py": RAW}) == [
        "raw.py:10: path.parent",
        "raw.py:11: path.name",
        "raw.py:12: path",
        "raw.py:13: path",
        "raw.py:14: ['rm', path]",
        "raw.py:9: path",
    ]


def test_remedies_leave_no_cluster_to_be_looked_up():
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            assert "with the same cluster" not in path.read_text(), path


def test_places_that_remedies_propose_are_free(tmp_path):
    """A name with `-2` may be taken as well: `unused_path` and `unused_file` look."""
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            assert '}-2"' not in path.read_text(), path
    (tmp_path / "v1.5").mkdir()
    (tmp_path / "v1.5-2").mkdir()
    assert unused_path(tmp_path / "v1.5") == tmp_path / "v1.5-3"
    for name in ("plan.json", "plan-2.json"):
        (tmp_path / name).touch()
    assert unused_file(tmp_path / "plan.json") == tmp_path / "plan-3.json"
    assert unused_file(tmp_path / "new.json") == tmp_path / "new.json"


def test_names_in_remedies_are_quoted():
    files = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    assert not raw_in({str(path.relative_to(ROOT)): path.read_text() for path in files})
