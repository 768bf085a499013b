"""A trained model in use: text after a prompt, and the model as a folder that other programs
load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from farspan.app.preflight_checks import (
    refuse_existing,
    require_gguf_library,
    unused_file,
    unused_path,
)
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.escapes import shell_line
from farspan.domain.model import StoredType, WeightType
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, write_atomically
from farspan.domain.suggest import known_names
from farspan.models import read_trained_tokens
from farspan.models._base_files import (
    LICENCE_FILES,
    copy_files,
    keeps_tokenizer,
    load_base,
    read_chat_template,
)

if TYPE_CHECKING:
    from farspan.runtime.inference import Trained

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


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported: the folder or file, the step and the type of its weights, and its address
    on the hub."""

    path: Path
    step: int
    dtype: WeightType
    url: str | None = None


def export_model(
    run: RunFolder,
    out: Path | None = None,
    *,
    dtype: WeightType | None = None,
    format: Format = "huggingface",
    push: str | None = None,
    public: bool = False,
) -> ExportedModel:
    """Write the model, with a model card, as a Hugging Face folder that transformers loads (by
    default RUN/export); or the embedder of the run's index as one that sentence-transformers loads
    (by default RUN/sentence-transformers); or the model as a file that llama.cpp loads (by default
    RUN/model.gguf); or the adapters of a run with `train.lora` as a folder that PEFT loads (by
    default RUN/adapters). In all others adapters are merged into the model.

    The weights are of the type that the weights of the model had which the run continues; of
    others, in fp32. `push` names a repository of the Hugging Face hub that the folder is uploaded
    to: a private one, or a `public` one.

    Refuses (run-exists) a folder that has something in it, (no-index) an embedder where there is no
    index, or one of other weights, (cannot-export) what llama.cpp would compute or read otherwise
    and adapters of a run without any, and (hub-unusable) an upload without token, network or
    rights, before anything is written.
    """
    asked = [] if out is None else ["--out", str(out)]
    if dtype is not None:
        asked += ["--dtype", dtype]
    out = out or run.path / _TARGETS[format]
    options = [] if format == "huggingface" else ["--format", format]
    _check_options(run, options, dtype=dtype, format=format, push=push, public=public)
    other = unused_file(out) if format == "gguf" else unused_path(out)
    upload = [] if push is None else ["--push", push, *(["--public"] if public else [])]
    refuse_existing(out, command("export", run.path, *options, *upload, "--out", other))
    repository = None
    if push is not None:
        from farspan.corpus.hub_upload import open_repository

        words = ["export", run.path, *options, *asked]
        repository = open_repository(push, public=public, export=words)
    from farspan.launch.trust import require_own_links

    if out.is_relative_to(run.path):
        require_own_links(run)
    if format == "peft":
        dtype = dtype or "fp32"
        step = _write_adapters(run, out, dtype)
    else:
        base = load_base(run.base)
        dtype = dtype or ("fp32" if base is None else base.stored)
        step = _write_model(run, out, dtype, format)
    url = None if repository is None else repository.upload(out)
    return ExportedModel(path=out, step=step, dtype=dtype, url=url)


def _write_model(run: RunFolder, out: Path, dtype: WeightType, format: Format) -> int:
    """Write the whole model, or the embedder of the run's index; return the step of the weights."""
    from farspan.runtime.inference import load as load_trained

    trained = load_trained(run)
    if format == "gguf":
        _write_gguf(run, out, trained, dtype)
    else:
        assert dtype != "q8_0"
        write = _write_embedder if format == "sentence-transformers" else _write_huggingface
        write(run, out, trained, dtype)
    return trained.step


def _check_options(
    run: RunFolder,
    options: list[str],
    *,
    dtype: WeightType | None,
    format: Format,
    push: str | None,
    public: bool,
) -> None:
    """Refuse what does not exist or does not go together, and a GGUF file without its library."""
    kinds = get_args(WeightType)
    if dtype is not None and dtype not in kinds:
        raise Refusal(
            "out-of-range",
            what=f"weights are not exported as {dtype}",
            where="--dtype",
            fact=known_names(dtype, kinds),
            remedy=command("export", run.path, *options, "--dtype", "bf16"),
        )
    if public and push is None:
        raise Refusal(
            "usage",
            what="--public is about an upload, and none is asked for",
            where="--public",
            fact="--push OWNER/NAME uploads the folder",
            remedy=command("export", run.path, *options, "--public", "--push", "OWNER/NAME"),
        )
    if format == "gguf":
        require_gguf_library()
        if push is not None:
            raise Refusal(
                "out-of-range",
                what="a GGUF file is not uploaded by --push",
                where="--push",
                fact="--push uploads a folder with its model card",
                remedy=(
                    f"{command('export', run.path, *options)} && "
                    f"{shell_line('hf', 'upload', push, run.path / _TARGETS[format])}"
                ),
            )
    elif dtype == "q8_0":
        raise Refusal(
            "out-of-range",
            what=f"--dtype {dtype} is a type of GGUF files",
            where="--dtype",
            fact=f"--format {format} has fp32, bf16 and fp16",
            remedy=command("export", run.path, *options, "--dtype", "bf16"),
        )


def _write_adapters(run: RunFolder, out: Path, dtype: WeightType) -> int:
    """Write a run's adapters, with a card, as a folder that PEFT loads; return their step."""
    from farspan.report import model_card
    from farspan.report.history import open_run
    from farspan.runtime.inference import base_folder, read_best
    from farspan.runtime.model.peft_folder import write_adapters

    assert dtype != "q8_0"
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
    copy_files(run.base, out, LICENCE_FILES)
    write_adapters(out, best.weights, plan.model, base=base, dtype=dtype)
    return best.step


def _write_gguf(run: RunFolder, out: Path, trained: Trained, dtype: WeightType) -> None:
    from farspan.runtime.model.gguf_file import write_gguf

    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    model = trained.model
    template = read_chat_template(run.base) if keeps_tokenizer(run.base) else None
    write_gguf(
        out,
        model.state_dict(),
        model.spec,
        tokenizer=run.tokenizer,
        end_of_text=trained.tokenizer.end_of_text,
        name=run.path.resolve().name,
        kind=dtype,
        chat_template=template,
    )


def _write_embedder(run: RunFolder, out: Path, trained: Trained, dtype: StoredType) -> None:
    from farspan.app.indexing import model_origin, refuse_other_model
    from farspan.report import model_card
    from farspan.report.history import open_run
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
    dim = manifest.sets[OWN_VECTORS].dim
    card = model_card.embedder_card(open_run(run.path), trained.step, dim)
    write_atomically(out / "README.md", card.encode())
    copy_files(run.base, out, LICENCE_FILES)
    write_sentence_transformers(
        out,
        trained,
        tokenizer=run.tokenizer,
        fitted=run.index / manifest.files / FITTED,
        dtype=dtype,
    )


def _write_huggingface(run: RunFolder, out: Path, trained: Trained, dtype: StoredType) -> None:
    from farspan.report import model_card
    from farspan.report.history import open_run
    from farspan.runtime.model.huggingface import export_model as write_model

    out.mkdir(parents=True, exist_ok=True)
    card = model_card.model_card(open_run(run.path), trained.step)
    write_atomically(out / "README.md", card.encode())
    copy_files(run.base, out, LICENCE_FILES)
    write_model(
        out,
        trained.model.state_dict(),
        trained.model.spec,
        tokenizer=run.tokenizer,
        end_of_text=trained.tokenizer.end_of_text,
        dtype=dtype,
        base=run.base if keeps_tokenizer(run.base) else None,
        trained_tokens=_count_trained_tokens(run, trained.step),
    )


def _count_trained_tokens(run: RunFolder, step: int) -> int | None:
    """Return the tokens that the weights of a step were trained on, those of the model that the run
    continues included; None where that does not record them."""
    tokens = step * run.load_plan().train.tokens_per_step
    if load(run.record, RunRecord).initial is None:
        return tokens
    # Runs of earlier versions kept no files of the model that they continue.
    if load_base(run.base) is None:
        return None
    before = read_trained_tokens(run.base)
    return None if before is None else before + tokens
