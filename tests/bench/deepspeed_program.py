"""A small DeepSpeed program: a Llama of transformers on random tokens, with the configuration of this folder.

    torchrun --standalone --nproc-per-node=4 deepspeed_program.py --model config.json --seq-len 4096 --steps 9

reads `deepspeed.json` as it is and prints, on rank 0, one line of JSON: the seconds of each step (slowest rank, between
device synchronisations), the bytes torch reserved on the fullest rank, and the losses. Every step has the same tokens,
so that the loss falls.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    deepspeed.init_distributed()

    config = transformers.LlamaConfig(**json.loads(options.model.read_text()), attn_implementation="sdpa")
    torch.manual_seed(0)  # the same weights on every rank
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, config="deepspeed.json", optimizer=optimizer)

    generator = torch.Generator(device).manual_seed(1 + rank // options.tp)
    accumulated, batch = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    tokens = torch.randint(config.vocab_size, (accumulated, batch, options.seq_len), device=device, generator=generator)
    seconds, losses = [], []
    for _ in range(options.steps):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for micro_batch in tokens:
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            engine.backward(loss)
            engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    figures = torch.tensor([*seconds, torch.cuda.max_memory_reserved()], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(figures, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        *steps_s, reserved = figures.tolist()
        print(json.dumps({"steps_s": steps_s, "reserved_bytes": int(reserved), "losses": losses}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
