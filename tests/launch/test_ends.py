"""What a run is told of its workers' ends, and finds of earlier ones; rank 0 in the default folder
of another host."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Site
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunRecord
from farspan.domain.run_events import Finished, Step, read_events
from farspan.domain.struct_files import load, save
from farspan.launch.launchers import launch_workers, torchrun
from farspan.launch.processes import HostProcess, run_folder
from farspan.launch.run_folder_transfer import RemoteRun
from farspan.launch.trial import Deadline
from farspan.launch.workers import Workers
from farspan.runtime.model import huggingface
from farspan.runtime.model.decoder import initial_parameters
from farspan.runtime.training.events import EventLog
from tests import tiny
from tests.launch.test_launchers import LONG, TRAIN, worker_of
from tests.waiting import LIMIT_S, wait_for


class Scripted(Workers):
    """Shell scripts, one a rank, on the rank's host; `held`, as behind a client, if they are to
    be."""

    scripts: tuple[str, ...] = ()
    held = False

    def start(self):
        hosts = {host.name: host for host in self.hosts}
        before = [sys.executable, "-m", "farspan.launch.stop_on_stdin"] if self.held else []
        for rank, script in enumerate(self.scripts):
            yield HostProcess(
                hosts[self.plan.devices[rank].host],
                (rank,),
                [*before, "sh", "-c", script],
                log=self.log(f"rank-{rank}"),
                keep_open=self.keep_open,
                first_input=b"\n" if self.held else None,
            )


def scripted(run, *scripts, kind=Scripted, cluster=None):
    plan = run.load_plan()
    made = kind(plan, run, cluster or tiny.this_machine(plan))
    made.scripts = scripts
    return made


def ended(workers):
    """The problem that a run ends with."""
    with pytest.raises(Refusal) as refusal, workers:
        list(workers)
    return refusal.value.problem


@pytest.fixture
def far_run(tmp_path):
    """A run of one worker, on that host."""
    plan = tiny.plan(TRAIN, micro_rows=2)
    return tiny.run_folder(
        tmp_path / "run", replace(plan, devices=(replace(plan.devices[0], host="far"),))
    )


def on_disk(folder, tmp_path):
    """Where a folder of the far host lies on this machine."""
    return tmp_path / "home" / str(folder).removeprefix("~/")


# -- rank 0 on another host
#   --------------------------------------------------------------------------------------------


def test_rank_0_in_the_default_folder_finds_its_corpus_and_first_weights(far, far_run, tmp_path):
    plan = far_run.load_plan()
    cached = tmp_path / "models--of--tests"
    model = cached / "blobs"
    linked = cached / "snapshots" / "0123"
    huggingface.export_model(
        model,
        dict(initial_parameters(plan.model, 5)),
        plan.model,
        tokenizer=far_run.tokenizer,
        end_of_text=0,
    )
    # As in the cache of Hugging Face.
    linked.mkdir(parents=True)
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    save(replace(load(far_run.record, RunRecord), initial=str(linked)), far_run.record)
    there = run_folder(far, plan, far_run)
    RemoteRun(far, plan, far_run, there).send_run()
    # What a worker opens is there by now, and nowhere else.
    shutil.rmtree(model)
    shutil.rmtree(linked)
    for name in TOKEN_FILES:
        (tmp_path / "corpus" / name).unlink()
    assert load(on_disk(there.record, tmp_path), RunRecord).initial == f"{there.path}/initial"
    with launch_workers(
        "local", plan, far_run, Cluster(sites=(Site(name="far", hosts=(far,)),))
    ) as workers:
        events = list(workers)
    assert isinstance(events[-1], Finished) and events[-1].reason == "done"


def test_a_copy_of_the_corpus_that_lacks_bytes_is_sent_again_and_only_from_a_whole_one(
    far, far_run, tmp_path
):
    plan = far_run.load_plan()
    away = RemoteRun(far, plan, far_run, run_folder(far, plan, far_run))
    away.send_run()
    copy = on_disk(load(on_disk(away._there.record, tmp_path), RunRecord).corpus, tmp_path)
    source = tmp_path / "corpus"
    whole = (source / "train.bin").read_bytes()
    for damage in (lambda file: file.write_bytes(whole[:10]), Path.unlink):
        damage(copy / "train.bin")
        away.send_run()
        assert (copy / "train.bin").read_bytes() == whole
    (copy / "train.bin").unlink()
    manifest = load(source / "corpus.json", CorpusManifest)
    save(tiny.with_checksums(manifest, source), source / "corpus.json")
    (source / "train.bin").write_bytes(bytes(4000) + whole[4000:])
    with pytest.raises(Refusal) as refusal:
        away.send_run()
    problem = refusal.value.problem
    assert (problem.code, problem.where) == ("corpus-damaged", str(source / "train.bin"))
    assert problem.remedy == f"farspan prepare {far_run.config}"
    shutil.rmtree(source)
    with pytest.raises(Refusal, match=r"error\[path-missing\]"):
        away.send_run()
    assert not (copy / "train.bin").exists()


def test_first_weights_that_are_gone_are_named(far, far_run, tmp_path):
    save(replace(load(far_run.record, RunRecord), initial=str(tmp_path / "gone")), far_run.record)
    plan = far_run.load_plan()
    with pytest.raises(Refusal, match=r"error\[path-missing\]"):
        RemoteRun(far, plan, far_run, run_folder(far, plan, far_run)).send_run()


def test_problem_file_of_an_earlier_start_on_a_remote_host_is_ignored(far, tmp_path):
    plan = tiny.plan(TRAIN, rows=(4, 4), micro_rows=2)
    plan = replace(plan, devices=(plan.devices[0], replace(plan.devices[1], host="far")))
    run = tiny.run_folder(tmp_path / "run", plan)
    logs = on_disk(run_folder(far, plan, run).logs, tmp_path)
    logs.mkdir(parents=True)
    old = Problem(
        code="non-finite", what="the loss is not finite", where="step 3", fact="nan", remedy="none"
    )
    save(old, logs / "rank-1.problem.json")
    cluster = Cluster(sites=(Site(name="both", hosts=(*tiny.this_machine(plan).hosts, far)),))
    problem = ended(scripted(run, "exit 0", "exit 28", cluster=cluster))
    assert (problem.code, problem.what) == ("device-missing", "rank 1 on far was lost")


def test_remedy_from_remote_workers_names_the_run_folder_of_the_launcher(far, tmp_path):
    plan = tiny.plan(LONG, rows=(4, 4), micro_rows=2)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),) * 2)
    run = tiny.run_folder(tmp_path / "my run", plan)
    two = replace(far, devices=far.devices * 2)
    cluster = Cluster(sites=(Site(name="far", hosts=(two,)),))
    with pytest.raises(Refusal) as refusal, launch_workers("local", plan, run, cluster) as workers:
        for event in workers:
            if isinstance(event, Step) and event.step == 1:
                os.kill(worker_of(run, 1), signal.SIGKILL)
    said = load(on_disk(run_folder(far, plan, run).logs, tmp_path) / "rank-0.problem.json", Problem)
    *_, last = read_events(run.events)
    assert isinstance(last, Finished) and last.problem is not None
    remedies = {problem.remedy for problem in (refusal.value.problem, said, last.problem)}
    assert remedies == {f"farspan resume '{run.path}'"}


# -- half of an event
#   ------------------------------------------------------------------------------------------------

#: As rank 0 begins: what is unfinished is cut off, and more is written.
WRITES = """
import sys
from pathlib import Path
from farspan.domain.run_events import Finished, Step, read_events
from farspan.runtime.training.events import EventLog
with EventLog(Path(sys.argv[1])) as log:
    log.write(Finished(at=2.0, step=6, reason="done", seconds=1.0))
"""
HALF = b'{"type":"step","at":1.5'


def first_event(path):
    with EventLog(path) as log:
        log.write(Finished(at=1.0, step=3, reason="interrupted", seconds=1.0))
    return path.read_bytes()


def test_events_of_the_next_start_are_all_read_after_an_incomplete_line(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    first_event(run.events)
    with open(run.events, "ab") as events:
        events.write(HALF)
    with scripted(run, shlex.join([sys.executable, "-c", WRITES, str(run.events)])) as workers:
        assert list(workers) == [Finished(at=2.0, step=6, reason="done", seconds=1.0)]


def test_half_an_event_stays_on_the_host_where_it_was_written(far, far_run, tmp_path):
    plan = far_run.load_plan()
    there = run_folder(far, plan, far_run)
    away = RemoteRun(far, plan, far_run, there)
    away.send_run()
    events = on_disk(there.events, tmp_path)
    whole = first_event(events)
    events.write_bytes(whole + HALF)
    away.pull_events()
    assert far_run.events.read_bytes() == whole
    # The next worker cuts it off.
    events.write_bytes(whole * 2)
    away.pull_events()
    assert far_run.events.read_bytes() == whole * 2


# -- how workers ended
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [(137, -9), (143, -15), (139, -11), (130, 130), (255, 255), (128, 128), (24, 24), (0, 0)],
)
def test_exit_codes_of_killing_signals_are_converted_and_others_kept(tmp_path, code, found):
    (host,) = tiny.this_machine(tiny.plan(TRAIN)).hosts
    with open(tmp_path / "log", "wb") as log:
        process = HostProcess(
            host, (0,), ["sh", "-c", f"exit {code}"], log=log, keep_open=log.fileno()
        )
        process.wait(timeout=LIMIT_S)
    assert process.poll() == found


class Held(Scripted):
    held = True


def test_worker_killed_behind_a_client_process_is_reported_as_killed(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    problem = ended(scripted(run, "kill -9 $$", kind=Held))
    assert problem.code == "worker-lost"
    assert "ended by SIGKILL; last words" in problem.fact, "this machine's kernel did not"


class Served(Scripted):
    """Beside a service, which says that it was asked to end."""

    def start(self):
        script = (
            f"cd {self.run.path}; trap 'touch asked; exit 0' TERM; touch up; while :; do sleep "
            "0.05; done"
        )
        yield HostProcess(
            self.hosts[0],
            (),
            ["sh", "-c", script],
            log=self.log("service"),
            keep_open=self.keep_open,
        )
        yield from super().start()


def test_a_trial_ends_its_workers_and_asks_services_to_end(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with scripted(run, "exec sleep 1000", kind=Served) as workers, Deadline(workers, LIMIT_S):
        wait_for((run.path / "up").exists, "the service is up")
    assert workers.processes[1].poll() == -signal.SIGKILL
    assert (run.path / "asked").exists()


#: What torchrun says at its end, of the start before.
EARLIER = """
worker.py FAILED
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""


class Torchrun(torchrun.Launch):
    """Says nothing, and ends as torchrun does where the host lacks a device."""

    def start(self):
        words = ["sh", "-c", "exit 28"]
        yield HostProcess(
            self.hosts[0], (0, 1), words, log=self.log("rank-0"), keep_open=self.keep_open
        )


def test_torchrun_output_of_an_earlier_start_is_not_the_cause(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(4, 4), micro_rows=2))
    (run.logs / "rank-0.log").write_text(EARLIER)
    problem = ended(scripted(run, kind=Torchrun))
    assert (problem.code, problem.what) == ("device-missing", "rank 0 on here was lost")
    assert problem.fact.endswith("last words: none")


def test_a_worker_sees_the_gpu_that_ray_gave_and_no_command_line_shows_its_secret(
    tmp_path, monkeypatch
):
    pytest.importorskip("ray", reason="waits for farspan[ray]")
    from farspan.launch.ray_driver import RankActor

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    actor = RankActor()
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    actor.start(str(tmp_path), environment, "0b5e55ed" * 4)
    process = Path(f"/proc/{actor._process.pid}")

    def read_both() -> tuple[bytes, bytes] | None:
        """What it was started with, once `env` has become Python: in between both are empty."""
        line = (process / "cmdline").read_bytes()
        given = (process / "environ").read_bytes()
        return (line, given) if given and line and not line.startswith(b"env\0") else None

    try:
        line, variables = wait_for(read_both, "Python runs", actor._process)
        given = variables.split(b"\0")
    finally:
        actor.signal(signal.SIGKILL)
        actor._process.wait(timeout=LIMIT_S)
    assert b"RANK=0" in given
    assert b"CUDA_VISIBLE_DEVICES=1" in given
    assert b"0b5e55ed" not in line + b"".join(given)
