#!/bin/sh
# meshwright 0.3.0, plan d3146bdfd7ac2913, for Megatron-LM 0.19.2
# model "qwen3-30b-a3b" on "dgx-h200"
# 8 = dp 1 x fsdp 8 x tp 1 x pp 1; ep 8, micro batch 1, recompute full
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 8 x 1 x 1, the last fastest
# not expressed: FSDP2 is written as Megatron-FSDP, which is another implementation
# not expressed: parameters in float32: with these keys they are held in bfloat16
# needed: pretrain_gpt.py of a Megatron-LM checkout
# needed: data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags
# needed: nothing more to try the plan: without arguments the script runs on made-up data
# needed: to run: sh megatron.sh
# note: by --use-megatron-fsdp (or --use-torch-fsdp2): the distributed optimizer alone is ZeRO-1
# planned: {"model": "qwen3-30b-a3b", "gpus": 8}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
[ $# -gt 0 ] || set -- --mock-data --tokenizer-type=NullTokenizer --lr=1e-4 --train-iters=20 --log-interval=1 --eval-iters=0 --distributed-timeout-minutes=10  # your data, tokenizer, learning rate and iterations instead
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 pretrain_gpt.py --num-layers 48 \
  --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention \
  --num-query-groups 4 --kv-channels 128 --vocab-size 151936 --normalization RMSNorm \
  --position-embedding-type rope --swiglu --disable-bias-linear --qk-layernorm \
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \
  --no-create-attention-mask-in-dataloader --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size \
  768 --moe-grouped-gemm --norm-epsilon 1e-06 --rotary-base 1000000 --moe-router-load-balancing-type \
  aux_loss --moe-aux-loss-coeff 0.001 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 \
  --context-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
  --moe-token-dispatcher-type alltoall --use-distributed-optimizer --overlap-grad-reduce \
  --overlap-param-gather --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
  --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion --micro-batch-size 1 --global-batch-size \
  64 --seq-length 4096 --max-position-embeddings 40960 --recompute-granularity full --recompute-method \
  uniform --recompute-num-layers 1 --bf16 "$@"
