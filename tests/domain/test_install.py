"""The command that adds an extra, where farspan is a clone and where it is a package."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from farspan.domain import install
from farspan.domain import installation as installations

ROOT = Path(__file__).parents[2]


def copy_module(root: Path) -> Path:
    """The package with the modules that the command needs, in a folder of its own."""
    folder = root / "farspan" / "domain"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "domain/__init__.py"):
        (root / "farspan" / name).write_text("")
    for name in ("decoding.py", "escapes.py", "install.py", "installation.py"):
        shutil.copy(ROOT / "farspan" / "domain" / name, folder)
    return root


def command_of(root: Path, cwd: Path) -> list[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); "
        "from farspan.domain.install import install_command; print(install_command('serve'))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_clone_keeps_its_editable_install_and_its_versions(tmp_path: Path) -> None:
    clone = copy_module(tmp_path / "my clone")
    for name in ("pyproject.toml", "constraints.txt"):
        (clone / name).write_text("")
    there = command_of(clone, clone)
    assert there[-5:] == ["install", "-c", "constraints.txt", "-e", ".[serve]"]
    elsewhere = command_of(clone, tmp_path)
    assert elsewhere[-5:] == [
        "install",
        "-c",
        str(clone / "constraints.txt"),
        "-e",
        f"{clone}[serve]",
    ]


def test_package_gets_its_extra_by_name(tmp_path: Path) -> None:
    words = command_of(copy_module(tmp_path / "site-packages"), tmp_path)
    assert words[-2:] == ["install", "farspan[serve]"] and "-e" not in words


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (
            {"url": "https://example.org/farspan-1.0-py3-none-any.whl", "archive_info": {}},
            "farspan[serve] @ https://example.org/farspan-1.0-py3-none-any.whl",
        ),
        (
            {
                "url": "https://example.org/farspan.git",
                "vcs_info": {"vcs": "git", "commit_id": "0a1b", "requested_revision": "main"},
                "subdirectory": "python",
            },
            "farspan[serve] @ git+https://example.org/farspan.git@0a1b#subdirectory=python",
        ),
        (
            {
                "url": "file:///srv/far%20span.git",
                "vcs_info": {"vcs": "git", "commit_id": "0a1b"},
            },
            "farspan[serve] @ git+file:///srv/far%20span.git@0a1b",
        ),
        ({"unlike": "a record"}, "farspan[serve]"),
    ],
    ids=["archive", "git", "git folder", "unreadable"],
)
def test_package_of_a_url_gets_its_extra_from_there(
    record: dict[str, object], requirement: str, tmp_path: Path
) -> None:
    site = copy_module(tmp_path / "site-packages")
    info = site / "farspan-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: farspan\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps(record))
    assert command_of(site, tmp_path)[-1] == requirement


def write_pipx(prefix: Path, package: str, **fields: object) -> None:
    main = {"package": package, "suffix": "", "pip_args": []}
    record = {"main_package": main, "environment": prefix.name, "backend": "pip", **fields}
    (prefix / "pipx_metadata.json").write_text(json.dumps(record))


def test_program_that_made_an_environment_is_known_by_what_it_left(tmp_path: Path) -> None:
    def installer_of(prefix: Path) -> tuple[str, bool]:
        installation = installations.find_installer(prefix)
        return installation.installer, installation.has_torch_backend

    plain = "uv pip" if importlib.util.find_spec("pip") is None else "pip"
    tool = tmp_path / "tools" / "farspan"
    tool.mkdir(parents=True)
    assert installer_of(tool)[0] == plain
    write_pipx(tool, "farspan")
    assert installer_of(tool) == ("pipx", False)
    write_pipx(tool, "farspan", backend="uv", environment=None)
    assert installer_of(tool) == ("pipx run", True)
    # As `pipx inject` puts farspan beside another program, and `uv tool install --with` does.
    write_pipx(tool, "jupyter")
    assert installer_of(tool)[0] == plain
    (tool / "pipx_metadata.json").write_text("not JSON")
    assert installer_of(tool)[0] == plain
    (tool / "uv-receipt.toml").write_text("[tool]\n")
    assert installer_of(tool) == ("uv tool", True)
    other = tool.rename(tmp_path / "tools" / "jupyter")
    assert installer_of(other)[0] == plain
    assert installer_of(tmp_path / "archive-v0" / "4bZU7") == ("uvx", True)


def test_pip_is_that_of_the_interpreter(tmp_path: Path) -> None:
    words = command_of(copy_module(tmp_path), tmp_path)
    assert words[:3] == [sys.executable, "-m", "pip"] or words[:2] == ["uv", "pip"]


def test_every_extra_that_is_proposed_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name.replace("_", "-") for name in project["optional-dependencies"]}
    assert set(install.EXTRAS.values()) | {install.extra_of("torch")} <= extras


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch.nn", "train"), ("uvicorn", "serve"), ("pyarrow.parquet", "parquet")],
)
def test_missing_module_brings_the_extra_that_has_it(module: str, extra: str) -> None:
    assert install.extra_of(module) == extra


def test_no_other_place_writes_the_command_of_an_extra() -> None:
    """One function decides: elsewhere a clone would lose its editable install."""
    own = {"farspan/domain/install.py", "farspan/corpus/sources/folder.py"}
    files = [
        path
        for folder in ("farspan", "farspan_exports", "farspan_lab", "farspan_studies")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in files if "'farspan[" in path.read_text()}
    assert found <= own
