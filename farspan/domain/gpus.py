"""Diagnosis of a machine's NVIDIA GPUs: what the driver lists, what PyTorch's wheel has code for,
and the fix where it cannot use them."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import msgspec

from farspan.domain import catalog
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Problem
from farspan.domain.units import counted

Capability = tuple[int, int]
#: Values of `CUDA_VISIBLE_DEVICES` that hide every GPU.
HIDDEN = ("", "-1", "NoDevFiles", "none", "void")
#: Oldest Linux driver for programs of each major version of CUDA ("CUDA Toolkit release notes",
#: table of minor version compatibility).
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as `nvidia-smi` lists it; None and 0 where it reports nothing."""

    name: str
    #: Bytes.
    memory: int = 0
    driver: str = ""
    capability: Capability | None = None
    uuid: str = ""
    #: Whether it is divided into instances (MIG), of which CUDA programs see the first.
    mig: bool = False


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """What `nvidia-smi` lists of a machine, in the order of its numbers; `failure` is why it lists
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
    #: Whether Triton is installed, its compiler for GPUs.
    triton: bool | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        built = "no CUDA: it is a CPU wheel"
        if self.cuda:
            built = f"CUDA {self.cuda}"
        elif self.hip:
            built = f"ROCm {self.hip}"
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
        return OLDEST_DRIVER[_parse_version(self.cuda)[0]]

    @property
    def tag(self) -> str:
        return f"cu{self.cuda.replace('.', '')}"

    def install(self, torch: str) -> str:
        tag = self.tag
        plain = torch.split("+")[0]
        return f"pip install torch=={shell_word(plain)}+{tag} --index-url https://download.pytorch.org/whl/{tag}"


#: PyTorch's RELEASE.md, "PyTorch CUDA Support Matrix" of 2.11 to 2.14; the newer build goes first.
#: It holds PTX, which later cards can run.
BUILDS = (Build("13.0", (7, 5), (99, 0)), Build("12.6", (5, 0), (9, 0)))


def has_code_for(capability: Capability, archs: tuple[str, ...]) -> bool:
    """Return whether a wheel has code for a card: binary code (`sm_86`) runs on the same major
    version from its minor one on, PTX (`compute_90`) on all later cards; what ends in a letter is
    for its own card (`sm_90a`) or family (`sm_100f`).
    """
    if not archs:  # A build that does not list what it has code for.
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


def judge_gpus(nvidia: Nvidia, wheel: Wheel, host: str | None = None) -> Verdict:
    """Judge whether PyTorch can use the GPUs that the driver lists on a host, by default this
    machine, and what mends it where it cannot."""
    if wheel.visible is not None and wheel.visible.strip() in HIDDEN:
        hidden = "CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs"
        return Verdict(notes=(hidden,) if nvidia.gpus else ())
    if not nvidia.gpus:
        failure = f"nvidia-smi does not list the GPUs of this machine: {nvidia.failure}"
        return Verdict(notes=(failure,) if nvidia.failure and not wheel.seen else ())
    cards = _select_visible(nvidia.gpus, wheel.visible)
    counts = Counter(card.name for card in cards)
    models = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
    card_names = " and ".join(models)
    if wheel.hip and wheel.seen:
        note = f"{card_names}: left out, as torch {wheel.torch} is built for ROCm {wheel.hip}"
        return Verdict(notes=(note,))
    if any(has_code_for(gpu.capability, wheel.archs) for gpu in wheel.seen):
        return Verdict(notes=_note_left_out(cards, wheel))
    driver = next((card.driver for card in cards if card.driver), "")
    cause, fix = _explain_failure(cards, driver, wheel)
    cpu = "or, to train on the CPU: set parallel.device: cpu, or CUDA_VISIBLE_DEVICES=''"
    where = "nvidia-smi"
    remedy = f"{fix}; {cpu}"
    if host:
        where = f"host {host}"
        remedy = f"on {shell_word(host)}: {fix}"
    what = f"PyTorch cannot use the {card_names} of {host or 'this machine'}"
    fact = f"{cause}; driver {driver or 'unknown'}; {wheel}"
    return Verdict(
        Problem(code="device-unusable", what=what, where=where, fact=fact, remedy=remedy)
    )


def judge_granted_gpus(granted: int, wheel: Wheel, node: str) -> Problem | None:
    """Return why PyTorch can use none of the GPUs that Slurm has given to this process on a node;
    None where it can, or where somebody has hidden them."""
    is_hidden = wheel.visible is not None and wheel.visible.strip() in HIDDEN
    if is_hidden or any(has_code_for(gpu.capability, wheel.archs) for gpu in wheel.seen):
        return None
    fix = shell_line("srun", f"--nodelist={node}", "--gpus=1", "nvidia-smi")
    if wheel.hip:
        fix = shell_line("srun", f"--nodelist={node}", "--gpus=1", "rocm-smi")
    elif wheel.cuda is None or wheel.seen:
        _, fix = _explain_failure((), "", wheel)
    seen = ", ".join(gpu.name for gpu in wheel.seen) or "none"
    reason = f" ({wheel.error})" if wheel.error else ""
    return Problem(
        code="device-missing",
        what=f"PyTorch can use none of the GPUs that Slurm has given to the job on {node}",
        where=f"node {node}",
        fact=f"Slurm: {counted(granted, 'GPU')}; PyTorch sees: {seen}{reason}; {wheel}",
        remedy=(
            f"{fix}; or, to use the CPU: set parallel.device: cpu, or CUDA_VISIBLE_DEVICES='' in "
            "the command's environment"
        ),
    )


def _select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; all where it names none of them."""
    chosen = [name.strip() for name in (visible or "").split(",")]
    uuids = tuple(name for name in chosen if name.startswith("GPU-"))
    kept = []
    for index, gpu in enumerate(gpus):
        if str(index) in chosen or gpu.uuid.startswith(uuids):
            kept.append(gpu)
    return tuple(kept) or gpus


def _note_left_out(cards: tuple[Gpu, ...], wheel: Wheel) -> tuple[str, ...]:
    """Report which GPUs are not used where others are."""
    notes = []
    for gpu in wheel.seen:
        if not has_code_for(gpu.capability, wheel.archs):
            arch = _format_arch(gpu.capability)
            fix = _choose_fix(gpu.capability, "", wheel)
            notes.append(f"{gpu.name} ({arch}) is left out: {wheel}; {fix}")
    # Of divided cards (MIG) CUDA sees one instance, whatever their number.
    missing = len(cards) - len(wheel.seen)
    if missing > 0 and not any(card.mig for card in cards):
        notes.append(
            f"{missing} of {len(cards)} GPUs are left out: nvidia-smi lists them and PyTorch does "
            "not see them"
        )
    return tuple(notes)


def _explain_failure(cards: tuple[Gpu, ...], driver: str, wheel: Wheel) -> tuple[str, str]:
    """Return why no card can be used, and what mends it."""
    known = [gpu.capability for gpu in wheel.seen]
    if not known:
        known = [card.capability for card in cards if card.capability]
    fix = _choose_fix(max(known, default=None), driver, wheel)
    if wheel.cuda is None:
        return "PyTorch was built without CUDA", fix
    oldest = OLDEST_DRIVER.get(_parse_version(wheel.cuda)[0])
    if oldest and driver and not wheel.seen and _parse_version(driver) < _parse_version(oldest):
        return f"the driver is too old: CUDA {wheel.cuda} needs {oldest} or newer", fix
    if known and not any(has_code_for(capability, wheel.archs) for capability in known):
        archs = map(_format_arch, sorted(set(known)))
        return f"the wheel has no code for {', '.join(archs)}", fix
    named = f"CUDA_VISIBLE_DEVICES is {wheel.visible}; " if wheel.visible is not None else ""
    if any(card.mig for card in cards):
        if wheel.visible is not None and "MIG-" in wheel.visible:
            return (
                f"{named}MIG is on, and CUDA finds no such instance",
                "name one that nvidia-smi -L lists in CUDA_VISIBLE_DEVICES",
            )
        return (
            f"{named}MIG is on, and CUDA finds no instance",
            "sudo nvidia-smi mig -cgi 0 -C, or: sudo nvidia-smi -mig 0",
        )
    return (
        f"{named}CUDA finds none: {wheel.error or 'it does not say why'}",
        "sudo nvidia-modprobe -u -c=0, or restart",
    )


def _choose_fix(capability: Capability | None, driver: str, wheel: Wheel) -> str:
    """Choose the wheel for a card and a driver, or the driver for the wheel."""
    able = []
    for build in BUILDS:
        if capability is None or build.least <= capability <= build.most:
            able.append(build)
    if not able:
        return "no wheel of this PyTorch has code for such a card: use another GPU"
    newer = f"update the NVIDIA driver to {able[0].driver} or newer"
    for build in able:
        if not is_driver_new_enough(driver, build):
            continue
        fix = build.install(wheel.torch)
        # The installed wheel would do, had it its driver.
        return f"{newer}, or: {fix}" if wheel.cuda is not None and build is not able[0] else fix
    if wheel.cuda is not None and _parse_version(wheel.cuda)[0] == _parse_version(able[-1].cuda)[0]:
        return newer
    return f"{newer}, then: {able[0].install(wheel.torch)}"


def is_driver_new_enough(driver: str, build: Build) -> bool:
    """Return whether a driver runs programs of a build's CUDA; True where the driver is unknown."""
    return not driver or _parse_version(driver) >= _parse_version(build.driver)


def _format_arch(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def is_kind(name: str, kind: str) -> bool:
    """Return whether a GPU that its driver calls `name` is of a kind that a plan names: a driver's
    name, or a catalogue's."""
    if name == kind:
        return True
    if kind not in catalog.load_devices():
        return False
    known = catalog.find_kind(name)
    if known:
        return known == kind
    # The catalogue does not know every name of a kind: "NVIDIA H200 NVL" is an h200. But an A2000
    # is no a2, and an RTX 4080 SUPER no rtx4080.
    model = kind.replace("-", "") if kind.startswith("rtx-") else kind.split("-")[0]
    squashed = name.lower().replace(" ", "")
    return re.search(rf"{model}(?!\d|ti|super)", squashed) is not None
