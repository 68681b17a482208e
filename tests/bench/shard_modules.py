"""Modules of transformers and diffusers as they are, their configurations shrunk: captured, placed, run on ranks of
gloo.

    python -m tests.bench.shard_modules --out examples/sharding/modules.md

Outputs and all gradients are compared with one process in float64. transformers and diffusers are no dependencies:
install them next to torch, or name their folder with --packages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch.multiprocessing import ProcessRaisedException

from executor.sharding import api, capture
from planner.sharding.frontends.captured import graph_statements
from tests.executor.sharding.ranks import Case, planned_here, run
from topology.errors import PlannerError

F64 = torch.float64
Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def llama() -> Made:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    x = torch.randn(4, 8, 32, dtype=F64)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    return LlamaDecoderLayer(config, 0).double(), (x,), {"position_embeddings": angles}


def experts() -> Made:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = Llama4TextConfig(hidden_size=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=1)
    module = Llama4TextMoe(config).double()
    for parameter in module.parameters():  # some are made without values
        torch.nn.init.normal_(parameter, std=0.2)
    return module, (torch.randn(4, 8, 16, dtype=F64),), {}


def vision() -> Made:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        image_size=16,
        patch_size=4,
        attn_implementation="sdpa",
    )
    module = ViTModel(config, add_pooling_layer=False).double().eval()
    return module, (torch.randn(4, 3, 16, 16, dtype=F64),), {}


def diffusion() -> Made:
    from diffusers.models.attention import BasicTransformerBlock

    module = BasicTransformerBlock(32, 4, 8, cross_attention_dim=16).double().eval()
    x, text = torch.randn(4, 8, 32, dtype=F64), torch.randn(4, 4, 16, dtype=F64)
    return module, (x,), {"encoder_hidden_states": text}


def residual() -> Made:
    from diffusers.models.resnet import ResnetBlock2D

    module = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=8, groups=4).double().eval()
    return module, (torch.randn(4, 8, 8, 8, dtype=F64), torch.randn(4, 8, dtype=F64)), {}


BY_TIME = {"choose": ["*"], "policy": "min_time", "cluster": "h200x4"}
COLUMNS, ROWS = ["S(0)"], ["S(1)"]
LLAMA_TP = {
    **dict.fromkeys(("*q_proj.weight", "*k_proj.weight", "*v_proj.weight"), COLUMNS),
    **dict.fromkeys(("*gate_proj.weight", "*up_proj.weight"), COLUMNS),
    **dict.fromkeys(("*o_proj.weight", "*down_proj.weight"), ROWS),
}
EXPERT_PARALLEL = {"experts.gate_up_proj": ["S(0)"], "experts.down_proj": ["S(0)"]}
DIFFUSION_TP = {
    **dict.fromkeys(("*to_q.weight", "*to_k.weight", "*to_v.weight", "*net.0.proj.*"), COLUMNS),
    **dict.fromkeys(("*to_out.0.weight", "*net.2.weight"), ROWS),
}
VISION_TP = {
    **dict.fromkeys(("*query.*", "*key.*", "*value.*", "*intermediate.dense.*"), COLUMNS),
    "*output.dense.weight": ROWS,
}
ASKED: list[tuple[str, Callable[[], Made], str, dict[str, Any]]] = [
    ("transformers LlamaDecoderLayer", llama, "tensor parallel", {"placements": LLAMA_TP}),
    ("transformers LlamaDecoderLayer", llama, "data parallel", {"placements": {"hidden_states": ["S(0)"]}}),
    ("transformers LlamaDecoderLayer", llama, "found by time", BY_TIME),
    ("transformers Llama4TextMoe", experts, "expert parallel", {"placements": EXPERT_PARALLEL}),
    ("transformers Llama4TextMoe", experts, "found by time", BY_TIME),
    ("transformers ViTModel", vision, "tensor parallel", {"placements": VISION_TP}),
    ("transformers ViTModel", vision, "found by time", BY_TIME),
    ("diffusers BasicTransformerBlock", diffusion, "tensor parallel", {"placements": DIFFUSION_TP}),
    ("diffusers BasicTransformerBlock", diffusion, "found by time", BY_TIME),
    ("diffusers ResnetBlock2D", residual, "output channels", {"placements": {"conv*.weight": COLUMNS}}),
    ("diffusers ResnetBlock2D", residual, "found by time", BY_TIME),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="folder that transformers and diffusers are installed in")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.packages is not None:
        sys.path.append(str(asked.packages))
    lines = [
        "# Modules of other packages",
        "",
        f"`python -m tests.bench.shard_modules`: {versions()}, configurations shrunk, code as published; captured, placed, and run",
        "on ranks of gloo. Outputs and gradients of all parameters are those of one process in float64, within 1e-8, or 1e-5 where",
        "the module computes in float32. Operators are those of the captured graph; opaque ones, which no rule knows, are computed",
        "whole on every rank. Seconds are CPU time of capturing and planning. *Found by time*: nothing placed, least time on four H200.",
        "",
        "| module | placed | ranks | operators | opaque | exchanges forward and backward | planning s | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, make, how, constraints in ASKED:
        for ranks in asked.ranks if asked.only in f"{name} {how}" else ():
            lines.append(row(name, make, how, constraints, ranks))
            print(lines[-1], flush=True)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def versions() -> str:
    found = []
    for package in ("transformers", "diffusers", "torch"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def row(name: str, make: Callable[[], Made], how: str, constraints: dict[str, Any], ranks: int) -> str:
    torch.manual_seed(0)
    module, args, kwargs = make()
    started = process_time()
    captured = capture(module, args, kwargs)
    opaque = sum(not one.known for one in graph_statements(captured.graph))
    in_float32 = any(node.dtype == "f32" for node in captured.graph.nodes)
    case = Case(f"{name}, {how}", module, args, {"d": ranks}, constraints, kwargs, 1e-6 if in_float32 else 1e-9)
    try:
        more = {key: value for key, value in constraints.items() if key != "cluster"}
        document = api.request(captured, case.mesh, **more)
        program = planned_here(document, cluster=constraints.get("cluster"))
        seconds = process_time() - started
        kinds = [one.kind for one in program.work.values() if hasattr(one, "axes")]
        run([case], ranks)
        equal = "yes"
    except PlannerError as error:
        kinds, seconds, equal = [], process_time() - started, f"no answer: {error}"
    except ProcessRaisedException as error:
        equal = "no: " + " ".join(str(error).split()[-40:])
    exchanges = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
    return (
        f"| {name} | {how} | {ranks} | {len(captured.graph.nodes)} | {opaque} | {exchanges} | {seconds:.1f} | {equal} |"
    )


if __name__ == "__main__":
    main()
