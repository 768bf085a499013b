"""Slurm's own commands: submitting a script, the state of a job, the nodes of a partition.

All of it goes through `sbatch`, `squeue`, `sinfo` and `scontrol` of Slurm 21.08 and newer, here or
on the login node of another site.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.escapes import key_word, shell_line
from farspan.domain.problems import Refusal
from farspan.launch.hosts import host_command
from farspan.launch.reach_faults import explain_fault

#: Slurm's own commands give up on a silent controller after some tens of seconds.
CLIENT_TIMEOUT_S = 120.0
#: Exit codes of ssh that could not connect, and of a shell that has no such command.
SSH_FAILED = 255
COMMAND_MISSING = 127
#: What squeue prints of a job (`QueuedJob`): the folder may hold any letter.
QUEUE_FORMAT = "%i|%T|%r|%V|%S|%N|%C|%j|%Z"
#: Commands that list what there is.
ASSOCIATIONS = ("sacctmgr", "show", "associations", "format=user,account,partition,qos")
NODES = ("sinfo", "--format=%P %l %D %c %m %G %f")
#: Text of Slurm's errors (slurm_errno.c), the key of run.yaml that it is about, and the command
#: that lists what there is.
REFUSALS = (
    ("invalid partition", "partition", NODES),
    ("Invalid account", "account", ASSOCIATIONS),
    ("Invalid qos", "qos", ASSOCIATIONS),
    ("Invalid generic resource", "gres", NODES),
    ("Invalid feature", "constraint", NODES),
    ("time limit", "time", NODES),
    ("Invalid --mem", "memory", NODES),
    ("Memory specification", "memory", NODES),
    ("CPU count per node", "cpus", NODES),
    ("Node count specification", "nodes", NODES),
    ("node configuration is not available", "nodes", NODES),
)
#: States of jobs (squeue(1)) that have not ended.
LIVE_STATES = frozenset(
    {
        "PENDING",
        "RUNNING",
        "SUSPENDED",
        "CONFIGURING",
        "COMPLETING",
        "STOPPED",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
    }
)


class QueuedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the queue shows it; `reason` is why it does not run, else `None`."""

    id: str
    name: str
    state: str
    reason: str
    #: The folder that it runs in.
    workdir: str
    #: When it was submitted, and when it has started or is predicted to (`N/A` where nothing is
    #: known).
    submitted: str
    starts: str
    #: Its nodes in Slurm's short form, empty while it waits; and the CPUs of all together.
    node_list: str
    cpus: int

    def __str__(self) -> str:
        text = f"job {self.id}: {self.state}"
        if self.state == "PENDING":
            text += f" ({self.reason}), since {self.submitted}"
            if self.starts != "N/A":
                text += f", predicted to start {self.starts}"
        elif self.state == "COMPLETING":
            text += ", it has ended and its nodes are being cleared"
        elif self.starts != "N/A":
            text += f", since {self.starts}"
        return text


def has_slurm() -> bool:
    """Return whether Slurm's commands are here."""
    from shutil import which

    return which("sbatch") is not None


def require_slurm() -> None:
    """Refuse where Slurm's commands are not here."""
    if not has_slurm():
        raise Refusal(
            "launcher-unusable",
            what="there is no sbatch on this machine",
            where="PATH",
            fact="Slurm's commands are on the login nodes of a cluster",
            remedy="module load slurm, or the same command on a login node",
        )


def submit_script(script: str, login: str | None = None, key: str = "slurm") -> str:
    """Submit a script that the table `key` of run.yaml asks for; return the job's number. Raises
    Refusal (launcher-unusable) with Slurm's reason."""
    done = run_client(["sbatch", "--parsable"], login, given=script)
    if done.returncode:
        raise _explain_refusal(done.stderr, login, key)
    number = done.stdout.strip().partition(";")[0]
    if not number.isdecimal():
        raise _no_answer("sbatch", f"it prints {number[:200]!r} before the number of the job")
    return number


def check_script(script: str, login: str | None = None, key: str = "slurm") -> str:
    """Have Slurm check a script without submitting it; return its message on the start. Raises
    Refusal (launcher-unusable)."""
    done = run_client(["sbatch", "--test-only"], login, given=script)
    if done.returncode:
        raise _explain_refusal(done.stderr, login, key)
    return done.stderr.strip()


def list_jobs(
    *job_names: str, login: str | None = None, timeout_s: float = CLIENT_TIMEOUT_S
) -> list[QueuedJob]:
    """List this user's jobs of these names that have not ended."""
    words = ["squeue", "--me", "--noheader", f"--name={','.join(job_names)}"]
    words.append(f"--format={QUEUE_FORMAT}")
    return _parse_jobs(run_client(words, login, timeout_s=timeout_s))


def find_job(number: str) -> QueuedJob | None:
    """Return a job that has not ended; None of one that has."""
    done = run_client(["squeue", "--noheader", f"--jobs={number}", f"--format={QUEUE_FORMAT}"])
    jobs = [] if "Invalid job id" in done.stderr else _parse_jobs(done)
    return jobs[0] if jobs else None


def _parse_jobs(done: subprocess.CompletedProcess[str]) -> list[QueuedJob]:
    if done.returncode:
        raise _no_answer("squeue", done.stderr)
    jobs = []
    for line in done.stdout.splitlines():
        if line.count("|") < QUEUE_FORMAT.count("|"):
            raise _no_answer("squeue", f"it prints {line[:200]!r} before its answer")
        number, state, reason, submitted, starts, nodes, cpus, name, workdir = line.split("|", 8)
        if state in LIVE_STATES:
            job = QueuedJob(
                id=number,
                name=name,
                state=state,
                reason=reason,
                workdir=workdir,
                submitted=submitted,
                starts=starts,
                node_list=nodes,
                cpus=int(cpus),
            )
            jobs.append(job)
    return jobs


def node_facts(nodes: Sequence[str], login: str | None = None) -> list[dict[str, str]]:
    """Return the facts of each node by `scontrol show node`, by key."""
    facts = []
    for node in nodes:
        done = run_client(["scontrol", "--oneliner", "show", "node", node], login)
        if done.returncode:
            raise _no_answer("scontrol", done.stdout + done.stderr)
        facts.append(dict(re.findall(r"(\w+)=(\S*)", done.stdout)))
    return facts


def expand_nodes(short: str, login: str | None = None) -> list[str]:
    """Return the nodes of Slurm's short form, `n[0-3]`."""
    done = run_client(["scontrol", "show", "hostnames", short], login)
    if done.returncode:
        raise _no_answer("scontrol", done.stderr)
    return done.stdout.split()


class PartitionNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind in a partition: each one's CPUs, bytes of memory, and GRES."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    memory: int
    gres: str


def list_partition_nodes(partition: str | None, login: str | None = None) -> list[PartitionNodes]:
    """List the nodes of a partition, or of all, by kind."""
    words = ["sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G"]
    if partition is not None:
        words.append(f"--partition={partition}")
    done = run_client(words, login)
    if done.returncode:
        raise _no_answer("sinfo", done.stderr)
    kinds = []
    for line in done.stdout.splitlines():
        name, count, cpus, memory, gres = line.split("|", 4)
        memory_bytes = int(memory.rstrip("+")) * 2**20
        kind = PartitionNodes(
            partition=name.rstrip("*"),
            is_default=name.endswith("*"),
            count=int(count),
            cpus=int(cpus.rstrip("+")),
            memory=memory_bytes,
            gres="" if gres == "(null)" else gres,
        )
        kinds.append(kind)
    return kinds


def run_client(
    words: Sequence[str],
    login: str | None = None,
    *,
    given: str | None = None,
    timeout_s: float = CLIENT_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's here, or on another site's login node. Raises Refusal
    (launcher-unusable, host-unreachable) where it does not run."""
    command = list(words)
    if login is None:
        require_slurm()
    else:
        command = host_command(Host(name=login, devices=()), words)
    try:
        done = subprocess.run(
            command,
            input=given,
            stdin=None if given is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise _no_answer(words[0], f"no answer within {timeout_s:.0f} s") from None
    except FileNotFoundError:
        raise _no_answer(command[0], "it is not on PATH") from None
    if login is not None and done.returncode in (SSH_FAILED, COMMAND_MISSING):
        raise _no_login(login, command, done.stderr)
    return done


def _no_login(login: str, command: Sequence[str], printed: str) -> Refusal:
    """Return the refusal of a login node that cannot be entered, or has no Slurm."""
    ssh = tuple(command[: command.index(login) + 1])
    fault = explain_fault(login, ssh, printed, shell_line("ssh", login, "sinfo"))
    # A shell that finds no Python is no fault of this command's.
    no_slurm = fault.cause == "python"
    return Refusal(
        "host-unreachable",
        what=f"{login} has no Slurm" if no_slurm else f"{login} cannot be entered: {fault.cause}",
        where=f"login node {login}",
        fact=fault.fact,
        remedy=shell_line("ssh", login, "sinfo") if no_slurm else fault.remedy,
    )


def _no_answer(client: str, message: str) -> Refusal:
    return Refusal(
        "launcher-unusable",
        what=f"Slurm does not answer {client}",
        where=client,
        fact=_last_line(message),
        remedy="scontrol ping",
    )


def _explain_refusal(message: str, login: str | None, table: str) -> Refusal:
    """Return the refusal of a job, with the key of run.yaml that Slurm's message is about."""
    fact = _last_line(message)
    at = "" if login is None else f" at {login}"
    for sign, key, listing in REFUSALS:
        if sign.lower() in message.lower():
            words = list(listing) if login is None else ["ssh", login, shell_line(*listing)]
            return Refusal(
                "launcher-unusable",
                what=f"Slurm{at} refuses the job's {key}",
                where=f"run.yaml, key {table}.{key}",
                fact=fact,
                remedy=f"{shell_line(*words)}, then set {key_word(table)}.{key_word(key)}",
                key=f"{table}.{key}",
            )
    return Refusal(
        "launcher-unusable",
        what=f"Slurm{at} refuses the job",
        where="sbatch",
        fact=fact,
        remedy="farspan slurm run.yaml --print > job.sbatch && sbatch --test-only job.sbatch",
    )


def _last_line(message: str) -> str:
    """Return the message that Slurm printed, without its prefixes, on one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in message.strip().splitlines()]
    return "; ".join(dict.fromkeys(lines))[-400:] or "it printed nothing"
