"""What FABRIC is not asked for, or answers with a refusal: credentials, room, a slice that never
becomes ready. All of it without fablib."""

from __future__ import annotations

import base64
import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farspan.app.fabric import PlannedSlice, check_hours, make_slice, plan_slice, wait_for_slice
from farspan.domain.cluster import Cluster, Host
from farspan.domain.fabric import Resources, SliceCheck, SliceRecord
from farspan.domain.problems import Refusal
from farspan.launch import fabric_process, fabric_setup
from farspan.launch.clusters import find_cluster
from farspan.launch.fabric_client import FAULTS, PYTHON_VARIABLE, FabricProcess
from farspan.planning.fabric_layout import lay_out_slice
from tests.fabric.resources import LOCATIONS, recorded_summary
from tests.fabric.test_layout import recorded_slice


def token_file(folder: Path, claims: dict[str, Any], **more: str) -> str:
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    path = folder / "tokens.json"
    path.write_text(json.dumps({"id_token": f"e30.{part}.e30", **more}))
    return str(path)


def test_missing_token_is_named(tmp_path: Path):
    with pytest.raises(fabric_process.Unusable, match="is not there") as refused:
        fabric_process.require_token(str(tmp_path / "none.json"), 0.0)
    assert refused.value.kind == "no-token"
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(fabric_process.Unusable) as refused:
        fabric_process.require_token(str(tmp_path / "bad.json"), 0.0)
    assert refused.value.kind == "no-token"


def test_expired_token_is_named_unless_it_can_be_refreshed(tmp_path: Path):
    location = token_file(tmp_path, {"exp": 1000})
    fabric_process.require_token(location, 999.0)
    with pytest.raises(fabric_process.Unusable, match="expired on 1970-01-01 00:16 UTC") as refused:
        fabric_process.require_token(location, 1001.0)
    assert refused.value.kind == "expired"
    fabric_process.require_token(token_file(tmp_path, {"exp": 1000}, refresh_token="x"), 1001.0)


class OrchestratorHTTPError(Exception):
    """As fablib's own, by its name and field."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"{status_code}: HTTP request failed\nPolicy Violation: no GPU")
        self.status_code = status_code


FabricManagerException = type("FabricManagerException", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OrchestratorHTTPError(401), "expired"),
        (OrchestratorHTTPError(403), "refused"),
        (FabricManagerException("Token refresh failed: no"), "expired"),
        (FabricManagerException("project_id must be set"), "configuration"),
        (ConnectionError("Failed to resolve 'orchestrator.fabric-testbed.net'"), "unreachable"),
        (KeyError("sites"), "other"),
    ],
)
def test_errors_have_a_kind_and_a_remedy(error: Exception, kind: str):
    fault = fabric_process.explain(error)
    assert fault["kind"] == kind and "\n" not in fault["fact"]
    what, remedy = FAULTS[kind]
    assert what and remedy


def test_missing_fablib_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr("farspan.launch.fabric_client.find_spec", lambda name: None)
    with pytest.raises(Refusal, match="fablib, the client of FABRIC, is missing") as refused:
        FabricProcess().__enter__()
    assert refused.value.problem.code == "extra-missing"


def test_python_without_fablib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    empty.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(empty))
    with FabricProcess() as process:
        with pytest.raises(Refusal, match="is missing") as refused:
            process.ask("list_resources", Resources)
        assert refused.value.problem.code == "extra-missing"
        assert f"{empty} -m pip install" in refused.value.problem.remedy
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "none"))
    with FabricProcess() as process, pytest.raises(Refusal, match="No such file"):
        process.ask("list_resources", Resources)


def test_process_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """So that a slice can be deleted whatever became of the process that made it."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!/bin/sh\nif [ ! -e {tmp_path}/again ]; then\n"
        f"  touch {tmp_path}/again; echo why >&2; exit 1\nfi\n"
        'read line; echo \'{"answer": {"deleted": ["1"]}}\'; read line\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(stand_in))
    with FabricProcess() as process:
        with pytest.raises(Refusal, match="has ended") as refused:
            process.ask("delete_slice", dict[str, Any], wanted="x")
        assert refused.value.problem.fact == "why"
        assert process.ask("delete_slice", dict[str, Any], wanted="x") == {"deleted": ["1"]}


@pytest.mark.parametrize("hours", [0, 337])
def test_lease_that_the_testbed_does_not_grant_is_refused(hours: int):
    with pytest.raises(Refusal, match="out of range"):
        check_hours(hours)


# -- no room, and slices that do not become ready
#   ------------------------------------------------------------------------------------------------


class Answers:
    """Answers to questions in the process's stead; `asked` are the questions."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.asked = list[str]()

    def ask(self, question: str, kind: type, **values: object) -> Any:
        self.asked.append(question)
        answer = self.answers[question]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def checked(**fields: object) -> SliceCheck:
    return SliceCheck(built=recorded_slice(), **{"errors": {}, **fields})


RESOURCES = Resources(summary=recorded_summary())


def test_no_free_gpu_is_refused_with_when_and_where_else():
    check = checked(errors={"vm1": "no GPU-RTX6000"}, slot="2999-01-01T00:00:00Z")
    process = Answers(list_resources=RESOURCES, check_slice=check)
    with pytest.raises(Refusal, match="FABRIC has no room for vm1 now") as refused:
        plan_slice(process, "fabric/utah-mass")
    problem = refused.value.problem
    assert problem.code == "device-missing"
    assert "vm1: no GPU-RTX6000; free in 3" in problem.fact
    assert "free now: 2 rtx6000 at UTAH" in problem.fact and "2 a30 at AMST" in problem.fact


def test_unknown_time_is_said_to_be_unknown():
    nothing = {**recorded_summary(), "hosts": []}
    no_calendar = {"kind": "no-token", "fact": "no token"}
    resources = Resources(summary=nothing, no_calendar=no_calendar)
    check = checked(errors={"vm2": "no GPU-RTX6000"})
    process = Answers(list_resources=resources, check_slice=check)
    with pytest.raises(Refusal) as refused:
        plan_slice(process, "fabric/utah-mass")
    assert refused.value.problem.fact == "vm2: no GPU-RTX6000; when is unknown: no token"


def test_name_that_is_taken_is_refused():
    process = Answers(list_resources=RESOURCES, check_slice=checked(taken=True))
    with pytest.raises(Refusal, match="you have a slice utah-mass already") as refused:
        plan_slice(process, "fabric/utah-mass")
    assert refused.value.problem.remedy == "farspan fabric import utah-mass"


class Time:
    """A clock that only waiting advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(process: Answers, ready_s: float = 100.0) -> SliceRecord:
    time = Time()
    return wait_for_slice(process, "three", ready_s, clock=time.clock, sleep=time.sleep)


def test_slice_is_waited_for_over_a_service_that_does_not_answer():
    away = Refusal("fabric-unusable", what="a", where="b", fact="c", remedy="d")
    states = [recorded_slice(state="Configuring"), away, recorded_slice()]
    assert waited(Answers(read_slice=states)).state == "StableOK"


def test_service_that_answers_no_more_ends_the_wait():
    away = Refusal("fabric-unusable", what="a", where="b", fact="gone", remedy="d")
    process = Answers(read_slice=away)
    with pytest.raises(Refusal, match="gone"):
        waited(process, ready_s=1e6)
    assert len(process.asked) == 10


def test_slice_that_fails_is_refused_with_the_testbeds_reasons():
    failed = recorded_slice(state="StableError", errors=("Insufficient resources",))
    with pytest.raises(Refusal, match="Insufficient resources") as refused:
        waited(Answers(read_slice=[failed]))
    assert refused.value.problem.code == "slice-failed"


def test_slice_that_is_never_ready_is_refused_at_the_deadline():
    process = Answers(read_slice=[recorded_slice(state="Configuring")])
    with pytest.raises(Refusal, match="still Configuring after 1 min 40 s"):
        waited(process)
    assert 6 <= len(process.asked) <= 8


def planned() -> PlannedSlice:
    cluster: Cluster = find_cluster("fabric/utah-mass")
    layout = lay_out_slice(cluster, "utah-mass", list(LOCATIONS))
    return PlannedSlice(layout=layout, cluster=cluster, hours=24)


@pytest.mark.parametrize(
    ("fault", "keep"),
    [
        (Refusal("fabric-unusable", what="a", where="b", fact="c", remedy="d"), False),
        (KeyboardInterrupt(), False),
        (KeyboardInterrupt(), True),
    ],
)
def test_whatever_goes_wrong_deletes_the_slice(fault: BaseException, keep: bool, tmp_path: Path):
    process = Answers(create_slice=fault, delete_slice={"deleted": ["1"]})
    with pytest.raises(type(fault)):
        make_slice(process, planned(), tmp_path / "made.yaml", keep=keep)
    assert process.asked == ["create_slice"] + ["delete_slice"] * (not keep)
    assert list(tmp_path.iterdir()) == []


def test_slice_that_cannot_be_deleted_is_named(tmp_path: Path):
    away = Refusal("fabric-unusable", what="a", where="b", fact="no answer", remedy="d")
    process = Answers(create_slice=away, delete_slice=away)
    notes = list[str]()
    with pytest.raises(Refusal):
        make_slice(process, planned(), tmp_path / "made.yaml", lambda note: notes.append(str(note)))
    assert notes[-1] == "utah-mass may be left: no answer; farspan fabric delete utah-mass"


def test_vm_that_lets_nobody_in_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fabric_setup, "START_S", 0.0)
    monkeypatch.setattr(fabric_setup.time, "sleep", lambda seconds: threading.Event())
    record = recorded_slice()
    cluster = find_cluster("fabric/utah-mass")

    def closed(host: Host) -> Host:
        enter = ("sh", "-c", "echo 'Permission denied (publickey)' >&2; exit 255", "sh")
        return msgspec.structs.replace(host, name={"vm1": "a", "vm2": "b"}[host.name], enter=enter)

    with pytest.raises(Refusal, match="lets nobody in") as refused:
        fabric_setup.set_up_vms(record, cluster.with_hosts(closed), lambda text: None)
    assert refused.value.problem.code == "slice-failed"
    assert "Permission denied" in refused.value.problem.fact
