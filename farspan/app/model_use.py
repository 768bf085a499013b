"""A trained model in use: text after a prompt, and the model as a folder that other programs
load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from farspan.app.preflight_checks import refuse_existing, require_gguf_library
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.model import WeightType
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, write_atomically

#: What loads what is exported: transformers, sentence-transformers, llama.cpp, or PEFT.
Format = Literal["huggingface", "sentence-transformers", "gguf", "peft"]
#: What is exported by default, below the run's folder.
_TARGETS: dict[Format, str] = {
    "huggingface": "export",
    "sentence-transformers": "sentence-transformers",
    "gguf": "model.gguf",
    "peft": "adapters",
}


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
    from farspan.runtime.inference import load as load_trained
    from farspan.runtime.inference import on_gpu
    from farspan.runtime.model.generate import generate as write

    trained = on_gpu(load_trained(run), note_reporter(progress))
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
    dtype: WeightType = "fp32",
    format: Format = "huggingface",
) -> tuple[Path, int]:
    """Write the model, with a model card, as a Hugging Face folder that transformers loads (by
    default RUN/export); or the embedder of the run's index as one that sentence-transformers loads
    (by default RUN/sentence-transformers); or the model as a file that llama.cpp loads (by default
    RUN/model.gguf); or the adapters of a run with `train.lora` as a folder that PEFT loads (by
    default RUN/adapters). In all others adapters are merged into the model.

    Returns the folder or file, and the step that its weights are from. Refuses (run-exists) a
    folder that has something in it, (no-index) an embedder where there is no index, or one of other
    weights, and (cannot-export) what llama.cpp would compute or read otherwise, and adapters of a
    run without any.
    """
    embedder = format == "sentence-transformers"
    out = out or run.path / _TARGETS[format]
    options = [] if format == "huggingface" else ["--format", format]
    if format == "gguf":
        require_gguf_library()
    elif dtype in ("fp16", "q8_0"):
        raise Refusal(
            "out-of-range",
            what=f"--dtype {dtype} is a type of GGUF files",
            where="--dtype",
            fact=f"--format {format} has fp32 and bf16",
            remedy=command("export", run.path, *options, "--dtype", "bf16"),
        )
    other = out.with_stem(f"{out.stem}-2") if format == "gguf" else f"{out}-2"
    refuse_existing(out, command("export", run.path, *options, "--out", other))
    from farspan.launch.trust import require_own_links
    from farspan.report import model_card
    from farspan.report.history import open_run
    from farspan.runtime.inference import load as load_trained

    if out.is_relative_to(run.path):
        require_own_links(run)
    if format == "peft":
        assert dtype in ("fp32", "bf16")
        return out, _export_adapters(run, out, dtype)
    trained = load_trained(run)
    if format == "gguf":
        from farspan.runtime.model.gguf_file import write_gguf

        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_gguf(
            out,
            trained.model.state_dict(),
            trained.model.spec,
            tokenizer=run.tokenizer,
            end_of_text=trained.tokenizer.end_of_text,
            name=run.path.resolve().name,
            kind=dtype,
        )
        return out, trained.step
    assert dtype in ("fp32", "bf16")
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


def _export_adapters(run: RunFolder, out: Path, dtype: Literal["fp32", "bf16"]) -> int:
    """Write a run's adapters, with a card, as a folder that PEFT loads; return their step."""
    from farspan.report import model_card
    from farspan.report.history import open_run
    from farspan.runtime.inference import base_folder, read_best
    from farspan.runtime.model.peft_folder import write_adapters

    plan = run.load_plan()
    if not plan.model.lora:
        raise Refusal(
            "cannot-export",
            what="the run has no adapters: it trained all weights of its model",
            where=run.path,
            fact="PEFT's folders hold adapters alone, which train.lora trains",
            remedy=command("export", run.path),
        )
    folder = base_folder(run)
    best = read_best(run, plan)
    # An id of the hub is found on every machine.
    asked = load(run.record, RunRecord).asked
    base = str(folder)
    if asked is not None and asked.model.path is not None and is_hub_id(asked.model.path):
        base = asked.model.path
    out.mkdir(parents=True, exist_ok=True)
    card = model_card.adapter_card(open_run(run.path), best.step, base)
    write_atomically(out / "README.md", card.encode())
    write_adapters(out, best.weights, plan.model, base=base, dtype=dtype)
    return best.step
