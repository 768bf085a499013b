"""The command that adds an extra to farspan as it is installed: from a clone with the versions that
its tests pass with, or from a package.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from farspan.domain.escapes import shell_line, shell_word

#: The file of a clone with the versions that its tests pass with.
CONSTRAINTS = "constraints.txt"
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
    """Write the command that installs an extra for this interpreter.

    In a clone it keeps the editable install and its versions: without them pip would put a copy of
    the package in its place, or take the newest of everything.
    """
    root = Path(__file__).resolve().parents[2]
    is_clone = (root / "pyproject.toml").is_file() and (root / CONSTRAINTS).is_file()
    requirement = [f"farspan[{extra}]"]
    if is_clone and root == Path.cwd().resolve():
        requirement = ["-c", CONSTRAINTS, "-e", f".[{extra}]"]
    elif is_clone:
        requirement = ["-c", str(root / CONSTRAINTS), "-e", f"{root}[{extra}]"]
    # pip of this interpreter: that on the path may be another's. uv makes environments without.
    if find_spec("pip") is None:
        return shell_line("uv", "pip", "install", "--python", sys.executable, *requirement)
    return shell_line(sys.executable, "-m", "pip", "install", *requirement)


def install_command_there(extra: str, python: str = "python3") -> str:
    """Write the command that installs an extra on another host, for an interpreter there."""
    return f"{shell_word(python)} -m pip install {shell_word(f'farspan[{extra}]')}"
