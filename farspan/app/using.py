"""A trained model in use: text after a prompt, and the model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from farspan.app.checks import refuse_existing
from farspan.domain.problems import command
from farspan.domain.run import RunFolder


def generate(run: RunFolder, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int) -> tuple[str, int]:
    """Text that the model writes after a prompt, and the step that its weights are from."""
    from farspan.runtime.inference import load
    from farspan.runtime.model.generate import generate as write

    trained = load(run)
    text = write(
        trained.model, trained.tokenizer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    return text, trained.step


def export(run: RunFolder, out: Path | None = None, *, dtype: Literal["fp32", "bf16"] = "fp32") -> tuple[Path, int]:
    """Write the model as a Hugging Face folder that transformers loads, with a model card (by default RUN/export): the
    folder, and the step that its weights are from."""
    out = out or run.path / "export"
    refuse_existing(out, command("export", run.path, "--out", f"{out}-2"))
    from farspan.report.history import open_run
    from farspan.report.model_card import model_card
    from farspan.runtime.inference import load
    from farspan.runtime.model.huggingface import export as write

    trained = load(run)
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(model_card(open_run(run.path), trained.step))
    write(
        out, trained.model.state_dict(), trained.model.spec, tokenizer=run.tokenizer,
        end_of_text=trained.tokenizer.end_of_text, dtype=dtype,
    )  # fmt: skip
    return out, trained.step
