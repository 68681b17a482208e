"""GPT-NeoX's YAML, whose keys may have dashes or underscores.

Keys and defaults: `megatron/neox_arguments/neox_args.py` of GPT-NeoX 2.0.
"""

from __future__ import annotations

from planner.configs.formats.yaml_format import Described, YamlFormat, constant, degree, length, types
from planner.export.frameworks.deepspeed_fields import read_batch, write_batch
from planner.export.mapping import Entry, Facts, NotStated, Settings, Table, truth, whole
from simulator.config.hf_config import model_from_config
from topology.errors import BadInput, BadModel

_STAGE = "zero_optimization.stage"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
VOCABULARY = 50304  # GPT-NeoX-20B's tokenizer and GPT-2's, padded to a multiple of 128 as it does
# Keys of model variants other than GPT-NeoX's own.
OTHERS = (
    "mlp_type",
    "num_kv_heads",
    "intermediate_size",
    "moe_num_experts",
    "num_experts",
    "attention_config",
    "mamba_selective_scan_fusion",
)


def _ready(settings: Settings) -> Settings:
    return {key.replace("-", "_"): value for key, value in settings.items()}


def _read_dp(settings: Settings, facts: Facts) -> Facts:
    others = facts["tp"] * facts["pp"]
    if facts["gpus"] % others:
        raise BadInput(f"{facts['gpus']} GPUs are not a multiple of tp {facts['tp']} x pp {facts['pp']}")
    return {
        "dp_replicate": facts["gpus"] // others,
        "dp_shard": 1,
        "zero_stage": whole(settings, _STAGE, 0, least=0),
        "schedule": "1F1B" if facts["pp"] > 1 else None,
    }


def _read_types(settings: Settings, _: Facts) -> Facts:
    word = str(settings.get("precision") or "")
    half = truth(settings, "fp16.enabled") or word == "fp16"
    low = truth(settings, "bf16.enabled") or word == "bfloat16" or settings.get("fp16.type") == "bfloat16"
    dtype = "bfloat16" if low else "float16" if half else "float32"
    reduce = "float32" if truth(settings, "fp32_allreduce") else dtype
    return types(dtype, dtype, reduce)


def _read_batch(settings: Settings, facts: Facts) -> Facts:
    found = read_batch(settings, facts)
    if "micro_batch_size" not in found:
        raise NotStated("the batch is not stated", remedy="--micro-batch and --global-batch")
    return found


TABLE: Table = (
    degree("model_parallel_size", "tp"),
    degree("pipe_parallel_size", "pp"),
    constant(
        {"cp": 1, "ep": 1, "virtual_stages": 1, "optimizer": "adamw", "compile": False, "sequence_parallel": False}
    ),
    Entry(keys=(_STAGE,), write=lambda facts: {_STAGE: facts["zero_stage"] or 0}, read=_read_dp),
    Entry(keys=_SIZES, write=write_batch, read=_read_batch),
    length("seq_length"),
    Entry(
        keys=("checkpoint_activations", "activation_checkpointing", "checkpoint_num_layers"),
        write=lambda facts: {"checkpoint_activations": facts["recompute"] == "full"},
        read=lambda settings, _: {"recompute": "full" if truth(settings, "checkpoint_activations") else "none"},
    ),
    Entry(keys=("fp16.enabled", "bf16.enabled", "fp16.type", "precision", "fp32_allreduce"), read=_read_types),
)


def _describe(settings: Settings) -> Described:
    own = [key for key in OTHERS if settings.get(key)]
    if own or settings.get("pos_emb") != "rotary" or settings.get("norm", "layernorm") != "layernorm":
        return Described(unknown=f"a network with {own[0] if own else 'other positions or norms'} than GPT-NeoX-20B's")
    shapes = {
        "num_hidden_layers": settings.get("num_layers"),
        "hidden_size": settings.get("hidden_size"),
        "num_attention_heads": settings.get("num_attention_heads"),
        "max_position_embeddings": settings.get("max_position_embeddings"),
    }
    try:
        model = model_from_config(
            {
                "model_type": "gpt_neox",
                **{key: value for key, value in shapes.items() if value is not None},
                "intermediate_size": 4 * whole(settings, "hidden_size"),
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": not truth(settings, "no_weight_tying"),
                "use_parallel_residual": truth(settings, "gpt_j_residual"),
            },
            name="gpt-neox",
        )
    except (BadModel, BadInput) as error:
        return Described(unknown=error.what)
    return Described(model=model, assumed=(f"vocabulary of {VOCABULARY} (the tokenizer was not read)",))


FORMAT = YamlFormat(
    framework="gpt-neox",
    runtime="megatron-deepspeed",
    marks=tuple(frozenset({f"num{dash}layers", f"pipe{other}parallel{other}size"}) for dash in "-_" for other in "-_"),
    table=TABLE,
    describe=_describe,
    ready=_ready,
    limits={"cp": ((1, 1),), "ep": ((1, 1),)},
    harmless=(
        r"(optimizer|fp16|bf16|zero_optimization)(\..*)?|(num_layers|hidden_size|num_attention_heads|max_position_embeddings|norm"
        r"|pos_emb|rotary_pct|no_weight_tying|gpt_j_residual|gpt_j_tied|output_layer_\w+|.*_fusion|bias_\w+|data_\w+|vocab_file"
        r"|merge_file|tokenizer_type|save.*|load|.*_interval|.*_iters|lr_\w+|min_lr|warmup|weight_decay|.*dropout|gradient_clipping"
        r"|clip_grad|steps_per_print|wall_clock_breakdown|distributed_backend|init_method|output_layer_init_method|log\w*|seed"
        r"|keep_last_n_checkpoints|tensorboard\w*|use_wandb|wandb\w*|partition_activations|synchronize_each_layer|hostfile"
        r"|rotary_\w+|layernorm_epsilon|train_\w+|attention_softmax_in_fp32|launcher|deepspeed\w*|print_stats|hysteresis)"
    ),
)
