"""Check how the code reads: sizes of statements, names, words, and subjects of commits.

    python tools/check_style.py                 # list violations; exit with 1 where there are any
    python tools/check_style.py farspan/corpus  # only of these files and folders
    python tools/check_style.py --sizes         # AST nodes by folder, without annotations

A statement's size is its AST nodes without the statements inside it, annotations and docstrings.
No formatter changes it. Docstrings' first lines are ruff's D401, and types are mypy's.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("farspan",)

#: The 90th percentile of statements; torchtitan, litgpt and nanochat have 21 or 22.
MAX_STATEMENT_P90 = 22
#: The largest statement that is neither a literal nor a refusal.
MAX_STATEMENT = 60
#: The share of functions with names of one word, without properties and methods that plug-ins and
#: frameworks prescribe. Others have a quarter to two fifths.
MAX_ONE_WORD_SHARE = 0.45

#: Words that no part of a name may be.
NAME_PARTS = {
    *("told", "tell", "tells", "say", "says", "said", "hear", "hears", "heard"),
    *("anew", "crowd", "foretold", "paces", "who", "whom", "whose"),
}
#: Words that name nothing when they stand alone.
WHOLE_NAMES = {"one", "found", "left", "names", "held", "apart", "trip", "way"}
#: Words and phrases that no docstring holds. CONTRIBUTING.md and docs/glossary.md have the others.
PHRASES = re.compile(
    r"\b(told|tells?|says?|said|hears?|heard|anew|again and again|by now|so many|as many|of which"
    r"|goes on|go on|whom|crowds?|foretold|expected to take|unlike (?:devices|kinds)"
    r"|beside|what nothing hides|what rounding (?:has )?left|learned by heart|leans on words"
    r"|replicas that meet|(?:process|worker|rank|host|stage|replica|peer)(?:e?s)? who(?:se)?)\b",
    re.IGNORECASE,
)
#: Names that files and JSON have, by the file that defines them.
WRITTEN_NAMES = {
    "farspan/app/jobs.py": {"heard_s"},
    "farspan/planning/diff.py": {"names"},
    "farspan/report/compare.py": {"names"},
    "farspan/report/drift.py": {"who", "paces"},
    "farspan/runtime/time_budget.py": {"told"},
    "farspan/semantics/communications.py": {"way", "Way"},
}
#: A later redesign replaces these: their statements are not checked one by one.
TO_BE_REPLACED = ("farspan/estimate/", "farspan/semantics/", "farspan/report/plan_")
#: A docstring that names nothing: style wants the thing that is returned.
RIDDLE = re.compile(r"(?:Return|Yield) (?:what|who)\b")
SUBJECT = re.compile(r"[a-z0-9_./, -]+: \S.*")
MAX_SUBJECT = 72
#: On the main branch itself, commits and growth are checked from this commit on.
CHECKED_SINCE = "c6a2bb2cfbde"

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    path: Path
    tree: ast.Module
    annotations: frozenset[int]

    @classmethod
    def parse(cls, path: Path) -> Source:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return cls(path, tree, frozenset(annotation_ids(tree)))

    def violation(self, node: ast.AST, text: str) -> str:
        line = getattr(node, "lineno", 1)
        return f"{self.path.relative_to(ROOT)}:{line}: {text}"

    @property
    def name(self) -> str:
        """The path from the repository's root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_kept(self) -> bool:
        return not self.name.startswith(TO_BE_REPLACED)

    def count_nodes(self) -> int:
        return sum(id(node) not in self.annotations for node in ast.walk(self.tree))


def annotation_ids(tree: ast.AST) -> Iterator[int]:
    """Yield the ids of all nodes inside annotations."""
    for node in ast.walk(tree):
        annotation = None
        if isinstance(node, Function):
            annotation = node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign):
            annotation = node.annotation
        if annotation is None:
            continue
        for inner in ast.walk(annotation):
            if not isinstance(inner, ast.expr_context):
                yield id(inner)


def statements(source: Source) -> Iterator[tuple[ast.stmt, int]]:
    """Yield each statement but imports and docstrings, with its size in nodes."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node, statement_size(node, source.annotations)


def statement_size(statement: ast.stmt, ignored: frozenset[int]) -> int:
    """Return the nodes of a statement without the statements inside it."""
    size = 0
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if id(node) in ignored:
            continue
        size += 1
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                waiting.append(child)
    return size


def is_literal_or_refusal(statement: ast.stmt) -> bool:
    """Return whether a statement may be large: a table of constants, or an error that is raised."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.Return) and isinstance(value, ast.Call):
        called = getattr(value.func, "id", getattr(value.func, "attr", ""))
        return called in ("Refusal", "Problem")
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    if not isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.Set):
        return False
    computed = (ast.comprehension, ast.IfExp, ast.Lambda)
    return not any(isinstance(node, computed) for node in ast.walk(value))


def check_statements(sources: list[Source]) -> Iterator[str]:
    """Yield statements that are too large, and the 90th percentile where that is."""
    sizes = []
    for source in sources:
        for statement, size in statements(source):
            sizes.append(size)
            is_too_large = size > MAX_STATEMENT and not is_literal_or_refusal(statement)
            if is_too_large and source.is_kept:
                yield source.violation(statement, f"a statement of {size} AST nodes")
    p90 = sorted(sizes)[len(sizes) * 9 // 10]
    if p90 > MAX_STATEMENT_P90:
        yield f"90th percentile of statements: {p90} AST nodes, at most {MAX_STATEMENT_P90}"


def check_expressions(source: Source) -> Iterator[str]:
    """Yield assignments of unrelated values, nested comprehensions and hidden assignments."""
    if not source.is_kept:
        return
    tests = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If | ast.While):
            tests.update(id(inner) for inner in ast.walk(node.test))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and assigns_unrelated_values(node):
            yield source.violation(node, "a tuple of unrelated values: one statement for each")
        elif isinstance(node, COMPREHENSIONS):
            conditions = sum(len(generator.ifs) for generator in node.generators)
            if len(node.generators) > 1 or conditions > 1:
                yield source.violation(node, "a comprehension with two `for` or two `if`")
        elif isinstance(node, ast.NamedExpr) and id(node) not in tests:
            yield source.violation(node, "`:=` outside the test of an `if` or `while`")


def assigns_unrelated_values(node: ast.Assign) -> bool:
    """Return whether a tuple is assigned to a tuple otherwise than to swap names."""
    target = node.targets[0]
    if not isinstance(node.value, ast.Tuple) or not isinstance(target, ast.Tuple):
        return False
    old = sorted(map(ast.unparse, node.value.elts))
    new = sorted(map(ast.unparse, target.elts))
    return old != new


def check_names(source: Source) -> Iterator[str]:
    """Yield names and docstrings with words that docs/glossary.md replaces."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            if RIDDLE.match(docstring):
                yield source.violation(node, f'"{docstring[:30]}..." does not name the thing')
            for phrase in dict.fromkeys(PHRASES.findall(docstring)):
                yield source.violation(node, f'"{phrase}" in a docstring')
        for name in defined_names(node):
            words = re.findall(r"[a-z]+|[A-Z][a-z]*", name)
            parts = {word.lower() for word in words}
            is_vague = parts & NAME_PARTS or name.strip("_").lower() in WHOLE_NAMES
            if is_vague and name not in WRITTEN_NAMES.get(source.name, ()):
                yield source.violation(node, f"the name `{name}`")


def defined_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def check_function_names(sources: list[Source]) -> Iterator[str]:
    """Yield the share of functions with names of one word where it is too large."""
    total = one_word = 0
    prescribed = prescribed_methods(sources)
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, Function) or node.name.startswith("__"):
                continue
            total += 1
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_property = any("property" in decorator for decorator in decorators)
            if "_" not in node.name.strip("_") and not is_property:
                one_word += node.name not in prescribed
    share = one_word / max(1, total)
    if share > MAX_ONE_WORD_SHARE:
        yield f"{share:.1%} of functions have names of one word, at most {MAX_ONE_WORD_SHARE:.0%}"


def prescribed_methods(sources: list[Source]) -> set[str]:
    """Return the methods that protocols of our own and of frameworks prescribe."""
    methods = {"forward", "run", "main", "write", "read", "close", "emit"}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
                methods.update(part.name for part in node.body if isinstance(part, Function))
    return methods


def is_plugin(path: Path) -> bool:
    """Return whether a file is one of a kind that all define the same names."""
    folders = {"techniques", "sources", "stores", "launchers", "commands", "export", "models"}
    return path.parent.name in folders | {"formats"}


def check_public_names(sources: list[Source]) -> Iterator[str]:
    """Yield classes with one name, and constants with one name and several values."""
    classes: dict[str, list[str]] = defaultdict(list)
    constants: dict[str, dict[str, str]] = defaultdict(dict)
    for source in sources:
        if is_plugin(source.path):
            continue
        for node in source.tree.body:
            place = source.violation(node, "")
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(place)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch("[A-Z][A-Z0-9_]*", target.id):
                    constants[target.id].setdefault(ast.dump(node.value), place)
    for name, places in classes.items():
        if len(places) > 1:
            yield f"{places[0]}class {name} is defined in {len(places)} places"
    for name, values in constants.items():
        if len(values) > 1:
            yield f"{next(iter(values.values()))}{name} has {len(values)} values"


def check_commits() -> Iterator[str]:
    """Yield commits since the main branch with another subject than `scope: what it does`."""
    base = merge_base()
    if base is None:
        return
    log = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") or ""
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        yield from check_subject(f"commit {commit}", subject)


def check_subject(place: str, subject: str) -> Iterator[str]:
    """Yield a commit's subject, if it is another than `scope: what it does`."""
    if len(subject) > MAX_SUBJECT or not SUBJECT.fullmatch(subject):
        yield (
            f"{place}: {subject!r} of {len(subject)} characters is not `scope: what it does` in "
            f"{MAX_SUBJECT}"
        )


def check_growth(sources: list[Source]) -> Iterator[str]:
    """Yield where the code has grown since the main branch without a line in the CHANGELOG."""
    base = merge_base()
    if base is None or not git("diff", "--name-only", base, "--", *PACKAGES):
        return
    if git("diff", "--name-only", base, "--", "CHANGELOG.md"):
        return
    before = 0
    files = git("ls-tree", "-r", "--name-only", base, "--", *PACKAGES) or ""
    for file in files.splitlines():
        if file.endswith(".py"):
            tree = ast.parse(git("show", f"{base}:{file}") or "")
            before += Source(ROOT / file, tree, frozenset(annotation_ids(tree))).count_nodes()
    now = sum(source.count_nodes() for source in sources)
    if now > before:
        yield f"{now - before:,} AST nodes more than on the main branch: say why in CHANGELOG.md"


def merge_base() -> str | None:
    """Return the commit that this branch left the main branch at, if git knows one.

    On the main branch itself, return CHECKED_SINCE.
    """
    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        base = git("merge-base", "HEAD", branch)
        if base:
            return CHECKED_SINCE if base == head else base.strip()
    return None


def git(*arguments: str) -> str | None:
    """Return what a git command prints; None where it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def print_sizes(sources: list[Source]) -> None:
    """Print the nodes of each folder and of all, without annotations."""
    folders: dict[Path, int] = defaultdict(int)
    for source in sources:
        folders[source.path.parent.relative_to(ROOT)] += source.count_nodes()
    for folder, nodes in sorted(folders.items()):
        print(f"{nodes:9,}  {folder}")
    print(f"{sum(folders.values()):9,}  in all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--sizes", action="store_true", help="print AST nodes by folder")
    parser.add_argument("--message", type=Path, help="check the subject of this message alone")
    options = parser.parse_args()

    if options.message:
        lines = options.message.read_text(encoding="utf-8").splitlines()
        subject = next((line for line in lines if line and not line.startswith("#")), "")
        if subject.startswith("Merge "):
            return
        sys.exit("\n".join(check_subject("message", subject)) or None)

    roots = [path.resolve() for path in options.paths] or [ROOT / name for name in PACKAGES]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    sources = [Source.parse(file) for file in sorted(files)]
    if options.sizes:
        print_sizes(sources)
        return

    violations = list(check_statements(sources))
    for source in sources:
        violations += check_expressions(source)
        violations += check_names(source)
    violations += check_function_names(sources)
    if not options.paths:
        violations += check_public_names(sources)
        violations += check_commits()
        violations += check_growth(sources)
    for violation in violations:
        print(violation)
    if violations:
        sys.exit(f"{len(violations)} violations; CONTRIBUTING.md has the rules")


if __name__ == "__main__":
    main()
