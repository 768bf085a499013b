"""The embedder as a folder that sentence-transformers loads: the Hugging Face folder, the maps, a
module for both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from farspan.domain.model import StoredType
from farspan.domain.struct_files import missing_path, write_atomically
from farspan.retrieval.index import FITTED
from farspan.runtime.inference import Trained
from farspan.runtime.model import huggingface

#: The source of the module, which nothing here imports: farspan works without
#: sentence-transformers.
_MODULE = Path(__file__).with_name("farspan_embedding.py")
#: What it imports of farspan, which needs no more than the standard library.
_NAMES_MODULE = Path(__file__).with_name("names.py")
#: The first version whose modules are given the prompt and the task.
_REQUIRES = ">=5.4"


def write_sentence_transformers(
    folder: Path,
    trained: Trained,
    *,
    tokenizer: Path,
    fitted: Path,
    dtype: StoredType = "fp32",
) -> None:
    """Write a folder that `SentenceTransformer(folder, trust_remote_code=True)` loads as an
    embedder's vectors.

    `tokenizer` is a tokenizer.json and `fitted` what `Embedder.save` wrote; refuses (path-missing)
    files that are not there. modules.json is written last, so that a folder with one is whole.
    """
    if not fitted.exists():
        raise missing_path(fitted)
    huggingface.export_model(
        folder,
        trained.model.state_dict(),
        trained.model.spec,
        tokenizer=tokenizer,
        end_of_text=trained.tokenizer.end_of_text,
        dtype=dtype,
    )
    for source, name in (
        (fitted, FITTED),
        (_MODULE, _MODULE.name),
        (_NAMES_MODULE, _NAMES_MODULE.name),
    ):
        shutil.copyfile(source, folder / name)
    config = {
        "model_type": "SentenceTransformer",
        "similarity_fn_name": "cosine",
        "default_prompt_name": None,
        # The module takes the prompt for a mark and embeds none of it: some programs give a prompt,
        # but no task.
        "prompts": {"query": "query: ", "document": ""},
        "requirements": {"sentence-transformers": _REQUIRES},
    }
    module = {"idx": 0, "name": "0", "path": "", "type": f"{_MODULE.stem}.FarspanEmbedding"}
    for name, value in (("config_sentence_transformers.json", config), ("modules.json", [module])):
        write_atomically(folder / name, json.dumps(value, indent=2).encode() + b"\n")
