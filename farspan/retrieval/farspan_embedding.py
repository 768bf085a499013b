"""What a model that farspan trained makes of a text: the one module of a sentence-transformers
folder.

farspan copies this file into the folders that it exports, where it must do without farspan. Vectors
are farspan's own: every stream of the model (token embeddings, the states after each block, the
output) is averaged over the tokens of a text, rare tokens weighing more. A mean is taken off and a
linear map applied, of which queries and passages have one each. To that the vectors of the text's
own tokens are added, from a table. `encode_query` gives vectors of queries, `encode` and
`encode_document` those of passages.

Shapes: B texts, S positions, D size of a state, L streams, F = L D features, E size of a vector, V
vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import InputModule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

#: The prompt that marks queries where `task` cannot be given. It is never embedded.
QUERY_PROMPT = "query: "

_FITTED = "fitted.safetensors"
_NAME = re.compile(r"\w+(?:\.\w+)*")
_SEPARATOR = re.compile(r"[._]+")
#: Between a small letter or digit and a capital, and before the last capital of a run:
#: CrossEntropy, HTTPServer.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class FarspanEmbedding(InputModule):
    """Texts to unit vectors (B, E). Of a text only as many tokens count as `max_seq_length` holds,
    less the end of text that comes before them."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, fitted: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_seq_length: int = model.config.max_position_embeddings
        for name, tensor in fitted.items():
            self.register_buffer(name, tensor)

    def preprocess(
        self,
        inputs: Sequence[str],
        prompt: str | None = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Token ids (B, S) that begin with the end of text, as in training; the mask (B, S) leaves
        out padding."""
        query = task == "query" or prompt == QUERY_PROMPT
        before = "" if prompt in (None, QUERY_PROMPT) else prompt
        texts = [_encodable(f"{before}{text}") for text in inputs]
        ids = self.tokenizer(
            [_query_form(text) for text in texts] if query else texts,
            add_special_tokens=False,
            truncation=True,
            max_length=min(self.max_seq_length, self.model.config.max_position_embeddings) - 1,
        )["input_ids"]
        words = self.tokenizer([_spread(text) for text in texts], add_special_tokens=False)[
            "input_ids"
        ]
        end = self.model.config.eos_token_id
        ids = [torch.tensor([end, *text]) for text in ids]
        masks = [torch.ones_like(text) for text in ids]
        return {
            # Padding lies behind the texts, where causal attention cannot see.
            "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=end),
            "attention_mask": nn.utils.rnn.pad_sequence(masks, batch_first=True),
            "word_ids": nn.utils.rnn.pad_sequence(
                [torch.tensor(sorted({*text}), dtype=torch.long) for text in words],
                batch_first=True,
                padding_value=-1,
            ),
            "task": "query" if query else "document",
        }

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Adds `sentence_embedding` (B, E)."""
        ids_BS = features["input_ids"]
        weights_BS = (self.weights[ids_BS] * features["attention_mask"])[:, 1:].float()
        states_LBSD = torch.stack(self._streams(ids_BS))[:, :, 1:].float()
        sums_BLD = torch.einsum("bs,lbsd->bld", weights_BS, states_LBSD)
        # A text without tokens has zeros for features.
        means_BF = sums_BLD.flatten(1) / weights_BS.sum(1, keepdim=True).clamp(min=1e-9)
        kind = "query" if features.get("task") == "query" else "passage"
        mean_F, map_FE, gate = (
            self.get_buffer(f"{kind}_{name}").float() for name in ("mean", "map", "gate")
        )
        states_BE = gate.exp() * F.normalize((means_BF - mean_F) @ map_FE, dim=1)
        words_BW = features["word_ids"]
        known_BW = (words_BW >= 0) * self.token_weights[words_BW.clamp(min=0)].float().exp()
        table_BE = torch.einsum("bw,bwe->be", known_BW, self.table[words_BW.clamp(min=0)].float())
        return features | {
            "sentence_embedding": F.normalize(F.normalize(table_BE, dim=1) + states_BE, dim=1)
        }

    def _streams(self, ids_BS: Tensor) -> list[Tensor]:
        """The states (B, S, D) that each block reads, those that the final norm reads, and what it
        makes of them."""
        streams: list[Tensor] = []
        blocks, norm = _parts(self.model.base_model)
        hooks = [
            module.register_forward_pre_hook(_keep(streams), with_kwargs=True)
            for module in (*blocks, norm)
        ]
        try:
            output_BSD = self.model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return [*streams, output_BSD]

    def get_embedding_dimension(self) -> int:
        return self.get_buffer("passage_map").shape[1]

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.model.save_pretrained(output_path, safe_serialization=True)
        self.tokenizer.save_pretrained(output_path)
        fitted = {
            name: tensor.cpu().contiguous() for name, tensor in self.named_buffers(recurse=False)
        }
        save_file(fitted, Path(output_path) / _FITTED)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> FarspanEmbedding:
        """From a folder or a repository of the hub. Raises FileNotFoundError where
        fitted.safetensors is missing."""
        hub = {"token": token, "revision": revision, "local_files_only": local_files_only}
        where = {**hub, "subfolder": subfolder, "cache_folder": cache_folder}
        fitted = cls.load_file_path(model_name_or_path, filename=_FITTED, **where)
        if fitted is None:
            raise FileNotFoundError(f"{model_name_or_path} has no {_FITTED}")
        hub |= {"subfolder": subfolder, "cache_dir": cache_folder}
        model = AutoModelForCausalLM.from_pretrained(
            model_name_or_path, use_safetensors=True, **hub, **(model_kwargs or {})
        )
        return cls(
            model, AutoTokenizer.from_pretrained(model_name_or_path, **hub), load_file(fitted)
        )

    def __repr__(self) -> str:
        return (
            f"FarspanEmbedding({self.model.config.model_type}, {self.get_embedding_dimension()} "
            "numbers a vector)"
        )


def _parts(body: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """The blocks and the final norm, by the names that GPT-2, Llama and OPT have for them."""
    body = getattr(body, "decoder", body)
    blocks = next(getattr(body, name) for name in ("h", "layers") if hasattr(body, name))
    return blocks, next(
        getattr(body, name) for name in ("ln_f", "norm", "final_layer_norm") if hasattr(body, name)
    )


def _keep(streams: list[Tensor]) -> Any:
    """A hook that keeps what a module is given."""

    def keep(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams.append(given[0] if given else named["hidden_states"])

    return keep


def _query_form(text: str) -> str:
    """Names split, one space before each word as inside a text: `torch.nn.CrossEntropyLoss` as `
    torch nn cross...`."""
    pieces = (piece for word in text.split() for piece in _SEPARATOR.split(word))
    return "".join(f" {part.lower()}" for piece in pieces for part in _CAMEL.split(piece) if part)


def _spread(text: str) -> str:
    """Every word in small letters, names split, one space before each."""
    return "".join(_query_form(match[0]) for match in _NAME.finditer(text))


def _encodable(text: str) -> str:
    """The text with halves of surrogate pairs joined, and those without their other half as
    U+FFFD."""
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )
