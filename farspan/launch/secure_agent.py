"""The agent that `farspan cluster secure` runs on a host, as root: it makes and ends an interface
of WireGuard, one JSON line each way.

Sent there as text and run by whatever Python is there: standard library only, written for Python
3.7. Questions are `{"do": NAME, ...}`. It ends with its standard input; the interface stays until
it is ended or the machine is. The host's private key never leaves it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from farspan.launch.agent_loop import answer_questions

#: A host has one private network of farspan's: no other interface is ever touched.
INTERFACE = "farspan0"
#: Root's alone to write, and gone after a restart of the machine, as interfaces are.
STATE_FOLDER = Path("/run")
#: A command that sets an interface takes no longer.
COMMAND_TIMEOUT_S = 20.0
#: What WireGuard adds to a packet, over IPv6, which has the longer head: wg-quick(8).
OVERHEAD_BYTES = 80
#: Ethernet's packets; a path between sites carries no larger ones, whatever its first link does.
ETHERNET_MTU = 1500
#: Seconds between packets that keep routers from forgetting a path: wireguard.com/quickstart.
KEEPALIVE_S = 25
#: Paths of users may lack the folders of administrators' tools.
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def look() -> dict[str, Any]:
    """Return the user, missing tools, the network that this host is in, and the networks of other
    routes."""
    system = platform.system()
    missing = [name for name in ("ip", "wg") if find_tool(name) is None]
    is_ready = system == "Linux" and not missing
    return {
        "user": os.geteuid(),
        "system": system,
        "missing": missing,
        "is_up": is_up(),
        "network": read_record() if is_up() else None,
        "routes": list_routes() if is_ready else [],
    }


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=TOOL_PATH)


def is_up() -> bool:
    return any(name == INTERFACE for _, name in socket.if_nameindex())


def record_path() -> Path:
    """Return the file that holds which network this host is in. Each network namespace has
    interfaces of its own."""
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return STATE_FOLDER / f"farspan-wireguard-{namespace}.json"


def read_record() -> Any:
    """Return the network that this host is in; None where there is no record of one."""
    with suppress(OSError, ValueError):
        return json.loads(record_path().read_text())
    return None


def forget_network() -> None:
    """Remove the key and the record."""
    for path in (key_path(), record_path()):
        with suppress(FileNotFoundError):
            path.unlink()


def key_path() -> Path:
    return record_path().with_suffix(".key")


def list_routes() -> list[str]:
    """Return the networks and addresses of all routes, but for those of farspan's interface."""
    networks = []
    for line in run_tool("ip", "-4", "route", "show", "table", "all").splitlines():
        words = line.split()
        if INTERFACE not in words:
            # The first word may be a kind of route: local, broadcast, unreachable.
            networks += [word for word in words[:2] if re.match(r"\d+\.", word)][:1]
    return networks


def run_tool(name: str, *words: str, text: str = "") -> str:
    """Run a tool with `text` as its input; return its output. Raises OSError with its words."""
    path = find_tool(name)
    if path is None:
        raise OSError(0, name + " is not installed")
    done = subprocess.run(
        [path, *words], input=text.encode(), capture_output=True, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode:
        printed = done.stderr.decode(errors="replace").strip()
        raise OSError(0, f"{name} {' '.join(words)}: {printed or done.returncode}")
    return done.stdout.decode().strip()


def make_key() -> dict[str, Any]:
    """Make the host's key, where there is none yet; return its public half."""
    path = key_path()
    if not is_up():
        # Of an interface that somebody else has ended.
        forget_network()
    # There is none, or it was half written when power was lost.
    with suppress(OSError):
        return {"public_key": run_tool("wg", "pubkey", text=path.read_text())}
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(run_tool("wg", "genkey"))
    return {"public_key": run_tool("wg", "pubkey", text=path.read_text())}


def bring_up(
    network: str, address: str, prefix: int, port: int, peers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Make the interface, or give the one that is there these peers."""
    lines = ["[Interface]", f"PrivateKey = {key_path().read_text()}", f"ListenPort = {port}"]
    mtus = [ETHERNET_MTU]
    for peer in peers:
        lines += ["[Peer]", f"PublicKey = {peer['public_key']}"]
        lines += [f"AllowedIPs = {peer['address']}/32", f"PersistentKeepalive = {KEEPALIVE_S}"]
        # A peer whose name is not known here, or that no route leads to, has to call first.
        with suppress(OSError):
            ip = str(socket.getaddrinfo(peer["host"], port, type=socket.SOCK_DGRAM)[0][4][0])
            mtus.append(path_mtu(ip))
            lines.append(f"Endpoint = [{ip}]:{port}" if ":" in ip else f"Endpoint = {ip}:{port}")
    is_new = not is_up()
    record = read_record()
    if not is_new and (record is None or record["id"] != network):
        raise OSError(0, "the host is in another network now")
    record_path().write_text(json.dumps({"id": network, "address": address}))
    record_path().chmod(0o644)
    try:
        if is_new:
            make_interface()
        run_tool("wg", "setconf", INTERFACE, "/dev/stdin", text="\n".join([*lines, ""]))
        run_tool("ip", "address", "flush", "dev", INTERFACE)
        run_tool("ip", "address", "add", f"{address}/{prefix}", "dev", INTERFACE)
        mtu = str(min(mtus) - OVERHEAD_BYTES)
        run_tool("ip", "link", "set", "mtu", mtu, "up", "dev", INTERFACE)
    except BaseException:
        if is_new:
            take_down(network)
        raise
    return {"is_new": is_new}


def make_interface() -> None:
    """Make it by the kernel, or by wireguard-go where the kernel knows none."""
    try:
        run_tool("ip", "link", "add", "dev", INTERFACE, "type", "wireguard")
    except OSError as error:
        if find_tool("wireguard-go") is None:
            raise OSError(0, f"{error.strerror}; wireguard-go is not installed") from None
        run_tool("wireguard-go", INTERFACE)


def path_mtu(ip: str) -> int:
    """Return the largest packet that the first link to an address carries."""
    words = run_tool("ip", "-oneline", "route", "get", ip).split()
    if "mtu" in words:
        return int(words[words.index("mtu") + 1])
    device = words[words.index("dev") + 1]
    link = run_tool("ip", "-oneline", "link", "show", "dev", device).split()
    return int(link[link.index("mtu") + 1])


def handshakes() -> dict[str, Any]:
    """Return the public keys of the peers with which keys were exchanged."""
    keys = []
    for line in run_tool("wg", "show", INTERFACE, "latest-handshakes").splitlines():
        key, seconds = line.split()
        if seconds != "0":
            keys.append(key)
    return {"public_keys": keys}


def take_down(network: str) -> dict[str, Any]:
    """End the interface of a network, and forget its key; not another network's."""
    ended = is_up()
    record = read_record()
    if ended and (record is None or record["id"] != network):
        return {"ended": False}
    if ended:
        run_tool("ip", "link", "delete", "dev", INTERFACE)
    forget_network()
    return {"ended": ended}


SECURE_QUESTIONS = (look, make_key, bring_up, handshakes, take_down)


if __name__ == "__main__":
    answer_questions(SECURE_QUESTIONS, refused=(OSError, subprocess.TimeoutExpired))
