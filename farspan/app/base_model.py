"""The model that a run continues, as the run keeps it for its exports."""

from __future__ import annotations

from pathlib import Path

from farspan import models
from farspan.corpus.hub_models import is_hub_id
from farspan.domain.config import RunConfig
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import to_json, write_atomically
from farspan.models._base_files import (
    KEPT_FILES,
    RECORD,
    BaseRecord,
    copy_files,
    name_base,
)
from farspan.models._weight_files import locate_weights


def describe_base(config: RunConfig, folder: Path) -> BaseRecord:
    """Describe the model that a run.yaml continues, which lies in a folder. Raises Refusal for
    weights that do not fit its config.json."""
    asked = str(config.model.path)
    name, has_hub_id = name_base(asked, folder, is_hub_id=is_hub_id(asked))
    places = locate_weights(folder, models.read_config(folder))
    return BaseRecord(
        name=name,
        is_hub_id=has_hub_id,
        stored=places.stored,
        keeps_tokenizer=config.tokenizer_config.use == config.model.path,
    )


def keep_base(run: RunFolder, folder: Path, base: BaseRecord) -> None:
    """Copy the small files of a model into a run's folder."""
    run.base.mkdir(exist_ok=True)
    copy_files(folder, run.base, KEPT_FILES)
    write_atomically(run.base / RECORD, to_json(base))
