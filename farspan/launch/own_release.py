"""The farspan that runs here, as hosts are given it: its name, its wheel, the versions of all that
it needs, and wheels of those made from what is installed here."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import os
import re
import stat
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from farspan._version import __version__
from farspan.domain.escapes import shell_line
from farspan.domain.install import install_command
from farspan.domain.interpreter import own_command
from farspan.domain.problems import Refusal

#: What hosts get: training, with all that probes and searches need.
EXTRA = "train"
EXTRAS_OF_TRAINING = ("train", "search")
#: Least change of any file: a zip of the same files has the same bytes.
ZIP_DATE = (1980, 1, 1, 0, 0, 0)
#: Files of an installation that no wheel holds.
NOT_IN_WHEELS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
#: Hosts are set up side by side, by threads.
_BUILDING = threading.Lock()


class OwnWheel(NamedTuple):
    path: Path
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> OwnWheel:
        return cls(path, _sha256_of(path, path.stat().st_mtime_ns), path.stat().st_size)


@functools.cache
def release_name() -> str:
    """Name this farspan by its version and its code: a clone changes without its version."""
    digest = hashlib.sha256(repr(sorted(pinned_versions().items())).encode())
    for name, content in _own_files():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{__version__}-{digest.hexdigest()[:8]}"


@functools.cache
def pinned_versions() -> dict[str, str]:
    """Return the version here of every library that farspan needs for training, by its canonical
    name; also of some that only other systems need.

    What follows a +, as in 2.13.0+cpu, is a build: hosts take theirs.
    """
    pins = dict[str, str]()
    todo: list[tuple[str, tuple[str, ...]]] = [("farspan", ("", *EXTRAS_OF_TRAINING))]
    while todo:
        name, extras = todo.pop()
        try:
            library = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        pins[canonical_name(name)] = library.version.partition("+")[0]
        for line in library.requires or ():
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
            needed = canonical_name(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])
            if (extra[1] if extra else "") in extras and needed not in pins:
                todo.append((needed, ("",)))
    pins.pop("farspan", None)
    return pins


def canonical_name(name: str) -> str:
    """Return a library's name as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def build_own_wheel(folder: Path) -> OwnWheel:
    """Make the wheel of this farspan, from a clone or an installation: its files, and what pip
    knows of it."""
    path = folder / release_name() / f"farspan-{__version__}-py3-none-any.whl"
    with _BUILDING:
        if not path.exists():
            _write_wheel(path, f"farspan-{__version__}.dist-info", _own_files())
        return OwnWheel.of(path)


def repack_installed(name: str, version: str, folder: Path) -> OwnWheel | None:
    """Make a wheel of a library from its installed files; None where these are not all that its
    wheel held, or not as they were."""
    try:
        library = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    built = library.read_text("WHEEL")
    if library.version.partition("+")[0] != version or built is None or not library.files:
        return None
    info = next(
        (file.parts[0] for file in library.files if file.parts[0].endswith(".dist-info")), None
    )
    if info is None:
        return None
    path = folder / f"{info.removesuffix('.dist-info')}-{_join_tags(built)}.whl"
    if not path.exists():
        try:
            _write_wheel(path, info, _installed_files(library))
        except (OSError, ValueError):
            return None
    return OwnWheel.of(path)


def installed_tags(name: str) -> frozenset[str]:
    """Return the tags of the wheel that a library here was installed from."""
    try:
        built = metadata.distribution(name).read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return frozenset()
    return frozenset(re.findall(r"^Tag: (\S+)$", built, re.MULTILINE))


def installed_build(name: str) -> str:
    """Return the build of an installed version, as `cpu` of 2.13.0+cpu; empty without one."""
    try:
        return metadata.version(name).partition("+")[2]
    except metadata.PackageNotFoundError:
        return ""


def own_pip() -> list[str]:
    """Return the command of a pip here."""
    if importlib.util.find_spec("pip") is not None:
        return own_command("pip")
    return [sys.executable, f"{find_pip_wheel()}/pip"]


def find_pip_wheel() -> Path:
    """Return the wheel of pip that Python itself brings. Raises Refusal (extra-missing)."""
    folders = [Path(sysconfig.get_path("stdlib")) / "ensurepip" / "_bundled"]
    if shared := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(shared))
    folders.append(Path("/usr/share/python-wheels"))
    for folder in folders:
        wheels = sorted(folder.glob("pip-*.whl"))
        if wheels:
            return wheels[-1]
    raise Refusal(
        "extra-missing",
        what="this Python has no wheel of pip, which hosts install with",
        where=sys.executable,
        fact=f"it is in none of {', '.join(map(str, folders))}",
        remedy=shell_line("sudo", "apt-get", "install", "python3-venv"),
    )


def _own_files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of this farspan, and what pip has written of it, in the order of names."""
    root = Path(__file__).resolve().parents[2]
    for package in sorted(root.glob("farspan*")):
        if not (package / "__init__.py").is_file():
            continue
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root)), path.read_bytes()
    try:
        library = metadata.distribution("farspan")
    except metadata.PackageNotFoundError:
        raise Refusal(
            "extra-missing",
            what="farspan is not installed here: hosts would not know what it needs",
            where=root,
            fact="it runs from a folder that pip does not know",
            remedy=install_command(EXTRA),
        ) from None
    info = f"farspan-{__version__}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        text = library.read_text(name)
        if text is not None:
            yield f"{info}/{name}", text.encode()
    wheel = "Wheel-Version: 1.0\nGenerator: farspan\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    yield f"{info}/WHEEL", wheel.encode()


def _installed_files(library: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the files that a library's wheel held. Raises ValueError for one that was changed.

    Programs outside the folder of libraries are left out: pip makes those of entry points again.
    """
    for file in library.files or ():
        name = file.as_posix()
        if name.startswith("..") or file.suffix == ".pyc" or file.name in NOT_IN_WHEELS:
            continue
        content = Path(str(file.locate())).read_bytes()
        if file.hash is not None and _record_hash(content) != file.hash.value:
            raise ValueError(f"{name} was changed after its installation")
        yield name, content


def _write_wheel(path: Path, info: str, files: Iterable[tuple[str, bytes]]) -> None:
    """Write a wheel, whole or not at all, with the list of its files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    record = []
    try:
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
            for name, content in files:
                _add_file(wheel, name, content)
                record.append(f'"{name}",sha256={_record_hash(content)},{len(content)}\n')
            record.append(f"{info}/RECORD,,\n")
            _add_file(wheel, f"{info}/RECORD", "".join(record).encode())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def _add_file(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, ZIP_DATE)
    is_program = "/bin/" in name
    entry.external_attr = (stat.S_IFREG | (0o755 if is_program else 0o644)) << 16
    wheel.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=1)


def _record_hash(content: bytes) -> str:
    """Return a hash as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _join_tags(built: str) -> str:
    """Return the tags of a file WHEEL as one name of a wheel holds them."""
    tags = [tag.split("-") for tag in re.findall(r"^Tag: (\S+)$", built, re.MULTILINE)]
    parts = (dict.fromkeys(column) for column in zip(*tags, strict=True))
    return "-".join(".".join(part) for part in parts)


@functools.lru_cache(maxsize=1024)
def _sha256_of(path: Path, _modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
