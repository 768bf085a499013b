"""The wheel and the sdist: what is in them, and that an installation of each works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("twine")

ROOT = Path(__file__).parents[1]
PACKAGES = ("farspan", "farspan_exports", "farspan_lab", "farspan_studies")
LIMIT_S = 300


def run(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_files() -> set[str]:
    """The project's files, without what git ignores."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """A wheel and an sdist, built from a copy of the project."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in list_files():
        target = folder / "project" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    run("-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "project")
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_wheel_has_every_file_of_the_packages_and_no_other(built):
    names = {name for name in zipfile.ZipFile(built["wheel"]).namelist() if "dist-info" not in name}
    assert names == {name for name in list_files() if name.split("/")[0] in PACKAGES}


def test_sdist_has_the_packages_and_what_builds_them(built):
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {name for name in list_files() if name.split("/")[0] in PACKAGES}
    assert names >= wanted | {"pyproject.toml", "README.md", "LICENSE"}
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_descriptions_are_ones_that_an_index_shows(built):
    run("-m", "twine", "check", "--strict", *built.values(), cwd=ROOT)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installation_plans_and_prepares(kind, built, tmp_path):
    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--target", site, built[kind], cwd=tmp_path)
    paths = {"PYTHONPATH": str(site), "FARSPAN_CACHE": str(tmp_path / "cache")}
    where = run("-c", "import farspan; print(farspan.__file__)", cwd=tmp_path, **paths)
    assert where.startswith(str(site))
    question = ("plan", "--model", "gpt2m", "--cluster", "fabric/gat-amst")
    assert "zero" in run("-m", "farspan", *question, "--all", cwd=tmp_path, **paths)
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.md").write_text(f"# Page {number}\n\n{'words ' * 99}")
    run("-m", "farspan", "init", "text", cwd=tmp_path, **paths)
    assert (tmp_path / "run.yaml").is_file()
    run("-m", "farspan", "prepare", cwd=tmp_path, **paths)
