"""What starts a job again without a person: a unit of systemd and a line of cron, for
`farspan train --until-done`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from farspan.app.jobs import STOP_TIMEOUT_S
from farspan.domain.escapes import shell_line
from farspan.domain.interpreter import module_command
from farspan.domain.problems import EXIT_CODES

#: What another start may find mended: a crash and a kill are systemd's own `on-abnormal`.
RETRIED = ("run-busy", "host-unreachable", "preempted")
#: Variables that say where farspan and those that it uses keep their files.
PASSED_VARIABLES = ("FARSPAN_CACHE", "HF_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "PATH")


def job_command(words: Sequence[object]) -> list[str]:
    """Return the command of a job, as it can be started from anywhere."""
    return module_command(sys.executable, "farspan", *map(str, words))


def systemd_unit(name: str, words: Sequence[object]) -> str:
    """Write a unit of the user's own systemd for a job."""
    unit = unit_name(name)
    variables = [
        f"Environment={_systemd_word(f'{variable}={os.environ[variable]}')}"
        for variable in PASSED_VARIABLES
        if variable in os.environ
    ]
    quoted = [_systemd_word(word).replace("$", "$$") for word in job_command(words)]
    command = " ".join(quoted)
    codes = " ".join(str(EXIT_CODES[code]) for code in RETRIED)
    lines = [
        f"# ~/.config/systemd/user/{unit}",
        "# systemctl --user daemon-reload",
        f"# systemctl --user enable --now {unit}",
        "# loginctl enable-linger          (it starts with the machine, without a login)",
        "[Unit]",
        f"Description=farspan trains {name}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=30",
        "",
        "[Service]",
        f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}",
        *variables,
        f"ExecStart={command}",
        "# The supervisor alone gets the signal: it has its workers save.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_TIMEOUT_S:.0f}",
        "# After a crash, a kill, or a host that is away. Not after a stop, nor a refusal.",
        "Restart=on-abnormal",
        f"RestartForceExitStatus={codes}",
        f"SuccessExitStatus={EXIT_CODES['interrupted']}",
        "RestartSec=30",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def cron_lines(name: str, words: Sequence[object]) -> str:
    """Write the lines of a crontab for a job: at the machine's start, and every ten minutes in case
    it was killed. cron knows no stop: a job that was stopped begins again, too."""
    log = shell_line(Path.cwd() / f"{_plain(name)}.cron.log")
    command = f"cd {shell_line(Path.cwd())} && {shell_line(*job_command(words))} >>{log} 2>&1"
    command = command.replace("%", r"\%")
    head = "# crontab -e   (take both lines out to stop the run: cron begins it again)"
    return f"{head}\n@reboot {command}\n*/10 * * * * {command}\n"


def unit_name(name: str) -> str:
    return f"farspan-{_plain(name)}.service"


def _plain(name: str) -> str:
    """Return a name of letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "run"


def _systemd_word(word: str) -> str:
    """Quote a word of a unit: systemd reads C's escapes and `%`, and `$` in commands."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("%", "%%")}"'
