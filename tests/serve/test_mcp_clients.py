"""What `farspan mcp --config` prints for the programs that take it."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from farspan.app.mcp_clients import client_settings, describe_settings, server_name


@pytest.fixture
def run(tmp_path):
    return tmp_path / "my 'odd' run"


def test_process_settings_start_this_interpreter_on_the_whole_path(run):
    words = [sys.executable, "-P", "-m", "farspan", "mcp", str(run)]
    settings = client_settings(run, url=None, has_token=False)
    for setting in settings:
        if setting.goes_to != "shell":
            ((_, servers),) = json.loads(setting.setting).items()
            assert servers == {"farspan-my-odd-run": {"command": words[0], "args": words[1:]}}
        elif setting.client == "VS Code":
            typed = shlex.split(setting.setting)
            assert typed[:2] == ["code", "--add-mcp"]
            entry = json.loads(typed[2])
            assert [entry["command"], *entry["args"]] == words
        else:
            typed = shlex.split(setting.setting)
            assert typed[typed.index("--") + 1 :] == words
    assert {"Claude Code", "Claude Desktop", "Cursor", "VS Code"} <= {s.client for s in settings}
    # One line each, below the program's name.
    assert len(describe_settings(settings).splitlines()) == 2 * len(settings)


@pytest.mark.parametrize("has_token", [False, True])
def test_address_settings_name_the_variable_and_never_the_token(run, has_token):
    url = "http://127.0.0.1:8000/mcp"
    for setting in client_settings(run, url=url, has_token=has_token):
        assert url in setting.setting
        assert ("TOKEN" in setting.setting) == has_token
        if setting.goes_to != "shell":
            json.loads(setting.setting)


def test_server_name_is_a_word_that_every_program_takes(tmp_path):
    assert server_name(tmp_path / "demo") == "farspan-demo"
    assert server_name(tmp_path / "日本") == "farspan"
    assert server_name(tmp_path / "a b/../a.b c") == "farspan-a-b-c"
