"""A process that asks the FABRIC testbed through fablib: one question a line, one answer a line.

It runs as a file, under any interpreter that has `fabrictestbed-extensions`: it needs nothing of
farspan. fablib prints, logs and starts threads as it likes, which is why it has a process.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

#: What fablib calls a time.
TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"
#: What parts of a slice say that end for another part's sake.
CASCADE = "Closing reservation due to failure in slice"
#: Days that the testbed looks ahead at most.
MAX_SEARCH_DAYS = 30


class Unusable(Exception):
    """Raised for what the testbed cannot be asked for; farspan has a remedy for each `kind`."""

    def __init__(self, kind: str, fact: str) -> None:
        super().__init__(fact)
        self.kind = kind


class Testbed:
    """The testbed, as one user sees it. Nothing is asked of it before the first question.

    `folder` is where fablib writes its log; `resources` is a file with a recorded summary of the
    testbed, which is then not asked at all.
    """

    def __init__(self, folder: str, resources: str | None) -> None:
        from fabrictestbed.external_api.orchestrator_client import OrchestratorClient
        from fabrictestbed_extensions.fablib.fablib import FablibManager

        self._summary = None if resources is None else _read_summary(resources)
        self._is_recorded = resources is not None
        logs = {"log_file": f"{folder}/fablib.log", "data_dir": folder}
        # Required by its constructor, and by nothing that works offline.
        if not os.environ.get("FABRIC_PROJECT_ID"):
            logs["project_id"] = _configured("project_id") or "none"
        if not os.environ.get("FABRIC_BASTION_USERNAME"):
            logs["bastion_username"] = _configured("bastion_username") or ""
        self.fablib = FablibManager(offline=True, no_ssh=True, **logs)
        self.orchestrator = OrchestratorClient(self.fablib.get_orchestrator_host(), retries=1)

    def read_summary(self) -> dict[str, Any]:
        """Return the testbed's sites and hosts. They are public: no credentials are needed."""
        if self._summary is None:
            self._summary = self.orchestrator.portal_resources_summary(level=2)
        return self._summary

    def manager(self) -> Any:
        """Return fablib's client of the testbed's services, with the user's token."""
        from fabrictestbed.fabric_manager_v2 import FabricManagerV2

        if self._is_recorded:
            raise Unusable("recorded", "only a recorded summary of the testbed is asked")
        if self.fablib.manager is None:
            fablib = self.fablib
            require_token(fablib.get_token_location(), time.time())
            project = fablib.get_project_id()
            self.fablib.manager = FabricManagerV2(
                credmgr_host=fablib.get_credmgr_host(),
                orchestrator_host=fablib.get_orchestrator_host(),
                core_api_host=fablib.get_core_api_host(),
                token_location=fablib.get_token_location(),
                project_id=None if project == "none" else project,
            )
            fablib.set_project_id(fablib.manager.get_project_id())
        return self.fablib.manager

    # -- questions

    def list_resources(self) -> dict[str, Any]:
        """Return the testbed's summary, and its calendar or why there is none."""
        calendar = None
        reason = None
        start = datetime.now(UTC) + timedelta(hours=1)
        try:
            calendar = self.manager().resources_calendar(
                start=start, end=start + timedelta(days=MAX_SEARCH_DAYS - 1), interval="day"
            )
        except Exception as error:
            reason = explain(error)
        return {"summary": self.read_summary(), "calendar": calendar, "no_calendar": reason}

    def check_slice(self, layout: dict[str, Any], hours: float) -> dict[str, Any]:
        """Build a slice and validate it as fablib does; return what speaks against it by VM, and
        when there is room for all of it if there is none now."""
        from fabrictestbed_extensions.fablib.resources_v2 import ResourcesV2
        from fabrictestbed_extensions.fablib.validator import NodeValidator

        built = self.build_slice(layout)
        built.get_fim_topology().validate()
        tags = None
        taken = False
        if not self._is_recorded:
            manager = self.manager()
            taken = bool(self._find_slices(layout["name"]))
            tags = _project_tags(manager) or None
        # Its constructor requires a manager of fablib's class.
        resources = ResourcesV2.__new__(ResourcesV2)
        resources.fablib_manager = _SummaryHolder(self.read_summary())
        resources.update()
        _, errors = NodeValidator.validate_nodes(built.get_nodes(), resources, tags)
        slot = None
        if errors and not self._is_recorded:
            slot = self._find_slot(built, hours)
        return {
            "errors": errors,
            "slot": slot,
            "taken": taken,
            "built": self.describe_slice(built),
        }

    def create_slice(self, layout: dict[str, Any], hours: int) -> dict[str, Any]:
        """Submit a slice; return its id. It is not waited for."""
        self.manager()
        key = self.fablib.get_default_slice_public_key_file()
        if not Path(key).is_file():
            raise Unusable("no-keys", f"{key} is not there")
        self._require_bastion_login()
        built = self.build_slice(layout)
        return {"id": built.submit(wait=False, lease_in_hours=hours, post_boot_config=False)}

    def read_slice(self, wanted: str) -> dict[str, Any]:
        """Describe the slice of a name or an id."""
        from fabrictestbed_extensions.fablib.slice import Slice

        summary = self._require_slice(wanted)
        self._require_bastion_login()
        return self.describe_slice(Slice.get_slice(self.fablib, summary))

    def renew_slice(self, wanted: str, end: str) -> dict[str, Any]:
        """Move the end of a slice's lease."""
        slice_id = self._require_slice(wanted).slice_id
        self.manager().renew_slice(slice_id=slice_id, lease_end_time=end)
        return {"id": slice_id}

    def delete_slice(self, wanted: str) -> dict[str, Any]:
        """Delete every living slice of a name, or the one of an id."""
        slice_ids = [each.slice_id for each in self._find_slices(wanted)]
        for slice_id in slice_ids:
            self.manager().delete_slice(slice_id=slice_id)
        return {"deleted": slice_ids}

    # -- steps

    def build_slice(self, layout: dict[str, Any]) -> Any:
        """Return an unsubmitted slice: VMs with their GPUs and cards, and networks between them."""
        built = self.fablib.new_slice(layout["name"])
        cards: dict[str, list[Any]] = {network["name"]: [] for network in layout["networks"]}
        for vm in layout["vms"]:
            node = built.add_node(
                name=vm["name"],
                site=vm["site"],
                cores=vm["cores"],
                ram=vm["ram_gb"],
                disk=vm["disk_gb"],
                image=layout["image"],
                user_data={"farspan": {"address": vm["address"]}},
            )
            for number, model in enumerate(vm["gpus"], start=1):
                node.add_component(model=model, name=f"gpu{number}")
            for network in layout["networks"]:
                if vm["name"] in network["vms"]:
                    card = node.add_component(model="NIC_Basic", name=network["name"])
                    cards[network["name"]] += card.get_interfaces()
        for network in layout["networks"]:
            built.add_l2network(
                name=network["name"], interfaces=cards[network["name"]], type=network["kind"]
            )
        return built

    def describe_slice(self, subject: Any) -> dict[str, Any]:
        """Describe a slice (`domain.fabric.SliceRecord`)."""
        networks = {}
        network_of = {}
        for network in subject.get_networks():
            networks[network.get_name()] = str(network.get_type())
            for card in network.get_interfaces():
                network_of[card.get_name()] = network.get_name()
        vms = []
        for node in subject.get_nodes():
            cards = []
            for card in node.get_interfaces():
                address = card.get_fablib_data().get("addr")
                network = network_of.get(card.get_name())
                cards.append({"network": network, "mac": card.get_mac(), "address": address})
            models = [part.get_model() for part in node.get_components()]
            gpus = [model for model in models if str(model).startswith("GPU_")]
            own = node.get_user_data().get("farspan") or {}
            vm = {"name": node.get_name(), "site": node.get_site(), "user": node.get_username()}
            vm |= {"state": node.get_reservation_state(), "error": node.get_error_message() or ""}
            vm |= {"management_ip": node.get_management_ip(), "address": own.get("address")}
            vm |= {"cores": node.get_cores() or node.get_requested_cores()}
            vm |= {"ram_gb": node.get_ram() or node.get_requested_ram()}
            vms.append(vm | {"gpus": gpus, "cards": cards})
        errors = []
        if subject.sm_slice is not None:
            notices = [notice for notice in subject.get_notices().values() if notice]
            errors = [notice for notice in notices if CASCADE not in notice]
        fablib = self.fablib
        access = {
            "bastion": fablib.get_bastion_host(),
            "bastion_user": fablib.get_bastion_username() or "",
            "bastion_key": fablib.get_bastion_key_location(),
            "slice_key": fablib.get_default_slice_private_key_file(),
        }
        return {
            **access,
            "name": subject.get_name(),
            "id": subject.get_slice_id(),
            "state": subject.get_state(),
            "lease_end": subject.get_lease_end(),
            "vms": vms,
            "networks": networks,
            "errors": errors,
        }

    def _find_slices(self, wanted: str) -> list[Any]:
        """Return the user's living slices of this name or id."""
        slices = self.manager().list_slices(exclude_states=["Dead", "Closing"], return_fmt="dto")
        return [each for each in slices if wanted in (each.name, each.slice_id)]

    def _require_slice(self, wanted: str) -> Any:
        slices = self._find_slices(wanted)
        if not slices:
            raise Unusable("no-slice", f"no slice of yours has the name or id {wanted!r}")
        return slices[0]

    def _require_bastion_login(self) -> None:
        if not self.fablib.get_bastion_username():
            login = self.manager().get_user_info().get("bastion_login")
            self.fablib.set_bastion_username(login)

    def _find_slot(self, built: Any, hours: float) -> str | None:
        """Return when the testbed has room for a slice; None where it knows of no such time."""
        start = datetime.now(UTC) + timedelta(hours=1)
        answer = self.fablib.find_resource_slot(
            start=start,
            end=start + timedelta(days=MAX_SEARCH_DAYS - 1),
            duration=max(1, round(hours)),
            slice=built,
        )
        slots = answer.get("slots") or []
        return slots[0].get("start") if slots else None


class _SummaryHolder:
    """Stands where `ResourcesV2` looks for a manager that has a summary."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self._summary = summary

    def get_manager(self) -> Any:
        from fabrictestbed.fabric_manager_v2 import FabricManagerV2

        manager = FabricManagerV2.__new__(FabricManagerV2)
        manager.resources_summary = lambda **_: self._summary
        return manager


def _project_tags(manager: Any) -> frozenset[str]:
    """Return the permissions of the project in the token; empty where it has none."""
    claims = decode_token(manager.ensure_valid_id_token())
    for project in claims.get("projects") or []:
        if project.get("uuid") == manager.project_id:
            return frozenset(project.get("tags") or [])
    return frozenset()


def require_token(location: str, now: float) -> None:
    """Refuse a token file that is missing, is none, or has expired for good."""
    try:
        content = json.loads(Path(location).read_text())
        token = content["id_token"]
    except FileNotFoundError:
        raise Unusable("no-token", f"{location} is not there") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable("no-token", f"{location}: {error!r}") from None
    expires = decode_token(token).get("exp", float("inf"))
    if expires <= now and not content.get("refresh_token"):
        ended = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise Unusable("expired", f"the token in {location} expired on {ended}")


def decode_token(token: str) -> dict[str, Any]:
    """Return the claims of a token, which is not verified here; none of what is no token."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _configured(key: str) -> str | None:
    """Return a value of the user's fabric_rc, as fablib reads it."""
    from fabrictestbed_extensions.fablib.config.config import Config

    value: str | None = Config(offline=True).get_config().get(key)
    return value


def _read_summary(path: str) -> dict[str, Any]:
    """Read a recorded summary, as the testbed answers it (`/portalresources/summary`)."""
    try:
        content = json.loads(Path(path).read_text())
        summary = content["data"][0] if "data" in content else content
        summary["hosts"], summary["sites"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Unusable("no-resources", f"{path}: {error!r}") from None
    return dict(summary)


def explain(error: BaseException) -> dict[str, str]:
    """Return the kind of an error and its facts, in one line."""
    fact = " ".join(str(error).split())[:600] or type(error).__name__
    if isinstance(error, Unusable):
        return {"kind": error.kind, "fact": fact}
    name = type(error).__name__
    status = getattr(error, "status_code", None)
    if status == 401 or "Token refresh failed" in fact or "Token expired" in fact:
        return {"kind": "expired", "fact": fact}
    if status is not None:
        return {"kind": "refused", "fact": fact}
    if name in ("ConfigException", "FabricManagerException"):
        return {"kind": "configuration", "fact": fact}
    if name == "OrchestratorError" or isinstance(error, OSError):
        # The client wraps the cause several times.
        return {"kind": "unreachable", "fact": fact.rpartition("Caused by ")[2].strip("()'\"")}
    return {"kind": "other", "fact": f"{name}: {fact}"}


def answer_questions(
    questions: TextIO, answers: TextIO, folder: str, resources: str | None
) -> None:
    """Answer each line until there is none."""
    testbed = None
    for line in questions:
        question = json.loads(line)
        try:
            if testbed is None:
                testbed = Testbed(folder, resources)
            answer = {"answer": getattr(testbed, question.pop("ask"))(**question)}
        except Exception as error:
            answer = {"fault": explain(error)}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Standard output is for answers: what fablib prints goes to standard error.
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_questions(sys.stdin, own_output, sys.argv[1], sys.argv[2] if sys.argv[2:] else None)
