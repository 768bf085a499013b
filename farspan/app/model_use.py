"""A trained model in use: text after a prompt, and the model as a folder that other programs
load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from farspan.app.preflight_checks import refuse_existing
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import write_atomically

#: What loads an exported folder: transformers, or sentence-transformers.
Format = Literal["huggingface", "sentence-transformers"]


def generate_text(
    run: RunFolder,
    prompt: str,
    progress: Progress = ignore_update,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> tuple[str, int]:
    """Return text that the model writes after a prompt, and the step that its weights are from."""
    from farspan.runtime.inference import load, on_gpu
    from farspan.runtime.model.generate import generate as write

    trained = on_gpu(load(run), note_reporter(progress))
    text = write(
        trained.model,
        trained.tokenizer,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return text, trained.step


def export_model(
    run: RunFolder,
    out: Path | None = None,
    *,
    dtype: Literal["fp32", "bf16"] = "fp32",
    format: Format = "huggingface",
) -> tuple[Path, int]:
    """Write the model, with a model card, as a Hugging Face folder that transformers loads (by
    default RUN/export), or the embedder of the run's index as one that sentence-transformers loads
    (by default RUN/sentence-transformers).

    Returns the folder, and the step that its weights are from. Refuses (run-exists) a folder that
    has something in it, and (no-index) an embedder where there is no index, or one of other
    weights.
    """
    embedder = format == "sentence-transformers"
    out = out or run.path / ("sentence-transformers" if embedder else "export")
    options = ["--format", format] if embedder else []
    refuse_existing(out, command("export", run.path, *options, "--out", f"{out}-2"))
    from farspan.launch.trust import require_own_links
    from farspan.report import model_card
    from farspan.report.history import open_run
    from farspan.runtime.inference import load

    if out.is_relative_to(run.path):
        require_own_links(run)
    trained = load(run)
    if embedder:
        from farspan.app.indexing import model_origin, refuse_other_model
        from farspan.retrieval.index import FITTED, OWN_VECTORS, read_manifest
        from farspan.retrieval.sentence_transformers import write_sentence_transformers

        manifest = read_manifest(run.index, command("embed", run.path))
        if manifest.origin is None:
            raise Refusal(
                "no-index",
                what="the index has no vectors of the run's own model",
                where=run.index,
                fact=f"its sets of vectors: {', '.join(manifest.sets) or 'none'}",
                remedy=command("embed", run.path),
            )
        refuse_other_model(run, manifest.origin, model_origin(run, trained))
        out.mkdir(parents=True, exist_ok=True)
        card = model_card.embedder_card(
            open_run(run.path), trained.step, manifest.sets[OWN_VECTORS].dim
        )
        write_atomically(out / "README.md", card.encode())
        write_sentence_transformers(
            out,
            trained,
            tokenizer=run.tokenizer,
            fitted=run.index / manifest.files / FITTED,
            dtype=dtype,
        )
    else:
        from farspan.runtime.model.huggingface import export_model as write_model

        out.mkdir(parents=True, exist_ok=True)
        card = model_card.model_card(open_run(run.path), trained.step)
        write_atomically(out / "README.md", card.encode())
        write_model(
            out,
            trained.model.state_dict(),
            trained.model.spec,
            tokenizer=run.tokenizer,
            end_of_text=trained.tokenizer.end_of_text,
            dtype=dtype,
        )
    return out, trained.step
