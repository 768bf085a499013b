"""Reading what a user wrote in run.yaml: every value that does not fit is a Refusal that names its
key."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from farspan import models
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.cluster import Cluster
from farspan.domain.config import (
    CheckpointConfig,
    DataConfig,
    IndexConfig,
    Quantity,
    RunConfig,
    TokenizerConfig,
)
from farspan.domain.escapes import key_word, shell_word, yaml_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path
from farspan.domain.suggest import advise, any_of
from farspan.domain.units import is_bare, parse_count, parse_duration, parse_fraction, parse_rate
from farspan.models._weight_files import locate_weights
from farspan.planning.model_speed import hourly_price
from farspan.planning.size import KNOBS

Number = TypeVar("Number", int, float)

#: The least and the most of anything, of a time, and of a model's parameters: beyond them it is a
#: slip of the pen. What follows from them still fits 64 bits.
ANY = ("0", "1e15")
TIME_BOUNDS = ("1ms", "100y")
PARAMETERS = ("1", "100T")
#: Seconds between checkpoints where no machine is taken away.
SAVE_INTERVAL_S = 300.0
RATES = ("1kB/s", "1000TB/s")
#: Names of the size dial: parameters in all, embeddings included.
SIZES = {
    "tiny": 3_000_000,
    "small": 15_000_000,
    "medium": 60_000_000,
    "large": 250_000_000,
    "xl": 1_000_000_000,
}
#: Keys of which at most one may be set.
EXCLUSIVE = (
    ("model.preset", "model.path", "model.params", "size"),
    ("train.batch.global", "train.batch.per_device"),
    *(("model.path", f"model.{knob}") for knob in ("family", *KNOBS)),
)


def out_of_range(
    key: str, value: object, fact: str, remedy: str, file: str = "run.yaml"
) -> Refusal:
    """Return the refusal of one value of a file, or of a flag."""
    what = f"{key} = {value} cannot be used"
    where = key if key.startswith("--") else f"{file}, key {key}"
    own = key if where == f"run.yaml, key {key}" else None
    return Refusal("out-of-range", what=what, where=where, fact=fact, remedy=remedy, key=own)


def setting_remedy(key: str, value: str) -> str:
    """Return the remedy that gives a key, or a flag, another value."""
    if key.startswith("--"):
        return f"{key_word(key)} {shell_word(value)}"
    return f"set {key_word(key)}: {value}"


def _setting_unit_remedy(key: str, value: Quantity) -> str:
    """Return the remedy for a time without a unit: its writer knows whether it is minutes or
    seconds."""
    minutes = f"{value}m"
    seconds = f"{value}s"
    if key.startswith("--"):
        return any_of((minutes, seconds), key)
    return f"set {key_word(key)}: {any_of((minutes, seconds))}"


def given_or(value: object, otherwise: str) -> str:
    """Return where a value came from: run.yaml, or `otherwise` where that leaves it out."""
    return otherwise if value is None or value == "auto" else "run.yaml"


def parse_positive(
    parse: Callable[[Quantity], Number],
    value: Quantity,
    key: str,
    example: str,
    file: str = "run.yaml",
    within: tuple[str, str] = ANY,
) -> Number:
    """Read `value` by `parse`; refuse what does not parse, is not above 0, or is not `within` two
    values."""
    least, most = TIME_BOUNDS if parse is parse_duration else within
    remedy = f"set {key_word(key)} to something like {example}"
    try:
        number = parse(value)
    except (ValueError, OverflowError) as error:
        if parse is parse_duration and is_bare(value):
            remedy = _setting_unit_remedy(key, value)
        raise out_of_range(key, value, str(error), remedy, file) from None
    if not number > 0:
        raise out_of_range(key, value, "it must be above 0", remedy, file)
    if number < parse(least):
        raise out_of_range(
            key, value, f"it must be at least {least}", setting_remedy(key, least), file
        )
    if number > parse(most):
        raise out_of_range(
            key, value, f"it must be at most {most}", setting_remedy(key, most), file
        )
    return number


def asked_parameters(config: RunConfig) -> int | None:
    """Return the parameters that `size` or `model.params` asks for; None for `auto`."""
    if config.model.params is not None:
        return parse_positive(
            parse_count, config.model.params, "model.params", "30M", within=PARAMETERS
        )
    size = str(config.size)
    if size == "auto" or size in SIZES:
        return SIZES.get(size)
    if not size.removeprefix("-")[:1].isdigit():
        known = ["auto", *SIZES]
        fix = advise(size, known, fix="use auto, or parameters such as 30M")
        raise out_of_range(
            "size", size, f"known: {', '.join(known)}, or parameters such as 30M", fix
        )
    return parse_positive(parse_count, size, "size", "30M", within=PARAMETERS)


def asked_tokens(value: Quantity, parameters: int, key: str = "train.tokens") -> int:
    """Return the tokens to train on: a count, or a multiple of the model's parameters such as
    `20x_params`."""
    example = "20x_params or 500M"
    if match := re.fullmatch(r"\s*([0-9.]+)\s*x[ _]?params\s*", str(value)):
        return round(parse_positive(float, match[1], key, example) * parameters)
    return parse_positive(parse_count, value, key, example)


def asked_rows(
    value: Quantity, seq_len: int, key: str = "train.batch.global", file: str = "run.yaml"
) -> int:
    """Return the sequences of a global batch: `256k tokens` (rounded to whole sequences),
    `32 sequences`, or bare `32`."""
    count = parse_positive(parse_count, value, key, "8k tokens or 32 sequences", file)
    if not str(value).strip().lower().endswith("tokens"):
        return count
    if count < seq_len:
        raise out_of_range(
            key,
            value,
            f"one sequence has {seq_len} tokens",
            setting_remedy(key, f"{seq_len} tokens"),
            file,
        )
    return round(count / seq_len)


def save_every_s(config: RunConfig) -> float:
    """Return the seconds between checkpoints; of `auto` those where no machine is taken away."""
    if config.checkpoint.every == "auto":
        return SAVE_INTERVAL_S
    return parse_positive(parse_duration, config.checkpoint.every, "checkpoint.every", "5m")


def copy_rate(config: CheckpointConfig) -> float | None:
    """Return the bytes a second that copies of checkpoints may take; None for `auto`."""
    if config.copy_rate == "auto":
        return None
    return parse_positive(
        parse_rate, config.copy_rate, "checkpoint.copy_rate", "20MB/s", within=RATES
    )


def fit_s(index: IndexConfig) -> float:
    return parse_positive(parse_duration, index.time, "index.time", "5m")


def time_budget_s(config: RunConfig) -> float | None:
    time = config.budget.time
    return None if time is None else parse_positive(parse_duration, time, "budget.time", "1h")


def deadline_s(config: RunConfig, cluster: Cluster) -> float | None:
    """Return the seconds that the budget's time and dollars pay for, the fewer of both. Refuses
    dollars without a price."""
    seconds = time_budget_s(config)
    budget = config.budget
    if budget.usd is None:
        return seconds
    price = budget.usd_per_hour or hourly_price(cluster)
    if price == 0:  # What is free no sum of dollars ends.
        return seconds
    if price is None:
        raise Refusal(
            "out-of-range",
            what="a dollar budget needs a price",
            where="run.yaml, key budget.usd",
            fact=f"no price is known for {', '.join(sorted({d.kind for d in cluster.devices}))}",
            remedy="set budget.usd_per_hour: the price of all devices together, dollars an hour",
            key="budget.usd",
        )
    paid_for = budget.usd / price * 3600
    return paid_for if seconds is None else min(seconds, paid_for)


def _require_model_folder(folder: Path) -> None:
    """Refuse a single file as the model that is continued, and a folder of GGUF files."""
    gguf = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if gguf and not (folder / "config.json").is_file():
        raise Refusal(
            "model-unsupported",
            what="GGUF holds a model as llama.cpp runs it; training starts from safetensors",
            where=gguf[0],
            fact="the weights of a GGUF file are rounded, most often to 4 or 8 bits",
            remedy=(
                "name the folder or the hub id of the model that the file was made from; "
                "docs/models.md, GGUF files, says how to turn one back"
            ),
        )
    if folder.is_file():
        raise Refusal(
            "model-unsupported",
            what="a model is a folder with config.json, weights and a tokenizer; this is a file",
            where=folder,
            fact="model.path names a file",
            remedy=f"set model.path: {yaml_word(folder.parent)}",
        )


def _require_tokenizer(folder: Path) -> None:
    """Refuse to continue a model whose folder has no tokenizer, where none is named."""
    has_file = (folder / "tokenizer.json").is_file()
    has_parts = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not (has_file or has_parts):
        raise Refusal(
            "tokenizer-unreadable",
            what="the model's folder has no tokenizer, and another one's ids would mean nothing",
            where=folder,
            fact="it has neither tokenizer.json nor both vocab.json and merges.txt",
            remedy="copy the model's tokenizer.json there, or name it: tokenizer: {use: FILE}",
        )


def _check_adapters(config: RunConfig) -> None:
    """Refuse adapters without a model that they belong to, or with an optimizer of whole
    matrices."""
    adapting = config.train.adapting
    if adapting is None:
        return
    if config.model.path is None:
        fact = "adapters change a model that is continued, and model.path names none"
        remedy = "set model.path: FOLDER, or remove train.lora"
        raise out_of_range("train.lora", adapting.rank, fact, remedy)
    if config.train.optimizing.kind == "muon":
        fact = "Muon updates whole matrices; adapters are factors of them"
        raise out_of_range("train.optimizer", "muon", fact, "set train.optimizer: adamw")


def check_quantities(config: RunConfig) -> None:
    """Refuse what can be refused before any text is read: units, signs, shares, contradictions."""
    asked_parameters(config)
    save_every_s(config)
    copy_rate(config.checkpoint)
    time_budget_s(config)
    fit_s(config.index)
    share = parse_positive(
        parse_fraction, config.data_config.val, "data.val", "5%", within=("0%", "100%")
    )
    if share > 0.5:
        raise out_of_range(
            "data.val",
            config.data_config.val,
            "more than half of the text would be held out",
            "set data.val: 50%",
        )
    _check_mixture(config.data_config)
    if config.train.tokens is not None:
        asked_tokens(config.train.tokens, 1)
    model = config.model
    batch = config.train.batch
    if batch.global_ is not None:
        asked_rows(batch.global_, 1)
    if model.family is not None:
        models.family(model.family)
    if model.path is not None and not is_hub_id(model.path):
        folder = Path(model.path).expanduser()
        if not folder.exists():
            raise missing_path(folder)
        _require_model_folder(folder)
        if config.tokenizer == TokenizerConfig():
            _require_tokenizer(folder)
        # Of the hub's models, weights are fetched for training.
        locate_weights(folder, models.read_config(folder))
    _check_adapters(config)
    for keys in EXCLUSIVE:
        values = {key: attrgetter(key.replace("global", "global_"))(config) for key in keys}
        given = [key for key, value in values.items() if value not in (None, "auto")]
        if len(given) > 1:
            first, second = given[:2]
            fact = f"{first} = {values[first]} sets the same"
            remedy = f"remove {key_word(second)} or {key_word(first)}"
            raise out_of_range(second, values[second], fact, remedy)


def _check_mixture(data: DataConfig) -> None:
    """Refuse weights and shares that no mixture can have. Raises Refusal (out-of-range)."""
    weights = [part.weight for part in data.parts if not part.replay]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise out_of_range(
            "data.source",
            f"{len(given)} weights for {len(weights)} sources",
            "the sources without a weight have no share",
            "give every source a weight, or none",
        )
    if given and not sum(given):
        raise out_of_range(
            "data.source", "weights of 0", "no source would be read", "raise one weight above 0"
        )
    replay = data.replayed
    if replay is not None:
        share = parse_positive(
            parse_fraction, replay.share, "data.replay.share", "5%", within=("0%", "100%")
        )
        if share >= 1:
            raise out_of_range(
                "data.replay.share",
                replay.share,
                "nothing of your own text would be read",
                "set data.replay.share: 5%",
            )
