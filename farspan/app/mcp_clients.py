"""How the common programs are set up to search by the Model Context Protocol."""

from __future__ import annotations

import json
import re
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.escapes import shell_line
from farspan.domain.interpreter import own_command

#: How each program, and a shell, names the variable with the token: no setting holds the token.
SHELL_TOKEN = "Bearer $FARSPAN_TOKEN"
EDITOR_TOKEN = "Bearer ${env:FARSPAN_TOKEN}"
TYPED_TOKEN = "Bearer TOKEN"


class ClientSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A program, where its setting goes ("shell" for a command to type), and the setting."""

    client: str
    goes_to: str
    setting: str


def client_settings(run: Path, *, url: str | None, has_token: bool) -> list[ClientSetting]:
    """Return one setting for each program: of a process that it starts, or of the server at
    `url`."""
    name = server_name(run)
    if url is None:
        return _process_settings(name, server_command(run))
    return _address_settings(name, url, has_token)


def server_name(run: Path) -> str:
    """Return a name that every program takes: letters, digits and hyphens."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", run.resolve().name).strip("-")
    return f"farspan-{words}" if words else "farspan"


def server_command(run: Path) -> list[str]:
    """Return the command, with whole paths: programs have another PATH and another folder."""
    return own_command("farspan", "mcp", str(run.resolve()))


def describe_settings(settings: list[ClientSetting]) -> str:
    lines = []
    for setting in settings:
        lines.append(f"{setting.client} ({setting.goes_to}):")
        lines.append(f"  {setting.setting}")
    return "\n".join(lines)


def _process_settings(name: str, words: list[str]) -> list[ClientSetting]:
    entry = {"command": words[0], "args": words[1:]}
    servers = _servers(name, entry)
    claude = shell_line("claude", "mcp", "add", name, "--", *words)
    code = shell_line("code", "--add-mcp", json.dumps({"name": name, **entry}))
    codex = shell_line("codex", "mcp", "add", name, "--", *words)
    rows = [
        ("Claude Code", "shell", claude),
        ("Claude Desktop", "claude_desktop_config.json", servers),
        ("VS Code", "shell", code),
        ("VS Code", ".vscode/mcp.json", _servers(name, entry, key="servers")),
        ("Cursor", "~/.cursor/mcp.json", servers),
        ("Codex", "shell", codex),
        ("Gemini CLI", "~/.gemini/settings.json", servers),
        ("LM Studio", "mcp.json", servers),
    ]
    return list(starmap(_setting, rows))


def _address_settings(name: str, url: str, has_token: bool) -> list[ClientSetting]:
    def entry(key: str, token: str, **more: str) -> dict[str, Any]:
        headers = {"headers": {"Authorization": token}} if has_token else {}
        return {**more, key: url, **headers}

    # The shell fills the token in: this option is not quoted as a whole.
    option = f' --header "Authorization: {SHELL_TOKEN}"' if has_token else ""
    claude = shell_line("claude", "mcp", "add", "--transport", "http", name, url) + option
    token_words = ["--bearer-token-env-var", "FARSPAN_TOKEN"] if has_token else []
    codex = shell_line("codex", "mcp", "add", name, "--url", url, *token_words)
    code = _servers(name, entry("url", EDITOR_TOKEN, type="http"), key="servers")
    cursor = _servers(name, entry("url", EDITOR_TOKEN))
    gemini = _servers(name, entry("httpUrl", SHELL_TOKEN))
    rows = [
        ("Claude Code", "shell", claude),
        ("VS Code", ".vscode/mcp.json", code),
        ("Cursor", "~/.cursor/mcp.json", cursor),
        ("Codex", "shell", codex),
        ("Gemini CLI", "~/.gemini/settings.json", gemini),
        ("LM Studio", "mcp.json", _servers(name, entry("url", TYPED_TOKEN))),
    ]
    return list(starmap(_setting, rows))


def _servers(name: str, entry: dict[str, Any], *, key: str = "mcpServers") -> str:
    return json.dumps({key: {name: entry}}, ensure_ascii=False)


def _setting(client: str, goes_to: str, setting: str) -> ClientSetting:
    return ClientSetting(client=client, goes_to=goes_to, setting=setting)
