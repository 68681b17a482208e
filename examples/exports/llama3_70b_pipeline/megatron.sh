#!/bin/sh
# meshwright 0.3.0, plan ad1e77f0500a526b, for Megatron-LM 0.19.2
# model "llama3-70b" on "4 x 8 h100-sxm"
# 32 = dp 1 x fsdp 1 x tp 8 x pp 4; micro batch 1, recompute full, sp, Interleaved1F1B x2
# ranks: pp x dp_replicate x dp_shard x cp x tp = 4 x 1 x 1 x 1 x 8, the last fastest
# not expressed: parameters in float32: with these keys they are held in bfloat16
# needed: pretrain_gpt.py of a Megatron-LM checkout
# needed: data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags
# needed: nothing more to try the plan: without arguments the script runs on made-up data
# needed: to run: sh megatron.sh
# planned: {"model": "llama3-70b", "gpus": 32}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
# Megatron-LM requires it with tensor or context parallelism: kernels then run in launch order
export CUDA_DEVICE_MAX_CONNECTIONS=1
[ $# -gt 0 ] || set -- --mock-data --tokenizer-type=NullTokenizer --lr=1e-4 --train-iters=20 --log-interval=1 --eval-iters=0 --distributed-timeout-minutes=10  # your data, tokenizer, learning rate and iterations instead
exec torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=0 --node-rank \
  "${NODE_RANK:?set it to 0 on the first host, 1 on the next}" --master-addr \
  "${MASTER_ADDR:?set it to the address of the first host}" --master-port=29500 pretrain_gpt.py \
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 8 --kv-channels 128 --vocab-size 128256 --normalization \
  RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \
  --no-create-attention-mask-in-dataloader --norm-epsilon 1e-05 --rotary-base 500000 --use-rope-scaling \
  --rope-scaling-factor 8.0 --tensor-model-parallel-size 8 --sequence-parallel \
  --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 1 \
  --micro-batch-size 1 --global-batch-size 64 --seq-length 8192 --max-position-embeddings 131072 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16 "$@"
