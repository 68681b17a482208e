"""torchtune's recipe configurations.

Keys and defaults: `recipes/full_finetune_distributed.py` and `recipes/configs/` of torchtune 0.6. Parameters, products
and gradients all have the type `dtype`.
"""

from __future__ import annotations

import re

from planner.configs.formats.adapters import TORCHTUNE
from planner.configs.formats.savers import TORCHTUNE as SAVERS
from planner.configs.formats.yaml_format import (
    DATA_PARALLEL,
    FLAT,
    Described,
    YamlFormat,
    accumulated,
    compiled,
    constant,
    degree,
    length,
    named,
    types,
    whole_blocks,
)
from planner.export.mapping import Entry, Facts, Settings, Table, data_parallel_rest, either, one_of, truth
from planner.export.named_models import model_spelt
from topology.errors import BadInput

_SHARD = "data_parallel_shard_dim"
_OPTIMIZER = "optimizer._component_"
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _read_shard(settings: Settings, facts: Facts) -> Facts:
    product = facts["tp"] * facts["cp"] * facts["dp_replicate"]
    return {"dp_shard": data_parallel_rest(settings, facts, _SHARD, product)}


def _read_types(settings: Settings, _: Facts) -> Facts:
    dtype = one_of(settings, "dtype", DTYPES, "bf16")
    return types(dtype, dtype, dtype)


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    name = str(settings.get(_OPTIMIZER, "torch.optim.AdamW")).rpartition(".")[2].lower()
    if name == "muon":
        raise BadInput(
            f"{_OPTIMIZER} is torch.optim.Muon, which refuses what is no matrix",
            why="torchtune gives all parameters to one optimizer",
            remedy=f"{_OPTIMIZER}: torch.optim.AdamW",
        )
    return {"optimizer": name}


TABLE: Table = (
    constant(FLAT),
    degree("tensor_parallel_dim", "tp"),
    degree("context_parallel_dim", "cp"),
    degree("data_parallel_replicate_dim", "dp_replicate"),
    Entry(keys=(_SHARD,), read=_read_shard),
    accumulated("batch_size", "gradient_accumulation_steps"),
    length("tokenizer.max_seq_len", "dataset.max_seq_len"),
    whole_blocks("enable_activation_checkpointing"),
    compiled("compile"),
    either("fsdp_cpu_offload", "offload", "parameters", "none"),
    Entry(
        keys=("fsdp_reshard_after_forward",),
        write=lambda facts: (
            {}
            if facts["reshard_after_forward"] is None
            else {"fsdp_reshard_after_forward": facts["reshard_after_forward"]}
        ),
        read=lambda settings, _: {"reshard_after_forward": truth(settings, "fsdp_reshard_after_forward", default=True)},
    ),
    Entry(keys=("dtype",), write=lambda facts: {"dtype": DTYPES[facts["compute_dtype"]]}, read=_read_types),
    Entry(keys=(_OPTIMIZER,), read=_read_optimizer),
    TORCHTUNE,
    SAVERS,
)


def _describe(settings: Settings) -> Described:
    component = str(settings.get("model._component_", "")).rpartition(".")[2]
    model = model_spelt(re.sub(r"^q?(lora|dora)_", "", component))
    if model is not None:
        return Described(model=model)
    found = named(settings, "checkpointer.checkpoint_dir")
    return found if found.model else Described(unknown=f"torchtune's {component[:60]} is none whose shapes are known")


FORMAT = YamlFormat(
    framework="torchtune",
    runtime="torchtune",
    marks=(frozenset({"model._component_", "batch_size", "optimizer._component_"}),),
    table=TABLE,
    describe=_describe,
    limits=DATA_PARALLEL,
    harmless=(
        r"(model|tokenizer|dataset|dataset_val|checkpointer|optimizer|loss|lr_scheduler|metric_logger|profiler|seed|shuffle|epochs"
        r"|max_steps_per_epoch|resume_from_checkpoint|output_dir|log_\w+|device|clip_grad_norm|save_\w+|run_val\w*|name"
        r"|custom_sharded_layers|model_type|keep_last\w*|cudnn_deterministic_mode|batch_size_val|collate_fn)(\..*)?"
    ),
)
