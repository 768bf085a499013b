"""The README's commands for one's own text, run as they stand; only the folder and the time are
replaced."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from farspan.retrieval.serve.server_info import find_server
from tests.waiting import LIMIT_S, wait_for

README = Path(__file__).parent.parent / "README.md"
FOLDER = "~/papers"
TIME = "10m"


def commands() -> list[str]:
    """The lines of the fenced block under "Your own text" that run farspan."""
    section = README.read_text().split("\n## Your own text\n")[1].split("\n## ")[0]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0]
    return [line for line in block.splitlines() if line.startswith("farspan ")]


def write_papers(folder: Path) -> None:
    """80 short papers, .md and .txt by turns, over 1,200 made-up words that follow one another
    unevenly."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(1200)]
    for number in range(80):
        topic = rng.sample(words, 150)
        lines = [
            " ".join(rng.choices(topic, k=rng.randint(8, 15))).capitalize() + "." for _ in range(25)
        ]
        title = " ".join(topic[:4])
        suffix = ("md", "txt")[number % 2]
        (folder / f"paper-{number:02}.{suffix}").write_text(
            f"# The sample of {title}\n\n" + "\n".join(lines) + "\n"
        )


def served(words: list[str], here: Path, environment: dict[str, str]) -> str:
    """What the search page's own API answers, before the server is ended as by Ctrl-C."""
    process = subprocess.Popen(
        words, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url, *_ = wait_for(lambda: find_server(here / "runs/papers"), "the server's start", process)
        with urllib.request.urlopen(f"{url}/api/search?q=paper+sample", timeout=LIMIT_S) as answer:
            said = answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    return said


def test_the_commands_for_ones_own_text_work_as_they_stand(tmp_path: Path) -> None:
    papers = tmp_path / "papers"
    here = tmp_path / "here"
    papers.mkdir()
    here.mkdir()
    write_papers(papers)
    environment = os.environ | {"FARSPAN_CACHE": str(tmp_path / "cache")}
    lines = commands()
    done = {}
    for line in lines:
        words = shlex.split(line.replace(FOLDER, str(papers)).replace(TIME, "8s"), comments=True)
        if words[1] == "serve":
            done["serve"] = served([sys.executable, "-m", *words, "--port", "0"], here, environment)
            continue
        result = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        done[words[1]] = result.stdout
    assert [line.split()[1] for line in lines] == [
        "doctor",
        "init",
        "train",
        "report",
        "generate",
        "embed",
        "search",
        "tune",
        "serve",
        "export",
        "resume",
    ]
    run = here / "runs/papers"
    for name in (
        "report.html",
        "plan.json",
        "estimate.json",
        "run.yaml",
        "run.json",
        "corpus.json",
        "tokenizer.json",
        "events.jsonl",
        "tensorboard",
        "logs",
        "checkpoints/best",
        "index",
    ):
        assert (run / name).exists(), name
    assert json.loads((run / "export/config.json").read_text())["model_type"] in ("gpt2", "llama")
    assert done["generate"].split("\n", 1)[1].startswith("In this paper")
    assert "default: " in done["tune"]
    assert "paper-" in done["search"] and "paper-" in done["serve"]
    assert any((tmp_path / "cache/corpora").iterdir()), (
        "prepared text goes where FARSPAN_CACHE says"
    )
