"""An encoder as the files of its sentence-transformers or model2vec folder describe it.

Read as sentence-transformers 6.2 and model2vec 0.10 read them; whatever else would change vectors
is refused, not guessed.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

import msgspec

from farspan.domain.decoding import convert_value, decode_json
from farspan.domain.problems import Refusal
from farspan.retrieval.encoders.tensors import another_encoder, missing_file, unreadable

T = TypeVar("T")

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
_MODULES = "modules.json"

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
#: Older folders have a key for each mode, and concatenate them in this order.
_LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
#: Names of what a Transformer module is configured by; the first that is there counts.
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
)
#: Prompts by which a folder may call that of passages.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
#: Tokens that model2vec reads of a text where its folder does not say.
_STATIC_MAX_TOKENS = 512
#: Where nothing limits the tokens of a text.
UNLIMITED_TOKENS = 1 << 20


class Module(msgspec.Struct, frozen=True):
    """One entry of modules.json."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """The class's name, whatever version of sentence-transformers wrote its module."""
        return self.type.rpartition(".")[2]


class Pooling(msgspec.Struct, frozen=True):
    """How the states of a text's tokens become one vector; several modes are concatenated."""

    modes: tuple[PoolingMode, ...]
    #: Whether the tokens of the prompt count.
    include_prompt: bool = True
    #: Numbers of a state, where its file says so.
    dimension: int | None = None


class DenseConfig(msgspec.Struct, frozen=True):
    """A linear map of the pooled vector."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class Dense(msgspec.Struct, frozen=True):
    """A linear map, and the folder, relative to the encoder's, of its weights."""

    folder: str
    config: DenseConfig


class Normalize(msgspec.Struct, frozen=True):
    """Scaling to unit length."""


class Prompts(msgspec.Struct, frozen=True):
    """What is put before a query and before a passage."""

    query: str = ""
    document: str = ""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder's modules by its JSON files: all that changes vectors except weights and the
    tokenizer."""

    kind: Literal["transformer", "static"]
    #: The folder of weights and tokenizer, relative to the encoder's; "" is the encoder's own.
    model: str = ""
    pooling: Pooling | None = None
    steps: tuple[Dense | Normalize, ...] = ()
    prompts: Prompts = Prompts()
    max_tokens: int = UNLIMITED_TOKENS
    lowercase: bool = False


class _SentenceTransformersConfig(msgspec.Struct):
    prompts: dict[str, str | None] = {}


class _TransformerConfig(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"


class _TokenizerConfig(msgspec.Struct):
    # transformers writes 1e30 where there is no limit.
    model_max_length: float | None = None


class _PoolingConfig(msgspec.Struct):
    word_embedding_dimension: int | None = None
    embedding_dimension: int | None = None
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


class _StaticConfig(msgspec.Struct):
    model_type: str = ""
    max_length: int | None = _STATIC_MAX_TOKENS


class _ModelType(msgspec.Struct):
    model_type: str = ""


def read_layout(folder: Path) -> Layout:
    """Read the modules, prompts and limits of an encoder's folder.

    Refuses (path-missing) a folder or a file of it that is not there, (file-unreadable) one that is
    not as its format has it, (model-unsupported) modules that would change vectors and are not
    known here.
    """
    if not folder.is_dir():
        raise Refusal(
            "path-missing",
            what=f"there is no encoder {folder.name}",
            where=f"index.encoder: {folder}",
            fact="the folder does not exist",
            remedy=another_encoder(),
            key="index.encoder",
        )
    if not (folder / _MODULES).exists():
        return _read_bare_static(folder)
    modules = read_json(folder / _MODULES, list[Module])
    for module in modules:
        path = PurePosixPath(module.path)
        if path.is_absolute() or ".." in path.parts:
            raise unreadable(folder / _MODULES, f"a module lies outside the folder: {module.path}")
    if not modules:
        raise unreadable(folder / _MODULES, "it lists no module")
    first = modules[0]
    model = "" if first.path == "." else first.path
    prompts = _read_prompts(folder)
    if first.kind == "StaticEmbedding":
        steps = _read_steps(folder, modules[1:])
        max_tokens = _read_static_max_tokens(folder / model)
        return Layout(
            kind="static", model=model, steps=steps, prompts=prompts, max_tokens=max_tokens
        )
    if first.kind != "Transformer":
        raise unsupported(folder, f"its first module is {first.type}")
    if len(modules) < 2 or modules[1].kind != "Pooling":
        raise unsupported(
            folder,
            "it has no pooling: modules.json does not say how the states of a text's tokens become "
            "its vector",
        )
    config = _read_transformer_config(folder / model)
    if config.transformer_task != "feature-extraction":
        raise unsupported(folder, f"its transformer_task is {config.transformer_task}")
    return Layout(
        kind="transformer",
        model=model,
        pooling=_read_pooling(folder, modules[1].path),
        steps=_read_steps(folder, modules[2:]),
        prompts=prompts,
        max_tokens=_read_max_tokens(folder / model, config),
        lowercase=config.do_lower_case,
    )


def _read_bare_static(folder: Path) -> Layout:
    """Read a table of vectors with a tokenizer, in a folder without modules.json: what model2vec
    once wrote."""
    if not (folder / WEIGHTS).exists():
        raise missing_file(folder / WEIGHTS)
    if (folder / "config.json").exists():
        model_type = read_json(folder / "config.json", _ModelType).model_type
        if model_type not in ("", "model2vec"):
            raise unsupported(
                folder,
                f"it has no pooling: it is a bare {model_type} model without modules.json, which "
                "would say how the states of a text's tokens become its vector",
            )
    return Layout(kind="static", max_tokens=_read_static_max_tokens(folder))


def _read_static_max_tokens(folder: Path) -> int:
    """Return the tokens that model2vec reads of a text; sentence-transformers' own tables have no
    limit."""
    path = folder / "config.json"
    if not path.exists():
        return UNLIMITED_TOKENS
    return read_json(path, _StaticConfig).max_length or UNLIMITED_TOKENS


def _read_prompts(folder: Path) -> Prompts:
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return Prompts()
    prompts = read_json(path, _SentenceTransformersConfig).prompts
    documents = [prompts[name] for name in _DOCUMENT_PROMPTS if prompts.get(name)]
    return Prompts(query=prompts.get("query") or "", document=(documents or [""])[0] or "")


def _read_transformer_config(model: Path) -> _TransformerConfig:
    for name in _TRANSFORMER_CONFIGS:
        if (model / name).exists():
            return read_json(model / name, _TransformerConfig)
    return _TransformerConfig()


def _read_max_tokens(model: Path, config: _TransformerConfig) -> int:
    """Return how many tokens of a text are read, special ones included; the model's own positions
    limit it further."""
    if config.max_seq_length is not None:
        return config.max_seq_length
    path = model / "tokenizer_config.json"
    length = read_json(path, _TokenizerConfig).model_max_length if path.exists() else None
    return UNLIMITED_TOKENS if length is None else int(min(length, UNLIMITED_TOKENS))


def _read_pooling(folder: Path, path: str) -> Pooling:
    file = folder / path / "config.json"
    config = read_json(file, _PoolingConfig)
    if config.pooling_mode is None:
        legacy = [mode for key, mode in _LEGACY_MODES.items() if getattr(config, key)]
        # sentence-transformers takes the mean where every key says no.
        modes: list[str] = [*legacy] or ["mean"]
    else:
        given = config.pooling_mode
        modes = [given] if isinstance(given, str) else given
    try:
        known = convert_value(modes, tuple[PoolingMode, ...])
    except msgspec.ValidationError as error:
        raise unreadable(file, f"pooling_mode: {error}") from None
    if not known:
        raise unsupported(folder, "it has no pooling: pooling_mode is empty")
    dimension = config.embedding_dimension or config.word_embedding_dimension
    return Pooling(known, config.include_prompt, dimension)


def _read_steps(folder: Path, modules: list[Module]) -> tuple[Dense | Normalize, ...]:
    steps: list[Dense | Normalize] = []
    for module in modules:
        if module.kind == "Normalize":
            steps.append(Normalize())
        elif module.kind == "Dense":
            config = read_json(folder / module.path / "config.json", DenseConfig)
            inputs = {config.module_input_name, config.module_output_name or "sentence_embedding"}
            if config.use_residual or inputs != {"sentence_embedding"}:
                raise unsupported(folder, "its Dense module is not a map of one vector to another")
            steps.append(Dense(module.path, config))
        elif module.kind != "Dropout":  # Which does nothing after training.
            raise unsupported(folder, f"it has a module {module.type}")
    return tuple(steps)


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file; keys that are not known are passed over."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise unreadable(path, str(error)) from None
    try:
        return decode_json(content, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise unreadable(path, str(error)) from None


def unsupported(folder: Path, fact: str) -> Refusal:
    return Refusal(
        "model-unsupported",
        what=f"the encoder {folder.name} cannot be used",
        where=f"index.encoder: {folder}",
        fact=fact,
        remedy=another_encoder(),
        key="index.encoder",
    )
