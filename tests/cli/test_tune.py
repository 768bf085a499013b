"""`farspan tune` as a person meets it: their own queries, what it says, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from farspan.domain.problems import EXIT_CODES
from tests.cli.conftest import Farspan


def test_tune_judges_by_queries_of_ones_own(run: Path, tmp_path: Path, here: Farspan):
    path = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
    assert here("embed", str(path), "--no-eval").returncode == 0
    config = path / "run.yaml"
    config.write_text(config.read_text().replace("time: 5m", "time: 1s"))
    assert "index:\n  store: auto\n  encoder: own\n  time: 1s" in config.read_text()
    found = json.loads(here("search", "time", "--run", str(path), "-k", "12", "--json").stdout)[
        "answer"
    ]["results"]
    queries = tmp_path / "queries.jsonl"
    qrels = tmp_path / "qrels.tsv"
    queries.write_text(
        "".join(f'{{"_id": {n}, "text": "time number {n}"}}\n' for n in range(len(found)))
    )
    qrels.write_text("".join(f"{n}\t{result['origin']}\t1\n" for n, result in enumerate(found)))
    done = here("tune", str(path), "--queries", str(queries), "--qrels", str(qrels))
    assert done.returncode == 0, done.stderr
    assert "for 1.0 s at most" in done.stdout and "6 own queries" in done.stdout, done.stdout
    assert "model - untuned" in done.stdout and "default: " in done.stdout
    again = here("embed", str(path))
    assert again.returncode == 0 and "up to date" in again.stdout, (
        "who embeds next has the index that was tuned"
    )
    lonely = here("tune", str(path), "--queries", str(queries))
    assert lonely.returncode == EXIT_CODES["usage"] and "come together" in lonely.stderr
    qrels.write_text("0\tno such document\t1\n")
    unknown = here("tune", str(path), "--queries", str(queries), "--qrels", str(qrels))
    assert unknown.returncode == EXIT_CODES["out-of-range"] and "qrels.tsv:1" in unknown.stderr
