"""The model of a plan for torchtitan: one that it ships, or a flavor of a shipped class, written next to the
configuration.

torchtitan builds models by name. 0.2.2 imports the module that `experimental.custom_import` names before it looks one
up; 0.3.0 imports the module that `--module` names and calls its function `--config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.export.job_files import slug
from planner.export.schema import schema, shipped_model
from simulator.config.model import Model
from simulator.config.workload import Workload
from topology.errors import Infeasible

FLAVOR_MODULE = "torchtitan_flavor"
CONFIG_MODULE = "torchtitan_config"
CONFIG_FUNCTION = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model by its name in torchtitan. `files` are Python modules that must be in the working directory."""

    module: str
    flavor: str
    files: dict[str, str] = field(default_factory=dict)


def toml_model(model: Model, workload: Workload, version: str) -> NamedModel:
    """Return the model for 0.2.2. Raises Infeasible if none of its classes has these shapes."""
    try:
        known = shipped_model("torchtitan", version, model)
    except Infeasible as error:
        if lacking := _not_a_llama(model, workload):
            raise Infeasible(error.what, why=f"{lacking}; {error.why}", remedy=error.remedy) from None
    else:
        return NamedModel(module=known["module"], flavor=known["flavor"])
    plain = not model.moe and not model.tied_embeddings and not model.qk_norm
    llama = plain and model.heads * model.head_dim == model.hidden
    text = _llama_flavor(model) if llama else _qwen_flavor(model)
    return NamedModel(
        module="llama3" if llama else "qwen3", flavor=slug(model.name), files={f"{FLAVOR_MODULE}.py": text}
    )


def registry_model(model: Model, workload: Workload, version: str, *, loss_in_pieces: bool) -> NamedModel:
    """Return the model for 0.3.0, as a module with a configuration function. Raises Infeasible.

    `loss_in_pieces`: head and loss for an eighth of the sequence at a time, as in torchtitan's own functions.
    """
    try:
        known = shipped_model("torchtitan", version, model)
    except Infeasible as error:
        lacking = _not_a_llama(model, workload)
        if not lacking and (model.moe or model.heads * model.head_dim != model.hidden or model.qk_norm):
            lacking = "its Llama has no experts, no norms on queries and keys, and heads of width hidden / heads"
        if lacking:
            raise Infeasible(error.what, why=f"{lacking}; {error.why}", remedy=error.remedy) from None
        module, flavor, shapes = "llama3", slug(model.name), _registry_shapes(model)
    else:
        module, flavor, shapes = known["module"], known["flavor"], ""
    start = _starting_config(version, module, flavor, model.parameters)
    imports = _REGISTRY_IMPORTS if shapes else "from torchtitan.models.common.config_utils import decoder_vocab_size\n"
    models = f"from torchtitan.models import {module} as models\n"
    loss, pieces = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))", "one piece"
    names = "CrossEntropyLoss"
    if loss_in_pieces:
        loss, pieces = f"ChunkedLossWrapper.Config(num_chunks=8, loss_fn={loss})", "8 pieces"
        names = f"ChunkedLossWrapper, {names}"
    body = (
        f'"""The configuration that the plan starts from: {module} {flavor}, its loss in {pieces} as it was'
        ' predicted."""\n\n'
        f"from torchtitan.components.loss import {names}\n{models}{imports}"
        f"from torchtitan.models.{module}.config_registry import {start}\n\n{shapes}\n"
        f"def {CONFIG_FUNCTION}():\n"
        f"    config = {start}()\n"
        f"    config.model_spec = models.model_registry({json.dumps(flavor)})\n"
        f"    config.loss = {loss}\n"
        "    return config\n"
    )
    return NamedModel(module=module, flavor=flavor, files={f"{CONFIG_MODULE}.py": body})


def _starting_config(version: str, module: str, flavor: str, parameters: int) -> str:
    """Return the configuration function in a module for this flavor, or for the one nearest in size."""
    known = schema("torchtitan", version)
    sizes: dict[str, int] = {one["flavor"]: one["parameters"] for one in known["models"] if one["module"] == module}
    for_flavor: dict[str, str] = {
        name.partition(".")[2]: one["flavor"]
        for name, one in known["configs"].items()
        if name.startswith(f"{module}.{module}") and one["flavor"] in sizes
    }

    def distance(name: str) -> tuple[bool, float, int]:
        ratio = sizes[for_flavor[name]] / parameters
        return for_flavor[name] != flavor, max(ratio, 1 / ratio), len(name)

    return min(for_flavor, key=distance)


def _not_a_llama(model: Model, workload: Workload) -> str:
    """Return parts of a model that torchtitan's Llama and Qwen3 classes do not have; empty if there are none."""
    moe = model.moe
    has = {
        "latent attention of other shapes": model.latent is not None,
        "biases": model.qkv_bias or model.attention_out_bias or model.mlp_bias or model.head_bias,
        "LayerNorm": model.norm != "rmsnorm" or model.norm_bias,
        "other norms": model.norms_per_layer != 2 or model.qk_norm_wide or not model.final_norm,
        "no gate in its feed-forward blocks": not model.gated_mlp,
        "Gemma's activation": model.family.startswith("gemma"),
        "learned positions": bool(model.learned_positions) or not model.rotary,
        "parallel residuals": model.parallel_residual,
        "a sliding window": model.windowed_layers > 0 and workload.seq_len > model.sliding_window,
        "shared or biased experts, or dense layers alongside sparse ones": bool(
            moe and (moe.shared_ffn or moe.dense_layers or moe.router_bias or moe.expert_bias)
        ),
    }
    lacking = [name for name, present in has.items() if present]
    return f"its classes have no {', no '.join(lacking)}" if lacking else ""


def _arguments(values: Mapping[str, object]) -> str:
    return "".join(f"    {name}={value!r},\n" for name, value in values.items())


def _llama_flavor(model: Model) -> str:
    # The class computes int(multiplier * int(8/3 dim)) and rounds up to multiple_of: half a unit more protects against
    # truncation.
    multiplier = (model.ffn + 0.5) / int(2 * 4 * model.hidden / 3)
    arguments = {
        "dim": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "multiple_of": 1,
        "ffn_dim_multiplier": multiplier,
        "max_seq_len": model.max_positions or 131072,
    }
    return (
        f'"""Shapes for torchtitan 0.2.2, imported by experimental.custom_import."""\n\n'
        "from torchtitan.models.llama3 import TransformerModelArgs, llama3_args\n\n"
        f"llama3_args[{json.dumps(slug(model.name))}] = TransformerModelArgs(\n{_arguments(arguments)})\n"
    )


def _qwen_flavor(model: Model) -> str:
    moe = model.moe
    arguments: dict[str, object] = {
        "vocab_size": model.vocab,
        "max_seq_len": model.max_positions or 131072,
        "head_dim": model.head_dim,
        "dim": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "qk_norm": model.qk_norm,
        "hidden_dim": model.ffn or (moe.ffn if moe else 0),
        "enable_weight_tying": model.tied_embeddings,
    }
    experts = imports = ""
    if moe:
        arguments |= {"moe_enabled": True, "moe_inter_dim": moe.ffn}
        imports = "from torchtitan.models.moe import MoEArgs\n"
        experts = (
            f"    moe_args=MoEArgs(num_experts={moe.experts}, num_shared_experts=0, top_k={moe.experts_per_token}, "
            'score_func="softmax", route_norm=True, score_before_experts=False),\n'
        )
    return (
        f'"""Shapes for torchtitan 0.2.2, imported by experimental.custom_import."""\n\n'
        f"{imports}from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args\n\n"
        f"qwen3_args[{json.dumps(slug(model.name))}] = Qwen3ModelArgs(\n{_arguments(arguments)}{experts})\n"
    )


_REGISTRY_IMPORTS = (
    "from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm\n"
    "from torchtitan.models.common.config_utils import decoder_vocab_size\n"
)


def _registry_shapes(model: Model) -> str:
    """Return a function that builds the shapes like llama3's own flavors, and its entry among them."""
    embedding = "_EMBEDDING_SKIP_INIT" if model.tied_embeddings else "_EMBEDDING_INIT"
    return (
        '\ndef shapes(attn_backend, tp_gemm_backend="default"):\n'
        f"    dim, vocab = {model.hidden}, {model.vocab}\n"
        "    return models.Llama3Model.Config(\n"
        "        dim=dim,\n        vocab_size=vocab,\n"
        f"        enable_weight_tying={model.tied_embeddings},\n"
        "        tok_embeddings=Embedding.Config(\n"
        f"            num_embeddings=vocab, embedding_dim=dim, param_init=models.{embedding}\n        ),\n"
        "        norm=RMSNorm.Config(normalized_shape=dim, param_init=models._NORM_INIT),\n"
        "        lm_head=Linear.Config(\n"
        "            in_features=dim, out_features=vocab, param_init=models._output_linear_init(dim)\n        ),\n"
        "        layers=models._build_llama3_layers(\n"
        f"            n_layers={model.layers},\n            dim=dim,\n            n_heads={model.heads},\n"
        f"            n_kv_heads={model.kv_heads},\n            hidden_dim={model.ffn},\n"
        f"            rope=ComplexRoPE.Config(dim={model.head_dim}, max_seq_len={model.max_positions or 131072},"
        ' theta=500000, scaling="llama"),\n'
        "            attn_backend=attn_backend,\n            tp_gemm_backend=tp_gemm_backend,\n        ),\n    )\n\n\n"
        f"models.llama3_configs[{json.dumps(slug(model.name))}] = shapes\n\n"
    )
