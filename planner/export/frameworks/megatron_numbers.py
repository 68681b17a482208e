"""Numbers of a known model that do not affect its cost, as flags of Megatron-LM: for rotary embeddings, norms, and the
router.

Flags: `megatron/training/arguments.py` and `TransformerConfig` of megatron-core 0.19.2. Numbers: config.json of the
model; a model that is known by its shape alone has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.config.hf_config import model_from_config, shipped_models
from simulator.config.hub_models import SHIPPED
from simulator.config.model import Model
from topology.codec import read_json

# DeepSeek-V3 trains its selection biases at this speed (arXiv 2412.19437, section 4.2).
BIAS_RATE = 1e-3


def number_flags(model: Model) -> dict[str, Any]:
    """Return the flags of known numbers; empty if only the shape is known."""
    config = _config(model)
    flags: dict[str, Any] = {}
    if "rms_norm_eps" in config:
        flags["--norm-epsilon"] = config["rms_norm_eps"]
    if model.rotary and "rope_theta" in config:
        flags["--rotary-base"] = int(config["rope_theta"])
    if "rotary_pct" in config:
        flags["--rotary-percent"] = config["rotary_pct"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": scaling["factor"]}
    elif scaling.get("type") == "yarn" and model.latent:
        names = {"factor": "--rotary-scaling-factor", "mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
        flags |= {flag: scaling[key] for key, flag in names.items()}
    return flags | (_router_flags(config) if model.moe else {})


def _config(model: Model) -> dict[str, Any]:
    """Return the config.json of a shipped model; empty for any other, even one that differs only in its positions."""
    if model.name not in shipped_models():
        return {}
    config = dict(read_json(SHIPPED / f"{model.name}.json"))
    same = replace(model_from_config(config, name=model.name), assumed=()) == replace(model, assumed=())
    return config if same else {}


def _router_flags(config: dict[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    loss = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    if loss is not None:
        # DeepSeek's loss is per sequence, the others' over all tokens.
        kind = "seq_aux_loss" if config.get("seq_aux") else "aux_loss"
        flags |= {"--moe-router-load-balancing-type": kind, "--moe-aux-loss-coeff": loss}
    if config.get("scoring_func") == "sigmoid" and loss is not None:
        flags["--moe-router-bias-update-rate"] = BIAS_RATE
    if config.get("norm_topk_prob") is False:  # weights of the chosen experts do not sum to one
        flags["--moe-router-pre-softmax"] = True
    if config.get("n_group", 1) > 1:
        flags |= {"--moe-router-num-groups": config["n_group"], "--moe-router-group-topk": config["topk_group"]}
    if config.get("routed_scaling_factor", 1.0) != 1.0:
        flags["--moe-router-topk-scaling-factor"] = config["routed_scaling_factor"]
    return flags
