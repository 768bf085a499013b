"""The `farspan` command; `python -m farspan` where it is not on the path."""

import sys

#: What farspan runs on, as pyproject.toml has it: the oldest version, and the first too new.
OLDEST_PYTHON = (3, 11, 4)
NEWER_PYTHON = (3, 14)
#: Exit codes of `farspan.domain.problems`, which cannot be imported where they are needed here.
VERSION_MISMATCH = 38
EXTRA_MISSING = 23


def refuse_python() -> None:
    """End on a Python that farspan does not run on, before anything is imported that this one
    cannot read."""
    version = sys.version_info[:3]
    if OLDEST_PYTHON <= version < NEWER_PYTHON:
        return
    sys.stderr.write(
        "error[version-mismatch]: this Python cannot run farspan\n"
        "  where: {}\n"
        "  fact:  it is Python {}.{}.{}; farspan needs 3.11.4 or newer, up to 3.13\n"
        "  fix:   python3.12 -m farspan --help\n".format(sys.executable, *version)
    )
    raise SystemExit(VERSION_MISMATCH)


def refuse_bare_clone(error: ImportError) -> None:
    """End where farspan lies in a clone whose libraries this Python does not have: what writes
    problems needs them too."""
    from importlib.util import find_spec
    from pathlib import Path
    from shlex import quote

    root = Path(__file__).resolve().parents[1]
    if find_spec("msgspec") is not None or not (root / "constraints.txt").is_file():
        return
    constraints = quote(str(root / "constraints.txt"))
    sys.stderr.write(
        "error[extra-missing]: farspan is not installed for this Python\n"
        f"  where: {sys.executable}\n"
        f"  fact:  {error}\n"
        f"  fix:   {quote(sys.executable)} -m pip install -c {constraints} -e {quote(str(root))}\n"
    )
    raise SystemExit(EXTRA_MISSING)


def main() -> int:
    """Run the command line; returns the process's exit code."""
    import signal
    import threading

    # Until it can answer Ctrl-C in words, Ctrl-C just ends the process: no traceback out of the
    # middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from farspan.cli.console import print_thread_traceback, print_traceback
        from farspan.cli.main import main as command_line
        from farspan.domain.library_messages import escape_library_messages
    except ModuleNotFoundError as error:
        refuse_bare_clone(error)
        raise

    # What farspan itself does not print may quote documents and names too.
    sys.excepthook = print_traceback
    threading.excepthook = print_thread_traceback
    escape_library_messages()
    return command_line()


if __name__ == "__main__":
    refuse_python()
    # `python -m` puts the current folder first, where a user's file may be called as a module is.
    # It stays only if farspan itself was found there.
    if not sys.flags.safe_path and __file__ != f"{sys.path[0]}/farspan/__main__.py":
        del sys.path[0]
    raise SystemExit(main())
