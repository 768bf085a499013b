"""Whether PyTorch can use the NVIDIA GPUs of a machine: what the driver lists, what the wheel has
code for, the fix."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from farspan.domain import catalog
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem

Capability = tuple[int, int]
#: What `CUDA_VISIBLE_DEVICES` says to hide every GPU.
HIDDEN = ("", "-1", "NoDevFiles", "none", "void")
#: Oldest Linux driver for programs of each major version of CUDA ("CUDA Toolkit release notes",
#: table of minor version compatibility).
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as `nvidia-smi` lists it; None and 0 where it does not say."""

    name: str
    #: Bytes.
    memory: int = 0
    driver: str = ""
    capability: Capability | None = None
    uuid: str = ""
    #: Whether it is divided into instances (MIG), of which CUDA programs see the first.
    mig: bool = False


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """What `nvidia-smi` says of a machine, in the order of its numbers; `failure` is why it says
    nothing."""

    gpus: tuple[Gpu, ...] = ()
    failure: str = ""


class TorchGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as PyTorch sees it."""

    name: str
    capability: Capability


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """The PyTorch of an interpreter, and the GPUs that it sees there."""

    torch: str
    #: Version of CUDA, or of ROCm's HIP, that it was built for; None is neither.
    cuda: str | None
    hip: str | None = None
    #: `torch.cuda.get_arch_list()` of the build.
    archs: tuple[str, ...] = ()
    seen: tuple[TorchGpu, ...] = ()
    #: Why it sees none, in its own words.
    error: str = ""
    #: CUDA_VISIBLE_DEVICES; None where it is not set.
    visible: str | None = None

    def __str__(self) -> str:
        built = (
            f"CUDA {self.cuda}"
            if self.cuda
            else f"ROCm {self.hip}"
            if self.hip
            else "no CUDA: it is a CPU wheel"
        )
        return f"torch {self.torch} is built for {built}; get_arch_list() is {list(self.archs)}"


class Verdict(NamedTuple):
    """Why no GPU of a machine can be used, if so; and which of several are left out, and why."""

    problem: Problem | None = None
    notes: tuple[str, ...] = ()


class Build(NamedTuple):
    """A wheel that PyTorch offers, with the least and the most capability that it has code for on
    Linux x86-64."""

    cuda: str
    least: Capability
    most: Capability

    @property
    def driver(self) -> str:
        return OLDEST_DRIVER[int(self.cuda.split(".")[0])]

    def install(self, torch: str) -> str:
        tag = f"cu{self.cuda.replace('.', '')}"
        plain = torch.split("+")[0]
        return f"pip install torch=={shell_word(plain)}+{tag} --index-url https://download.pytorch.org/whl/{tag}"


#: PyTorch's RELEASE.md, "PyTorch CUDA Support Matrix" of 2.11 to 2.14; the newer build goes first.
#: It holds PTX, which later cards can run.
BUILDS = (Build("13.0", (7, 5), (99, 0)), Build("12.6", (5, 0), (9, 0)))


def runs(capability: Capability, archs: tuple[str, ...]) -> bool:
    """Whether a wheel has code for a card: binary code (`sm_86`) runs on the same major version
    from its minor one on, PTX (`compute_90`) on all later cards; what ends in a letter is for its
    own card (`sm_90a`) or family (`sm_100f`).
    """
    if not archs:  # A build that does not say what it has code for.
        return True
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind = match[1]
        built = (int(match[2]), int(match[3]))
        suffix = match[4]
        if suffix == "a":
            fits = capability == built
        elif kind == "sm" or suffix == "f":
            fits = capability[0] == built[0] and capability >= built
        else:
            fits = capability >= built
        if fits:
            return True
    return False


def judge(nvidia: Nvidia, wheel: Wheel, host: str | None = None) -> Verdict:
    """Whether PyTorch can use the GPUs that the driver lists on a host, by default this machine,
    and what mends it where it cannot."""
    if wheel.visible is not None and wheel.visible.strip() in HIDDEN:
        return Verdict(notes=("CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs",) if nvidia.gpus else ())
    if not nvidia.gpus:
        said = f"nvidia-smi does not list the GPUs of this machine: {nvidia.failure}"
        return Verdict(notes=(said,) if nvidia.failure and not wheel.seen else ())
    cards = _wanted(nvidia.gpus, wheel.visible)
    if wheel.hip and wheel.seen:
        return Verdict(
            notes=(
                f"{_names(cards)}: left out, as torch {wheel.torch} is built for ROCm {wheel.hip}",
            )
        )
    if any(runs(gpu.capability, wheel.archs) for gpu in wheel.seen):
        return Verdict(notes=_left_out(cards, wheel))
    driver = next((card.driver for card in cards if card.driver), "")
    why, fix = _cause(cards, driver, wheel)
    cpu = "or, to train on the CPU: set parallel.device: cpu, or CUDA_VISIBLE_DEVICES=''"
    problem = Problem(
        code="device-unusable",
        what=f"PyTorch cannot use the {_names(cards)} of {host or 'this machine'}",
        where=f"host {host}" if host else "nvidia-smi",
        fact=f"{why}; driver {driver or 'unknown'}; {wheel}",
        remedy=f"on {shell_word(host)}: {fix}" if host else f"{fix}; {cpu}",
    )
    return Verdict(problem)


def _wanted(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; all where it names none of them."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    kept = tuple(
        gpu
        for index, gpu in enumerate(gpus)
        if any(
            name == str(index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
            for name in names
        )
    )
    return kept or gpus


def _names(cards: tuple[Gpu, ...]) -> str:
    counts = {card.name: sum(other.name == card.name for other in cards) for card in cards}
    return " and ".join(
        f"{count} x {name}" if count > 1 else name for name, count in counts.items()
    )


def _left_out(cards: tuple[Gpu, ...], wheel: Wheel) -> tuple[str, ...]:
    """Which GPUs are not used beside others that are."""
    unable = [gpu for gpu in wheel.seen if not runs(gpu.capability, wheel.archs)]
    notes = [
        f"{gpu.name} ({_arch(gpu.capability)}) is left out: {wheel}; "
        f"{_fix(gpu.capability, '', wheel)}"
        for gpu in unable
    ]
    divided = any(
        card.mig for card in cards
    )  # Of those CUDA sees one instance, whatever their number.
    if not divided and (missing := len(cards) - len(wheel.seen)) > 0:
        notes.append(
            f"{missing} of {len(cards)} GPUs are left out: nvidia-smi lists them and PyTorch does "
            "not see them"
        )
    return tuple(notes)


def _cause(cards: tuple[Gpu, ...], driver: str, wheel: Wheel) -> tuple[str, str]:
    """Why no card can be used, and what mends it."""
    known = [gpu.capability for gpu in wheel.seen] or [
        card.capability for card in cards if card.capability
    ]
    newest = max(known, default=None)
    fix = _fix(newest, driver, wheel)
    if wheel.cuda is None:
        return "PyTorch was built without CUDA", fix
    oldest = OLDEST_DRIVER.get(int(wheel.cuda.split(".")[0]))
    if oldest and driver and _numbers(driver) < _numbers(oldest) and not wheel.seen:
        return f"the driver is too old: CUDA {wheel.cuda} needs {oldest} or newer", fix
    if known and not any(runs(capability, wheel.archs) for capability in known):
        return f"the wheel has no code for {', '.join(map(_arch, sorted(set(known))))}", fix
    if any(card.mig for card in cards):
        return (
            "MIG is on, and CUDA finds no instance",
            "sudo nvidia-smi mig -cgi 0 -C, or: sudo nvidia-smi -mig 0",
        )
    named = f"CUDA_VISIBLE_DEVICES is {wheel.visible}; " if wheel.visible is not None else ""
    return (
        f"{named}CUDA finds none: {wheel.error or 'it does not say why'}",
        "sudo nvidia-modprobe -u -c=0, or restart",
    )


def _fix(capability: Capability | None, driver: str, wheel: Wheel) -> str:
    """The wheel for a card and a driver, or the driver for the wheel."""
    able = [
        build for build in BUILDS if capability is None or build.least <= capability <= build.most
    ]
    if not able:
        return "no wheel of this PyTorch has code for such a card: use another GPU"
    ready = [build for build in able if not driver or _numbers(driver) >= _numbers(build.driver)]
    newer = f"update the NVIDIA driver to {able[0].driver} or newer"
    if not ready:
        same_major = (
            wheel.cuda is not None and wheel.cuda.split(".")[0] == able[-1].cuda.split(".")[0]
        )
        return newer if same_major else f"{newer}, then: {able[0].install(wheel.torch)}"
    fix = ready[0].install(wheel.torch)
    # The wheel that is there would do, had it its driver.
    return f"{newer}, or: {fix}" if wheel.cuda is not None and ready[0] is not able[0] else fix


def _arch(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def is_kind(name: str, kind: str) -> bool:
    """Whether a GPU that its driver calls `name` is of a kind that a plan names: a driver's name,
    or a catalogue's."""
    if name == kind:
        return True
    if kind not in catalog.devices():
        return False
    known = catalog.kind_of(name)
    if known:
        return known == kind
    # The catalogue does not know every name of a kind: "NVIDIA H200 NVL" is an h200. But an A2000
    # is no a2, and an RTX 4080 SUPER no rtx4080.
    model = kind.replace("-", "") if kind.startswith("rtx-") else kind.split("-")[0]
    return re.search(rf"{model}(?!\d|ti|super)", name.lower().replace(" ", "")) is not None
