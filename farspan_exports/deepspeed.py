"""DeepSpeed's JSON configuration (`ds_config.json`).

Keys as `deepspeed/runtime/config.py`, `zero/config.py` and `lr_schedules.py` of 0.19.8 read them,
and as https://www.deepspeed.ai/docs/config-json documents them. A pipeline's stages are made by
`PipelineModule` in the training script; the file can only name the partition, so only its "uniform"
one is written.
"""

from __future__ import annotations

import json
from typing import Any

from farspan.domain.plan import Plan
from farspan.domain.units import counted
from farspan_exports.exporter import Exporter
from farspan_exports.regular import (
    irregular,
    launch_note,
    node_order,
    one_forward_one_backward,
    regular,
)

VERSION = "deepspeed 0.19.8"
FILE = "ds_config.json"


def reasons(plan: Plan) -> list[str]:
    """Why DeepSpeed cannot run this plan."""
    if reasons := irregular(plan):
        return reasons
    parts = regular(plan)
    if parts.tensor > 1:
        reasons.append(
            f"operators are divided over {parts.tensor} devices, which DeepSpeed leaves to the "
            "model's own code"
        )
    if parts.sites > 1 and parts.zero:
        reasons.append(
            "state is divided inside each site and copied between sites: MiCS, which did that, was "
            "removed"
        )
    if parts.stages > 1:
        reasons += _pipeline(plan)
    schedule = plan.train.schedule
    if schedule.kind == "wsd":
        reasons.append("it has no schedule that warms up, stays and decays (wsd)")
    if schedule.kind == "linear" and schedule.floor:
        reasons.append(
            "its linear schedule ends at 0: set train.floor: 0, or train.schedule: cosine"
        )
    if node_order(plan) is None:
        reasons.append("no numbering of the hosts puts the ranks in the plan's order")
    return reasons


def _pipeline(plan: Plan) -> list[str]:
    parts = regular(plan)
    reasons = []
    if parts.zero > 1:
        reasons.append(f"its pipelines go with ZeRO 0 and 1, not {parts.zero}")
    if parts.cuts != uniform(plan.model.layers + 2, parts.stages):
        reasons.append(
            f"stages are cut before units {', '.join(map(str, parts.cuts[1:-1]))}, and its own "
            "cuts are even ones"
        )
    if not one_forward_one_backward(plan):
        reasons.append("more microbatches are in flight than 1F1B has")
    return reasons


def uniform(items: int, parts: int) -> tuple[int, ...]:
    """Where `partition_uniform` of deepspeed/runtime/utils.py cuts: what is left over goes to the
    first parts."""
    size, left = divmod(items, parts)
    return tuple(i * size + min(i, left) for i in range(parts + 1))


def write(plan: Plan) -> str:
    """Return the file. World size = train_batch_size / (micro batch x accumulation), which
    DeepSpeed checks itself."""
    parts = regular(plan)
    train = plan.train
    (replica,) = plan.replicas
    bucket = replica.stages[0].grad_sync.bucket_bytes
    config: dict[str, Any] = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": parts.micro_rows,
        "gradient_accumulation_steps": parts.microbatches,
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        # Its default is 1.0; 0 leaves gradients as they are, as in `TrainSpec`.
        "gradient_clipping": train.optimizer.clip,
        # Gradients are summed in fp32, as `grad_sync.bits` says.
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": int(parts.zero),
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": train.optimizer.lr,
                "betas": [train.optimizer.beta1, train.optimizer.beta2],
                "eps": train.optimizer.eps,
                "weight_decay": train.optimizer.weight_decay,
            },
        },
        "scheduler": _scheduler(plan),
    }
    if bucket is not None:
        # Elements, not bytes: of the fp32 sums.
        config["zero_optimization"]["reduce_bucket_size"] = bucket // 4
    if parts.stages > 1:
        config["pipeline"] = {"stages": parts.stages, "partition": "uniform"}
    return json.dumps(config, indent=2) + "\n"


def _scheduler(plan: Plan) -> dict[str, Any]:
    schedule = plan.train.schedule
    train = plan.train
    # DeepSpeed takes 1 and more, and warms up over 2 steps at least.
    warmup = max(1, schedule.warmup_steps)
    if schedule.kind == "constant":
        params = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": train.optimizer.lr,
            "warmup_num_steps": warmup,
            "warmup_type": "linear",
        }
        return {"type": "WarmupLR", "params": params}
    if schedule.kind == "linear":
        params = {
            "total_num_steps": train.steps,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": train.optimizer.lr,
            "warmup_num_steps": warmup,
            "warmup_type": "linear",
        }
        return {"type": "WarmupDecayLR", "params": params}
    params = {
        "total_num_steps": train.steps,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": warmup,
        "warmup_type": "linear",
        "cos_min_ratio": schedule.floor,
    }
    return {"type": "WarmupCosineLR", "params": params}


def notes(plan: Plan) -> list[str]:
    """Return what the file leaves to the training script."""
    parts = regular(plan)
    train = plan.train
    notes = [
        launch_note(plan, "the deepspeed launcher, its hostfile"),
        f"the script brings the model ({plan.model.family}, {counted(plan.model.layers, 'layer')} "
        "x "
        f"{plan.model.d_model}), its sequences of {train.seq_len} tokens and "
        f"{counted(train.steps, 'step')}",
    ]
    if parts.recompute:
        notes.append(
            "the model's blocks must call deepspeed.checkpointing.checkpoint: the plan computes "
            "them again"
        )
    if parts.stages > 1:
        tied = "; the tied table as TiedLayerSpec" if plan.model.tied else ""
        notes.append(
            f"PipelineModule(layers=[embedding, {plan.model.layers} blocks, norm with head], "
            f"num_stages={parts.stages}, partition_method='uniform'){tied}"
        )
    if train.optimizer.weight_decay:
        notes.append(
            "pass matrices and other parameters as two groups: the plan decays matrices only"
        )
    return notes


exporter = Exporter(
    name="deepspeed", version=VERSION, file=FILE, reasons=reasons, write=write, notes=notes
)
