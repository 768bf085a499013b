"""What a trained model is worth beyond its loss: a cloze on its own held-out text, and the tasks of
the LM Evaluation Harness."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farspan.app.model_use import export_model
from farspan.app.updates import Note, Progress, ignore_update, note_reporter
from farspan.domain.corpus import CorpusManifest
from farspan.domain.install import install_packages_command
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load as load_struct

if TYPE_CHECKING:
    from farspan.runtime.cloze import Cloze

HARNESS = "lm-eval[hf]"


def measure_cloze(
    run: RunFolder, progress: Progress = ignore_update, *, questions: int, seed: int = 0
) -> tuple[Cloze, int]:
    """Ask a run's model for words of its held-out documents; return the answers' worth, and the
    step that the weights are from."""
    from farspan.corpus.documents import read_documents
    from farspan.corpus.find_prepared import require_corpus
    from farspan.runtime import cloze
    from farspan.runtime.inference import load, on_gpu

    manifest = load_struct(run.corpus, CorpusManifest)
    folder = require_corpus(run, manifest.hash)
    # The held-out ones follow those of the training split; what is replayed comes last.
    first = manifest.train.documents
    last = first + manifest.own_documents("val")
    held_out = itertools.islice(read_documents(folder), first, last)
    texts = [document.text for document in held_out]
    trained = on_gpu(load(run), note_reporter(progress))
    progress(Note(f"asking for {questions:,} words of {len(texts):,} held-out documents"))
    answered = cloze.measure_cloze(
        trained.model, trained.tokenizer, texts, count=questions, seed=seed
    )
    return answered, trained.step


def run_tasks(
    run: RunFolder, tasks: Sequence[str], progress: Progress = ignore_update, *, limit: int | None
) -> dict[str, Any]:
    """Run tasks of the LM Evaluation Harness, by its names or as its YAML files, on a run's model.

    Returns the harness's results by task. Raises Refusal (extra-missing) where it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise Refusal(
            "extra-missing",
            what="--tasks needs the LM Evaluation Harness",
            where=sys.executable,
            fact="lm_eval is not installed there",
            remedy=install_packages_command(HARNESS),
        )
    import lm_eval
    from lm_eval.tasks import TaskManager

    from farspan.runtime.device import usable_gpus

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    task_names = [Path(task).stem if Path(task) in files else task for task in tasks]
    folders = sorted({str(file.absolute().parent) for file in files})
    with tempfile.TemporaryDirectory(prefix="farspan-eval-") as folder:
        out = export_model(run, Path(folder) / "model", dtype="fp32").path
        progress(Note(f"running {', '.join(task_names)} with lm-eval {lm_eval.__version__}"))
        evaluated = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(out), "dtype": "float32"},
            tasks=task_names,
            device="cuda" if usable_gpus() else "cpu",
            limit=limit,
            task_manager=TaskManager(include_path=folders or None),
            bootstrap_iters=0,
        )
    results: dict[str, Any] = evaluated["results"]
    return results
