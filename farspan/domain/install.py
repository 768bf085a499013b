"""The command that adds an extra to farspan as it is installed here: by pip, uv or pipx, from a
clone, a file or an index.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from farspan.domain.escapes import shell_line
from farspan.domain.installation import (
    CONSTRAINTS,
    PACKAGE,
    OwnInstallation,
    find_installation,
    find_installed_extras,
    find_requirements,
)

#: Extras that bring PyTorch.
TORCH_EXTRAS = {"all", "train"}
#: The index of PyTorch's builds without CUDA.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: The extra that has a library, where it is not `train`.
EXTRAS = {
    "alembic": "mlflow",
    "bm25s": "search",
    "chromadb": "chroma",
    "datasets": "hf",
    "fabrictestbed": "fabric",
    "fabrictestbed_extensions": "fabric",
    "faiss": "faiss",
    "gguf": "gguf",
    "fastapi": "serve",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "mlflow": "mlflow",
    "pgvector": "pgvector",
    "psutil": "search",
    "psycopg": "pgvector",
    "py3langid": "search",
    "pyarrow": "parquet",
    "pypandoc": "formats",
    "pypdf": "pdf",
    "qdrant_client": "qdrant-server",
    "qdrant_edge": "search",
    "ray": "ray",
    "safetensors": "search",
    "sentence_transformers": "st",
    "snowballstemmer": "search",
    "sqlalchemy": "mlflow",
    "starlette": "serve",
    "tensorboard": "tensorboard",
    "uvicorn": "serve",
    "wandb": "wandb",
}


def extra_of(module: str) -> str:
    """Return the extra that a missing module belongs to."""
    return EXTRAS.get(module.partition(".")[0], "train")


def install_command(extra: str) -> str:
    """Write the command that installs an extra where farspan runs.

    It names what farspan was installed from: a name alone would make pip replace a clone or look
    for an index that has none. Environments of `uvx`, `uv tool` and pipx are made again, with the
    extras that they have.
    """
    installation = find_installation()
    if installation.is_source_lost:
        # What the extra needs can be installed without the source.
        options = _torch_backend(extra) if find_spec("pip") is None else []
        return install_packages_command(*options, *_requirements(extra))
    if installation.installer in ("pipx", "pipx run"):
        return _pipx_command(installation, extra)
    options = _torch_backend(extra) if installation.has_torch_backend else []
    if installation.constraints is not None:
        options += ["-c", _from_here(installation.constraints)]
    if installation.installer == "uvx":
        requirement = _write_requirement(installation, _all_extras(extra))
        return shell_line("uvx", *options, "--from", requirement, PACKAGE, *_own_words())
    if installation.installer == "uv tool":
        requirement = _write_requirement(installation, _all_extras(extra))
        options += _editable(installation, requirement)
        return shell_line("uv", "tool", "install", *options)
    requirement = _write_requirement(installation, [extra])
    return install_packages_command(*options, *_editable(installation, requirement))


def advise_cpu_torch() -> str:
    """Return how pip avoids the libraries of CUDA on Linux without an NVIDIA GPU, else nothing.

    The command leaves it to the user: not every network has a path to that index, and a login node
    may install for nodes that have GPUs.
    """
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    if find_installation().has_torch_backend or sys.platform != "linux" or has_gpu:
        return ""
    return f"; pip avoids several GB of CUDA with --extra-index-url {CPU_INDEX}"


def install_packages_command(*words: str) -> str:
    """Write the command by which this interpreter gets packages: requirements and options of pip.

    The pip of this interpreter: that on the path may be another's.
    """
    if find_spec("pip") is None:
        return shell_line("uv", "pip", "install", "--python", sys.executable, *words)
    return shell_line(sys.executable, "-m", "pip", "install", *words)


def install_command_there(extra: str, python: str = "python3") -> str:
    """Write the command that installs an extra's libraries for an interpreter on another host.

    How farspan was installed there is not known: the line does not name it.
    """
    return shell_line(python, "-m", "pip", "install", *_requirements(extra))


def _requirements(extra: str) -> list[str]:
    """Return an extra's libraries, or the extra itself where no metadata names them."""
    return find_requirements(extra) or [f"{PACKAGE}[{extra}]"]


def _pipx_command(installation: OwnInstallation, extra: str) -> str:
    """Write the command by which pipx makes its environment again."""
    words: list[str] = []
    if installation.installer == "pipx":
        words += ["install", "--force"]
    else:
        words += ["run"]
    if installation.constraints is not None:
        words.append(f"--pip-args={shell_line('-c', installation.constraints)}")
    if installation.suffix:
        words.append(f"--suffix={installation.suffix}")
    requirement = _write_requirement(installation, _all_extras(extra))
    if installation.installer == "pipx" and installation.is_editable:
        words += ["--editable", requirement]
    elif installation.installer == "pipx":
        words += [requirement]
    else:
        words += ["--spec", requirement, PACKAGE, *_own_words()]
    if installation.has_torch_backend and _torch_backend(extra):
        # pipx has no option for it: uv reads the variable.
        return f"UV_TORCH_BACKEND=auto {shell_line('pipx', *words)}"
    return shell_line("pipx", *words)


def _write_requirement(installation: OwnInstallation, extras: list[str]) -> str:
    """Write what to install: `.[train]`, `/downloads/farspan-1.0-py3-none-any.whl[train]`,
    `farspan[train] @ https://...` or `farspan[train]`."""
    listed = ",".join(extras)
    if installation.path is not None:
        return f"{_from_here(installation.path)}[{listed}]"
    if installation.url:
        return f"{PACKAGE}[{listed}] @ {installation.url}"
    return f"{PACKAGE}[{listed}]"


def _from_here(path: Path) -> str:
    """Return a path as it is written in the current folder, whole where it lies elsewhere."""
    here = Path.cwd().resolve()
    if path == here:
        return "."
    if path.parent == here and path.name == CONSTRAINTS:
        return path.name
    return str(path)


def _editable(installation: OwnInstallation, requirement: str) -> list[str]:
    return ["-e", requirement] if installation.is_editable else [requirement]


def _all_extras(extra: str) -> list[str]:
    """Return the extras of an environment that is made again."""
    return sorted(find_installed_extras() | {extra})


def _torch_backend(extra: str) -> list[str]:
    """Return the option by which uv installs the PyTorch for this machine's GPU, or for none.

    Without it PyPI's PyTorch brings the libraries of CUDA, several gigabytes.
    """
    if extra in TORCH_EXTRAS or find_spec("torch") is not None:
        return ["--torch-backend", "auto"]
    return []


def _own_words() -> list[str]:
    """Return the words that farspan was called with, none where another program runs it."""
    return sys.argv[1:] if Path(sys.argv[0]).name == PACKAGE else []
