"""Makes a site: namespaces of its own, an interface with its address, names for all sites, TCP set
for its links."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.domain.escapes import shell_word
from farspan_lab import INTERFACE, _kernel
from farspan_lab.lab import Lab, Link, Site, unavailable

_SYSCTL = Path("/proc/sys/net/ipv4")
#: Super-packets that may wait for the relay: 1 GB, so that what is lost is lost by a link's own
#: queue.
_WAITING = 16384
#: The kernel counts its own headers among what a buffer holds. Measured: 0.66 of a receiver's is
#: data.
_BUFFER_PER_WINDOW = 1.5


class Made(msgspec.Struct, frozen=True):
    """A site that exists as long as this process, with what TCP has in force there."""

    site: Site
    namespaces: dict[str, str]
    tun: int
    congestion: str
    window: int


def make(lab: Lab, site: Site, folder: Path) -> Made:
    """Make a site. Raises OSError or Refusal when the system refuses a part of it."""
    hosts = folder / f"{site.name}.hosts"
    names = [f"{other.address} {other.name}" for other in lab.sites]
    # The machine's own name leads here too, for what looks itself up.
    hosts.write_text(
        "\n".join(["127.0.0.1 localhost", *names, f"{site.address} {socket.gethostname()}", ""])
    )
    with _kernel.new_namespaces() as namespaces:
        socket.sethostname(site.name)
        _run("mount", "--bind", str(hosts), "/etc/hosts")
        tun = _kernel.open_tun(INTERFACE)
        congestion, window = _tune(lab)
        ip(
            "link set lo up",
            f"link set {INTERFACE} mtu 1500 txqueuelen {_WAITING} up",
            f"addr add {site.address}/32 dev {INTERFACE}",
        )
    return Made(site=site, namespaces=namespaces, tun=tun, congestion=congestion, window=window)


def join(first: Made, other: Made) -> None:
    """Lay a veth pair between two sites."""
    to_first = f"near{first.site.number}"
    to_other = f"near{other.site.number}"
    namespace = other.namespaces["net"]
    ip(
        f"link add {to_other} type veth peer name {to_first} netns {namespace}",
        f"link set {to_other} up",
        made=first,
    )
    ip(f"link set {to_first} up", made=other)


def steer(
    made: Made, links: Sequence[Link], others: dict[str, Made], joined: set[frozenset[str]]
) -> None:
    """Send what a site sends over these links through the relay, or past it where a veth pair does.

    Before a lossy link the kernel cuts packets up, so that one that is lost is one segment, not
    forty.
    """
    commands = [
        f"link set {INTERFACE} gso_max_segs {1 if any(link.loss for link in links) else 65535}"
    ]
    for link in links:
        target = others[link.target].site
        near = link.near and frozenset((link.source, link.target)) in joined
        out = f"near{target.number}" if near else INTERFACE
        commands.append(f"route replace {target.address}/32 dev {out} src {made.site.address}")
    ip(*commands, made=made)


def ip(*commands: str, made: Made | None = None) -> None:
    """Run commands of iproute2, in the site if one is given."""
    within = ["nsenter", f"--net={made.namespaces['net']}"] if made else []
    _run(*within, "ip", "-batch", "-", said="\n".join(commands))


def _run(*words: str, said: str = "") -> None:
    done = subprocess.run(words, input=said, capture_output=True, text=True)
    if done.returncode:
        raise unavailable(
            "a part of a site cannot be made",
            f"{' '.join(words)} {said}",
            done.stderr.strip(),
            "update kernel and iproute2, or use: docker run --privileged",
        )


def _tune(lab: Lab) -> tuple[str, int]:
    """Set TCP of the namespace that this process is in; what is in force then, which may be a
    smaller window."""
    buffer = round(lab.window * _BUFFER_PER_WINDOW)
    # Receivers begin with all of it. When the kernel makes buffers larger as it measures, streams
    # whose reader waits for a core stay at 84 kB for seconds, by chance (Linux 6.18, 103 ms).
    wanted = {
        "tcp_congestion_control": lab.congestion,
        "tcp_rmem": f"4096 {buffer} {buffer}",
        "tcp_wmem": f"4096 16384 {buffer}",
        "tcp_slow_start_after_idle": "0",
        "tcp_no_metrics_save": "1",
        "conf/all/rp_filter": "0",
        "conf/default/rp_filter": "0",
    }
    settings = {}
    for name, value in wanted.items():
        with suppress(OSError):  # What counts is what is there afterwards.
            (_SYSCTL / name).write_text(value)
        settings[name] = (_SYSCTL / name).read_text().split()
        if settings[name] != value.split() and name not in ("tcp_rmem", "tcp_wmem"):
            allowed = (_SYSCTL / "tcp_allowed_congestion_control").read_text().strip()
            raise unavailable(
                f"{name} cannot be {value} in a site",
                _SYSCTL / name,
                f"it stays {' '.join(settings[name])}; namespaces may use: {allowed}",
                f"set congestion: {shell_word(allowed.split()[0])}, or use: "
                "docker run --privileged",
            )
    buffers = [int(settings[name][2]) for name in ("tcp_rmem", "tcp_wmem")]
    return settings["tcp_congestion_control"][0], round(min(buffers) / _BUFFER_PER_WINDOW)
