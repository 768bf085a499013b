"""The `farspan` command; `python -m farspan` where it is not on the path."""

import sys


def main() -> int:
    """Run the command line; returns the process's exit code."""
    import signal
    import threading

    # Until it can answer Ctrl-C in words, Ctrl-C just ends the process: no traceback out of the
    # middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from farspan.cli.console import print_thread_traceback, print_traceback
    from farspan.cli.main import main as command_line
    from farspan.domain.library_messages import escape_library_messages

    # What farspan itself does not print may quote documents and names too.
    sys.excepthook = print_traceback
    threading.excepthook = print_thread_traceback
    escape_library_messages()
    return command_line()


if __name__ == "__main__":
    # `python -m` puts the current folder first, where a user's file may be called as a module is.
    # It stays only if farspan itself was found there.
    if not sys.flags.safe_path and __file__ != f"{sys.path[0]}/farspan/__main__.py":
        del sys.path[0]
    raise SystemExit(main())
