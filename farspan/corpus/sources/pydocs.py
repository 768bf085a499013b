"""Documentation that lies on every machine: `pydoc_data.topics`, docstrings of the standard library
and of torch.

Sources are parsed, never run; only modules without Python source (`math`, `builtins`) are imported
for their docstrings. One document a topic, module, class and function, titled by the name a user
would import it under.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.processes import spawn_pool
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, SkipLog

#: Not documentation, or not fit to be read: test suites, generated code, the internals of torch's
#: compilers.
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "_internal",
    "antigravity.py",
    "this.py",
}
_Pairs = list[tuple[str, str]]


class PyDocs:
    """The built-in corpus, about 7.6 MB where torch is installed, 2.3 MB otherwise."""

    size_bytes = 8_000_000

    def __init__(self) -> None:
        self.skipped = SkipLog()
        self.recoded = SkipLog()

    def fingerprint(self) -> str:
        has_torch = importlib.util.find_spec("torch") is not None
        torch = importlib.metadata.version("torch") if has_torch else "none"
        return f"pydocs 1 python {sys.version} torch {torch}"

    def documents(self) -> Iterator[Document]:
        """Yield topics, then everything else by name; a name that is documented twice is taken
        once."""
        from pydoc_data.topics import topics

        for topic, text in sorted(topics.items()):
            yield Document(title=topic, text=text, origin=f"pydoc_data.topics:{topic}")
        for title, text in sorted(_collect_docstrings().items()):
            if title not in topics:
                yield Document(title=title, text=inspect.cleandoc(text), origin=title)


def open_source(location: str, fields: FieldsConfig = FieldsConfig()) -> PyDocs:
    """Open the documentation on this machine, which has no rows and no columns."""
    return PyDocs()


def _collect_docstrings() -> dict[str, str]:
    """Map public qualified names to docstrings, of all that is parsed or imported."""
    paths, modules = zip(*_find_files(), strict=True)
    with spawn_pool(min(4, os.cpu_count() or 1)) as pool:
        parsed = list(pool.map(_parse_file, paths, modules, chunksize=64))
    documented: _Pairs = []
    imports: set[tuple[str, str]] = set()
    for file_docs, file_imports in parsed:
        documented += file_docs
        imports.update(file_imports)
    documented += _import_docstrings()
    public = _public_names(imports)
    known_modules = set(modules)
    docstrings: dict[str, str] = {}
    for name, text in documented:
        title = _shorten_name(name, public, known_modules)
        last = title.rpartition(".")[2]
        if not title.startswith("_") and not last.startswith("_"):
            docstrings.setdefault(title, text)
    return docstrings


def _find_files() -> Iterator[tuple[str, str]]:
    """Yield (path, module name) of every Python file; stubs first, since torch's carry the
    filled-in texts."""
    roots = [(Path(sysconfig.get_path("stdlib")), "")]
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        roots.append((Path(torch.origin).parent, "torch"))
    for root, package in roots:
        for path in (*sorted(root.rglob("*.pyi")), *sorted(root.rglob("*.py"))):
            inner = path.relative_to(root)
            module = inner.with_suffix("").parts
            is_known = package or module[0] in sys.stdlib_module_names
            if is_known and _LEFT_OUT.isdisjoint(inner.parts):
                parts = [part for part in (package, *module) if part not in ("", "__init__")]
                yield str(path), ".".join(parts)


def _parse_file(path: str, module: str) -> tuple[_Pairs, _Pairs]:
    """Return a file's docstrings, as (qualified name, docstring), and its imports, as (name there,
    name here)."""
    with warnings.catch_warnings(action="ignore"):
        try:
            tree = ast.parse(Path(path).read_bytes())
        except SyntaxError:  # a template, or written for another Python
            return [], []
    package = module.split(".")
    if Path(path).stem != "__init__":
        package.pop()
    imports = list(_find_imports(tree, module, package))
    return list(_find_definitions(tree, module)), imports


def _find_definitions(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, docstring) of a module, class or function and of all that its top
    level defines."""
    if text := ast.get_docstring(node, clean=False):  # type: ignore[arg-type]
        yield name, text
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in _top_level(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _find_definitions(child, f"{name}.{child.name}")
        elif isinstance(child, ast.Expr | ast.Assign):
            yield from _assigned_docstring(child, name)


def _assigned_docstring(statement: ast.Expr | ast.Assign, module: str) -> Iterator[tuple[str, str]]:
    """`f.__doc__ = x`; torch's `add_docstr(torch.abs, x)`, `add_docstr_all("abs", x)`, `f =
    _add_docstr(…)`."""
    value = statement.value
    target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    call = value if isinstance(value, ast.Call) and len(value.args) > 1 else None
    if call and "add_docstr" in ast.unparse(call.func):
        subject, value = call.args[:2]
        if target:
            name = f"{module}.{target}"
        elif isinstance(subject, ast.Constant):
            name = f"torch.Tensor.{subject.value!s}"
        else:
            name = ast.unparse(subject)
    elif target.endswith(".__doc__"):
        name = f"{module}.{target.removesuffix('.__doc__')}"
    else:
        return
    # All of the text's constants, as of `a + b` or `a.format(...)`, in the order of the source.
    constants = [node for node in ast.walk(value) if isinstance(node, ast.Constant)]
    constants.sort(key=lambda node: (node.lineno, node.col_offset))
    yield name, "".join(node.value for node in constants if isinstance(node.value, str))


def _find_imports(tree: ast.Module, module: str, package: list[str]) -> Iterator[tuple[str, str]]:
    """`from x import y as z` at the top level, as (x.y, module.z); `from x import *` as (x.*,
    module)."""
    for node in _top_level(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                imported_as = f"{module}.{alias.asname or alias.name}"
                if alias.name == "*":
                    imported_as = module
                yield f"{origin}.{alias.name}", imported_as


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _top_level(child)


def _public_names(imports: set[tuple[str, str]]) -> dict[str, str]:
    """Map where a definition lives to the shortest name it is imported by; `x.*` to the module that
    has all of x."""
    public = {"torch._C.TensorBase": "torch.Tensor", "torch._C._VariableFunctions.*": "torch"}
    for definition, imported_as in sorted(imports, key=lambda pair: (pair[1].count("."), pair[1])):
        is_same_package = imported_as.split(".")[0] == definition.split(".")[0]
        if is_same_package and imported_as.count(".") < definition.count("."):
            public.setdefault(definition, imported_as)
    return public


def _shorten_name(name: str, public: dict[str, str], modules: set[str]) -> str:
    """`torch.nn.modules.linear.Linear.forward` -> `torch.nn.Linear.forward`; each step takes away a
    part."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        prefix = ".".join(parts[:length])
        rest = parts[length:]
        shorter = public.get(prefix)
        if shorter is None and rest:
            # `import *` brings what a module defines, without its submodules and private names.
            is_module = f"{prefix}.{rest[0]}" in modules
            if not (is_module or rest[0].startswith("_")):
                shorter = public.get(f"{prefix}.*")
        if shorter is not None:
            return _shorten_name(".".join([shorter, *rest]), public, modules)
    return name


def _import_docstrings() -> _Pairs:
    """Return the docstrings of modules without Python source, under the names that their objects
    give themselves."""
    docs: list[tuple[str, str | None]] = []
    for name in sorted(sys.stdlib_module_names - {"antigravity", "this", "__main__"}):
        spec = importlib.util.find_spec(name)
        if spec is None or (spec.origin or "").endswith(".py"):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(name)
        except ImportError:  # built without, say, Tk
            continue
        docs.append((name, module.__doc__))
        own_names = (name, name.lstrip("_"))
        for value in vars(module).values():
            if not isinstance(value, type | types.BuiltinFunctionType):
                continue
            if value.__module__ not in own_names:
                continue
            title = f"{value.__module__}.{value.__qualname__}"
            docs.append((title, value.__doc__))
            members = vars(value).items() if isinstance(value, type) else ()
            for key, member in members:
                if callable(member):
                    docs.append((f"{title}.{key}", member.__doc__))
    return [(title, text) for title, text in docs if isinstance(text, str) and text.strip()]
