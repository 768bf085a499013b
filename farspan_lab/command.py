"""Several sites on this one machine, with real network stacks and the links between them that you
ask for.

farspan lab up lab.yaml              make them; or one that ships with farspan:
                                     farspan lab up fabric/gat-amst
farspan lab exec SITE -- COMMAND     run a command in a site
farspan lab link SITE SITE --down    change a link while jobs run
farspan lab down                     remove every trace
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.domain.problems import Refusal, command
from farspan.domain.units import counted, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from farspan_lab.lab import Status

HELP = "emulate several sites on this machine"
#: Files of a folder that say which lab is meant there.
RUN_FILE = Path("run.yaml")
LAB_FILE = Path("lab.yaml")
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
        action.add_argument(
            "--lab",
            metavar="NAME",
            help="which lab (default: that of run.yaml or lab.yaml here, or the only one)",
        )


def run(given: argparse.Namespace, console: Console) -> None:
    {"up": up, "status": status, "exec": execute, "link": link, "down": down}[given.action](
        given, console
    )


def up(given: argparse.Namespace, console: Console) -> None:
    from farspan_lab import spec, state

    lab_status = state.up(spec.load_lab(given.file))
    show(lab_status, console)
    name = lab_status.lab.name
    # Where others are up, or the folder names another, a lab is not chosen without its name.
    is_chosen = state.names() == [name] and named_here()[1] in (None, name)
    option = () if is_chosen else ("--lab", name)
    inside = command("lab", "exec", *option, lab_status.lab.sites[0].name, "--", "COMMAND")
    console.write_line(f"next: {inside}, and at the end: {command('lab', 'down', *option)}")


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
    console.write_line(f"lab {name} is gone")
    console.answer({"lab": name})


def chosen(given: argparse.Namespace) -> str:
    """Return the lab that was named, else the one that the run.yaml or lab.yaml here names, else
    the only one. Raises Refusal (path-missing) where none is up, or where several are and none is
    named."""
    from farspan_lab import state

    if given.lab is not None:
        return str(given.lab)
    labs = state.names()
    file, name = named_here()
    if name in labs:
        return str(name)
    if name is None and len(labs) == 1:
        return labs[0]
    rest = (given.site, "--", *given.command) if given.action == "exec" else ()
    raise Refusal(
        "path-missing",
        what=_which(name, labs),
        where="--lab" if name is None else str(file),
        fact=f"labs here: {', '.join(labs) or 'none'}",
        remedy=" or ".join(command("lab", given.action, "--lab", lab, *rest) for lab in labs)
        or command("lab", "up", LAB_FILE if file == LAB_FILE else "fabric/gat-amst"),
    )


def _which(name: str | None, labs: list[str]) -> str:
    """Return what is wrong where no lab can be chosen."""
    if name is not None:
        return f"the lab {name!r} is not up"
    return "several labs are up, and none is named" if labs else "there is no lab"


def named_here() -> tuple[Path, str | None]:
    """Return the file of the current folder that names a lab, and the name: a run.yaml whose
    cluster is one, or a lab.yaml."""
    from farspan.domain.struct_files import load_yaml, parse_yaml, read_bytes
    from farspan_lab.spec import LabFile

    if RUN_FILE.is_file():
        # Of a run.yaml only this counts here: the rest of it may be wrong.
        content = parse_yaml(read_bytes(RUN_FILE).decode(errors="replace"), RUN_FILE)
        parallel = content.get("parallel") if isinstance(content, dict) else None
        cluster = parallel.get("cluster") if isinstance(parallel, dict) else None
        prefix, colon, name = str(cluster).partition(":")
        if prefix == "lab" and colon:
            return RUN_FILE, name
    if LAB_FILE.is_file():
        return LAB_FILE, load_yaml(LAB_FILE, LabFile).name
    return RUN_FILE, None


def show(status: Status, console: Console) -> None:
    lab = status.lab
    console.write_line(
        f"lab {lab.name}: up for {format_seconds(status.up_s)}; relay: "
        f"{status.relay_cpu_s / status.up_s:.1%} of a core"
        f"{'' if status.realtime else ', without priority'}; TCP: {lab.congestion}, window "
        f"{format_bytes(lab.window)}"
    )
    for site in lab.sites:
        console.write_line(f"{site.name}, {site.address}")
        for index, device in enumerate(site.devices):
            speed = (
                f"speed {device.speed:.3g} x {device.cores}"
                if device.speed
                else "no limit of speed"
            )
            memory = format_bytes(device.memory) if device.memory else "no limit of memory"
            console.write_line(
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
        console.write_line(f"{link.source} > {link.target}: {', '.join(is_now)}; {path}")
    for note in lab.notes:
        console.write_line(f"note: {note}")
    console.answer(status)
