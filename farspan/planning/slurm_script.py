"""The sbatch scripts of a run: one trains until the run is finished, in one job after another; on
each further site one holds nodes for it.

Options are those of Slurm 21.08 and newer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from farspan.domain.config import Quantity, SlurmConfig, SlurmNodes
from farspan.domain.escapes import key_word, shell_line
from farspan.domain.problems import Refusal
from farspan.domain.run import SITE_JOBS_VARIABLE, RunFolder
from farspan.domain.units import format_seconds, parse_duration
from farspan.planning.quantities import out_of_range, parse_positive, setting_remedy

#: Slurm sends the notice up to this much earlier than asked for (sbatch(1), --signal).
NOTICE_RESOLUTION_S = 60.0
#: A step and a save need about this much. A choice: a shorter notice is not proposed.
MIN_NOTICE_S = 20
#: What --signal takes at most, seconds.
MAX_NOTICE_S = 65535.0
#: Signals that a process does not end by of itself: a kill, as for memory, and crashes.
CRASHES = (
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGKILL,
    signal.SIGSEGV,
)
#: Starts in one job after such ends that bring no new checkpoint. A choice.
MAX_KILLS = 3
#: Times as sbatch takes them, but for bare minutes: with days, or with colons.
SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-(?=\d)|(?=\d+:))(?P<clock>\d+(?::\d+){0,2})")
#: Keys of `SlurmNodes` and `SlurmConfig` that are an option of sbatch, with its name.
NODE_OPTIONS = {
    "partition": "partition",
    "constraint": "constraint",
    "nodes": "nodes",
    "gpus": "gpus-per-node",
    "gres": "gres",
    "cpus": "cpus-per-task",
    "memory": "mem",
}
JOB_OPTIONS = {"account": "account", "qos": "qos"}
#: What libraries that fetch from the hub read.
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")

#: USR1 comes before the job's limit: the run saves, and the job goes back into the queue. TERM
#: comes when the job is cancelled or preempted: Slurm sends it to every process of the job, and
#: puts a preempted job back itself. A job that saved nothing new would go round for ever. A process
#: that was killed, as for memory, begins again in the same job.
TRAINING = """\
export PYTHONUNBUFFERED=1
newest_checkpoint() {{ ls {checkpoints} 2>/dev/null | grep '^step-[0-9]*$' | tail -n 1; }}
before=$(newest_checkpoint)
saved=$before noticed= signalled= job= kills=0
trap 'signalled=1 noticed=1; [ -z "$job" ] || kill -TERM "$job"' USR1
trap 'signalled=1' TERM

train() {{
    {train} &
    job=$!
    signalled=1
    while [ -n "$signalled" ]; do
        signalled=
        wait "$job"
        code=$?
    done
}}

crashed() {{ case $code in {crashed}) return 0 ;; esac; return 1; }}

train
while crashed && [ -z "$noticed" ]; do
    [ "$(newest_checkpoint)" = "$saved" ] || kills=0
    kills=$((kills + 1))
    [ "$kills" -le {max_kills} ] || break
    saved=$(newest_checkpoint)
    echo "farspan: its process was killed or has crashed, and begins again" >&2
    train
done

if [ -n "$noticed" ] && [ "$code" -ne 0 ]; then
    if [ "$(newest_checkpoint)" = "$before" ]; then
        echo "farspan: this job saved nothing: raise slurm.time, now {time}" >&2
        {end}
    fi
    echo "farspan: saved before the limit of the job, which goes back into the queue"
    if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
    echo "farspan: it cannot be requeued; to go on: farspan slurm" >&2
fi
{end}
"""
#: Ends with the code of the training; where other sites hold nodes for it, that ends too.
END = 'exit "$code"'
HOLDS = """\
export {variable}={name}
release_sites() {{
{cancel}
}}

"""
CANCEL = "    {enter} 'squeue --me --noheader --format=%i --name={names} | xargs -r scancel' || :"

#: The job at another site. It is asked for its steps this often, and ends after so long without
#: any, and `slurm.wait`. A choice: the run's own job may wait in its queue meanwhile, and asks for
#: it again.
HELD_POLL_S = 30
MAX_IDLE_S = 1800
#: USR1 comes before the job's limit. Workers that get TERM from Slurm save that very step.
HOLDING = """\
steps() {{
    squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -cv -e batch -e extern
}}
noticed=
trap 'noticed=1' USR1

idle_s=0
while [ -z "$noticed" ]; do
    sleep {poll_s} &
    wait $!
    idle_s=$((idle_s + {poll_s}))
    [ "$(steps)" -eq 0 ] || idle_s=0
    if [ "$idle_s" -ge {max_idle_s} ]; then
        echo "farspan: no run has entered this job for {max_idle}: it ends"
        exit 0
    fi
done

scancel --signal=TERM "$SLURM_JOB_ID"
saving_s=0
while [ "$(steps)" -gt 0 ] && [ "$saving_s" -lt {notice_s} ]; do
    sleep 5
    saving_s=$((saving_s + 5))
done
echo "farspan: the limit of the job is near: it goes back into the queue"
scontrol requeue "$SLURM_JOB_ID"
"""


class LoginNode(NamedTuple):
    """A login node of other sites: the words that enter it, and the names of the jobs there."""

    enter: Sequence[str]
    jobs: Sequence[str]


def write_training_script(
    config: SlurmConfig,
    run: RunFolder,
    *,
    train: Sequence[object],
    workdir: Path,
    site_jobs: str = "",
    logins: Sequence[LoginNode] = (),
) -> str:
    """Return the script that trains `run`; `train` is the command that begins or resumes
    it. Jobs whose names begin with `site_jobs` hold nodes of other sites. Raises Refusal
    (out-of-range)."""
    path = run.path.absolute()
    log = path.with_name(f"{path.name}.slurm.log")
    limit_s = job_limit_s(config)
    head = [
        f"#SBATCH --job-name={job_name(path.name)}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *_signal_lines(config, config.time, limit_s, "slurm.time"),
    ]
    limit = "the partition's" if limit_s is None else format_seconds(limit_s)
    begin = shell_line(*train)
    holds = ""
    end = END
    if logins:
        _refuse_long_wait(config, limit_s)
        lines = []
        for login in logins:
            enter = shell_line(*login.enter)
            lines.append(CANCEL.format(enter=enter, names=",".join(login.jobs)))
        holds = HOLDS.format(variable=SITE_JOBS_VARIABLE, name=site_jobs, cancel="\n".join(lines))
        end = f"release_sites; {END}"
    body = holds + TRAINING.format(
        checkpoints=shell_line(path / "checkpoints"),
        train=begin,
        # As a shell calls such ends.
        crashed="|".join(str(128 + number) for number in CRASHES),
        max_kills=MAX_KILLS,
        time=limit,
        end=end,
    )
    return _assemble(config, head, log, workdir, limit_s, body)


def write_holding_script(config: SlurmConfig, site_name: str, name: str) -> str:
    """Return the script of a job that holds the nodes of another site for a run; `name` is the
    job's. Raises Refusal (out-of-range)."""
    # The first start enters nobody while it waits for further sites.
    max_idle_s = MAX_IDLE_S + round(parse_wait_s(config))
    site = config.sites[site_name]
    key = f"slurm.sites.{site_name}"
    limit_s = _limit_s(site.time, f"{key}.time")
    signal_lines = _signal_lines(config, site.time, limit_s, f"{key}.time")
    lines = ["#!/bin/bash -l", f"#SBATCH --job-name={name}", "#SBATCH --requeue"]
    # The folder is the home there.
    lines += ["#SBATCH --open-mode=append", "#SBATCH --output=%x.log", *signal_lines]
    if limit_s is not None:
        lines.append(f"#SBATCH --time={_slurm_time(limit_s)}")
    lines += _options(site, JOB_OPTIONS)
    lines += _node_lines(site, key)
    body = HOLDING.format(
        poll_s=HELD_POLL_S,
        max_idle_s=max_idle_s,
        max_idle=format_seconds(max_idle_s),
        notice_s=round(parse_notice_s(config)),
    )
    return "\n".join([*lines, "", body])


def write_command_script(
    config: SlurmConfig, name: str, words: Sequence[object], *, log: Path, workdir: Path
) -> str:
    """Return the script of a job that runs one command."""
    head = [f"#SBATCH --job-name={job_name(name)}"]
    body = f"exec {shell_line(*words)}\n"
    return _assemble(config, head, log, workdir, job_limit_s(config), body)


def _assemble(
    config: SlurmConfig,
    head: Sequence[str],
    log: Path,
    workdir: Path,
    limit_s: float | None,
    body: str,
) -> str:
    lines = ["#!/bin/bash -l", *head]
    lines.append(f"#SBATCH --output={_file_option(log)}")
    lines.append(f"#SBATCH --chdir={_file_option(workdir)}")
    if limit_s is not None:
        lines.append(f"#SBATCH --time={_slurm_time(limit_s)}")
    lines += _options(config, JOB_OPTIONS)
    lines += _node_lines(config, "slurm")
    for number, component in enumerate(config.components):
        lines.append("#SBATCH hetjob")
        lines += _node_lines(component, f"slurm.components[{number}]")
    lines += ["", *_setup_lines(config), body]
    return "\n".join(lines)


def _node_lines(nodes: SlurmNodes, key: str) -> Iterator[str]:
    if nodes.gpus is not None and nodes.gres is not None:
        raise Refusal(
            "out-of-range",
            what=f"{key}.gpus and {key}.gres are two answers to one question",
            where=f"run.yaml, key {key}.gres",
            fact=f"gpus is {nodes.gpus}, gres is {nodes.gres}",
            remedy=f"leave {key_word(key)}.gpus out",
            key=f"{key}.gres",
        )
    yield from _options(nodes, NODE_OPTIONS)
    yield "#SBATCH --ntasks-per-node=1"
    for option in nodes.options:
        yield f"#SBATCH {option}"


def _options(source: SlurmNodes, options: dict[str, str]) -> Iterator[str]:
    for key, option in options.items():
        value = getattr(source, key)
        if value is not None:
            yield f"#SBATCH --{option}={value}"


def _setup_lines(config: SlurmConfig) -> Iterator[str]:
    if config.modules:
        yield f"module load {shell_line(*config.modules)} || exit 1"
    if config.conda is not None:
        yield 'eval "$(conda shell.bash hook)" || exit 1'
        yield f"conda activate {shell_line(config.conda)} || exit 1"
    if config.offline:
        yield f"export {' '.join(f'{name}=1' for name in OFFLINE)}"
    yield from config.setup


def job_limit_s(config: SlurmConfig) -> float | None:
    """Return the seconds that one job may take; None is as the partition has it."""
    return _limit_s(config.time, "slurm.time")


def _limit_s(time: Quantity | None, key: str) -> float | None:
    return None if time is None else _parse_time(time, key, "4h")


def _parse_time(value: Quantity, key: str, example: str) -> float:
    """Read `4h`, or a form of Slurm's own: `04:00:00`, `30:00`, `1-12`, `1-12:30:00`. Raises
    Refusal (out-of-range)."""
    match = SLURM_TIME.fullmatch(str(value).strip())
    if match is not None:
        # After days the first number is of hours, else the last one of seconds.
        numbers = [int(number) for number in match["clock"].split(":")]
        if match["days"] is None:
            numbers = [0] * (3 - len(numbers)) + numbers
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        value = f"{int(match['days'] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds}s"
    return parse_positive(parse_duration, value, key, example)


def parse_notice_s(config: SlurmConfig) -> float:
    """Return the seconds before a job's limit at which the run saves. Raises Refusal
    (out-of-range)."""
    notice_s = _parse_time(config.notice, "slurm.notice", "3m")
    if notice_s > MAX_NOTICE_S:
        raise out_of_range(
            "slurm.notice",
            config.notice,
            "Slurm takes at most 18 hours",
            setting_remedy("slurm.notice", "3m"),
        )
    return notice_s


def parse_wait_s(config: SlurmConfig) -> float:
    """Return the seconds that a run's first start waits for the jobs at other sites. Raises Refusal
    (out-of-range)."""
    return _parse_time(config.wait, "slurm.wait", "30m")


def _refuse_long_wait(config: SlurmConfig, limit_s: float | None) -> None:
    """Refuse a job whose limit would come while it waits for those at other sites."""
    waited_s = parse_wait_s(config) + parse_notice_s(config) + NOTICE_RESOLUTION_S
    if limit_s is not None and waited_s >= limit_s:
        # Half of what is left is for training.
        room_s = limit_s - parse_notice_s(config) - NOTICE_RESOLUTION_S
        wait_s = max(1, int(room_s // 2))
        raise out_of_range(
            "slurm.wait",
            config.wait,
            f"a job that takes {format_seconds(limit_s)} would end before it trains",
            f"--set slurm.wait={wait_s:d}s",
        )


def _signal_lines(
    config: SlurmConfig, time: Quantity | None, limit_s: float | None, key: str
) -> Iterator[str]:
    """Yield the option that announces the limit of a job, which `key` gives as `time`. Refuses a
    notice that would come when the job starts."""
    notice_s = parse_notice_s(config)
    if limit_s is not None and notice_s + NOTICE_RESOLUTION_S >= limit_s:
        # Half of what is left is for training.
        shorter_s = int(limit_s - NOTICE_RESOLUTION_S) // 2
        remedy = f"--set slurm.notice={shorter_s:d}s"
        if shorter_s < MIN_NOTICE_S:
            remedy = f"--set {key_word(key)}=1h"
        raise Refusal(
            "out-of-range",
            what=f"{key} = {time} leaves no time to train",
            where=f"run.yaml, key {key}",
            fact=(
                f"the run saves {format_seconds(notice_s)} before the limit, and Slurm gives "
                f"notice up to {format_seconds(NOTICE_RESOLUTION_S)} earlier"
            ),
            remedy=remedy,
            key=key,
        )
    yield f"#SBATCH --signal=B:USR1@{notice_s:.0f}"


def job_name(name: str) -> str:
    """Return the name of a run's jobs in the queue."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return f"farspan-{plain}"


def _slurm_time(seconds: float) -> str:
    """Format days-hours:minutes:seconds, whole seconds."""
    minutes, rest = divmod(max(1, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def _file_option(path: Path) -> str:
    """Quote a path as sbatch reads it in a script. In the name of a log `%` begins a variable."""
    text = str(path)
    if any(letter in text for letter in '"\\\n\r%'):
        raise Refusal(
            "path-unusable",
            what="the path of a Slurm job cannot have such a name",
            where=path,
            fact="sbatch reads quotes, backslashes, % and line breaks otherwise",
            remedy="farspan slurm run.yaml --run FOLDER, with a plain name",
        )
    return f'"{text}"' if " " in text or "'" in text or "#" in text else text
