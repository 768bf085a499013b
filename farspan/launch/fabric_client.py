"""Questions to the FABRIC testbed: a conversation with `fabric_process.py`, under an interpreter
that has fablib, and refusals of what it cannot answer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_line
from farspan.domain.install import install_command
from farspan.domain.interpreter import SAFE_PATH
from farspan.domain.problems import Refusal
from farspan.domain.run import make_cache_folder

T = TypeVar("T")
#: The extra with fablib, its distribution, and the variable that names another interpreter which
#: has it.
FABRIC_EXTRA = "fabric"
FABLIB = "fabrictestbed-extensions==2.0.9"
PYTHON_VARIABLE = "FARSPAN_FABRIC_PYTHON"
#: A question takes a dozen requests of 30 s at most, and fablib some seconds to load.
FABRIC_ANSWER_S = 300.0
#: The user's part, by the kinds of faults that `fabric_process.py` tells apart: what is refused,
#: and the command that mends it.
FAULTS = {
    "no-token": ("there are no credentials for FABRIC", "fabric-cli tokens create"),
    "expired": ("the credentials for FABRIC have expired", "fabric-cli tokens create"),
    "no-keys": ("there is no key for the VMs of a slice", "fabric-cli configure setup"),
    "configuration": ("fablib is not configured", "fabric-cli configure setup"),
    "refused": (
        "FABRIC refuses this",
        "see https://portal.fabric-testbed.net/projects",
    ),
    "unreachable": ("FABRIC does not answer", "curl -sI https://orchestrator.fabric-testbed.net"),
    "no-slice": ("there is no such slice", "fabric-cli slices list"),
    "recorded": ("this needs the testbed itself", "leave out --resources"),
    "no-resources": (
        "this file holds no summary of FABRIC's resources",
        "curl -o FILE 'https://orchestrator.fabric-testbed.net/portalresources/summary?level=2'",
    ),
    "other": ("fablib has failed", "fabric-cli slices list"),
}


class FabricProcess:
    """The process, for the time of a `with`; one that has ended is started again by a question.

    With `recorded`, a file with a summary of resources, it asks nobody.
    """

    def __init__(self, recorded: Path | None = None) -> None:
        self._recorded = recorded
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FabricProcess:
        self._python = _find_python()
        self._printed = tempfile.TemporaryFile()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._printed.close()

    def ask(self, question: str, kind: type[T], **values: object) -> T:
        """Return the answer to a question, a method of `fabric_process.Testbed`. Raises Refusal."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(FABRIC_ANSWER_S, process.kill)
        watchdog.start()
        line = b""
        try:
            process.stdin.write(msgspec.json.encode({"ask": question, **values}) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            watchdog.cancel()
            # After an interrupt too: its answer would be taken for that to the next question.
            if not line:
                self._end()
        if not line:
            raise self._explain_end()
        answer = msgspec.json.decode(line)
        if "fault" in answer:
            raise self._explain_fault(answer["fault"])
        return convert_value(answer["answer"], kind)

    def _start(self) -> subprocess.Popen[bytes]:
        program = str(resources.files("farspan.launch") / "fabric_process.py")
        words = [self._python, "-P", program, str(make_cache_folder("fabric"))]
        if self._recorded is not None:
            words.append(str(self._recorded.absolute()))
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env={**os.environ, **SAFE_PATH},
                # Ctrl-C must not end what deletes a slice.
                start_new_session=True,
            )
        except OSError as error:
            raise self._lacks_fablib(f"{error.strerror}") from None
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _explain_fault(self, fault: dict[str, str]) -> Refusal:
        if "No module named" in fault["fact"]:
            return self._lacks_fablib(fault["fact"])
        what, remedy = FAULTS[fault["kind"]]
        code = "path-missing" if fault["kind"] == "no-slice" else "fabric-unusable"
        return Refusal(code, what=what, where="FABRIC", fact=fault["fact"], remedy=remedy)

    def _explain_end(self) -> Refusal:
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace").strip().splitlines()
        return Refusal(
            "fabric-unusable",
            what="the process that asks FABRIC has ended",
            where=f"{self._python}, farspan/launch/fabric_process.py",
            fact=printed[-1][:400] if printed else f"no answer within {FABRIC_ANSWER_S:.0f} s",
            remedy="curl -sI https://orchestrator.fabric-testbed.net",
        )

    def _lacks_fablib(self, fact: str) -> Refusal:
        remedy = install_command(FABRIC_EXTRA)
        if self._python != sys.executable:
            remedy = shell_line(self._python, "-m", "pip", "install", FABLIB)
        return Refusal(
            "extra-missing",
            what="fablib, the client of FABRIC, is missing",
            where=self._python,
            fact=fact,
            remedy=remedy,
        )


def _find_python() -> str:
    """Return the interpreter that has fablib: the one that the user names, or this one."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return named
    if find_spec("fabrictestbed_extensions") is None:
        raise Refusal(
            "extra-missing",
            what="fablib, the client of FABRIC, is missing",
            where=sys.executable,
            fact=f"it brings some 50 packages; {PYTHON_VARIABLE} names another Python with it",
            remedy=install_command(FABRIC_EXTRA),
        )
    return sys.executable
