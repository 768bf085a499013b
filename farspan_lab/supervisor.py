"""`python -m farspan_lab.supervisor FOLDER`: makes the lab of FOLDER/plan.json, relays its packets,
answers questions.

The lab's namespaces and devices live in this one process: however it ends, the kernel removes them.
It begins in namespaces of its own, so nothing it does reaches the machine's network. When the lab
is up it closes its standard output; what it could not make it has written there as a Problem.
"""

from __future__ import annotations

import gc
import os
import random
import select
import socket
import sys
import time
from pathlib import Path

import msgspec

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load, parse_json, to_json
from farspan_lab import _kernel, devices, sites
from farspan_lab.lab import Lab, Link, Status, Traffic, unavailable
from farspan_lab.relay import Relay, Wire

#: Who asks and does not read holds up the packets for no longer than this.
PATIENCE_S = 0.2


class Supervisor:
    """A lab that is up. It does one thing after the other, so no packet sees half a change."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        rng = random.Random(0)
        devices.make_groups(lab)
        self._made = made = {site.name: sites.make(lab, site, folder) for site in lab.sites}
        self._wires = {
            (link.source, link.target): Wire(link, made[link.target].tun, rng) for link in lab.links
        }
        self._relay = Relay(
            {(made[a].tun, made[b].site.number): wire for (a, b), wire in self._wires.items()}
        )
        self._joined = {frozenset((link.source, link.target)) for link in lab.links if link.near}
        for pair in self._joined:
            sites.join(*(made[name] for name in pair))
        for name in made:
            self._steer(name)
        self._control = socket.socket(socket.AF_UNIX)
        self._control.bind(str(folder / "control"))
        self._control.listen()
        self._realtime = _kernel.wake_in_time()
        self._began_s = time.monotonic()
        self._began_cpu_s = time.process_time()

    def run(self) -> None:
        gc.disable()  # Packets make no cycles, and a collection would hold them up.
        control = self._control.fileno()
        tuns = [site.tun for site in self._made.values()]
        while True:
            ready, _, _ = select.select([control, *tuns], [], [], self._relay.deliver())
            for fd in ready:
                if fd == control:
                    self._answer()
                else:
                    self._relay.receive(fd)

    def _answer(self) -> None:
        """Put links in the place of those that join the same sites, then tell the status."""
        client, _ = self._control.accept()
        with client:
            client.settimeout(PATIENCE_S)
            try:
                for link in parse_json(client.recv(2**16), tuple[Link, ...], "the request"):
                    self._change(link)
                client.sendall(to_json(self._status()))
            except (OSError, Refusal, KeyError):
                return  # It has gone, or makes no sense: no answer, and packets go on.

    def _change(self, link: Link) -> None:
        wire = self._wires[link.source, link.target]
        old = wire.link
        wire.link = link
        if (old.near, bool(old.loss)) != (link.near, bool(link.loss)):
            self._steer(link.source)

    def _steer(self, site: str) -> None:
        links = [wire.link for (source, _), wire in self._wires.items() if source == site]
        sites.steer(self._made[site], links, self._made, self._joined)

    def _status(self) -> Status:
        first = next(iter(self._made.values()))
        wires = list(self._wires.values())
        lab = msgspec.structs.replace(
            self._lab,
            links=tuple(wire.link for wire in wires),
            congestion=first.congestion,
            window=first.window,
        )
        traffic = tuple(
            Traffic(
                source=a,
                target=b,
                relayed=not (wire.link.near and frozenset((a, b)) in self._joined),
                bytes=wire.bytes,
                packets=wire.packets,
                dropped=wire.dropped,
            )
            for (a, b), wire in self._wires.items()
        )
        return Status(
            lab=lab,
            pid=os.getpid(),
            namespaces={name: site.namespaces for name, site in self._made.items()},
            traffic=traffic,
            relay_cpu_s=time.process_time() - self._began_cpu_s,
            up_s=time.monotonic() - self._began_s,
            realtime=self._realtime,
        )


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        supervisor = Supervisor(load(folder / "plan.json", Lab), folder)
    except (OSError, Refusal) as error:
        refusal = (
            error
            if isinstance(error, Refusal)
            else unavailable(
                "the system refuses a part of the lab",
                error.filename or folder,
                error,
                "docker run --privileged",
            )
        )
        sys.stdout.buffer.write(to_json(refusal.problem))
        sys.exit(refusal.problem.exit_code)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    supervisor.run()


if __name__ == "__main__":
    main()
