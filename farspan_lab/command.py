"""Several sites on this one machine, with real network stacks and the links between them that you
ask for.

farspan lab up lab.yaml              make them; or one that ships with farspan: farspan lab up
fabric/gat-amst farspan lab exec SITE -- COMMAND     run a command in a site farspan lab link SITE
SITE --down    change a link while jobs run farspan lab down                     remove every trace
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.units import counted, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from farspan_lab.lab import Status

HELP = "emulate several sites on this machine"
#: Options that change a link: what each takes, and what that is.
QUANTITIES = {
    "rtt": ("TIME", "round trip"),
    "jitter": ("TIME", "by which delays differ"),
    "bandwidth": ("RATE", "of each direction, or none for no cap"),
    "loss": ("SHARE", "of the packets"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="make a lab and leave it up")
    up.add_argument(
        "file", metavar="LAB.YAML", help="a file, or the name of a lab that ships with farspan"
    )
    status = actions.add_parser("status", help="sites, devices, links and what they carried")
    inside = actions.add_parser("exec", help="run a command in a site")
    inside.add_argument("site", metavar="SITE", help="where to run it")
    inside.add_argument(
        "--device", type=int, metavar="N", help="as this device, with its speed and memory"
    )
    inside.add_argument(
        "command", metavar="COMMAND", nargs="+", help="the command and its arguments"
    )
    link = actions.add_parser("link", help="change a link while jobs run")
    link.add_argument("between", metavar="SITE", nargs=2, help="the two sites that it joins")
    switch = link.add_mutually_exclusive_group()
    switch.add_argument("--down", dest="up", action="store_const", const=False, help="cut it")
    switch.add_argument("--up", action="store_const", const=True, help="mend it")
    for key, (metavar, what) in QUANTITIES.items():
        link.add_argument(f"--{key}", metavar=metavar, help=what)
    link.add_argument(
        "--one-way", action="store_true", help="only from the first site to the second"
    )
    down = actions.add_parser("down", help="remove every trace of a lab, also of one that crashed")
    for action in (status, inside, link, down):
        action.add_argument("--lab", metavar="NAME", help="which lab (default: the only one)")


def run(given: argparse.Namespace, console: Console) -> None:
    {"up": up, "status": status, "exec": execute, "link": link, "down": down}[given.action](
        given, console
    )


def up(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import spec, state

    lab_status = state.up(spec.load_lab(given.file))
    show(lab_status, console)
    console.say(
        f"next: farspan lab exec {lab_status.lab.sites[0].name} -- COMMAND, and at the end: "
        "farspan lab down"
    )


def status(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import state

    show(state.status(chosen(given)), console)


def execute(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import state

    words = [*state.enter(state.status(chosen(given)), given.site, given.device), *given.command]
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # Python ignores it, and the command would inherit that.
    os.execvp(words[0], words)


def link(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import spec, state

    wanted = {key: value for key in QUANTITIES if (value := getattr(given, key)) is not None}
    values = spec.link_values(wanted, f"link {' '.join(given.between)}")
    if given.up is not None:
        values["up"] = given.up
    if not values:
        raise Refusal(
            "usage",
            what="nothing to change",
            where="farspan lab link",
            fact="no option says what",
            remedy="farspan lab link --help",
        )
    show(state.change(chosen(given), given.between, values, one_way=given.one_way), console)


def down(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import state

    name = chosen(given)
    state.down(name)
    console.say(f"lab {name} is gone")
    console.answer({"lab": name})


def chosen(given: argparse.Namespace) -> str:
    """The lab that was named, or the only one."""
    from farspan_lab import state

    labs = state.names()
    if given.lab is None and len(labs) != 1:
        raise Refusal(
            "path-missing",
            what="which lab?" if labs else "there is no lab",
            where="--lab",
            fact=f"labs here: {', '.join(labs) or 'none'}",
            remedy=f"--lab {shell_word(labs[0])}" if labs else "farspan lab up fabric/gat-amst",
        )
    return str(given.lab or labs[0])


def show(status: Status, console: Console) -> None:
    lab = status.lab
    console.say(
        f"lab {lab.name}: up for {format_seconds(status.up_s)}; relay: "
        f"{status.relay_cpu_s / status.up_s:.1%} of a core"
        f"{'' if status.realtime else ', without priority'}; TCP: {lab.congestion}, window "
        f"{format_bytes(lab.window)}"
    )
    for site in lab.sites:
        console.say(f"{site.name}, {site.address}")
        for index, device in enumerate(site.devices):
            speed = (
                f"speed {device.speed:.3g} x {device.cores}"
                if device.speed
                else "no limit of speed"
            )
            memory = format_bytes(device.memory) if device.memory else "no limit of memory"
            console.say(
                f"  device {index}: {speed}, {memory}, on cores {', '.join(map(str, device.cpus))}"
            )
    for link, traffic in zip(lab.links, status.traffic, strict=True):
        is_now = [
            f"{link.delay_s * 1e3:.4g} ms one way",
            f"jitter {link.jitter_s * 1e3:.3g} ms",
            f"loss {link.loss:.3g}",
            format_rate(link.bandwidth) if link.bandwidth else "no cap",
            "up" if link.up else "DOWN",
        ]
        carried = (
            f"{format_bytes(traffic.bytes)} in {counted(traffic.packets, 'packet')}, "
            f"{traffic.dropped} dropped"
        )
        path = carried if traffic.relayed else "past the relay, not counted"
        console.say(f"{link.source} > {link.target}: {', '.join(is_now)}; {path}")
    for note in lab.notes:
        console.say(f"note: {note}")
    console.answer(status)
