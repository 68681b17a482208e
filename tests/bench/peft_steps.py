"""Steps of transformers' own decoder on one GPU, with LoRA (peft) or by optimizers: seconds and bytes.

`python tests/bench/peft_steps.py OUT [--runs optimizers|qlora|wide]` needs transformers, peft, bitsandbytes (for its
8-bit AdamW and NF4) and a GPU; models have random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "llama3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, True),
    "llama3.2-3b": (28, 3072, 24, 8, 128, 8192, 128256, True),
    "llama3-8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
}
# Model, rank (0: all weights are trained), modules, dropout, recomputation, sequence length, micro batch.
RUNS = [
    ("llama3.2-1b", 0, "", 0.0, False, 4096, 2),
    ("llama3.2-1b", 16, "all-linear", 0.0, False, 4096, 2),
    ("llama3.2-1b", 16, "q_proj,v_proj", 0.1, True, 4096, 2),
    ("llama3.2-1b", 64, "all-linear", 0.1, False, 4096, 2),
    ("llama3-8b", 16, "all-linear", 0.0, True, 2048, 4),
    ("llama3-8b", 16, "all-linear", 0.05, False, 2048, 1),
    ("llama3-8b", 16, "q_proj,v_proj", 0.0, False, 2048, 2),
]
# The same, all weights trained, and the optimizer.
OPTIMIZERS = [
    (model, 0, "", 0.0, full, 4096, batch, optimizer)
    for model, full, batch in (("llama3.2-1b", False, 2), ("llama3.2-3b", False, 2), ("llama3-8b", True, 1))
    for optimizer in ("adamw", "adamw8bit", "muon")
]
# LoRA over weights in NF4, as bitsandbytes packs them.
QLORA = [
    ("llama3.2-1b", 16, "all-linear", 0.0, False, 4096, 2, "adamw", True),
    ("llama3-8b", 16, "all-linear", 0.0, True, 2048, 4, "adamw", True),
    ("llama3-8b", 16, "all-linear", 0.0, False, 2048, 2, "adamw", True),
]
# Adapters in float32, as peft keeps them by default, under autocast.
WIDE = [(*one, "adamw", False, True) for one in RUNS if one[1]]
STEPS, WARM_UP = 8, 4


def optimizers(kind: str, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return what updates the trained parameters: for Muon, AdamW has what is no hidden matrix."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if kind == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(trained.values(), lr=1e-4)]
    hidden = [one for name, one in trained.items() if kind == "muon" and one.ndim == 2 and ".layers." in name]
    rest = [one for one in trained.values() if not any(one is other for other in hidden)]
    return [torch.optim.AdamW(rest, lr=1e-4, fused=True), *([torch.optim.Muon(hidden, lr=1e-3)] if hidden else [])]


def pack(model: torch.nn.Module) -> None:
    """Give the layers' linear modules weights in NF4 with nested scales, as from_pretrained does with a
    BitsAndBytesConfig.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            packed = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta"
            )
            packed.weight = Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )  # packed by the move to a GPU, from wherever it is
            model.model.layers.set_submodule(name, packed.cuda())
    model.is_loaded_in_4bit = True


def run(
    name, rank, modules, dropout, recompute, seq_len, batch, kind="adamw", packed=False, wide=False
) -> dict[str, object]:
    layers, hidden, heads, kv, head_dim, ffn, vocab, tied = SHAPES[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=head_dim, intermediate_size=ffn, vocab_size=vocab, tie_word_embeddings=tied, use_cache=False,
        attn_implementation="sdpa", max_position_embeddings=seq_len,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if packed:
        pack(model)
        torch.cuda.empty_cache()  # of the weights as they were
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if rank:
        from peft import LoraConfig, get_peft_model

        targets = modules if modules == "all-linear" else modules.split(",")
        known = LoraConfig(r=rank, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
        model = get_peft_model(model, known, autocast_adapter_dtype=wide)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = optimizers(kind, model)
    seconds, update_s = [], []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(vocab, (batch, seq_len), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=wide):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for one in updates:
            one.step()
            one.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    memory = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    for _ in range(3):  # the update by itself
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for one in updates:
            one.step()
        torch.cuda.synchronize()
        update_s.append(time.perf_counter() - begin)
    return {
        "update_s": sorted(update_s)[1],
        "step_s": sorted(seconds[WARM_UP:])[STEPS // 2],
        **memory,
        "trained": sum(p.numel() for p in trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", choices=("adapters", "optimizers", "qlora", "wide"), default="adapters")
    asked, found = parser.parse_args(), []
    out = asked.out
    for one in {"optimizers": OPTIMIZERS, "qlora": QLORA, "adapters": RUNS, "wide": WIDE}[asked.runs]:
        gc.collect()  # a model refers to itself
        torch.cuda.empty_cache()
        try:
            found.append({"run": one, **run(*one)})
        except torch.OutOfMemoryError as error:
            found.append({"run": one, "problem": str(error)[:100]})
        except ImportError as error:
            found.append({"run": one, "problem": str(error)[:300]})
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": found}))
        print(found[-1], flush=True)


if __name__ == "__main__":
    main()
