"""The agent that `farspan cluster up` runs on a host: it makes farspan's own Python environment
there, one JSON line each way.

Sent there as text and run by whatever Python is there: standard library only, written for Python
3.7. Questions are `{"do": NAME, ...}`; after `receive` the bytes of a file follow. The environment
is locked as long as this process lives, and it ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from farspan.launch.agent_loop import answer_questions

#: Proves that farspan made the folder: nothing without it is ever written to or removed.
OWNER = "farspan-environment"
READY = "ready.json"
#: Interpreters that are looked for besides the host's own, the newest last: `up` prefers the one
#: that is like its own.
CANDIDATES = ("python3.11", "python3.12", "python3.13")
#: A program that imports PyTorch from a slow disk ends within this.
CALL_TIMEOUT_S = 240.0
RECEIVE_BYTES = 1 << 20
LAST_LINES = 30


class Installation:
    """An installation under way: commands, one after another, in the background."""

    def __init__(self, commands: list[list[str]], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.code: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        work = threading.Thread(target=self.run, args=(commands, environment), daemon=True)
        work.start()

    def run(self, commands: list[list[str]], environment: dict[str, str]) -> None:
        code = 0
        for command in commands:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                self.lines.append(f"{command[0]}: {error.strerror}")
                code = 1
                break
            assert self.process.stdout is not None
            for line in self.process.stdout:
                text = line.decode(errors="replace").strip()
                if text:
                    self.lines.append(text)
                    del self.lines[:-LAST_LINES]
            code = self.process.wait()
            if code:
                break
        self.code = code

    def stop(self) -> None:
        """End the command that runs, with all that it has started."""
        if self.process is not None and self.process.poll() is None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGTERM)


#: The lock's file, and the installation under way: at most one of each.
LOCKS: list[IO[bytes]] = []
INSTALLATIONS: list[Installation] = []


def look(base: str) -> dict[str, Any]:
    """Report the environment's folder and its disk."""
    folder = Path(base).expanduser()
    is_own = (folder / OWNER).is_file()
    ready = read_json(folder / READY) if is_own else None
    python = str(folder / "venv" / "bin" / "python")
    is_usable = ready is not None and run_program([python, "-c", "import msgspec"])[0] == 0
    parent = folder
    while not parent.exists():
        parent = parent.parent
    is_foreign = not is_own and folder.exists() and any(folder.iterdir())
    is_writable = os.access(str(parent), os.W_OK)
    disk_free = shutil.disk_usage(str(parent)).free
    return {
        "folder": str(folder),
        "is_own": is_own,
        "is_foreign": is_foreign,
        "ready": ready,
        "is_usable": is_usable,
        "is_writable": is_writable,
        "disk_free": disk_free,
        "packages": own_packages(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def list_pythons() -> dict[str, Any]:
    """Return the interpreters that an environment may be made of, this one first."""
    paths = filter(None, [sys.executable, *map(shutil.which, CANDIDATES)])
    return {"pythons": [describe_python(path) for path in dict.fromkeys(paths)]}


def own_packages() -> dict[str, str]:
    """Return the versions of farspan and PyTorch that this interpreter has."""
    versions = {}
    with suppress(ImportError):
        from importlib import metadata

        for name in ("farspan", "torch"):
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions


def describe_python(path: str) -> dict[str, Any]:
    """Return an interpreter's version, and why it can make no environment, if so."""
    program = "import platform; print(platform.python_version(), flush=True); import venv, ssl"
    code, output = run_program([path, "-c", program])
    lines = output.splitlines()
    fault = lines[-1] if code and lines else ""
    return {"path": path, "version": lines[0] if lines else "", "fault": fault}


def claim(base: str) -> dict[str, Any]:
    """Make the environment's folder, for this user alone, and lock it."""
    import fcntl

    folder = Path(base)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / OWNER).is_file():
        if any(folder.iterdir()):
            return {"is_foreign": True}
        (folder / OWNER).write_text("made by farspan cluster up\n")
    (folder / "wheels").mkdir(mode=0o700, exist_ok=True)
    lock = open(str(folder / "lock"), "ab")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return {"is_locked": True}
    LOCKS.append(lock)
    return {}


def have(base: str, files: dict[str, str]) -> dict[str, Any]:
    """Return the bytes of each file that are there: files go by their SHA-256."""
    sizes = {}
    for name, digest in files.items():
        path = wheel_path(base, name)
        part = part_path(path, digest)
        if path.is_file() and sha256_of(path) != digest:
            path.unlink()
        present = path if path.is_file() else part
        sizes[name] = present.stat().st_size if present.is_file() else 0
    return {"sizes": sizes}


def receive(base: str, name: str, digest: str, size: int, offset: int) -> dict[str, Any]:
    """Read the bytes of a file from `offset` to `size`; keep it if it has that SHA-256.

    What came before a cut stays, and the next `up` sends the rest.
    """
    path = wheel_path(base, name)
    part = part_path(path, digest)
    error = ""
    remaining = size - offset
    with open(str(part), "r+b" if part.exists() else "wb") as file:
        file.seek(offset)
        while remaining:
            piece = sys.stdin.buffer.read(min(remaining, RECEIVE_BYTES))
            if not piece:
                raise SystemExit(1)
            remaining -= len(piece)
            if error:
                continue
            try:
                file.write(piece)
                file.flush()
            except OSError as failure:  # The rest is read all the same: an answer follows it.
                error = failure.strerror or str(failure)
    if error:
        part.unlink()
        return {"is_whole": False, "fault": error}
    if sha256_of(part) != digest:
        part.unlink()
        return {"is_whole": False, "fault": "it arrived with other bytes"}
    os.replace(str(part), str(path))
    return {"is_whole": True}


def wheel_path(base: str, name: str) -> Path:
    if name != Path(name).name or not name.endswith(".whl"):
        raise ValueError("not the name of a wheel: " + name)
    return Path(base) / "wheels" / name


def part_path(path: Path, digest: str) -> Path:
    return path.with_name(f".{digest[:16]}.part")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(str(path), "rb") as file:
        for piece in iter(lambda: file.read(RECEIVE_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def ask_python(python: str, program: str, words: list[str]) -> dict[str, Any]:
    """Run a program with an interpreter there; return the JSON that it prints last, or why it
    failed."""
    # Without the current folder on the path, as -P has it, which is younger than some Pythons.
    safe = "import sys; sys.path[:] = filter(None, sys.path); "
    code, output = run_program([python, "-c", safe + program, *words])
    if code:
        return {"fault": " ".join(output.split())[-300:]}
    return {"printed": json.loads(output.splitlines()[-1])}


def run_program(words: list[str], timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, str]:
    """Run a command; return its exit code and all that it prints."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 1, error.strerror or str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def try_index(
    base: str, python: str, pip: str, options: list[str], requirement: str
) -> dict[str, Any]:
    """Try whether pip gets a small package there from its index; return why not."""
    target = Path(base) / "try"
    words = [python, str(wheel_path(base, pip)) + "/pip", "download", "--no-deps"]
    words += ["--disable-pip-version-check", "--no-input", "--retries", "0", "--timeout", "5"]
    code, output = run_program([*words, *options, "-d", str(target), requirement])
    shutil.rmtree(str(target), ignore_errors=True)
    lines = output.strip().splitlines()
    return {"fault": (lines[-1] if lines else f"exit code {code}") if code else ""}


def begin_installation(
    base: str, python: str, pip: str, options: list[str], wheel: str, extra: str, pins: list[str]
) -> dict[str, Any]:
    """Begin to make the environment, or to bring it up to date; `poll_installation` follows it."""
    folder = Path(base)
    venv = folder / "venv"
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, ""]))
    own_python = str(venv / "bin" / "python")
    is_whole = (folder / READY).is_file() and run_program([own_python, "-c", ""])[0] == 0
    # Without this file what is there counts as half made.
    with suppress(FileNotFoundError):
        (folder / READY).unlink()
    # pip runs from its wheel: Debian's venv module alone has none.
    pip_words = [own_python, str(wheel_path(base, pip)) + "/pip", "install", "--no-input"]
    pip_words += ["--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
    # Python compiles what it imports: pip would compile ten times as much.
    pip_words.append("--no-compile")
    requirement = f"farspan[{extra}] @ {wheel_path(base, wheel).as_uri()}"
    commands = []
    if is_whole:
        # A wheel of the same version may have other code.
        commands.append([*pip_words, "--no-deps", "--force-reinstall", requirement])
    else:
        commands.append([python, "-m", "venv", "--clear", "--without-pip", str(venv)])
    commands.append([*pip_words, "-c", str(constraints), *options, requirement])
    # A build of pip's that needs much space goes where there is some.
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    INSTALLATIONS.append(Installation(commands, {"TMPDIR": str(temporary)}))
    return {}


def poll_installation() -> dict[str, Any]:
    """Return the installation's exit code, None while it runs, and its last lines."""
    under_way = INSTALLATIONS[-1]
    return {"code": under_way.code, "lines": under_way.lines[-LAST_LINES:]}


def finish(base: str, ready: dict[str, Any], wheels: list[str]) -> dict[str, Any]:
    """Mark the environment as whole, and remove what only making it needed."""
    folder = Path(base)
    ready["python"] = str(folder / "venv" / "bin" / "python")
    kept = set(wheels)
    for path in (folder / "wheels").iterdir():
        if path.name not in kept:
            path.unlink()
    shutil.rmtree(str(folder / "tmp"), ignore_errors=True)
    written = folder / (READY + ".new")
    written.write_text(json.dumps(ready))
    os.replace(str(written), str(folder / READY))
    return ready


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


SETUP_QUESTIONS = (
    look,
    list_pythons,
    claim,
    have,
    receive,
    ask_python,
    try_index,
    begin_installation,
    poll_installation,
    finish,
)


if __name__ == "__main__":
    try:
        answer_questions(SETUP_QUESTIONS)
    finally:
        for under_way in INSTALLATIONS:
            under_way.stop()
