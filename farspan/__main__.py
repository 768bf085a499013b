"""The `farspan` command; `python -m farspan` where it is not on the path."""

import signal


def main() -> int:
    """Run the command line; returns the process's exit code."""
    # Until it can answer Ctrl-C in words, Ctrl-C just ends the process: no traceback out of the
    # middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from farspan.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    raise SystemExit(main())
