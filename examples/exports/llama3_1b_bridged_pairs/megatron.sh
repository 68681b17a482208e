#!/bin/sh
# meshwright 0.3.0, plan a92ed063daaf8eff, for Megatron-LM 0.19.2
# model "llama3.2-1b" on "1 x 4 rtx-a6000"
# 4 = dp 2 (ZeRO-1) x tp 2 x pp 1; micro batch 2, recompute selective, sp
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 2 x 1 x 1 x 2, the last fastest
# needed: pretrain_gpt.py of a Megatron-LM checkout
# needed: data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags
# needed: nothing more to try the plan: without arguments the script runs on made-up data
# needed: to run: sh megatron.sh
# planned: {"model": "llama3.2-1b", "gpus": 4}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
# Megatron-LM requires it with tensor or context parallelism: kernels then run in launch order
export CUDA_DEVICE_MAX_CONNECTIONS=1
# GPUs are numbered as in nvidia-smi, which the plan uses
export CUDA_DEVICE_ORDER=PCI_BUS_ID
# the plan places the ranks of a host on these GPUs, in this order
export CUDA_VISIBLE_DEVICES=0,2,1,3
[ $# -gt 0 ] || set -- --mock-data --tokenizer-type=NullTokenizer --lr=1e-4 --train-iters=20 --log-interval=1 --eval-iters=0 --distributed-timeout-minutes=10  # your data, tokenizer, learning rate and iterations instead
exec torchrun --standalone --nproc-per-node=4 --max-restarts=0 pretrain_gpt.py --num-layers 16 \
  --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention \
  --num-query-groups 8 --kv-channels 64 --vocab-size 128256 --normalization RMSNorm \
  --position-embedding-type rope --swiglu --disable-bias-linear --attention-dropout 0.0 \
  --hidden-dropout 0.0 --no-create-attention-mask-in-dataloader --norm-epsilon 1e-05 --rotary-base \
  500000 --use-rope-scaling --rope-scaling-factor 32.0 --tensor-model-parallel-size 2 \
  --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 2 \
  --global-batch-size 32 --seq-length 4096 --max-position-embeddings 131072 --recompute-granularity \
  selective --bf16 "$@"
