"""The model cards of exported models: what it is, what it was trained on, how far, and how it is
loaded."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import yaml

from farspan import models
from farspan._version import __version__
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.run import RunFolder
from farspan.domain.train import TrainSpec
from farspan.domain.units import counted, format_count
from farspan.models._base_files import (
    LICENCE_FILES,
    BaseCard,
    BaseRecord,
    has_chat_template,
    keeps_tokenizer,
    list_files,
    load_base,
    read_card,
)
from farspan.report import losses
from farspan.report.history import RunHistory
from farspan.report.measurement import measure_run

_HEAD = """---
{front_matter}---

# {name}

A decoder in the style of {family}: {layers} of width {width}, {parameters} parameters, a context of {context} tokens.
farspan {version} {made} on somebody's own text. {kind}

| | |
|---|---|
{rows}

## How to load it

"""  # noqa: E501
_KIND = "It is a base model: it goes on with text, and follows no\ninstructions."
#: What may be a model of the hub; that of the first ones has no owner.
HUB_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*\Z", re.ASCII)
_CHAT_KIND = (
    "{base} follows\ninstructions, and its chat template is in the folder. Plain text makes a "
    "model forget them."
)
_USE = """```python
from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = {tokenizer}.from_pretrained(FOLDER)
ids = tokenizer("A prompt", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

{licence}## Limits

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

{licence}## Limits

Vectors tell texts like its own apart, and of other texts little. Of a text only the first {tokens} tokens count, so
split longer ones first. The model in the folder may repeat its text word for word. People who may not read the text
should not get it.
"""  # noqa: E501


def model_card(run: RunHistory, step: int) -> str:
    """Write the card of a run's model after a step. It names only the text's folder: paths are
    private."""
    card = _fill_head(run, step, library="transformers", task="text-generation", kind=_KIND)
    base_files = RunFolder(run.folder).base
    loader = models.family(run.plan.model.family).TOKENIZER_CLASS
    if keeps_tokenizer(base_files):
        loader = "AutoTokenizer"
    return card + _USE.format(tokenizer=loader, licence=_write_licence(base_files))


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
    licence = _write_licence(RunFolder(run.folder).base)
    return card + _EMBEDDER_USE.format(tokens=run.plan.model.context - 1, licence=licence)


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
    front_matter: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
    made = "pretrained it"
    base_files = RunFolder(run.folder).base
    base = load_base(base_files)
    if base is not None:
        front_matter |= _describe_origin(base, base_files)
        made = f"continued the model {_plain(base.name)}"
        if kind == _KIND and has_chat_template(base_files):
            kind = _CHAT_KIND.format(base=_plain(base.name))
    front_matter["tags"] = ["farspan"]
    written = yaml.safe_dump(front_matter, sort_keys=False, allow_unicode=True)
    parameters = format_count(count_parameters(model))
    return _HEAD.format(
        front_matter=written,
        made=made,
        kind=kind,
        name=name,
        family=family,
        layers=counted(model.layers, "layer"),
        width=model.d_model,
        context=model.context,
        parameters=parameters,
        version=__version__,
        rows="\n".join(rows),
    )


def _describe_origin(base: BaseRecord, folder: Path) -> dict[str, Any]:
    """Return the front matter of the model that a run continues: its name, languages and
    licence."""
    card = read_card(folder)
    facts: dict[str, Any] = {}
    if HUB_NAME.match(base.name):  # The hub takes no card with another one.
        facts |= {"base_model": base.name, "base_model_relation": "finetune"}
    if card.languages:
        facts["language"] = list(card.languages)
    has_terms = bool(list_files(folder, LICENCE_FILES))
    facts["license"] = card.license or ("other" if has_terms else "unknown")
    if card.license_name is not None:
        facts["license_name"] = card.license_name
    if card.license_link is not None:
        facts["license_link"] = card.license_link
    return facts


def _write_licence(base_files: Path) -> str:
    """Write the section on the licence of the model that a run continues; empty where it continues
    none."""
    base = load_base(base_files)
    if base is None:
        return ""
    name = _plain(base.name)
    card = read_card(base_files)
    lines = ["## Licence", "", f"This model is derived from {name}. {_state_licence(card)}"]
    files = [file.name for file in list_files(base_files, LICENCE_FILES)]
    if files:
        terms = ", ".join(map(_plain, files))
        lines.append(f"Its terms are in {terms}: read them before you share it.")
    elif card.license is None:
        lines.append("Ask those who made it before you share this model.")
    if card.base_models:
        bases = ", ".join(map(_plain, card.base_models))
        lines.append(f"Its card names as its own base: {bases}.")
    return "\n".join([*lines, "", ""])


def _state_licence(card: BaseCard) -> str:
    if card.license is None:
        return "The licence of that model is unknown: no card in its folder states one."
    licence = _plain(card.license)
    if card.license_name is not None:
        licence += f", {_plain(card.license_name)}"
    if card.license_link is not None:
        licence += f", {_plain(card.license_link)}"
    return f"The card of that model states its licence: {licence}."


def _plain(text: str) -> str:
    """Quote a text of another's as one span of code."""
    words = " ".join(text.split()).replace("`", "")
    return f"`{words}`"
