"""How farspan was installed here: by which program, from where, and with which extras.

Programs leave records: `direct_url.json` (PEP 610) names a folder, file or URL that a package was
installed from; pipx writes `pipx_metadata.json` and uv `uv-receipt.toml` into a tool's environment.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from farspan.domain.decoding import decode_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

T = TypeVar("T")
Installer = Literal["pip", "uv pip", "uv tool", "uvx", "pipx", "pipx run"]

PACKAGE = "farspan"
#: The file of a clone with the versions that its tests pass with.
CONSTRAINTS = "constraints.txt"
#: Folders of uv's cache that environments of `uvx` and `uv run --with` lie in.
UV_CACHE_FOLDERS = ("archive-v", "builds-v", "environments-v")
#: A requirement of an extra in a package's metadata: `farspan[search]; extra == "train"`.
_EXTRA_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*;"
    r""".*\bextra == ['"](?P<extra>[\w.-]+)['"]"""
)


class VcsInfo(msgspec.Struct, frozen=True):
    """The part of `direct_url.json` on a version control system."""

    vcs: str
    commit_id: str


class DirectUrl(msgspec.Struct, frozen=True):
    """`direct_url.json`, as PEP 610 has it, without what is not read here."""

    url: str
    vcs_info: VcsInfo | None = None
    subdirectory: str = ""


class PipxPackage(msgspec.Struct, frozen=True):
    """The package that pipx made an environment for."""

    package: str | None = None
    suffix: str = ""


class PipxMetadata(msgspec.Struct, frozen=True):
    """`pipx_metadata.json`, without what is not read here. `pipx run` gives no environment."""

    main_package: PipxPackage = PipxPackage()
    environment: str | None = None
    backend: str = "pip"


class OwnInstallation(msgspec.Struct, frozen=True):
    """What has to be known of an installation to add an extra to it."""

    installer: Installer
    #: Folder or file that it was installed from. None for an index or a URL.
    path: Path | None = None
    #: URL that it was installed from, as a requirement has it.
    url: str = ""
    is_editable: bool = False
    #: What pipx puts behind the names of programs.
    suffix: str = ""
    #: Whether uv resolves, which knows `--torch-backend`.
    has_torch_backend: bool = False

    @property
    def constraints(self) -> Path | None:
        """The versions that come with a folder of sources."""
        if self.path is None or not (self.path / CONSTRAINTS).is_file():
            return None
        return self.path / CONSTRAINTS

    @property
    def is_source_lost(self) -> bool:
        """Whether the folder or file is no longer where it was."""
        return self.path is not None and not self.path.exists()


def find_installation() -> OwnInstallation:
    """Read from this environment how farspan was installed into it."""
    root = Path(__file__).resolve().parents[2]
    is_clone = (root / "pyproject.toml").is_file() and (root / CONSTRAINTS).is_file()
    origin = None if is_clone else _read_direct_url(root)
    path = root if is_clone else None
    url = ""
    if origin is not None and origin.url.startswith("file:") and origin.vcs_info is None:
        path = Path(unquote(urlsplit(origin.url).path))
    elif origin is not None:
        url = _write_url(origin)
    installation = find_installer(Path(sys.prefix))
    return msgspec.structs.replace(installation, path=path, url=url, is_editable=is_clone)


def find_installer(prefix: Path) -> OwnInstallation:
    """Return which program made an environment, without where the package is from.

    Environments that were made for another program count as those of pip or uv.
    """
    if (prefix / "uv-receipt.toml").is_file() and prefix.name == PACKAGE:
        return OwnInstallation("uv tool", has_torch_backend=True)
    pipx = _decode_file(prefix / "pipx_metadata.json", PipxMetadata)
    if pipx is not None and pipx.main_package.package == PACKAGE:
        return OwnInstallation(
            "pipx" if pipx.environment else "pipx run",
            suffix=pipx.main_package.suffix,
            has_torch_backend=pipx.backend == "uv",
        )
    if prefix.parent.name.startswith(UV_CACHE_FOLDERS):
        return OwnInstallation("uvx", has_torch_backend=True)
    # uv makes environments without pip.
    if find_spec("pip") is None:
        return OwnInstallation("uv pip", has_torch_backend=True)
    return OwnInstallation("pip")


def _read_direct_url(site: Path) -> DirectUrl | None:
    """Return where the package in a folder of libraries was installed from. None for an index."""
    from importlib.metadata import Distribution

    # The folder alone: the current one may hold what a build left there.
    for library in Distribution.discover(name=PACKAGE, path=[str(site)]):
        text = library.read_text("direct_url.json")
        if text is not None:
            return _decode_text(text, DirectUrl)
    return None


def _write_url(origin: DirectUrl) -> str:
    """Write a record's URL as a requirement has it: `git+https://host/repository@commit`."""
    url = origin.url
    if origin.vcs_info is not None:
        url = f"{origin.vcs_info.vcs}+{url}@{origin.vcs_info.commit_id}"
    if origin.subdirectory:
        url = f"{url}#subdirectory={origin.subdirectory}"
    return url


def _decode_file(path: Path, kind: type[T]) -> T | None:
    """Decode a record of another program. None where there is none that can be read."""
    try:
        return _decode_text(path.read_text(), kind)
    except (OSError, UnicodeDecodeError):
        return None


def _decode_text(text: str, kind: type[T]) -> T | None:
    try:
        return decode_json(text, kind)
    except msgspec.MsgspecError:
        return None


def find_installed_extras() -> set[str]:
    """Return the extras whose libraries are all installed, without those that others contain."""
    library = _find_library()
    if library is None:
        return set()
    libraries = _read_extras(library)
    complete = {
        extra: members
        for extra, members in libraries.items()
        if members and all(map(_is_installed, members))
    }
    return {
        extra
        for extra, members in complete.items()
        if not any(members < others for others in complete.values())
    }


def find_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, those of extras within it included."""
    library = _find_library()
    requirements: list[str] = []
    for line in (library.requires if library else None) or ():
        match = _EXTRA_REQUIREMENT.match(line)
        if match is None or match["extra"] != extra:
            continue
        if match["name"] == PACKAGE:
            for nested in _split_extras(match):
                requirements += find_requirements(nested)
        else:
            requirements.append(line.partition(";")[0].strip())
    return requirements


def _find_library() -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(PACKAGE)
    except PackageNotFoundError:
        return None


def _read_extras(library: Distribution) -> dict[str, set[str]]:
    """Return the names of the libraries of each extra, those of extras within it included."""
    extras: dict[str, set[str]] = {}
    for extra in library.metadata.get_all("Provides-Extra") or ():
        requirements = find_requirements(extra)
        extras[extra] = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements}
    return extras


def _split_extras(match: re.Match[str]) -> list[str]:
    return [extra.strip() for extra in (match["extras"] or "").split(",") if extra.strip()]


def _is_installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
