"""An exported folder on the Hugging Face hub: what can be refused before the model is exported, and
the upload."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farspan.corpus._hub import find_fault
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal, command
from farspan.models._base_files import TEMPLATES

#: What the hub takes as the name of a repository.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_]([\w.-]*\w)?\Z", re.ASCII)
_MAX_NAME_LENGTH = 96
#: Roles of an organization in which members may not write.
_READERS = ("read", "no-access")
#: Files of earlier exports that an upload removes, where it has none of their name: transformers
#: would load them.
_STALE = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin"),
    *("chat_template.*", f"{TEMPLATES}/*"),
)
#: Characters of an error of the hub's.
_MAX_FACT_LENGTH = 300
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class HubRepository:
    """A repository that this user may write to."""

    name: str
    public: bool
    _token: str = field(repr=False)

    def upload(self, folder: Path) -> str:
        """Upload a folder in one commit; return the repository's address. Raises Refusal
        (hub-unusable): the repository then is as it was."""
        from huggingface_hub import HfApi

        api = HfApi(token=self._token)
        try:
            url = api.create_repo(self.name, private=not self.public, exist_ok=True)
            api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message="farspan export",
                delete_patterns=list(_STALE),
            )
        # The library raises its own errors, and those of whatever it sends by.
        except Exception as error:
            raise _refuse(
                "the hub did not take the model; the exported folder is whole",
                self.name,
                _describe(error, self._token),
                self._upload_command(folder),
            ) from None
        return str(url)

    def _upload_command(self, folder: Path) -> str:
        """Write the command of the hub's library that does the same as `upload`."""
        options = [] if self.public else ["--private"]
        for pattern in _STALE:
            options += ["--delete", pattern]
        return shell_line("hf", "upload", self.name, folder, ".", *options)


def open_repository(name: str, *, public: bool, export: Sequence[object]) -> HubRepository:
    """Find out whether this user may write a repository, OWNER/NAME, which need not exist yet.

    The token is HF_TOKEN or the stored one of the hub's library. `export` are the words of the
    command that exports without an upload, for remedies. Raises Refusal (out-of-range) for a name
    that the hub does not take, and (hub-unusable) without a token, without the hub, or without the
    right to write.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    _check_name(name, export)
    remedy = command(*export)
    token = get_token()
    if token is None:
        fact = "HF_TOKEN is not set, and no token is stored"
        raise _refuse("the hub takes no model without a token", "--push", fact, "hf auth login")
    fault = find_fault()
    if fault is not None:
        raise _refuse("the hub cannot be asked, so nothing is uploaded", name, fault, remedy)
    api = HfApi(token=token)
    try:
        user = api.whoami()
        _check_rights(name, user, [*export, *(["--public"] if public else [])])
        try:
            is_private = bool(api.model_info(name).private)
        except RepositoryNotFoundError:
            return HubRepository(name, public, token)
    except Refusal:
        raise
    except Exception as error:
        fact = _describe(error, token)
        is_denied = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        if is_denied:
            raise _refuse("the hub does not accept the token", name, fact, _log_in()) from None
        raise _refuse("the hub cannot be asked", name, fact, remedy) from None
    if is_private == public:
        state = "private" if is_private else "public"
        # A text that is private must not become public by a slip, nor stay private unnoticed.
        fix = command(*export, "--push", name, *([] if is_private else ["--public"]))
        raise _refuse(f"the repository exists and is {state}", name, "it is left as it is", fix)
    return HubRepository(name, public, token)


def _check_name(name: str, export: Sequence[object]) -> None:
    is_valid = _NAME.match(name) is not None and len(name) <= _MAX_NAME_LENGTH
    if not is_valid or any(part in name for part in ("--", "..")) or name.endswith(".git"):
        raise Refusal(
            "out-of-range",
            what=f"{name!r} cannot be the name of a repository",
            where="--push",
            fact=(
                "it has an owner, a slash and a name, in letters, digits, and single - _ . between "
                f"them, of {_MAX_NAME_LENGTH} characters at most"
            ),
            remedy=command(*export, "--push", "OWNER/NAME"),
        )


def _check_rights(name: str, user: dict[str, Any], export: Sequence[object]) -> None:
    """Refuse a token that may only read, and an owner that is neither the user nor an organization
    in which it may write."""
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        fact = f"its role is read; {_TOKENS_PAGE} makes those with the role write"
        raise _refuse("the token may only read", name, fact, _log_in())
    owner, _, rest = name.partition("/")
    roles = {each.get("name"): each.get("roleInOrg") for each in user.get("orgs") or []}
    own = str(user.get("name"))
    writable = [own, *(org for org, role in roles.items() if role not in _READERS)]
    if owner.casefold() not in (str(each).casefold() for each in writable):
        raise _refuse(
            f"the token may not write to repositories of {owner}",
            name,
            f"it writes to those of {', '.join(map(str, writable))}",
            command(*export, "--push", f"{own}/{rest}"),
        )


def _log_in() -> str:
    """Return the command that puts another token in the place of the one in use."""
    if os.environ.get("HF_TOKEN"):
        return "unset HF_TOKEN && hf auth login"
    return "hf auth login"


def _describe(error: BaseException, token: str) -> str:
    """Return the text of an error on one line, without the token."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    text = "; ".join(dict.fromkeys(" ".join(str(each).split()) for each in causes))
    return (text.replace(token, "...") or type(error).__name__)[:_MAX_FACT_LENGTH]


def _refuse(what: str, where: object, fact: str, remedy: str) -> Refusal:
    return Refusal("hub-unusable", what=what, where=where, fact=fact, remedy=remedy)
