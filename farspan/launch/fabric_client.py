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

from farspan.domain.escapes import shell_line
from farspan.domain.install import install_command
from farspan.domain.interpreter import SAFE_PATH
from farspan.domain.problems import Refusal
from farspan.domain.run import make_cache_folder

T = TypeVar("T")
#: The extra with fablib, its distribution, and the variable that names another interpreter which
#: has it.
EXTRA = "fabric"
FABLIB = "fabrictestbed-extensions==2.0.9"
PYTHON_VARIABLE = "FARSPAN_FABRIC_PYTHON"
#: A question takes a dozen requests of 30 s at most, and fablib some seconds to load.
ANSWER_S = 300.0
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
    """The process, for the time of a `with`. With `recorded`, a file with a summary of resources,
    it asks nobody."""

    def __init__(self, recorded: Path | None = None) -> None:
        self._recorded = recorded
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FabricProcess:
        self._python = _find_python()
        self._words = tempfile.TemporaryFile()
        program = str(resources.files("farspan.launch") / "fabric_process.py")
        words = [self._python, "-P", program, str(make_cache_folder("fabric"))]
        if self._recorded is not None:
            words.append(str(self._recorded.absolute()))
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env={**os.environ, **SAFE_PATH},
                # Ctrl-C must not end what deletes a slice.
                start_new_session=True,
            )
        except OSError as error:
            raise self._lacks_fablib(f"{error.strerror}") from None
        return self

    def __exit__(self, *error: object) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        process.kill()
        process.communicate()
        self._words.close()

    def ask(self, question: str, kind: type[T], seconds: float = ANSWER_S, **values: object) -> T:
        """Return the answer to a question, a method of `fabric_process.Testbed`. Raises Refusal."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.start()
        try:
            process.stdin.write(msgspec.json.encode({"ask": question, **values}) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            watchdog.cancel()
        if not line:
            raise self._explain_end()
        answer = msgspec.json.decode(line)
        if "fault" in answer:
            raise self._explain_fault(answer["fault"])
        return msgspec.convert(answer["answer"], kind)

    def _explain_fault(self, fault: dict[str, str]) -> Refusal:
        if "No module named" in fault["fact"]:
            return self._lacks_fablib(fault["fact"])
        what, remedy = FAULTS[fault["kind"]]
        code = "path-missing" if fault["kind"] == "no-slice" else "fabric-unusable"
        return Refusal(code, what=what, where="FABRIC", fact=fault["fact"], remedy=remedy)

    def _explain_end(self) -> Refusal:
        self._words.seek(0)
        printed = self._words.read().decode(errors="replace").strip().splitlines()
        return Refusal(
            "fabric-unusable",
            what="the process that asks FABRIC has ended",
            where=f"{self._python}, farspan/launch/fabric_process.py",
            fact=printed[-1][:400] if printed else f"no answer within {ANSWER_S:.0f} s",
            remedy="curl -sI https://orchestrator.fabric-testbed.net",
        )

    def _lacks_fablib(self, fact: str) -> Refusal:
        remedy = install_command(EXTRA)
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
            remedy=install_command(EXTRA),
        )
    return sys.executable
