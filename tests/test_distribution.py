"""The wheel and the sdist: what is in them, and that an installation of each works."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from farspan.domain.install import CPU_INDEX
from farspan.domain.problems import EXIT_CODES
from tests.environments import INSTALL_LIMIT_S, install_apart

pytest.importorskip("build")
pytest.importorskip("twine")

ROOT = Path(__file__).parents[1]
PACKAGES = ("farspan", "farspan_exports", "farspan_lab", "farspan_studies")
LIMIT_S = 600


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
    """A copy of the project, and a wheel and an sdist built from it."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in list_files():
        target = folder / "project" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    clone = folder / "project"
    run("-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=clone)
    shutil.rmtree(clone / "farspan.egg-info", ignore_errors=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist, "clone": clone}


def test_wheel_has_every_file_of_the_packages_and_no_other(built):
    names = {name for name in zipfile.ZipFile(built["wheel"]).namelist() if "dist-info" not in name}
    assert names == {name for name in list_files() if name.split("/")[0] in PACKAGES}


def test_sdist_has_the_packages_and_what_builds_them(built):
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {name for name in list_files() if name.split("/")[0] in PACKAGES}
    assert names >= wanted | {"pyproject.toml", "README.md", "LICENSE"}
    assert "examples/first_model.ipynb" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_descriptions_are_ones_that_an_index_shows(built):
    run("-m", "twine", "check", "--strict", built["wheel"], built["sdist"], cwd=ROOT)


def link_libraries(folder: Path) -> None:
    """Link what farspan needs without extras, and what installs it, from this environment."""
    folder.mkdir()
    waiting = ["farspan", "pip", "setuptools"]
    seen = set(waiting)
    while waiting:
        library = metadata.distribution(waiting.pop())
        for line in library.requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            name = canonicalize_name(requirement.name)
            if wanted and name not in seen:
                seen.add(name)
                waiting.append(name)
        for name in {file.parts[0] for file in library.files or ()}:
            if library.name != "farspan" and name not in ("..", "__pycache__"):
                (folder / name).symlink_to(library.locate_file(name))


@pytest.fixture(scope="module", params=["wheel", "sdist", "folder", "editable"])
def installed(request, built, tmp_path_factory) -> tuple[Path, str]:
    """The bin folder of an environment where farspan is installed without extras, and its source
    as pip's requirement has it."""
    environment = tmp_path_factory.mktemp(f"of a {request.param}")
    run("-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    link_libraries(environment / "libraries")
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(str(environment / "libraries"))
    source = built["clone" if request.param in ("folder", "editable") else request.param]
    option = ["--editable"] if request.param == "editable" else []
    words = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    call(python, "-m", *words, *option, source, cwd=environment)
    return python.parent, request.param


def call(*words: object, cwd: Path, status: int = 0, **environment: str) -> str:
    """Run a program with the user's folders in `cwd` and no project on the path of modules."""
    variables = {**os.environ, "HOME": str(cwd), "FARSPAN_CACHE": str(cwd / "cache"), **environment}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def refused_remedy(*words: object, cwd: Path, **environment: str) -> str:
    """Return the remedy of a command that lacks an extra."""
    status = EXIT_CODES["extra-missing"]
    answer = json.loads(call(*words, "--json", cwd=cwd, status=status, **environment))
    assert answer["problem"]["code"] == "extra-missing"
    return answer["problem"]["remedy"]


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.md").write_text(f"# Page {number}\n\n{'words ' * 99}")


def test_installation_without_extras_plans_and_prepares(installed, tmp_path):
    farspan = installed[0] / "farspan"
    question = ("plan", "--model", "gpt2m", "--cluster", "fabric/gat-amst")
    assert "zero" in call(farspan, *question, "--all", cwd=tmp_path)
    write_text(tmp_path / "text")
    call(farspan, "init", "text", cwd=tmp_path)
    assert (tmp_path / "run.yaml").is_file()
    call(farspan, "prepare", cwd=tmp_path)


def test_training_without_its_extra_names_the_line_that_installs_it(installed, built, tmp_path):
    folder, kind = installed
    write_text(tmp_path / "text")
    call(folder / "farspan", "init", "text", cwd=tmp_path)
    remedies = {
        refused_remedy(folder / "farspan", *words, cwd=tmp_path)
        for words in (["train", "run.yaml"], ["demo"], ["plan", "run.yaml"], ["select", "run.yaml"])
    }
    (remedy,) = map(shlex.split, remedies)
    assert remedy[:4] == [str(folder / "python"), "-m", "pip", "install"]
    clone = built["clone"]
    assert (
        remedy[4:]
        == {
            "wheel": [f"{built['wheel']}[train]"],
            "sdist": [f"{built['sdist']}[train]"],
            "folder": ["-c", f"{clone}/constraints.txt", f"{clone}[train]"],
            "editable": ["-c", f"{clone}/constraints.txt", "-e", f"{clone}[train]"],
        }[kind]
    )
    # pip takes it: all but the download.
    call(*remedy, "--dry-run", "--no-deps", "--no-index", "--no-build-isolation", cwd=tmp_path)


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_file_that_was_installed_from_is_not_named_once_it_is_gone(installed, built, tmp_path):
    folder, _ = installed
    away = built["wheel"].rename(built["wheel"].with_name("moved.whl"))
    try:
        remedy = shlex.split(refused_remedy(folder / "farspan", "demo", cwd=tmp_path))
    finally:
        away.rename(built["wheel"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*extras["search"], *extras["train"]} - {"farspan[search]"}
    assert set(map(Requirement, remedy[4:])) == set(map(Requirement, wanted))


#: Programs that make an environment for farspan: what installs and what runs it.
TOOLS = {
    "uv tool": (["uv", "tool", "install"], ["farspan"]),
    "uvx": (None, ["uvx", "--from", "SOURCE", "farspan"]),
    "pipx": (["pipx", "install", "--backend", "pip"], ["farspan"]),
    "pipx with uv": (["pipx", "install", "--backend", "uv"], ["farspan"]),
    "pipx run": (None, ["pipx", "run", "--spec", "SOURCE", "farspan"]),
}
#: Those where uv resolves, which can take the PyTorch for this machine.
UV_RESOLVES = ("uv tool", "uvx", "pipx with uv", "pipx run")
#: A training of seconds.
FEW_STEPS = """
data: {source: text, dedup: false}
tokenizer: {vocab: 300}
model: {family: gpt2, layers: 1, d_model: 32, heads: 2, context: 16}
train: {steps: 2, precision: fp32, batch: {global: 2 sequences}}
"""
TOOL_RELEASES = ("uv==0.13.9", "pipx==1.18.4")


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    """The bin folder of an environment with uv and pipx."""
    folder = tmp_path_factory.mktemp("tools")
    for release in TOOL_RELEASES:
        if install_apart(release, folder, "FARSPAN_TOOLS_PYTHON") is None:
            pytest.skip(f"waits for {release}, which cannot be installed")
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "clone"])
@pytest.mark.parametrize("tool", TOOLS)
def test_remedy_of_a_tool_installs_the_extra_and_keeps_the_others(
    tool, kind, built, tools, tmp_path
):
    install, start = TOOLS[tool]
    start = [str(built[kind]) if word == "SOURCE" else word for word in start]
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    place = {
        "cwd": tmp_path,
        "PATH": os.pathsep.join(map(str, (tools, tmp_path / ".local" / "bin", "/usr/bin", "/bin"))),
        "UV_CACHE_DIR": str(tools.parent / "cache"),
        "UV_PYTHON": str(base),
        "PIPX_DEFAULT_PYTHON": str(base),
    }
    write_text(tmp_path / "text")
    (tmp_path / "run.yaml").write_text("data: text\n")
    if install:
        call(tools / install[0], *install[1:], built[kind], **place)
        start = [str(tmp_path / ".local" / "bin" / start[0])]
    else:
        start[0] = str(tools / start[0])
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.pdf").write_text("not a PDF")
    reading = ("prepare", "--set", "data.source=papers")
    remedy = refused_remedy(*start, *reading, **place)
    assert remedy.startswith(tool.removesuffix(" with uv"))
    # The library is there now: it is the file that cannot be read.
    status = EXIT_CODES["source-unreadable"]
    if install:
        call("sh", "-c", remedy, **place)
        call(*start, *reading, status=status, **place)
        training = refused_remedy(*start, "train", "run.yaml", **place)
        assert "[pdf,train]" in training
    else:
        call("sh", "-c", remedy, status=status, **place)
        training = refused_remedy(*start, "train", "run.yaml", **place)
        assert "[train]" in training and training.endswith("farspan train run.yaml --json")
    assert ("constraints.txt" in training) == (kind == "clone")
    backends = ("--torch-backend auto", "UV_TORCH_BACKEND=auto")
    assert any(words in training for words in backends) == (tool in UV_RESOLVES)


@pytest.mark.slow
def test_uvx_trains_in_an_empty_home_without_a_network(built, tools, tmp_path):
    """The README's first line, with the wheels at hand and fewer steps than the demo's."""
    (pin,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", tmp_path / "wheels"]
    # No other build: PyPI's brings gigabytes of CUDA.
    index = ["--extra-index-url", CPU_INDEX, "--no-deps"]
    if subprocess.run([*pip, *index, f"{pin}+cpu"], cwd=tmp_path).returncode:
        pytest.skip("waits for PyTorch's CPU build, which is neither here nor at its index")
    clone = built["clone"]
    kept = ["-c", clone / "constraints.txt", "--find-links", tmp_path / "wheels"]
    call(*pip, *kept, f"{clone}[train]", "setuptools>=77", cwd=tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    write_text(home / "text")
    (home / "run.yaml").write_text(FEW_STEPS)
    start = [tools / "uvx", "--torch-backend", "cpu", "--from", f"{clone}[train]", "farspan"]
    place = {
        "cwd": home,
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_PYTHON": sys.executable,
    }
    call(*start, "train", "run.yaml", **place)
    assert (home / "runs" / "text" / "report.html").is_file()


def test_image_is_given_all_that_its_script_installs():
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    script = (ROOT / "docker" / "install.sh").read_text()
    (listed,) = re.findall(r"^for name in (.*); do$", script, re.MULTILINE)
    needed = {"docker/install.sh", *listed.split()}
    assert needed >= {*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    for name in needed:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in allowed), name


@pytest.mark.parametrize(
    ("torch", "reason"), [("gpu", "TORCH is gpu"), ("none", "name a folder that does not")]
)
def test_script_of_the_image_refuses_what_it_cannot_make(torch, reason, tmp_path):
    script = ROOT / "docker" / "install.sh"
    prefix = tmp_path if torch == "none" else tmp_path / "farspan"
    done = subprocess.run(
        [script, prefix], env={**os.environ, "TORCH": torch}, capture_output=True, text=True
    )
    assert done.returncode == 1 and reason in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["none", "cpu"])
def test_script_of_the_image_makes_an_environment_that_plans(torch, built, tmp_path):
    place = {**os.environ, "TORCH": torch, "EXTRAS": "", "PYTHON": sys.executable}
    prefix = tmp_path / "farspan"
    done = subprocess.run(
        [built["clone"] / "docker" / "install.sh", prefix],
        env=place,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
    )
    if torch == "cpu" and "No matching distribution found for torch" in done.stderr:
        pytest.skip("waits for the index of PyTorch, which does not answer")
    assert done.returncode == 0, done.stderr
    assert done.stdout == call(prefix / "bin" / "farspan", "--version", cwd=tmp_path)
    write_text(tmp_path / "text")
    call(prefix / "bin" / "farspan", "init", "text", cwd=tmp_path)
    if torch == "cpu":
        answer = json.loads(call(prefix / "bin" / "farspan", "plan", "--json", cwd=tmp_path))
        assert answer["candidates"][answer["chosen"]]["fits"]
    else:
        call(prefix / "bin" / "farspan", "prepare", cwd=tmp_path)
