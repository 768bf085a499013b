"""Embed texts with a model that farspan trained: the only module of a sentence-transformers folder.

farspan copies this file and `names.py` into the folders that it exports, where farspan may not be
installed. The vectors equal farspan's: every stream of the model (token embeddings, the states
after each block, the output) is averaged over the tokens of a text, rare tokens with more weight. A
mean is subtracted and a linear map applied; queries and passages have their own. The vectors of the
text's tokens are added from a table. `encode_query` embeds queries, `encode` and `encode_document`
passages.

Shapes: B texts, S positions, D size of a state, L streams, F = L D features, E size of a vector, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import InputModule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .names import query_form, spread

#: The prompt that marks queries where `task` cannot be given. It is never embedded.
QUERY_PROMPT = "query: "

_FITTED = "fitted.safetensors"


class FarspanEmbedding(InputModule):
    """Embeds texts as unit vectors (B, E).

    Tokens beyond `max_seq_length` are left out; the end of text before them counts as one.
    """

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
        """Return token ids (B, S) that begin with the end of text, as in training.

        The mask (B, S) leaves out padding.
        """
        config = self.model.config
        is_query = task == "query" or prompt == QUERY_PROMPT
        prefix = "" if prompt in (None, QUERY_PROMPT) else prompt
        texts = [_join_surrogates(f"{prefix}{text}") for text in inputs]
        forms = [query_form(text) for text in texts] if is_query else texts
        max_length = min(self.max_seq_length, config.max_position_embeddings) - 1
        encoded = self.tokenizer(
            forms, add_special_tokens=False, truncation=True, max_length=max_length
        )
        words = self.tokenizer([spread(text) for text in texts], add_special_tokens=False)

        end = config.eos_token_id
        ids = [torch.tensor([end, *text]) for text in encoded["input_ids"]]
        masks = [torch.ones_like(text) for text in ids]
        distinct = [sorted({*text}) for text in words["input_ids"]]
        bags = [torch.tensor(text, dtype=torch.long) for text in distinct]
        pad = nn.utils.rnn.pad_sequence
        return {
            # Padding lies behind the texts, where causal attention cannot see.
            "input_ids": pad(ids, batch_first=True, padding_value=end),
            "attention_mask": pad(masks, batch_first=True),
            "word_ids": pad(bags, batch_first=True, padding_value=-1),
            "task": "query" if is_query else "document",
        }

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` (B, E)."""
        kind = "query" if features.get("task") == "query" else "passage"
        mean_F = self.get_buffer(f"{kind}_mean").float()
        map_FE = self.get_buffer(f"{kind}_map").float()
        gate = self.get_buffer(f"{kind}_gate").float()

        # The weighted mean of each stream. A text without tokens has zeros for features.
        ids_BS = features["input_ids"]
        weights_BS = self.weights[ids_BS] * features["attention_mask"]
        weights_BS = weights_BS[:, 1:].float()
        states_LBSD = torch.stack(self._collect_streams(ids_BS))[:, :, 1:].float()
        sums_BLD = torch.einsum("bs,lbsd->bld", weights_BS, states_LBSD)
        totals_B1 = weights_BS.sum(1, keepdim=True).clamp(min=1e-9)
        means_BF = sums_BLD.flatten(1) / totals_B1
        states_BE = F.normalize((means_BF - mean_F) @ map_FE, dim=1)

        # The weighted sum of the distinct tokens' vectors; padding is -1.
        words_BW = features["word_ids"]
        ids_BW = words_BW.clamp(min=0)
        weights_BW = self.token_weights[ids_BW].float().exp()
        weights_BW = (words_BW >= 0) * weights_BW
        vectors_BWE = self.table[ids_BW].float()
        table_BE = torch.einsum("bw,bwe->be", weights_BW, vectors_BWE)

        embedding_BE = F.normalize(table_BE, dim=1) + gate.exp() * states_BE
        return features | {"sentence_embedding": F.normalize(embedding_BE, dim=1)}

    def _collect_streams(self, ids_BS: Tensor) -> list[Tensor]:
        """Return the inputs (B, S, D) of each block and of the final norm, and the output."""
        streams: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            streams.append(inputs[0] if inputs else named["hidden_states"])

        body = self.model.base_model
        blocks, norm = _blocks_and_norm(body)
        hooks = []
        for module in (*blocks, norm):
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            output = body(input_ids=ids_BS, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return [*streams, output.last_hidden_state]

    def get_embedding_dimension(self) -> int:
        return self.get_buffer("passage_map").shape[1]

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.model.save_pretrained(output_path, safe_serialization=True)
        self.tokenizer.save_pretrained(output_path)
        buffers = self.named_buffers(recurse=False)
        fitted = {name: tensor.cpu().contiguous() for name, tensor in buffers}
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
        """Load from a folder or a repository of the hub.

        Raises FileNotFoundError where fitted.safetensors is missing.
        """
        hub: dict[str, Any] = {
            "token": token,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        where = {**hub, "subfolder": subfolder, "cache_folder": cache_folder}
        fitted = cls.load_file_path(model_name_or_path, filename=_FITTED, **where)
        if fitted is None:
            raise FileNotFoundError(f"{model_name_or_path} has no {_FITTED}")
        hub |= {"subfolder": subfolder, "cache_dir": cache_folder}
        options = {"use_safetensors": True, **hub, **(model_kwargs or {})}
        model = AutoModelForCausalLM.from_pretrained(model_name_or_path, **options)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_name_or_path, **hub)
        return cls(model, tokenizer, load_file(fitted))

    def __repr__(self) -> str:
        size = self.get_embedding_dimension()
        return f"FarspanEmbedding({self.model.config.model_type}, {size} numbers a vector)"


def _blocks_and_norm(body: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """Return the blocks and the final norm, by their names in GPT-2, Llama and OPT."""
    body = getattr(body, "decoder", body)
    blocks = next(name for name in ("h", "layers") if hasattr(body, name))
    norm = next(name for name in ("ln_f", "norm", "final_layer_norm") if hasattr(body, name))
    return getattr(body, blocks), getattr(body, norm)


def _join_surrogates(text: str) -> str:
    """Join halves of surrogate pairs, and replace those without their other half by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
