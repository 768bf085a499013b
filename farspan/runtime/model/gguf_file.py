"""A model with its tokenizer as one GGUF file, which llama.cpp and what is built on it load.

Names, keys and the layouts of tensors are those of llama.cpp's own converter
(convert_hf_to_gguf.py); its library `gguf` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from farspan import models
from farspan.corpus.llama_cpp_rules import find_rule
from farspan.domain.model import ModelSpec, WeightType
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import read_bytes
from farspan.runtime.model.rotary import rotary_frequencies

if TYPE_CHECKING:
    import gguf

#: The types of matrices in a file, by llama.cpp's names; vectors stay in fp32.
_TYPES: dict[WeightType, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
#: Architectures whose files have q, k and v in one tensor.
_FUSED = frozenset({"gpt2", "gptneox"})
#: Architectures whose positions turn pairs of neighbouring dims, not of two halves.
_INTERLEAVED = frozenset({"llama", "smollm3"})
#: The architecture in which each layer of this number has no positions, whatever a file has.
_UNROTATED_INTERVALS = {"smollm3": 4}
#: Every layer of this number has no window, where others have one, and the base of theirs
#: (src/llama-model.cpp, LLM_ARCH_GEMMA3).
_WINDOW_INTERVAL = 6
_WINDOW_ROPE_THETA = 10_000.0
#: Those that read the head from a tensor of its own also where it is the embedding's table.
_OWN_HEAD = frozenset({"gpt2", "gptneox"})
_BLOCK_NAMES = {
    "attn_norm": "attn_norm",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.down": "ffn_down",
}


def write_gguf(
    file: Path,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    *,
    tokenizer: Path,
    end_of_text: int,
    name: str,
    kind: WeightType = "fp32",
    chat_template: str | None = None,
) -> None:
    """Write a GGUF file of a model; the arguments are those of `huggingface.export_model`.

    Refuses (cannot-export) a family that llama.cpp lacks and a tokenizer that it would read
    otherwise.
    """
    architecture = require_gguf(spec, tokenizer)
    import gguf

    temporary = file.with_name(f"{file.name}.tmp")
    writer = gguf.GGUFWriter(temporary, architecture)
    writer.add_name(name)
    _add_sizes(writer, spec)
    _add_tokenizer(writer, spec, tokenizer, end_of_text)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    whole = gguf.GGMLQuantizationType.F32
    asked = gguf.GGMLQuantizationType[_TYPES[kind]]
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL_' if kind == 'fp32' else 'MOSTLY_'}{asked.name}"]
    )
    for tensor_name, tensor in _list_tensors(spec, state, architecture):
        array = tensor.detach().float().contiguous().cpu().numpy()
        block_size, _ = gguf.GGML_QUANT_SIZES[asked]
        is_matrix = array.ndim > 1 and array.shape[-1] % block_size == 0
        stored = asked if is_matrix else whole
        data = gguf.quants.quantize(array, stored)
        writer.add_tensor(tensor_name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(file)


def require_gguf(spec: ModelSpec, tokenizer: Path) -> str:
    """Return llama.cpp's name of a model's architecture. Raises Refusal (cannot-export) where it
    has none, or would split text otherwise than the tokenizer."""
    family = models.family(spec.family)
    if family.GGUF is None:
        raise _refuse(f"llama.cpp has no {family.TITLE}", "the model's family")
    words = json.loads(read_bytes(tokenizer))
    if find_rule(words) is None:
        raise _refuse(
            "the tokenizer splits text in a way that llama.cpp does not know", "tokenizer.json"
        )
    _require_layers(spec, family.GGUF)
    return family.GGUF


def _require_layers(spec: ModelSpec, architecture: str) -> None:
    """Refuse a model whose layers differ from one another otherwise than llama.cpp has them,
    whatever a file gives."""
    interval = _UNROTATED_INTERVALS.get(architecture, spec.layers + 1)
    if (spec.unrotated_layers or ()) != tuple(range(interval - 1, spec.layers, interval)):
        raise _refuse(
            f"llama.cpp's {architecture} lacks positions in every layer of number {interval} alone",
            "config.json, key 'no_rope_layers'",
        )
    if spec.window:
        every = [layer for layer in range(spec.layers) if (layer + 1) % _WINDOW_INTERVAL]
        if list(spec.window.layers) != every or spec.window.rope_theta != _WINDOW_ROPE_THETA:
            raise _refuse(
                f"llama.cpp's {architecture} has a window in all layers but every sixth, and "
                f"turns their positions by a base of {_WINDOW_ROPE_THETA:.0f}",
                "config.json, keys 'layer_types' and 'rope_parameters'",
            )
        if spec.rope_scaling:
            raise _refuse(
                f"llama.cpp's {architecture} scales no positions by frequency",
                "config.json, key 'rope_parameters'",
            )
    if spec.query_scalar:
        raise _refuse(
            f"llama.cpp's {architecture} divides scores by the root of the head size",
            "config.json, key 'query_pre_attn_scalar'",
        )


def _refuse(what: str, where: str) -> Refusal:
    return Refusal(
        "cannot-export",
        what=what,
        where=where,
        fact="a GGUF file would give other text than the model",
        remedy="export for transformers: farspan export --format huggingface",
    )


def _add_sizes(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_vocab_size(spec.vocab_size)
    if spec.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(spec.norm_eps)
    else:
        writer.add_layer_norm_eps(spec.norm_eps)
    if spec.positions == "rope":
        writer.add_rope_freq_base(spec.rope_theta)
        writer.add_rope_dimension_count(spec.turned_dims)
    if spec.window:
        writer.add_sliding_window(spec.window.size)
    if spec.head_size:
        writer.add_key_length(spec.head_size)
        writer.add_value_length(spec.head_size)
    if models.family(spec.family).GGUF == "gptneox":
        writer.add_parallel_residual(bool(spec.parallel_residual))


def _add_tokenizer(
    writer: gguf.GGUFWriter, spec: ModelSpec, tokenizer: Path, end_of_text: int
) -> None:
    """Add the tokens, their kinds and merges; rows that stand for no token are unused ones."""
    import gguf

    words: dict[str, Any] = json.loads(read_bytes(tokenizer))
    tokens = [f"[PAD{number}]" for number in range(spec.vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * spec.vocab_size
    for token, number in words["model"]["vocab"].items():
        tokens[number] = token
        kinds[number] = gguf.TokenType.NORMAL
    for added in words["added_tokens"]:
        number = added["id"]
        tokens[number] = added["content"]
        is_control = added["special"]
        kinds[number] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
    merges = []
    for merge in words["model"]["merges"]:
        merges.append(merge if isinstance(merge, str) else " ".join(merge))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(find_rule(words)))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _list_tensors(
    spec: ModelSpec, state: Mapping[str, Tensor], architecture: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a file with its name there."""
    yield "token_embd.weight", state["tok.weight"]
    if spec.positions == "learned":
        yield "position_embd.weight", state["pos.weight"]
    if spec.rope_scaling:
        scaled_R2 = rotary_frequencies(spec, torch.device("cpu"))
        plain_R2 = rotary_frequencies(
            replace(spec, rope_scaling=msgspec.UNSET), torch.device("cpu")
        )
        yield "rope_freqs.weight", plain_R2 / scaled_R2
    for layer in range(spec.layers):
        ours = f"blocks.{layer}."
        for name, tensor in state.items():
            if name.startswith(ours):
                part, _, kind = name.removeprefix(ours).rpartition(".")
                for theirs, piece in _divide(spec, architecture, part, tensor):
                    yield f"blk.{layer}.{theirs}.{kind}", piece
    gains = state["norm.weight"]
    yield "output_norm.weight", 1 + gains if spec.offset_gains else gains
    if "norm.bias" in state:
        yield "output_norm.bias", state["norm.bias"]
    if not spec.tied:
        yield "output.weight", state["head.weight"]
    elif architecture in _OWN_HEAD:
        yield "output.weight", state["tok.weight"]


def _divide(
    spec: ModelSpec, architecture: str, part: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter of a block in the tensors that a file has of it."""
    if part == "attn.qkv" and architecture in _FUSED:
        yield "attn_qkv", tensor
    elif part == "attn.qkv":
        kv = spec.kv_heads * spec.head_dim
        q, k, v = tensor.split([spec.heads * spec.head_dim, kv, kv])
        if architecture in _INTERLEAVED:
            q = _interleave_halves(q, spec.heads)
            k = _interleave_halves(k, spec.kv_heads)
        yield "attn_q", q
        yield "attn_k", k
        yield "attn_v", v
    elif part == "mlp.up" and spec.is_gated:
        gate, value = tensor.split(spec.d_ff)
        yield "ffn_gate", gate
        yield "ffn_up", value
    elif part == "mlp.up":
        yield "ffn_up", tensor
    elif spec.offset_gains and part.endswith("norm"):
        yield _BLOCK_NAMES[part], 1 + tensor
    else:
        yield _BLOCK_NAMES[part], tensor


def _interleave_halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k with the dims of each head's two halves in turn."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
