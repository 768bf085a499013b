"""torchtitan's configuration: a Python module with one function, for `torchtitan.train --module
FILE --config run`.

torchtitan has no TOML files since 0.3: `torchtitan/config/manager.py` loads a function that returns
`Trainer.Config`. The fields are those of `torchtitan/config/configs.py`, `trainer.py` and
`components/` of 0.3.0; the model is its Llama 3 with this plan's shape.
"""

from __future__ import annotations

from typing import Any

from farspan.domain.plan import Plan
from farspan.semantics.compile_choice import runs_compiled
from farspan_exports.exporter import Exporter
from farspan_exports.regular import (
    Regular,
    irregular,
    launch_note,
    node_order,
    one_forward_one_backward,
    regular,
)

VERSION = "torchtitan 0.3.0"
FILE = "farspan_plan.py"
#: How its Llama is divided over a tensor axis (`models/llama3/sharding.py`,
#: `models/common/decoder_sharding.py`), in the words of `Stage.splits`. The loss may be divided
#: like the logits or not.
SPLITS = {
    "tok": "v",
    "attn.qkv": "n",
    "attn": "n",
    "attn.out": "n",
    "mlp.up": "f",
    "mlp.act": "f",
    "mlp.down": "f",
    "head": "v",
}


def reasons(plan: Plan) -> list[str]:
    """Why torchtitan cannot run this plan."""
    if reasons := irregular(plan):
        return reasons
    parts = regular(plan)
    model = plan.model
    train = plan.train
    if model.family != "llama" or model.bias:
        reasons.append(
            f"it has no {model.family} model{' with biases' if model.family == 'llama' else ''}, "
            "only a Llama"
        )
    elif model.rope_scaling or model.head_size:
        reasons.append("scaled rotary positions and heads of another size are not translated")
    if train.precision == "fp16":
        reasons.append("it trains in bfloat16 or float32, not in fp16")
    if train.attention == "vanilla":
        reasons.append("it has no attention that keeps its score matrices")
    if parts.zero == 1:
        reasons.append(
            "FSDP2 divides gradients along with the optimizer's state, so ZeRO 1 has no counterpart"
        )
    reasons += _tensor(plan, parts)
    if parts.stages > 1:
        reasons += _pipeline(plan)
    if node_order(plan) is None:
        reasons.append("no numbering of the hosts puts the ranks in the plan's order")
    return reasons


def _tensor(plan: Plan, parts: Regular) -> list[str]:
    if parts.tensor == 1:
        return []
    splits = {op: dim for op, dim in plan.replicas[0].stages[0].splits.items() if dim}
    loss = splits.pop("loss", "v")
    if splits == SPLITS and loss == "v":
        return []
    unlike = sorted(op for op in {*splits, *SPLITS} if splits.get(op) != SPLITS.get(op))
    return [
        f"these operators are divided otherwise than in its Llama: {', '.join(unlike or ['loss'])}"
    ]


def _pipeline(plan: Plan) -> list[str]:
    reasons = []
    if plan.model.tied:
        reasons.append("it has no pipelines of models with tied embeddings")
    if schedule(plan) is None:
        reasons.append(
            "its schedules have 1F1B's microbatches in flight, or all of them (GPipe), and the "
            "plan has others"
        )
    return reasons


def schedule(plan: Plan) -> str | None:
    """Return the name of the schedule with the plan's microbatches in flight."""
    (replica,) = plan.replicas
    if one_forward_one_backward(plan):
        return "1F1B"
    return "GPipe" if all(depth >= replica.microbatches for depth in replica.in_flight) else None


def write(plan: Plan) -> str:
    """Return the module."""
    return _TEMPLATE.format(
        hash=plan.hash[:12],
        version=VERSION,
        model=_model(plan),
        parallelism=_call("ParallelismConfig", _parallelism(plan), 2),
        training=_call("TrainingConfig", _training(plan), 2),
        **_optimization(plan),
    )


def _parallelism(plan: Plan) -> dict[str, Any]:
    parts = regular(plan)
    sharded = parts.zero >= 2
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": parts.sites if sharded else parts.sites * parts.data,
        "data_parallel_shard_degree": parts.data if sharded else 1,
        "tensor_parallel_degree": parts.tensor,
        # The plan's residual stream is whole on every device of a tensor axis.
        "enable_sequence_parallel": False,
        "pipeline_parallel_degree": parts.stages,
    }
    if sharded:
        # Gathered again for the backward pass (ZeRO 3), or kept from the forward pass (ZeRO 2).
        settings["fsdp_reshard_after_forward"] = "always" if parts.zero == 3 else "never"
    if parts.stages > 1:
        settings["pipeline_parallel_schedule"] = schedule(plan)
        settings["pipeline_parallel_microbatch_size"] = parts.micro_rows
        settings["module_fqns_per_model_part"] = [
            [name for unit in range(first, last) for name in _names(unit, plan.model.layers)]
            for first, last in zip(parts.cuts, parts.cuts[1:], strict=False)
        ]
    return settings


def _names(unit: int, layers: int) -> list[str]:
    return (
        ["tok_embeddings"]
        if unit == 0
        else [f"layers.{unit - 1}"]
        if unit <= layers
        else ["norm", "lm_head"]
    )


def _training(plan: Plan) -> dict[str, Any]:
    parts = regular(plan)
    train = plan.train
    return {
        "local_batch_size": parts.rows if parts.stages > 1 else parts.micro_rows,
        "global_batch_size": train.batch,
        "seq_len": train.seq_len,
        "steps": train.steps,
        "max_norm": train.optimizer.clip or 1e9,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16" if train.precision == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,
    }


def _model(plan: Plan) -> str:
    spec = plan.model
    return _call(
        "dict",
        {
            "dim": spec.d_model,
            "n_layers": spec.layers,
            "n_heads": spec.heads,
            "n_kv_heads": spec.kv_heads,
            "hidden_dim": spec.d_ff,
            "vocab_size": spec.vocab_size,
            "max_seq_len": spec.context,
            "theta": spec.rope_theta,
            "eps": spec.norm_eps,
            "tied": spec.tied,
        },
        0,
    )


def _optimization(plan: Plan) -> dict[str, str]:
    train = plan.train
    adam = plan.train.optimizer
    kwargs = {
        "lr": adam.lr,
        "betas": (adam.beta1, adam.beta2),
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }
    decays: dict[str, dict[str, Any]] = {
        "cosine": {"decay_type": "cosine", "min_lr_factor": train.schedule.floor},
        "linear": {"decay_type": "linear", "min_lr_factor": train.schedule.floor},
        "wsd": {
            "decay_ratio": train.schedule.decay,
            "decay_type": "linear",
            "min_lr_factor": train.schedule.floor,
        },
        "constant": {"decay_ratio": 0.0},
    }
    decay = decays[train.schedule.kind]
    rates = {"warmup_steps": train.schedule.warmup_steps, **decay}
    return {
        "adam": repr(kwargs),
        "schedule": _call("LRSchedulersContainer.Config", rates, 2),
        "recompute": "FullAC.Config()" if regular(plan).recompute else "None",
        "compile": repr(any(runs_compiled(plan, rank) for rank in range(len(plan.devices)))),
        "seed": repr(train.seed),
    }


def _call(name: str, arguments: dict[str, Any], depth: int) -> str:
    """Return a call with one argument a line, as it stands `depth` levels deep."""
    inner = "    " * (depth + 1)
    end = "    " * depth
    lines = "".join(f"{inner}{key}={value!r},\n" for key, value in arguments.items())
    return f"{name}(\n{lines}{end})"


def notes(plan: Plan) -> list[str]:
    """Return what the module leaves to the command that starts it."""
    start = (
        f"torchrun ... -m torchtitan.train --module {FILE.removesuffix('.py')} --config run in "
        "the module's folder"
    )
    return [
        launch_note(plan, start),
        "add --hf_assets_path FOLDER for the tokenizer, --dataloader.dataset NAME for the text",
        "FSDP2 sums gradients block by block, whatever the plan's buckets",
    ]


_TEMPLATE = '''\
"""Plan {hash} for {version}: torchrun -m torchtitan.train --module farspan_plan --config run"""

from functools import partial

import torch.nn as nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

SHAPE = {model}
#: Matrices start from N(0, 0.02); those that write to the residual stream divided by sqrt(2 x
#: layers).
NORMAL = {{"weight": partial(nn.init.normal_, std=0.02)}}
DEEP = {{"weight": partial(nn.init.normal_, std=0.02 / (2 * SHAPE["n_layers"]) ** 0.5)}}


def norm():
    return RMSNorm.Config(normalized_shape=SHAPE["dim"], eps=SHAPE["eps"], param_init={{"weight": nn.init.ones_}})


def block():
    dim, heads = SHAPE["dim"], SHAPE["n_heads"]
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=SHAPE["max_seq_len"], theta=SHAPE["theta"])
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=dim, n_heads=heads, n_kv_heads=SHAPE["n_kv_heads"], wqkv_param_init=NORMAL, wo_param_init=DEEP,
            inner_attention=get_attention_config("flex"), fuse_qkv=True, rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=SHAPE["hidden_dim"], w1_param_init=NORMAL, w2w3_param_init=DEEP
        ),
    )


def model():
    dim, vocab = SHAPE["dim"], SHAPE["vocab_size"]
    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=SHAPE["tied"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=NORMAL),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=NORMAL),
        layers=[block() for _ in range(SHAPE["n_layers"])],
    )


def run() -> Trainer.Config:
    adam = {adam}
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3", flavor="farspan", model=model(), parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm, post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter,
        ),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=SHAPE["vocab_size"])),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                # Weights decay in matrices only.
                ParamGroupConfig(
                    pattern=r".*norm.*", optimizer_name="AdamW", optimizer_kwargs={{**adam, "weight_decay": 0.0}}
                ),
                ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=adam),
            ]
        ),
        lr_scheduler={schedule},
        training={training},
        parallelism={parallelism},
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compile}),
        debug=DebugConfig(seed={seed}),
        dataloader=HuggingFaceTextDataLoader.Config(),
    )
'''  # noqa: E501


exporter = Exporter(
    name="torchtitan", version=VERSION, file=FILE, reasons=reasons, write=write, notes=notes
)
