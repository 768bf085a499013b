"""A run in the LM Evaluation Harness, by a task of our own: its tasks come from the hub."""

from __future__ import annotations

import json

import pytest

from farspan.app import evaluation
from farspan.cli.main import main
from farspan.domain.run import RunFolder

TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{data}'}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """A model that has learned its text by heart."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "text").mkdir()
    for number in range(40):
        sentence = "the wind will list and blow where it wants to go. "
        (folder / "text" / f"{number}.txt").write_text(f"Paper {number}\n\n{sentence * 20}")
    config = folder / "run.yaml"
    config.write_text(
        f"data: {{source: '{folder / 'text'}', val: 20%}}\n"
        "tokenizer: {vocab: 400}\n"
        "model: {layers: 2, d_model: 64, heads: 2, context: 64}\n"
        "train: {steps: 60, batch: {global: 16 sequences}, precision: fp32}\n"
        "parallel: {technique: data, workers: 1, device: cpu}\n"
    )
    assert main(["train", str(config), "--run", str(folder / "run")]) == 0
    return RunFolder(folder / "run")


@pytest.mark.slow
def test_cloze_of_a_text_that_repeats_is_answered(run, capsys):
    assert main(["eval", str(run.path), "--questions", "60", "--json"]) == 0
    cloze = json.loads(capsys.readouterr().out)["cloze"]
    assert cloze["questions"] == 60
    assert cloze["accuracy"] > 2 * cloze["commonest"]


@pytest.mark.slow
def test_own_task_of_the_harness_runs_on_the_model(run, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the harness: pip install 'lm-eval[hf]'")
    rows = []
    for _ in range(8):
        question = "the wind will list and blow"
        rows.append({"question": question, "choices": ["where", "zebra"], "answer": 0})
    data = tmp_path / "own.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.yaml").write_text(TASK.format(data=data))
    results = evaluation.run_tasks(run, [str(tmp_path / "own.yaml")], limit=None)
    assert results["own"]["acc,none"] == 1.0
