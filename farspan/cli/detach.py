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
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from farspan.app import jobs
from farspan.cli.console import Console
from farspan.cli.paint import text_width
from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_word
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Step, decode_events


def takes_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detach",
        action="store_true",
        help="train in a process of its own, which outlives this terminal",
    )


def run_detached(words: Sequence[object], run: RunFolder, console: Console) -> None:
    """Start `farspan WORDS...`, which trains `run`, show its log until it has made a step, and
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
    with open_own(log, "ab", private=True) as writing, open(log, errors="replace") as reading:
        reading.seek(0, os.SEEK_END)
        with tempfile.TemporaryFile() as answer:
            # The job's output goes to the log, and its result or problem, as one object, to
            # `answer`.
            job = subprocess.Popen(
                module_command(sys.executable, "farspan", *map(str, words), "--json"),
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=writing,
                start_new_session=True,
                env={**os.environ, "COLUMNS": str(text_width())},
            )
            if not _wait_until_trains(job, run, position, reading, console):
                answer.seek(0)
                _answer_ended_job(job, answer.read(), run, console)
                return
    console.write_line(f"\nthe job goes on without this terminal, as process {job.pid}")
    console.write_line(f"  status    {command('status', run.path)}")
    console.write_line(f"  progress  {command('logs', '-f', run.path)}")
    console.write_line(f"  end it    {command('stop', run.path)}")
    console.answer({"run": str(run.path), "job": jobs.job_of(run)})


def _is_training(run: RunFolder, pid: int, position: int) -> bool:
    """Whether the job of this process has made a step, and has more to do.

    Only events after `position`, in bytes, are the job's.
    """
    job = jobs.job_of(run)
    if job is None or job.pid != pid:  # Another's, until this one is refused.
        return False
    lines = jobs.follow_lines(run.events, position=position)
    kinds = [type(event) for event in decode_events(lines, run.events)]
    return Step in kinds and Finished not in kinds


def _wait_until_trains(
    job: subprocess.Popen[bytes], run: RunFolder, position: int, log: IO[str], console: Console
) -> bool:
    """Wait until the job trains; return False if it ended first. Ctrl-C is passed on, and its end
    waited for."""
    interrupted = False
    while True:
        try:
            # Polled first: what it printed before its end is shown, and of its first step soon
            # after that.
            ended = job.poll() is not None
            trains = not ended and not interrupted and _is_training(run, job.pid, position)
            if not ended:
                time.sleep(jobs.JOB_POLL_S)
            _echo_log(log, console)
            if ended or trains:
                break
        except KeyboardInterrupt:
            interrupted = True
            job.send_signal(signal.SIGTERM)
    if interrupted and job.returncode < 0:  # It had not yet installed its handler.
        raise KeyboardInterrupt
    return trains


def _echo_log(log: IO[str], console: Console) -> None:
    """Print what the job has logged since, up to a refusal, its last message: that is raised."""
    while True:
        at = log.tell()
        line = log.readline()
        if not line.endswith("\n") or line.startswith("error["):
            log.seek(at)
            return
        console.write_line(line[:-1])


def _answer_ended_job(
    job: subprocess.Popen[bytes], answer: bytes, run: RunFolder, console: Console
) -> None:
    """Answer as a job that has ended, and refuse what it refuses."""
    log = jobs.log_file(run)
    if not answer:
        how = f"exit code {job.returncode}"
        if job.returncode < 0:
            how = signal.Signals(-job.returncode).name
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
    problem = convert_value(result["problem"], Problem)
    if problem.code == "interrupted" and not run.plan.exists():
        raise KeyboardInterrupt  # Its own words are not those of this command.
    raise Refusal.of(problem)
