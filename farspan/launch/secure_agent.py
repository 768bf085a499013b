"""The agent that `farspan cluster secure` runs on a host, as root: it makes and ends an interface
of WireGuard, one JSON line each way.

Sent there as text and run by whatever Python is there: standard library only, written for Python
3.7. Questions are `{"do": NAME, ...}`. It ends with its standard input; the interface stays until
it is ended or the machine is. The host's private key never leaves it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Root's alone, and gone after a restart of the machine, as interfaces are.
KEY_FOLDER = Path("/run/farspan-wireguard")
#: Interfaces that farspan has made: no other is ever touched.
OWN_INTERFACE = re.compile(r"farspan\d+\Z")
#: A command that sets an interface takes no longer.
COMMAND_TIMEOUT_S = 20.0
#: Packets of 1,500 bytes less those of WireGuard over IPv6, as wg-quick(8) has it.
MTU = 1420
#: Seconds between packets that keep routers from forgetting a path: wireguard.com/quickstart.
KEEPALIVE_S = 25
#: Paths of users may lack the folders of administrators' tools.
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def hello() -> dict[str, Any]:
    return {}


def look() -> dict[str, Any]:
    """Return the user, missing tools, farspan's interfaces, and the networks of other routes."""
    missing = [name for name in ("ip", "wg") if find_tool(name) is None]
    return {
        "user": os.geteuid(),
        "missing": missing,
        "interfaces": own_interfaces(),
        "networks": [] if missing else list_networks(),
    }


def list_networks() -> list[str]:
    """Return the networks and addresses of all routes, but for those of farspan's interfaces."""
    networks = []
    for line in run_tool("ip", "-4", "route", "show", "table", "all").splitlines():
        words = line.split()
        device = words[words.index("dev") + 1] if "dev" in words else ""
        if not OWN_INTERFACE.match(device):
            # The first words may be a kind of route: local, broadcast, unreachable.
            networks += [word for word in words[:2] if re.match(r"\d+\.", word)][:1]
    return networks


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=TOOL_PATH)


def own_interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex() if OWN_INTERFACE.match(name)]


def run_tool(name: str, *words: str, text: str = "") -> str:
    """Run a tool with `text` as its input; return its output. Raises OSError with its words."""
    path = find_tool(name)
    if path is None:
        raise OSError(0, name + " is not installed")
    done = subprocess.run(
        [path, *words],
        input=text.encode(),
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode:
        printed = done.stderr.decode(errors="replace").strip()
        raise OSError(0, f"{name} {' '.join(words)}: {printed or done.returncode}")
    return done.stdout.decode().strip()


def make_key(interface: str) -> dict[str, Any]:
    """Make the host's key, where there is none yet; return its public half."""
    KEY_FOLDER.mkdir(mode=0o700, exist_ok=True)
    path = key_path(interface)
    # There is none, or it was half written when power was lost.
    with suppress(OSError):
        return {"public_key": run_tool("wg", "pubkey", text=path.read_text())}
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(run_tool("wg", "genkey"))
    return {"public_key": run_tool("wg", "pubkey", text=path.read_text())}


def key_path(interface: str) -> Path:
    if not OWN_INTERFACE.match(interface):
        raise ValueError("not an interface of farspan: " + interface)
    return KEY_FOLDER / f"{network_namespace()}-{interface}.key"


def network_namespace() -> int:
    """Return the number of this network namespace: each has interfaces of its own."""
    return Path("/proc/self/ns/net").stat().st_ino


def bring_up(
    interface: str, address: str, port: int, peers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Make the interface, or give the one that is there these peers."""
    private_key = key_path(interface).read_text()
    lines = ["[Interface]", f"PrivateKey = {private_key}", f"ListenPort = {port}"]
    for peer in peers:
        lines += ["[Peer]", f"PublicKey = {peer['public_key']}"]
        lines += [f"AllowedIPs = {peer['address']}/32", f"PersistentKeepalive = {KEEPALIVE_S}"]
        # A peer whose name is not known here has to call first.
        with suppress(OSError):
            lines.append(f"Endpoint = {resolve(peer['host'], peer['port'])}")
    is_new = interface not in own_interfaces()
    if is_new:
        make_interface(interface)
    try:
        run_tool("wg", "setconf", interface, "/dev/stdin", text="\n".join([*lines, ""]))
        run_tool("ip", "address", "replace", address, "dev", interface)
        run_tool("ip", "link", "set", "mtu", str(MTU), "up", "dev", interface)
    except OSError:
        if is_new:
            with suppress(OSError):
                run_tool("ip", "link", "delete", "dev", interface)
        raise
    return {}


def make_interface(interface: str) -> None:
    """Make it by the kernel, or by wireguard-go where the kernel knows none."""
    try:
        run_tool("ip", "link", "add", "dev", interface, "type", "wireguard")
    except OSError as error:
        if find_tool("wireguard-go") is None:
            raise OSError(0, f"{error.strerror}; wireguard-go is not installed") from None
        run_tool("wireguard-go", interface)


def resolve(host: str, port: int) -> str:
    """Return an address and port as wg reads them."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    ip = address[0]
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def take_down() -> dict[str, Any]:
    """End farspan's interfaces, and forget their keys."""
    ended = own_interfaces()
    for interface in ended:
        run_tool("ip", "link", "delete", "dev", interface)
    for path in KEY_FOLDER.glob(f"{network_namespace()}-*.key"):
        path.unlink()
    return {"ended": ended}


SECURE_QUESTIONS = (hello, look, make_key, bring_up, take_down)


def main() -> None:
    functions = {function.__name__: function for function in SECURE_QUESTIONS}
    for line in sys.stdin.buffer:
        question = json.loads(line.decode())
        try:
            answer = functions[question.pop("do")](**question)
        except (OSError, subprocess.TimeoutExpired) as error:
            answer = {"refused": getattr(error, "strerror", None) or str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
