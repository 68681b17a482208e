#!/bin/sh
# meshwright 0.3.0, plan b2fb284ed70512af, for Megatron-LM 0.19.2
# model "qwen3-8b" on "1 x 8 h100-sxm"
# 8 = dp 1 x fsdp 4 x tp 2 x pp 1; micro batch 2, recompute selective-op, sp
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 4 x 1 x 2, the last fastest
# not expressed: recompute 'selective-op': written as selective, which recomputes core attention only
# not expressed: FSDP2 is written as Megatron-FSDP, which is another implementation
# not expressed: torch.compile of the model: Megatron-LM compiles single functions only
# not expressed: parameters in float32: with these keys they are held in bfloat16
# needed: pretrain_gpt.py of a Megatron-LM checkout
# needed: data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags
# needed: nothing more to try the plan: without arguments the script runs on made-up data
# needed: to run: sh megatron.sh
# note: by --use-megatron-fsdp (or --use-torch-fsdp2): the distributed optimizer alone is ZeRO-1
# planned: {"model": "qwen3-8b", "gpus": 8}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
[ $# -gt 0 ] || set -- --mock-data --tokenizer-type=NullTokenizer --lr=1e-4 --train-iters=20 --log-interval=1 --eval-iters=0 --distributed-timeout-minutes=10  # your data, tokenizer, learning rate and iterations instead
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 pretrain_gpt.py --num-layers 36 \
  --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention \
  --num-query-groups 8 --kv-channels 128 --vocab-size 151936 --normalization RMSNorm \
  --position-embedding-type rope --swiglu --disable-bias-linear --qk-layernorm \
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \
  --no-create-attention-mask-in-dataloader --norm-epsilon 1e-06 --rotary-base 1000000 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 \
  --context-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor \
  --no-gradient-accumulation-fusion --micro-batch-size 2 --global-batch-size 64 --seq-length 4096 \
  --max-position-embeddings 40960 --recompute-granularity selective --bf16 "$@"
