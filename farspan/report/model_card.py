"""The model card of an exported model: what it is, what it was trained on, how far, and how it is loaded."""

from __future__ import annotations

from pathlib import PurePath

from farspan._version import __version__
from farspan.domain.model import parameters
from farspan.domain.units import counted, format_count
from farspan.report import losses
from farspan.report.history import RunHistory
from farspan.report.measure import measure

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- farspan
---

# {name}

A decoder in the style of {family}: {layers} of width {width}, {parameters} parameters, a context of {context} tokens.
farspan {version} pretrained it on somebody's own text. It is a base model: it goes on with text, and follows no
instructions.

| | |
|---|---|
{rows}

## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
ids = tokenizer("A prompt", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

## Limits

It knows what its text says, right or wrong, and may repeat passages of it word for word. People who may not read
the text should not get the model.
"""


def model_card(run: RunHistory, step: int) -> str:
    """The card of a run's model after a step. Of the text it names the folder alone: paths are nobody else's matter."""
    plan, corpus = run.plan, run.corpus
    train, source = plan.train, corpus.source
    read = step * train.tokens_per_step
    rows = [
        ("text", f"{PurePath(source).name or source}: {counted(corpus.train.documents, 'document')}, "
                 f"{format_count(corpus.train.tokens)} tokens"),
        ("trained", f"{counted(step, 'step')} of {train.tokens_per_step:,} tokens, {format_count(read)} in all "
                    f"({read / corpus.train.tokens:.2g} passes over the text), in {train.precision}"),
        ("vocabulary", counted(corpus.vocab_size, "token")),
    ]  # fmt: skip
    if (measured := measure(run)) is not None and measured.val_loss is not None:
        loss = losses.exact(measured.val_loss, measured.val_standard_error)
        rows.append(("validation loss", f"{loss} nats a token, {measured.bits_per_byte:.3f} bits a byte"))
    return CARD.format(
        name=run.folder.resolve().name, family={"gpt2": "GPT-2", "llama": "Llama"}.get(plan.model.family, "GPT-2"),
        layers=counted(plan.model.layers, "layer"), width=plan.model.d_model, context=plan.model.context,
        parameters=format_count(parameters(plan.model)), version=__version__,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows),
    )  # fmt: skip
