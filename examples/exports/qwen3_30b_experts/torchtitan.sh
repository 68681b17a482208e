#!/bin/sh
# meshwright 0.3.0, plan d3146bdfd7ac2913, for torchtitan 0.3.0
# model "qwen3-30b-a3b" on "dgx-h200"
# 8 = dp 1 x fsdp 8 x tp 1 x pp 1; ep 8, micro batch 1, recompute full
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 8 x 1 x 1, the last fastest
# not expressed: attention kernel: torchtitan 0.3.0 runs FlexAttention, predicted as cuDNN's
# needed: --hf_assets_path: the folder of the tokenizer
# needed: data set, steps, optimizer and learning rate, which no plan decides: append their options
# needed: to run: sh torchtitan.sh
# planned: {"model": "qwen3-30b-a3b", "gpus": 8}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
cat > torchtitan_config.py <<'END_OF_FILE'
"""The configuration that the plan starts from: qwen3 30B-A3B, its loss in one piece as it was predicted."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models import qwen3 as models
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b


def planned():
    config = qwen3_30b_a3b()
    config.model_spec = models.model_registry("30B-A3B")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config
END_OF_FILE
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 -m torchtitan.train \
  --module=torchtitan_config --config=planned --parallelism.data_parallel_replicate_degree=1 \
  --parallelism.tensor_parallel_degree=1 --parallelism.context_parallel_degree=1 \
  --parallelism.pipeline_parallel_degree=1 --parallelism.expert_parallel_degree=8 \
  --parallelism.data_parallel_shard_degree=8 --parallelism.fsdp_reshard_after_forward=default \
  --training.local_batch_size=1 --training.global_batch_size=64 --training.seq_len=4096 \
  --training.dtype=float32 --training.mixed_precision_param=bfloat16 \
  --training.mixed_precision_reduce=float32 --parallelism.no_enable_sequence_parallel \
  --compile.no_enable --compile.components=model,loss --compile.no_enable_async_tensor_parallel \
  --training.disable_cuda_graphs "$@" activation_checkpoint:full
