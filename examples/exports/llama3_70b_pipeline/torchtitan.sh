#!/bin/sh
# meshwright 0.3.0, plan ad1e77f0500a526b, for torchtitan 0.3.0
# model "llama3-70b" on "4 x 8 h100-sxm"
# 32 = dp 1 x fsdp 1 x tp 8 x pp 4; micro batch 1, recompute full, sp, Interleaved1F1B x2
# ranks: pp x dp_replicate x dp_shard x cp x tp = 4 x 1 x 1 x 1 x 8, the last fastest
# not expressed: attention kernel: torchtitan 0.3.0 runs FlexAttention, predicted as cuDNN's
# needed: --hf_assets_path: the folder of the tokenizer
# needed: data set, steps, optimizer and learning rate, which no plan decides: append their options
# needed: to run: sh torchtitan.sh
# planned: {"model": "llama3-70b", "gpus": 32}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
cat > torchtitan_config.py <<'END_OF_FILE'
"""The configuration that the plan starts from: llama3 70B, its loss in one piece as it was predicted."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models import llama3 as models
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_70b


def planned():
    config = llama3_70b()
    config.model_spec = models.model_registry("70B")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config
END_OF_FILE
exec torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=0 --node-rank \
  "${NODE_RANK:?set it to 0 on the first host, 1 on the next}" --master-addr \
  "${MASTER_ADDR:?set it to the address of the first host}" --master-port=29500 -m torchtitan.train \
  --module=torchtitan_config --config=planned --parallelism.data_parallel_replicate_degree=1 \
  --parallelism.tensor_parallel_degree=8 --parallelism.context_parallel_degree=1 \
  --parallelism.pipeline_parallel_degree=4 --parallelism.expert_parallel_degree=1 \
  --parallelism.data_parallel_shard_degree=1 --parallelism.fsdp_reshard_after_forward=default \
  --training.local_batch_size=64 --training.global_batch_size=64 --training.seq_len=8192 \
  --training.dtype=float32 --training.mixed_precision_param=bfloat16 \
  --training.mixed_precision_reduce=float32 --parallelism.pipeline_parallel_schedule=Interleaved1F1B \
  --parallelism.pipeline_parallel_microbatch_size=1 --parallelism.enable_sequence_parallel \
  --compile.no_enable --compile.components=model,loss --compile.no_enable_async_tensor_parallel \
  --training.disable_cuda_graphs "$@" activation_checkpoint:full
