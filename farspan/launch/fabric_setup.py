"""VMs of a slice made ready after their first start: links between them, then the NVIDIA driver."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_line
from farspan.domain.fabric import SliceRecord
from farspan.domain.problems import Refusal
from farspan.launch.fabric_cluster import find_addresses, links_script
from farspan.launch.hosts import host_command

Report = Callable[[str], None]

#: The long-lived branch of NVIDIA's driver that Ubuntu 22.04 and 24.04 have as packages: it knows
#: Turing to Blackwell, and runs what is built for CUDA 12 and 13.
DRIVER = "580-server"
#: A VM starts within this, also again; and its driver is compiled.
START_S = 900.0
DRIVER_INSTALL_S = 1800.0
VM_POLL_S = 10.0
COMMAND_S = 60.0
LINKS_UNIT = """[Unit]
Description=Links of a slice, by farspan
After=network.target
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/farspan-links
[Install]
WantedBy=multi-user.target
"""
DRIVER_SCRIPT = f"""set -e
export DEBIAN_FRONTEND=noninteractive
nvidia-smi -L 2>/dev/null && exit 0
apt-get update -q
apt-get install -qy linux-headers-$(uname -r) nvidia-headless-{DRIVER} nvidia-utils-{DRIVER}
rmmod nouveau 2>/dev/null || true
modprobe nvidia || true
"""


def set_up_vms(record: SliceRecord, cluster: Cluster, report: Report) -> None:
    """Wait for a slice's VMs, join them, and give those with GPUs their driver. Raises Refusal
    (slice-failed) for the first that does not become ready."""

    def set_up(host: Host) -> None:
        (vm,) = [vm for vm in record.vms if vm.name == host.name]
        _wait_for(host, "true", START_S, "lets nobody in")
        _join(host, links_script(record, vm))
        if host.devices and vm.gpus:
            report(f"{host.name}: installing the NVIDIA driver")
            _install_driver(host)
        report(f"{host.name}: ready")

    with ThreadPoolExecutor(max(1, len(cluster.hosts))) as pool:
        list(pool.map(set_up, cluster.hosts))
    addresses = find_addresses(record)
    first = cluster.hosts[0]
    for host in cluster.hosts[1:]:
        ping = f"ping -c 1 -W 2 {addresses[host.name]}"
        _wait_for(first, ping, COMMAND_S, f"does not reach {host.name}")


def _join(host: Host, script: str) -> None:
    """Write the script that joins a VM, and have it run now and at every start."""
    text = (
        f"printf %s {shlex.quote(script)} > /usr/local/sbin/farspan-links; "
        "chmod 755 /usr/local/sbin/farspan-links; "
        f"printf %s {shlex.quote(LINKS_UNIT)} > /etc/systemd/system/farspan-links.service; "
        "systemctl daemon-reload; systemctl enable --now farspan-links"
    )
    _run_as_root(host, f"set -e; {text}", COMMAND_S, "cannot be joined to its networks")


def _install_driver(host: Host) -> None:
    _run_as_root(host, DRIVER_SCRIPT, DRIVER_INSTALL_S, "takes no NVIDIA driver")
    if _run(host, "nvidia-smi -L", COMMAND_S).returncode:
        # A driver that held the cards before lets them go at a start.
        _run(host, "sudo -n systemctl reboot", COMMAND_S)
        _wait_for(host, "nvidia-smi -L", START_S, "has no GPU after its driver was installed")


def _run_as_root(host: Host, script: str, seconds: float, what: str) -> None:
    done = _run(host, f"sudo -n sh -c {shlex.quote(script)}", seconds)
    if done.returncode:
        raise _not_ready(host, what, done)


def _wait_for(host: Host, text: str, seconds: float, what: str) -> None:
    """Wait until a command on a host succeeds. Raises Refusal (slice-failed)."""
    deadline = time.monotonic() + seconds
    while (done := _run(host, text, COMMAND_S)).returncode:
        if time.monotonic() > deadline:
            raise _not_ready(host, what, done)
        time.sleep(VM_POLL_S)


def _run(host: Host, text: str, seconds: float) -> subprocess.CompletedProcess[str]:
    words = host_command(host, ["sh", "-c", text])
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        late = f"no end within {seconds:.0f} s"
        return subprocess.CompletedProcess(words, returncode=1, stdout="", stderr=late)


def _not_ready(host: Host, what: str, done: subprocess.CompletedProcess[str]) -> Refusal:
    printed = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Refusal(
        "slice-failed",
        what=f"{host.name} {what}",
        where=f"host {host.name}",
        fact=printed[-1][:400] if printed else "it printed nothing",
        remedy=shell_line(*host_command(host, ["true"])),
    )
