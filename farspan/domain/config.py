"""run.yaml: what a user asks for. Quantities stay as written ("5m", "256k tokens");
`planning.resolve` reads them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from farspan.domain.model import Lora
from farspan.domain.objective import Objective

Quantity = str | int | float
Positive = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Dollars = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_NAME_RULE = msgspec.Meta(
    pattern=r"^(?!\.)[^/]{1,100}$",
    description="a name of 1 to 100 letters, no / and no dot in front",
)
Name = Annotated[str, _NAME_RULE]
Source = Annotated[str, msgspec.Meta(min_length=1)]
CopyLocation = Annotated[str, msgspec.Meta(min_length=1)]
#: What follows a fault of a run.
OnFault = Literal["recover", "wait", "stop"]


class FieldsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns of rows, in tables, JSON, Parquet and datasets."""

    #: Several are joined; by default the first of `text`, `content` and `body`.
    text: str | tuple[str, ...] = ()
    #: By default `title`; a row without one is called by its file and number.
    title: str | None = None
    #: What a row is cited by, instead of its number.
    id: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of the text, none if none is named."""
        return (self.text,) if isinstance(self.text, str) else self.text


class PartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of a mixture."""

    source: Source
    #: What reports call it; by default the last part of its path.
    name: Name | None = None
    #: Its share of what training reads, relative to the others' weights. All sources have one, or
    #: none has: then each is read as often as the others.
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    #: By default those of `data.fields`.
    fields: FieldsConfig | None = None


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text like that which a continued model was trained on, so that it forgets less of it. It is
    neither searched nor judged by: the best weights are those of the least loss on the other
    text."""

    source: Source
    #: Of what training reads. arXiv 2403.08763 takes 5 % where the texts are alike, and 25 % where
    #: they are of another language.
    share: Quantity = "5%"
    name: Name = "replay"


class NamedPart(NamedTuple):
    """A source of a mixture with all that it is known by."""

    name: str
    source: str
    fields: FieldsConfig
    weight: float | None
    replay: bool = False


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where text comes from: `pydocs`, a folder or file, or `hf:NAME:CONFIG`; or several of
    these."""

    source: Source | Annotated[tuple[Source | PartConfig, ...], msgspec.Meta(min_length=1)]
    val: Quantity = "5%"
    dedup: bool = True
    #: What becomes of a corpus with files or rows that cannot be read.
    bad: Literal["skip", "refuse"] = "skip"
    fields: FieldsConfig = FieldsConfig()
    #: Another corpus that is mixed in, or its source alone.
    replay: Source | ReplayConfig | None = None

    @property
    def is_mixture(self) -> bool:
        return not isinstance(self.source, str) or self.replay is not None

    @property
    def line(self) -> str:
        """The sources as one line of text; of a single one as it is written."""
        return " + ".join(part.source for part in self.parts)

    @property
    def parts(self) -> tuple[NamedPart, ...]:
        """The sources in their order, that of `replay` last."""
        asked = (self.source,) if isinstance(self.source, str) else self.source
        parts = []
        for part in asked:
            if isinstance(part, str):
                part = PartConfig(source=part)
            name = part.name or name_source(part.source) or "text"
            fields = part.fields or self.fields
            parts.append(NamedPart(name, part.source, fields, part.weight))
        replay = self.replayed
        if replay is not None:
            parts.append(NamedPart(replay.name, replay.source, self.fields, None, replay=True))
        return tuple(parts)

    @property
    def replayed(self) -> ReplayConfig | None:
        """The replay with all its keys, also where its source alone was given."""
        return ReplayConfig(source=self.replay) if isinstance(self.replay, str) else self.replay

    def without_replay(self) -> DataConfig:
        return msgspec.structs.replace(self, replay=None)


def name_source(source: str) -> str:
    """Return the name of a source: `papers` for `~/papers`, `wikitext` for `hf:wikitext:v1`;
    empty for the root folder."""
    bare = source.removeprefix("hf:").split(":")[0]
    path = Path(bare)
    with suppress(RuntimeError):  # Opening it refuses the home folder of nobody.
        path = path.expanduser()
    # "." and ".." have no name of their own.
    return Path(os.path.normpath(Path.cwd() / path)).stem


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train a byte-level BPE on the corpus, or use a tokenizer file, folder or hub id (`use`)."""

    train: Literal["bpe"] = "bpe"
    vocab: Literal["auto"] | Annotated[int, msgspec.Meta(ge=257, le=1_000_000)] = "auto"
    use: str | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A preset's name, a Hugging Face folder (`path`), or a family and a size; single knobs may be
    set on top."""

    preset: str | None = None
    path: str | None = None
    #: The name of a file in `models/`.
    family: str | None = None
    params: Quantity | None = None
    context: Positive | None = None
    layers: Positive | None = None
    d_model: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    d_ff: Positive | None = None
    tied: bool | None = None


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens (or sequences) an optimizer step reads over all devices, or sequences a device."""

    global_: Quantity | None = msgspec.field(name="global", default=None)
    per_device: Positive | None = None


#: Muon for the matrices of blocks and AdamW for the rest, AdamW for all, or what learns more in the
#: same time.
OptimizerKind = Literal["auto", "muon", "adamw"]


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: OptimizerKind = "auto"
    lr: Literal["auto"] | Annotated[float, msgspec.Meta(gt=0, le=1)] = "auto"
    weight_decay: Literal["auto"] | Annotated[float, msgspec.Meta(ge=0, le=10)] = "auto"
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    clip: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 1.0
    #: How many times `lr` embedding and head take where Muon updates the rest.
    embedding: Literal["auto"] | Annotated[float, msgspec.Meta(gt=0, le=100)] = "auto"
    #: Share of the weights' moving average that a step leaves; 0 keeps none.
    average: Literal["auto"] | Annotated[float, msgspec.Meta(ge=0, lt=1)] = "auto"


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters of this rank, whose product counts `alpha / rank`."""

    rank: Positive
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = Lora(rank=1).alpha


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tightest of steps, tokens, epochs and the budget ends the run."""

    steps: Positive | None = None
    tokens: Quantity | None = None
    epochs: Annotated[float, msgspec.Meta(gt=0, le=10_000)] | None = None
    batch: BatchConfig = BatchConfig()
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    attention: Literal["auto", "sdpa", "vanilla"] = "auto"
    #: What is "auto" as the study of recipes found it for so much text and time, or as usual.
    recipe: Literal["auto", "plain"] = "auto"
    optimizer: OptimizerKind | OptimizerConfig = OptimizerConfig()
    schedule: Literal["auto", "cosine", "linear", "constant", "wsd"] = "auto"
    warmup: Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"] = "auto"
    #: Final learning rate as a share of the peak.
    floor: Literal["auto"] | Annotated[float, msgspec.Meta(ge=0, le=1)] = "auto"
    #: Shares of what blocks write that is dropped, and of the tokens read that others replace;
    #: whether each epoch has the documents in another order.
    dropout: Literal["auto"] | Annotated[float, msgspec.Meta(ge=0, lt=1)] = "auto"
    mask: Literal["auto"] | Annotated[float, msgspec.Meta(ge=0, lt=1)] = "auto"
    reshuffle: Literal["auto"] | bool = "auto"
    recompute: bool = False
    #: Low-rank adapters alone are trained, of a model that is continued: their rank, or more.
    lora: Positive | LoraConfig | None = None
    #: Bits of a number in transit between sites.
    wan_bits: Literal[8, 16, 32] = 32
    #: Whether blocks are compiled, and whether a GPU records its step as one CUDA graph; `auto`
    #: goes by device and run.
    compile: Literal["auto"] | bool = "auto"
    graph: Literal["auto"] | bool = "auto"
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    validate_every: Positive | Literal["auto"] = "auto"
    patience: Literal["auto"] | Annotated[int, msgspec.Meta(ge=0)] = "auto"
    #: Names of files in `report/trackers/`, one or several; `auto` is TensorBoard where its library
    #: is installed.
    trackers: str | tuple[str, ...] = "auto"

    @property
    def optimizing(self) -> OptimizerConfig:
        """The optimizer with all its keys, also where its name alone was given."""
        asked = self.optimizer
        return asked if isinstance(asked, OptimizerConfig) else OptimizerConfig(kind=asked)

    @property
    def adapting(self) -> LoraConfig | None:
        """The adapters with all their keys, also where their rank alone was given."""
        return LoraConfig(rank=self.lora) if isinstance(self.lora, int) else self.lora


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: A technique's name; `auto` compares those that `allow` names, or all.
    technique: str = "auto"
    allow: tuple[str, ...] = ()
    #: What is best.
    objective: Objective = "time"
    workers: Positive | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    #: A cluster file, a name of `farspan cluster list`, or `lab:NAME`; None or `here` is this
    #: machine, or with the launcher `slurm` the nodes of the job.
    cluster: str | None = None
    #: What starts the workers: `local`, `torchrun`, `ray`, `ray:ADDRESS`, or `slurm` in a job.
    launcher: str = "local"


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Time between two; `auto` is 5m, or Daly's best where the cluster's machines are taken away.
    every: Quantity = "auto"
    keep: Positive = 3
    #: Where each checkpoint is copied: `site`, a folder, `s3://BUCKET/PREFIX`; one or several.
    copy: CopyLocation | tuple[CopyLocation, ...] = ()
    #: Bytes a second of copies; `auto` takes about half of the time between two checkpoints.
    copy_rate: Quantity = "auto"

    @property
    def copies(self) -> tuple[str, ...]:
        """The places, none if none is named."""
        return (self.copy,) if isinstance(self.copy, str) else self.copy


class BudgetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the whole run; the tightest decides. `usd` needs a price: `usd_per_hour`, or the
    catalogue's."""

    time: Quantity | None = None
    usd: Dollars | None = None
    usd_per_hour: Dollars | None = None


_SBATCH_VALUE = msgspec.Meta(
    pattern=r"^[^\s'\"`$#\\-][^\s'\"`$#\\]*\Z",
    description="one word of sbatch, without quotes and spaces",
)
SbatchValue = Annotated[str, _SBATCH_VALUE]
_SBATCH_OPTION = msgspec.Meta(
    pattern=r"^--?[A-Za-z][^\n\r]*\Z", description="an option of sbatch, such as --exclude=node7"
)
SbatchOption = Annotated[str, _SBATCH_OPTION]
#: ssh takes what begins with - for an option; USER@HOST and an address of IPv6 are names, too.
_LOGIN = msgspec.Meta(pattern=r"^(?!-)[\w.@:%+/-]+\Z", description="a host name, as ssh takes it")
LoginName = Annotated[str, _LOGIN]
#: It begins the names of the site's hosts, and ends those of its jobs.
_SITE_NAME = msgspec.Meta(
    pattern=r"^[A-Za-z0-9][\w.-]{0,49}\Z", description="a name of letters, digits, . _ and -"
)
SlurmSiteName = Annotated[str, _SITE_NAME]


class SlurmNodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind that a job asks for; what is left out is as the site has set it."""

    partition: SbatchValue | None = None
    constraint: SbatchValue | None = None
    nodes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    #: Of each node: GPUs of any kind, or what `--gres` takes (`gpu:a100:4`); CPUs; and memory, as
    #: sbatch takes it (`64G`).
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1_000)] | None = None
    gres: SbatchValue | None = None
    cpus: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    memory: SbatchValue | None = None
    #: The catalogue's name of these GPUs, for plans outside of a job where GRES names none.
    kind: str | None = None
    #: Further options of sbatch, as they are.
    options: tuple[SbatchOption, ...] = ()


class SlurmSite(SlurmNodes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of another site's Slurm: a job of their own there, which the run's first job enters."""

    #: Its login node, by its name in the user's ssh config.
    login: LoginName
    account: SbatchValue | None = None
    qos: SbatchValue | None = None
    #: The limit of the job there.
    time: Quantity | None = None
    #: The interpreter there that has farspan.
    python: Annotated[str, msgspec.Meta(min_length=1)] = "python3"
    #: The round trip from the run's own job, for plans outside of a job; a job measures it.
    rtt: Quantity | None = None


class SlurmConfig(SlurmNodes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job of `farspan slurm`: its first nodes, and what holds for all of it."""

    account: SbatchValue | None = None
    qos: SbatchValue | None = None
    #: The limit of one job, and how long before it the run saves.
    time: Quantity | None = None
    notice: Quantity = "3m"
    #: Nodes of other kinds in the same job: components of a heterogeneous job.
    components: tuple[SlurmNodes, ...] = ()
    #: Other Slurm sites by name, and how long the first start waits for their jobs.
    sites: dict[SlurmSiteName, SlurmSite] = {}
    wait: Quantity = "30m"
    #: Before farspan starts on the first node: modules that are loaded, the conda environment, and
    #: lines of shell.
    modules: tuple[SbatchValue, ...] = ()
    conda: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    setup: tuple[str, ...] = ()
    #: Whether nodes have no internet: the text is prepared before the job is submitted.
    offline: bool = False


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store: str = "auto"
    #: A ready encoder beside words and the run's own vectors: `auto` takes one that is on this
    #: machine and reads the text's language, `own` takes none, `minilm` may fetch one; or a folder.
    encoder: str = "auto"
    #: What fitting vectors to the text may take at most.
    time: Quantity = "5m"
    #: Files of a person's own queries, and of the documents that answer them, which `farspan tune`
    #: judges by too.
    queries: str | None = None
    qrels: str | None = None


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: The address of a language model that answers questions from what is found, in the form of
    #: OpenAI's API, and the model's name there. Its key is in the environment.
    llm: str | None = None
    llm_model: str | None = None


class IndexFolderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of index.yaml: an index of text that nothing was trained on."""

    data: Source | DataConfig
    version: Literal[1] = 1
    index: IndexConfig = IndexConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def data_config(self) -> DataConfig:
        return DataConfig(source=self.data) if isinstance(self.data, str) else self.data


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of run.yaml. Only `data` must be given."""

    data: Source | DataConfig
    version: Literal[1] = 1
    name: Name | None = None
    size: str | int = "auto"
    tokenizer: str | TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    budget: BudgetConfig = BudgetConfig()
    index: IndexConfig = IndexConfig()
    serve: ServeConfig = ServeConfig()
    slurm: SlurmConfig = SlurmConfig()
    #: After a lost worker, host or link: start again, with a new plan where a host stays away
    #: (`recover`); start again once all are there (`wait`); or end the run (`stop`).
    on_fault: OnFault = "recover"
    #: A shell command that is run at the end of a job and at trouble: it finds what happened in
    #: FARSPAN_EVENT, FARSPAN_RUN and FARSPAN_MESSAGE.
    notify: str | None = None

    @property
    def data_config(self) -> DataConfig:
        return DataConfig(source=self.data) if isinstance(self.data, str) else self.data

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The tokenizer asked for; a model that is read from a folder brings its own, unless
        another is set."""
        if isinstance(self.tokenizer, str):
            return TokenizerConfig(use=self.tokenizer)
        if self.model.path is not None and self.tokenizer == TokenizerConfig():
            return TokenizerConfig(use=self.model.path)
        return self.tokenizer
