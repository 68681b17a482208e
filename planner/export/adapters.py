"""Notes of exports on adapters, frozen weights and memory savers: the program must build what no file has keys for."""

from __future__ import annotations

import json

from simulator.config.adapter import ALL_LINEAR, DORA, FROZEN, IA3, MODULES, Adapter
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, LINEAR_LOSS, OPTIMIZER_IN_BACKWARD, TILED_MLP
from simulator.runtimes.library import spec_for

# Matrices by the names of Megatron-Bridge's CanonicalLoRA, which adapts each separately (peft/canonical_lora.py).
_CANONICAL = {
    "q": "linear_q",
    "k": "linear_k",
    "v": "linear_v",
    "o": "linear_proj",
    "gate": "linear_fc1_gate",
    "up": "linear_fc1_up",
    "down": "linear_fc2",
}


def adapter_needs(target: str, runtime: Runtime) -> tuple[str, ...]:
    """Return what the program of a target must build for the trained parameters; empty if all are trained."""
    adapter = runtime.adapter
    if adapter is None:
        return ()
    if adapter.kind == FROZEN:
        return (f"requires_grad_(False) on the parameters of {', '.join(adapter.target_modules)}",)
    if target == "megatron":
        return (f"Megatron-Bridge, whose recipes take cfg.peft = {_bridge(adapter)}",)
    if target == "torchtitan":
        where = ", ".join(adapter.target_modules)
        return (
            f"a LoRAConverter of rank {adapter.rank} on {where} among the model's converters (torchtitan PR #3264)",
        )
    narrow = runtime.param_dtype != "float32" and not spec_for(runtime).wide_adapters  # peft keeps them in float32
    kept = ", autocast_adapter_dtype=False" if narrow else ""
    return (f"peft: get_peft_model(model, {_peft(adapter)}{kept})", *_loaded(adapter, runtime))


def optimizer_needs(runtime: Runtime) -> tuple[str, ...]:
    """Return the optimizers that a program must build if hidden matrices have one of their own."""
    if OPTIMIZERS[runtime.optimizer].matrices is None:
        return ()
    return (
        (
            "torch.optim.Muon over the two-dimensional weights of layers, which on DTensors gathers or sums in each"
            " iteration, as it is costed; torch.optim.AdamW over embeddings, head, norms and biases"
        ),
    )


def _peft(adapter: Adapter) -> str:
    modules = ALL_LINEAR if ALL_LINEAR in adapter.target_modules else list(adapter.target_modules)
    if adapter.kind == IA3:
        return f"IA3Config(target_modules={json.dumps(modules)})"
    dora = ", use_dora=True" if adapter.kind == DORA else ""
    dropout = f", lora_dropout={adapter.dropout:g}" if adapter.dropout else ""
    return f"LoraConfig(r={adapter.rank}, target_modules={json.dumps(modules)}{dropout}{dora})"


def _loaded(adapter: Adapter, runtime: Runtime) -> tuple[str, ...]:
    """Return how the frozen weights are loaded where they are packed."""
    compute = f"torch.{runtime.activation_dtype}"
    if adapter.base_weights == "nf4":
        kept = f"bnb_4bit_compute_dtype={compute}, bnb_4bit_quant_storage={compute}"
        kind = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True'
        return (f"the model loaded with BitsAndBytesConfig({kind}, {kept})",)
    return (f"the model loaded with its frozen weights in {adapter.base_weights}",) if adapter.packed else ()


def _bridge(adapter: Adapter) -> str:
    dropout = f", dropout={adapter.dropout:g}" if adapter.dropout else ""
    whole = "DoRA" if adapter.kind == DORA else "LoRA"
    if ALL_LINEAR in adapter.target_modules:
        return f"{whole}(dim={adapter.rank}{dropout})"
    parts = dict.fromkeys(part for word in adapter.target_modules for part in MODULES[word.lower()])
    if all(word.startswith("linear_") for word in adapter.target_modules):
        return f"{whole}(dim={adapter.rank}, target_modules={json.dumps(list(adapter.target_modules))}{dropout})"
    names = [_CANONICAL.get(part, part) for part in parts]
    return f"CanonicalLoRA(dim={adapter.rank}, target_modules={json.dumps(names)}{dropout})"


# --- memory savers ----------------------------------------------------------------------------------------------------


_TRAINER = {
    LINEAR_LOSS: "TrainingArguments(use_liger_kernel=True)",
    ACTIVATION_OFFLOAD: 'TrainingArguments(gradient_checkpointing_kwargs={"offload": True})',
}
# By the first name of a description; others are built by the plain program.
_BY_RUNTIME = {
    "transformers": _TRAINER,
    "deepspeed": _TRAINER,
    "trl": {**_TRAINER, CHUNKED_LOSS: 'SFTConfig(loss_type="chunked_nll")'},
    "torchtune": {
        CHUNKED_LOSS: "loss._component_: torchtune.modules.loss.LinearCrossEntropyLoss",
        ACTIVATION_OFFLOAD: "enable_activation_offloading: True",
        OPTIMIZER_IN_BACKWARD: "optimizer_in_bwd: True, without clip_grad_norm",
    },
}
_PLAIN = {
    CHUNKED_LOSS: "head and loss computed for an eighth of the tokens at a time (torchtune's LinearCrossEntropyLoss)",
    LINEAR_LOSS: "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss in the place of head and loss",
    ACTIVATION_OFFLOAD: "forward passes under torchtune.training.OffloadActivations()",
    TILED_MLP: "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP in the place of feed-forward networks",
    OPTIMIZER_IN_BACKWARD: "an optimizer for each parameter, stepped by register_post_accumulate_grad_hook",
}
# Savers that a target's own file or program already has.
_OWN = {
    "torchtitan": frozenset({OPTIMIZER_IN_BACKWARD, CHUNKED_LOSS}),
    "torchrun": frozenset({CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD, ACTIVATION_OFFLOAD}),
}


def saver_needs(target: str, runtime: Runtime) -> tuple[str, ...]:
    """Return what must be added to the program of a target for the runtime's memory savers."""
    own = _OWN.get(target, frozenset()) if runtime.name in {"meshwright", "torchtitan"} else frozenset()
    words = {**_PLAIN, **_BY_RUNTIME.get(runtime.name, {})}
    asked = {*runtime.savers, *({LINEAR_LOSS} if "linear_loss" in runtime.fused else ())}
    return tuple(text for word, text in words.items() if word in asked and word not in own)
