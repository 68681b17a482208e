#!/bin/sh
# meshwright 0.1.0, plan 4e189ec494210826, for torchtitan 0.3.0
# model "qwen3-30b-a3b" on "dgx-h200"
# 8 = dp 1 x fsdp 8 x tp 1 x pp 1; ep 8, micro batch 1, recompute full
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 8 x 1 x 1, the last fastest
# needed: --hf_assets_path: the folder of the tokenizer
# needed: data set, steps, optimizer and learning rate, which no plan decides: add their options
#
set -eu
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 -m torchtitan.train --module=qwen3 \
  --config=qwen3_30b_a3b --training.local_batch_size=1 --training.global_batch_size=64 \
  --training.seq_len=4096 --training.dtype=float32 --training.mixed_precision_param=bfloat16 \
  --training.mixed_precision_reduce=float32 --training.disable_cuda_graphs \
  --parallelism.data_parallel_replicate_degree=1 --parallelism.data_parallel_shard_degree=8 \
  --parallelism.tensor_parallel_degree=1 --parallelism.context_parallel_degree=1 \
  --parallelism.pipeline_parallel_degree=1 --parallelism.expert_parallel_degree=8 \
  --parallelism.fsdp_reshard_after_forward=default --parallelism.no_enable_sequence_parallel \
  --compile.no_enable --compile.no_enable_async_tensor_parallel --compile.components=model,loss "$@" \
  activation_checkpoint:full
