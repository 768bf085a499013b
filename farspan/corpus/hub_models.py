"""Models that runs continue: a folder as transformers saves it, or an id of the Hugging Face hub,
whose files are fetched into the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from farspan.corpus._hub import use_cache_if_unreachable
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path

#: An owner and a name, as huggingface_hub checks them.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z", re.ASCII)
#: What farspan reads of a model, and what an export of a continued one keeps: its card, licence
#: and chat templates. Pickled weights are never fetched.
_TEXT_FILES = (
    *("*.json", "*.jinja", "merges.txt", "tokenizer.model", "README.md"),
    *("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*", "USE-POLICY*"),
    *("License*", "Licence*", "Copying*", "Notice*", "license*", "licence*", "notice*"),
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def is_hub_id(name: str) -> bool:
    """Return whether a name may be a model on the hub: an owner and a name, and no folder here has
    the owner's name."""
    return _HUB_ID.match(name) is not None and not Path(name).parent.exists()


def find_model_folder(name: str, *, weights: bool = False) -> Path:
    """Return the folder of a model; of a hub id the one of its files in the cache. Weights are
    fetched only where they are asked for. Raises Refusal (path-missing)."""
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if not is_hub_id(name):
        raise missing_path(folder)
    patterns = _TEXT_FILES + _WEIGHT_FILES if weights else _TEXT_FILES
    fault = None
    try:
        with use_cache_if_unreachable() as fault:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, allow_patterns=list(patterns)))
    # The hub's library raises its own errors, and those of whatever it sends by.
    except Exception as error:
        raise Refusal(
            "path-missing",
            what="there is neither a folder of this name nor a model on the hub that can be read",
            where=name,
            fact=fault or " ".join(str(error).split())[:300],
            remedy=(
                "fetch it where the hub can be reached, then name the folder: hf download "
                f"{shell_word(name)} --local-dir DIR"
            ),
        ) from None
