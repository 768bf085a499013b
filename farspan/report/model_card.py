"""The model cards of exported models: what it is, what it was trained on, how far, and how it is
loaded."""

from __future__ import annotations

from pathlib import PurePath

from farspan import models
from farspan._version import __version__
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.train import TrainSpec
from farspan.domain.units import counted, format_count
from farspan.report import losses
from farspan.report.history import RunHistory
from farspan.report.measurement import measure_run

_HEAD = """---
library_name: {library}
pipeline_tag: {task}
tags:
- farspan
---

# {name}

A decoder in the style of {family}: {layers} of width {width}, {parameters} parameters, a context of {context} tokens.
farspan {version} pretrained it on somebody's own text. {kind}

| | |
|---|---|
{rows}

## How to load it

"""  # noqa: E501
_KIND = "It is a base model: it goes on with text, and follows no\ninstructions."
_USE = """```python
from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = {tokenizer}.from_pretrained(FOLDER)
ids = tokenizer("A prompt", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

## Limits

It knows what its text says, right or wrong, and may repeat passages of it word for word. People who may not read
the text should not get the model.
"""  # noqa: E501
_EMBEDDER_KIND = (
    "Here it turns texts into vectors, by maps that were fitted to\ntitles and passages of that "
    "text."
)
_ADAPTER_KIND = (
    "Here are the adapters alone (LoRA) that were trained for that\ntext. They need the model that "
    "they belong to."
)
_ADAPTER_USE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, FOLDER)
```

BASE is `{base}`. `adapter_config.json` names where it lay.

## Limits

It knows what its text says, right or wrong, and may repeat passages of it word for word. People who may not read
the text should not get the adapters.
"""  # noqa: E501
_EMBEDDER_USE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(FOLDER, trust_remote_code=True)
passages = model.encode_document(["A passage of the text", "Another"])
queries = model.encode_query(["what is looked for"])
print(model.similarity(queries, passages))
```

It needs sentence-transformers 5.4 or later. `trust_remote_code` lets it run `farspan_embedding.py`, which lies in the
folder. `encode` gives vectors of passages. Where only `encode` can be called, `prompt_name="query"` gives those of
queries.

## Limits

Vectors tell texts like its own apart, and of other texts little. Of a text only the first {tokens} tokens count, so
split longer ones first. The model in the folder may repeat its text word for word. People who may not read the text
should not get it.
"""  # noqa: E501


def model_card(run: RunHistory, step: int) -> str:
    """Write the card of a run's model after a step. It names only the text's folder: paths are
    private."""
    card = _fill_head(run, step, library="transformers", task="text-generation", kind=_KIND)
    loader = models.family(run.plan.model.family).TOKENIZER_CLASS
    return card + _USE.format(tokenizer=loader)


def adapter_card(run: RunHistory, step: int, base: str) -> str:
    """Write the same of a run's adapters, which belong to the model at `base`."""
    lora = run.plan.model.lora
    assert lora
    count = format_count(models.count_trained(run.plan.model))
    card = _fill_head(
        run,
        step,
        library="peft",
        task="text-generation",
        kind=_ADAPTER_KIND,
        adapters=f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, {count} parameters",
    )
    name = base if is_hub_id(base) else PurePath(base).name
    return card + _ADAPTER_USE.format(base=name)


def embedder_card(run: RunHistory, step: int, dim: int) -> str:
    """Write the same of a folder for sentence-transformers, whose vectors have `dim` numbers."""
    card = _fill_head(
        run,
        step,
        library="sentence-transformers",
        task="sentence-similarity",
        kind=_EMBEDDER_KIND,
        vectors=f"{counted(dim, 'number')} each, of length 1, to be compared by cosine",
    )
    return card + _EMBEDDER_USE.format(tokens=run.plan.model.context - 1)


def _name_text(corpus: CorpusManifest, train: TrainSpec) -> str:
    """Name the text by its folder, or the sources of a mixture with their shares."""
    if not corpus.parts or not train.shares:
        return PurePath(corpus.source).name or corpus.source
    shares = zip(corpus.parts, train.shares, strict=True)
    return ", ".join(f"{part.name} ({share:.0%})" for part, share in shares)


def _fill_head(
    run: RunHistory, step: int, *, library: str, task: str, kind: str, **more: str
) -> str:
    """Fill in the part of a card above how the folder is loaded."""
    corpus = run.corpus
    model = run.plan.model
    train = run.plan.train
    source = _name_text(corpus, train)
    documents = counted(corpus.train.documents, "document")
    steps = f"{counted(step, 'step')} of {train.tokens_per_step:,} tokens"
    read = step * train.tokens_per_step
    passes = f"{read / corpus.epoch_tokens(train.shares):.2g} passes over the text"
    facts = {
        "text": f"{source}: {documents}, {format_count(corpus.train.tokens)} tokens",
        "trained": f"{steps}, {format_count(read)} in all ({passes}), in {train.precision}",
        "vocabulary": counted(corpus.vocab_size, "token"),
    }
    measured = measure_run(run)
    if measured is not None and measured.val_loss is not None:
        loss = losses.exact(measured.val_loss, measured.val_standard_error)
        facts["validation loss"] = f"{loss} nats a token, {measured.bits_per_byte:.3f} bits a byte"
    rows = [f"| {name} | {fact} |" for name, fact in (facts | more).items()]
    family = models.family(model.family).TITLE
    name = run.folder.resolve().name
    return _HEAD.format(
        library=library,
        task=task,
        kind=kind,
        name=name,
        family=family,
        layers=counted(model.layers, "layer"),
        width=model.d_model,
        context=model.context,
        parameters=format_count(count_parameters(model)),
        version=__version__,
        rows="\n".join(rows),
    )
