#!/bin/sh
# meshwright 0.3.0, plan b2fb284ed70512af, for torchtitan 0.3.0
# model "qwen3-8b" on "1 x 8 h100-sxm"
# 8 = dp 1 x fsdp 4 x tp 2 x pp 1; micro batch 2, recompute selective-op, sp
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 4 x 1 x 2, the last fastest
# not expressed: attention kernel: torchtitan 0.3.0 runs FlexAttention, predicted as cuDNN's
# needed: --hf_assets_path: the folder of the tokenizer
# needed: data set, steps, optimizer and learning rate, which no plan decides: append their options
# needed: to run: sh torchtitan.sh
# planned: {"model": "qwen3-8b", "gpus": 8}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
cat > torchtitan_config.py <<'END_OF_FILE'
"""The configuration that the plan starts from: qwen3 8B, its loss in one piece as it was predicted."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models import qwen3 as models
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.qwen3.config_registry import qwen3_14b


def planned():
    config = qwen3_14b()
    config.model_spec = models.model_registry("8B")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config
END_OF_FILE
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 -m torchtitan.train \
  --module=torchtitan_config --config=planned --parallelism.data_parallel_replicate_degree=1 \
  --parallelism.tensor_parallel_degree=2 --parallelism.context_parallel_degree=1 \
  --parallelism.pipeline_parallel_degree=1 --parallelism.expert_parallel_degree=1 \
  --parallelism.data_parallel_shard_degree=4 --parallelism.fsdp_reshard_after_forward=default \
  --training.local_batch_size=2 --training.global_batch_size=64 --training.seq_len=4096 \
  --training.dtype=float32 --training.mixed_precision_param=bfloat16 \
  --training.mixed_precision_reduce=float32 --parallelism.enable_sequence_parallel --compile.enable \
  --compile.components=model,loss --compile.no_enable_async_tensor_parallel \
  --training.disable_cuda_graphs "$@" activation_checkpoint:selective
