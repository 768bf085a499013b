"""Wheels for a host that reaches no index: made from what is installed here where the host can run
that, else downloaded here for the host's system, its Python and its GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from farspan.domain.cluster import Host
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.gpus import BUILDS, Nvidia, is_driver_new_enough
from farspan.domain.problems import Refusal
from farspan.domain.run import make_cache_folder
from farspan.launch.own_release import (
    OwnWheel,
    canonical_name,
    installed_build,
    installed_tags,
    own_pip,
    pinned_versions,
    repack_installed,
)

#: PyTorch's own index of one build.
TORCH_INDEX = "https://download.pytorch.org/whl"
DOWNLOAD_TIMEOUT_S = 3600.0
#: At most this much of what pip printed stands in a refusal.
MAX_FACT = 400
_DOWNLOADING = threading.Lock()


class WheelSource(NamedTuple):
    """Where libraries come from, as the user has it; without both by pip's own settings."""

    index_url: str | None = None
    folder: Path | None = None

    def options(self, build: str) -> list[str]:
        """Return pip's options; those of an index also hold on a host."""
        if self.folder is not None:
            return ["--no-index", "--find-links", str(self.folder)]
        if self.index_url is not None:
            return ["--index-url", self.index_url]
        return ["--extra-index-url", f"{TORCH_INDEX}/{build}"] if build else []


class WheelTarget(NamedTuple):
    """What wheels a host can run."""

    #: Tags of wheels, the best first.
    tags: tuple[str, ...]
    #: PyTorch's build: `cpu`, `cu126`, ...; empty where its own index is not needed.
    build: str


def torch_build(host: Host, nvidia: Nvidia, system: str) -> str:
    """Choose the build of PyTorch for a host. Raises Refusal (device-missing, device-unusable)
    where none can use the GPUs that the cluster file names."""
    if system != "Linux":
        return ""
    if not any(device.backend == "cuda" for device in host.devices):
        return "cpu"
    host_word = shell_word(host.name)
    if not nvidia.gpus:
        raise Refusal(
            "device-missing",
            what=f"{host.name} has fewer GPUs than the file says",
            where=f"host {host.name}",
            fact=nvidia.failure or "its driver lists none",
            remedy=f"on {host_word}: nvidia-smi, then mend its devices: in the cluster file",
        )
    card = nvidia.gpus[0]
    for build in BUILDS:
        has_code = card.capability is None or build.least <= card.capability <= build.most
        if has_code and is_driver_new_enough(card.driver, build):
            return build.tag
    oldest = BUILDS[-1].driver
    raise Refusal(
        "device-unusable",
        what=f"no PyTorch can use the {card.name} of {host.name}",
        where=f"host {host.name}",
        fact=f"its driver is {card.driver}; CUDA {BUILDS[-1].cuda} needs {oldest}",
        remedy=f"on {host_word}: update the NVIDIA driver to {shell_word(oldest)} or newer",
    )


def collect_wheels(
    requirements: Sequence[str], target: WheelTarget, source: WheelSource
) -> list[OwnWheel]:
    """Return wheels of requirements (`numpy==2.4.6`) that a host can run. Raises Refusal
    (install-failed)."""
    folder = make_cache_folder("wheels")
    wheels = []
    downloaded = []
    # Hosts of one kind need the same: the second finds what the first has made.
    with _DOWNLOADING:
        for requirement in requirements:
            wheel = None
            if source == WheelSource():
                wheel = _repack_for(requirement, target, folder)
            if wheel is None:
                downloaded.append(requirement)
            else:
                wheels.append(wheel)
        if downloaded:
            wheels += _download(downloaded, target, source, folder)
    return wheels


def _repack_for(requirement: str, target: WheelTarget, folder: Path) -> OwnWheel | None:
    name = canonical_name(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    if installed_tags(name).isdisjoint(target.tags):
        return None
    if name == "torch" and installed_build(name) != target.build:
        return None
    return repack_installed(name, pinned_versions().get(name, ""), folder)


def _download(
    requirements: Sequence[str], target: WheelTarget, source: WheelSource, folder: Path
) -> list[OwnWheel]:
    """Download wheels with pip, which keeps what it has downloaded."""
    words = [*own_pip(), "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    words += ["--disable-pip-version-check", "--retries", "1"]
    parts = [tag.split("-", 2) for tag in target.tags]
    version = parts[0][0].removeprefix("cp")
    words += ["--implementation", "cp", "--python-version", f"{version[0]}.{version[1:]}"]
    for abi in dict.fromkeys((parts[0][1], "abi3", "none")):
        words += ["--abi", abi]
    for platform in dict.fromkeys(platform for _, _, platform in parts if platform != "any"):
        words += ["--platform", platform]
    has_torch = any(re.match(r"torch\b", requirement) for requirement in requirements)
    options = source.options(target.build if has_torch else "")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as arriving:
        done = subprocess.run(
            [*words, *options, "--dest", arriving, *requirements],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
        if done.returncode:
            printed = done.stderr.decode(errors="replace").strip()
            errors = [line for line in printed.splitlines() if line.startswith("ERROR")]
            raise Refusal(
                "install-failed",
                what="wheels for hosts without an index cannot be downloaded",
                where=", ".join(requirements)[:MAX_FACT],
                fact="; ".join(errors)[-MAX_FACT:] or printed[-MAX_FACT:],
                remedy=shell_line("pip", "download", "--no-deps", *options, requirements[0]),
            )
        wheels = []
        for path in sorted(Path(arriving).iterdir()):
            kept = folder / path.name
            shutil.move(path, kept)
            wheels.append(OwnWheel.of(kept))
    return wheels
