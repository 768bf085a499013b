"""`farspan probe` of devices with little memory: what fits is measured, the rest is said, and what
one dies of is told without losing what the others said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from farspan.domain.clusterfile import load_cluster
from farspan.domain.problems import Problem
from farspan.domain.struct_files import save
from farspan.runtime.probing import unit_timing
from farspan.runtime.probing.rates import measure_device_rates
from farspan_lab import devices, state
from tests import tiny
from tests.launch.conftest import up
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

BOX = (
    "sites: {here: {hosts: {box: {enter: [], devices: [{kind: cpu-avx2, memory: 4GB, count: "
    "2}]}}}}\n"
)
#: Much state for little to compute.
SPEC = replace(tiny.SPEC, d_model=64, d_ff=128, vocab_size=50_000, context=64)


def probe(folder: Path, cluster: str, spec=SPEC, *words: str) -> subprocess.Popen[str]:
    """`farspan probe` at the shapes of a model, into measured.yaml of a folder."""
    plan = tiny.plan(tiny_train(spec), spec=spec)
    save(plan, folder / "plan.json")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "farspan",
            "probe",
            "--cluster",
            cluster,
            "--model",
            str(folder / "plan.json"),
            "-o",
            str(folder / "measured.yaml"),
            "--json",
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tiny_train(spec):
    return replace(TRAIN, seq_len=spec.context)


def problem_of(out: str) -> Problem:
    return msgspec.json.decode(out, type=dict[str, Problem])["problem"]


def test_the_killed_probe_of_one_of_two_devices_is_named_and_the_other_is_kept(tmp_path):
    (tmp_path / "box.yaml").write_text(BOX)
    process = probe(tmp_path, str(tmp_path / "box.yaml"), tiny.SPEC)

    def probes() -> list[int]:
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        pids = {int(pid) for file in children for pid in file.read_text().split()}
        return sorted(pid for pid in pids if is_probe(pid))

    wait_for(lambda: len(probes()) == 2, "two probes", process)
    pids = probes()
    os.kill(pids[1], signal.SIGKILL)
    out, said = process.communicate(timeout=LIMIT_S)
    problem = problem_of(out)
    assert (process.returncode, problem.code, problem.where) == (
        21,
        "out-of-memory",
        "host box, device 1",
    ), said
    assert (
        "limit 4 GB" in problem.fact
        and "peak" in problem.fact
        and str(tmp_path / "measured.yaml") in problem.fact
    )
    first, second = load_cluster(tmp_path / "measured.yaml").devices
    assert (
        (first.origin, second.origin) == ("measured", "given")
        and first.times.units
        and first.times.rates
    )
    assert "device 1 of box has failed" in (tmp_path / "measured.yaml").read_text()


def is_probe(pid: int) -> bool:
    try:
        return b"farspan.runtime.probe_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_devices_with_little_memory_are_measured_as_far_as_it_goes(tmp_path):
    """Under the caps of real control groups: the first has too little to start, the second for the
    units."""
    if not devices.parents():
        pytest.skip("waits for control groups that can be written")
    name = f"caps-{os.getpid()}"
    up(f"name: {name}\nsites: {{utah: {{devices: [{{memory: 60MB}}, {{memory: 420MB}}, {{}}]}}}}\n")
    try:
        process = probe(tmp_path, f"lab:{name}")
        out, said = process.communicate(timeout=LIMIT_S)
    finally:
        state.down(name)
    problem = problem_of(out)
    text = (tmp_path / "measured.yaml").read_text()
    assert (process.returncode, problem.code, problem.where) == (
        21,
        "out-of-memory",
        "host utah, device 0",
    ), said
    assert "limit 60 MB, peak " in problem.fact and "peak unknown" not in problem.fact
    small, capped, free = load_cluster(tmp_path / "measured.yaml").devices
    assert (small.times.units, capped.times.units, capped.origin, free.origin) == (
        (),
        (),
        "measured",
        "measured",
    )
    assert free.times.units and capped.times.rates
    assert "device 1 of utah: left out units in fp32 of 1, 2, 4, 8 sequences at a time: " in text
    assert "device 2 of utah: left out" not in text


# -- by the bytes alone
#   ------------------------------------------------------------------------------------------------


def held() -> int:
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")
    )


def test_unit_timing_skips_sizes_beyond_the_memory_limit_and_frees_its_memory(monkeypatch):
    monkeypatch.setattr(unit_timing, "LONG_S", 1e9)  # However slow the machine is.
    monkeypatch.setattr(unit_timing, "UNITS_S", 0.1)
    cpu = torch.device("cpu")
    before = held()
    whole = unit_timing.unit_times(cpu, SPEC, 64, (1, 2), ("fp32",), 2**40)
    assert {unit.rows for unit in whole.times} == {1, 2} and not whole.left_out
    assert held() - before < 60_000_000, "its state alone takes twice as much"
    state, one = unit_timing.bytes_needed(SPEC, 64, 1, "fp32", "cpu")
    part = unit_timing.unit_times(
        cpu, SPEC, 64, (1, 2000), ("fp32",), held() + state + one + 10_000_000
    )
    assert {unit.rows for unit in part.times} == {1}
    assert [(left.what, left.rows) for left in part.left_out] == [("units in fp32", (2000,))]
    none = unit_timing.unit_times(cpu, SPEC, 64, (1, 2), ("fp32", "bf16"), held() + 10_000_000)
    assert not none.times and [(left.what, left.rows) for left in none.left_out] == [
        ("units in fp32", (1, 2)),
        ("units in bf16", (1, 2)),
    ]
    assert all(left.needed > left.free >= 0 for left in none.left_out)


def test_a_product_that_does_not_fit_is_left_out():
    device = tiny.plan(tiny_train(SPEC)).devices[0]
    found = measure_device_rates(
        device, ((64, 64, 64), (512, 512, 50_000)), ("fp32",), held() + 50_000_000
    )
    assert [(rate.m, rate.n) for rate in found.rates] == [(64, 64)]
    assert [one.what for one in found.left_out] == ["the product [512, 512] @ [512, 50000]"]
    assert found.bandwidth > 0
