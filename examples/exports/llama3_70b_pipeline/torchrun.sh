#!/bin/sh
# meshwright 0.3.0, plan ad1e77f0500a526b, for meshwright's executor under torchrun 2.13
# model "llama3-70b" on "4 x 8 h100-sxm"
# 32 = dp 1 x fsdp 1 x tp 8 x pp 4; micro batch 1, recompute full, sp, Interleaved1F1B x2
# ranks: pp x dp_replicate x dp_shard x cp x tp = 4 x 1 x 1 x 1 x 8, the last fastest
# needed: torch and meshwright on every host: pip install "meshwright[exec]"
# needed: to run: sh torchrun.sh
# note: predicted for torchtitan, whose kernels are others than the executor's: steps and memory will differ; planner suggest --framework meshwright
# note: each host keeps the records of its own ranks; several hosts were tried on CPU processes only
# planned: {"model": "llama3-70b"}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
# NVLink multicast stays off: in virtual machines and on shared hosts it can hang the fabric
export NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export NVSHMEM_DISABLE_NVLS=1
mkdir -p meshwright-ad1e77f0500a526b/records
cat > meshwright-ad1e77f0500a526b/request.json <<'REQUEST'
{"schema_version":1,"plan":{"dp_replicate":1,"dp_shard":1,"zero_stage":null,"tp":8,"sequence_parallel":true,"cp":1,"pp":4,"ep":1,"etp":null,"virtual_stages":2,"schedule":"Interleaved1F1B","micro_batch_size":1,"recompute":"full","tp_overlap":"none","reshard_after_forward":null,"layers_per_stage":[],"placement":[],"cp_method":null,"recompute_per_stage":[],"capacity_factor":null,"offload":"none","offload_layers":null,"ep_overlap":"none","fsdp_exchange":"nccl"},"model":{"name":"llama3-70b","family":"llama","layers":80,"hidden":8192,"heads":64,"kv_heads":8,"head_dim":128,"ffn":28672,"vocab":128256,"gated_mlp":true,"tied_embeddings":false,"learned_positions":0,"norm":"rmsnorm","norm_bias":false,"norms_per_layer":2,"final_norm":true,"qk_norm":false,"qk_norm_wide":false,"qkv_bias":false,"attention_out_bias":false,"mlp_bias":false,"head_bias":false,"latent":null,"attention_gate":false,"linear":null,"moe":null,"sliding_window":0,"sliding_layers":0,"max_positions":131072,"multi_token_layers":0,"rotary":true,"parallel_residual":false,"assumed":[]},"workload":{"task":"train","seq_len":8192,"global_batch_size":64,"expert_imbalance":1.0,"routing":"","expert_counts":[],"document_len":0},"runtime":{"name":"torchtitan","version":null,"compile":false,"param_dtype":"float32","compute_dtype":"bfloat16","reduce_dtype":"float32","optimizer":"adamw","low_precision_recipe":"","wide_layers":[0,0],"cuda_graph":false,"adapter":null,"graph_scopes":[],"moe_dispatcher":"","expert_products":"","fused":[],"savers":[],"reentrant":null,"logs_each_step":false},"device":"cuda","steps":10,"warm_up":3}
REQUEST
exec torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=0 --node-rank \
  "${NODE_RANK:?set it to 0 on the first host, 1 on the next}" --master-addr \
  "${MASTER_ADDR:?set it to the address of the first host}" --master-port=29500 -m executor.run.worker \
  --request=meshwright-ad1e77f0500a526b/request.json --out=meshwright-ad1e77f0500a526b/records
