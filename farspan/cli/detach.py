"""A job in a process of its own session: started, waited for until it trains, and left to
itself."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from farspan.app import jobs
from farspan.cli.console import Console
from farspan.cli.paint import width
from farspan.domain.escapes import shell_word
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.results import Finished, Step, decoded
from farspan.domain.run import RunFolder


def takes_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detach",
        action="store_true",
        help="train in a process of its own, which outlives this terminal",
    )


def detached(words: Sequence[object], run: RunFolder, console: Console) -> None:
    """Start `farspan WORDS...`, which trains `run`, show what it says until it has made a step, and
    leave it alone.

    What it refuses before is refused here. Ctrl-C stops it until then.
    """
    from farspan.launch.trust import require_own_links

    if run.plan.exists() and "--trust" not in words:
        require_own_links(run)
    log = jobs.log_file(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    position = run.events.stat().st_size if run.events.exists() else 0
    # The log is opened twice: it may move into the run's folder while it is written and read.
    with open_own(log, "ab", private=True) as taking, open(log, errors="replace") as said:
        said.seek(0, os.SEEK_END)
        with tempfile.TemporaryFile() as answer:
            job = _started(words, answer, taking)
            trains = _waited(
                job, lambda: _trains(run, job.pid, position), lambda: _echo(said, console)
            )
            if not trains:
                answer.seek(0)
                _ended(job, answer.read(), run, console)
                return
    console.say(f"\nthe job goes on without this terminal, as process {job.pid}")
    for what, line in (
        ("status", ("status",)),
        ("progress", ("logs", "-f")),
        ("end it", ("stop",)),
    ):
        console.say(f"  {what:<9} {command(*line, run.path)}")
    console.answer({"run": str(run.path), "job": jobs.job_of(run)})


def _started(words: Sequence[object], answer: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the job's process. Its output goes to the log, and its result or problem, as one
    object, to `answer`."""
    return subprocess.Popen(
        module_command(sys.executable, "farspan", *map(str, words), "--json"),
        stdin=subprocess.DEVNULL,
        stdout=answer,
        stderr=log,
        start_new_session=True,
        env={**os.environ, "COLUMNS": str(width())},
    )


def _trains(run: RunFolder, pid: int, position: int) -> bool:
    """Whether the job of this process has made a step since the run's events were so long, and has
    more to do."""
    job = jobs.job_of(run)
    if job is None or job.pid != pid:  # Another's, until this one is refused.
        return False
    kinds = [
        type(event) for event in decoded(jobs.lines(run.events, position=position), run.events)
    ]
    return Step in kinds and Finished not in kinds


def _waited(
    job: subprocess.Popen[bytes], trains: Callable[[], bool], echo: Callable[[], None]
) -> bool:
    """Wait until the job trains; False where it has ended before. Ctrl-C is passed on, and its end
    waited for."""
    asked = False
    while True:
        try:
            # Asked first: what it said before its end is shown, and of its first step soon after
            # that.
            ended = job.poll() is not None
            done = not asked and not ended and trains()
            if not ended:
                time.sleep(jobs.POLL_S)
            echo()
            if ended or done:
                break
        except KeyboardInterrupt:
            asked = True
            job.send_signal(signal.SIGTERM)
    if asked and job.returncode < 0:  # It had not even begun to listen.
        raise KeyboardInterrupt
    return done


def _echo(said: IO[str], console: Console) -> None:
    """Say what the job has said since, but for a refusal, the last that it says: that is raised."""
    while True:
        at = said.tell()
        line = said.readline()
        if not line.endswith("\n") or line.startswith("error["):
            said.seek(at)
            return
        console.say(line[:-1])


def _ended(job: subprocess.Popen[bytes], answer: bytes, run: RunFolder, console: Console) -> None:
    """Answer as a job that has ended, and refuse what it refuses."""
    log = jobs.log_file(run)
    if not answer:
        how = (
            signal.Signals(-job.returncode).name
            if job.returncode < 0
            else f"exit code {job.returncode}"
        )
        raise Refusal(
            "worker-lost",
            what="the job ended without a word",
            where=log,
            fact=f"ended by {how}",
            remedy=f"tail {shell_word(log)}",
        )
    jobs.planning_log(run).unlink(missing_ok=True)  # Of a run that was not made: it has been shown.
    result: dict[str, Any] = msgspec.json.decode(answer)
    if "problem" not in result:
        console.answer(result)
        return
    problem = msgspec.convert(result["problem"], Problem)
    if problem.code == "interrupted" and not run.plan.exists():
        raise KeyboardInterrupt  # Its own words are not those of this command.
    raise Refusal.of(problem)
