#!/bin/sh
# meshwright 0.3.0, plan 5344c953691cf60c, for meshwright's executor under torchrun 2.13
# model "llama3-8b" on "2 x 8 h100-sxm"
# 16 = dp 2 x fsdp 4 x tp 2 x pp 1; micro batch 1, recompute selective-op, sp
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 2 x 4 x 1 x 2, the last fastest
# needed: torch and meshwright on every host: pip install "meshwright[exec]"
# needed: to run: sh torchrun.sh
# note: predicted for torchtitan, whose kernels are others than the executor's: steps and memory will differ; planner suggest --framework meshwright
# note: each host keeps the records of its own ranks; several hosts were tried on CPU processes only
# planned: {"model": "llama3-8b"}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
# NVLink multicast stays off: in virtual machines and on shared hosts it can hang the fabric
export NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export NVSHMEM_DISABLE_NVLS=1
mkdir -p meshwright-5344c953691cf60c/records
cat > meshwright-5344c953691cf60c/request.json <<'REQUEST'
{"schema_version":1,"plan":{"dp_replicate":2,"dp_shard":4,"zero_stage":null,"tp":2,"sequence_parallel":true,"cp":1,"pp":1,"ep":1,"etp":null,"virtual_stages":1,"schedule":null,"micro_batch_size":1,"recompute":"selective-op","tp_overlap":"none","reshard_after_forward":null,"layers_per_stage":[],"placement":[],"cp_method":null,"recompute_per_stage":[],"capacity_factor":null,"offload":"none","offload_layers":null,"ep_overlap":"none","fsdp_exchange":"nccl"},"model":{"name":"llama3-8b","family":"llama","layers":32,"hidden":4096,"heads":32,"kv_heads":8,"head_dim":128,"ffn":14336,"vocab":128256,"gated_mlp":true,"tied_embeddings":false,"learned_positions":0,"norm":"rmsnorm","norm_bias":false,"norms_per_layer":2,"final_norm":true,"qk_norm":false,"qk_norm_wide":false,"qkv_bias":false,"attention_out_bias":false,"mlp_bias":false,"head_bias":false,"latent":null,"attention_gate":false,"linear":null,"moe":null,"sliding_window":0,"sliding_layers":0,"max_positions":131072,"multi_token_layers":0,"rotary":true,"parallel_residual":false,"assumed":[]},"workload":{"task":"train","seq_len":8192,"global_batch_size":64,"expert_imbalance":1.0,"routing":"","expert_counts":[],"document_len":0},"runtime":{"name":"torchtitan","version":null,"compile":true,"param_dtype":"float32","compute_dtype":"bfloat16","reduce_dtype":"float32","optimizer":"adamw","low_precision_recipe":"","wide_layers":[0,0],"cuda_graph":false,"adapter":null,"graph_scopes":[],"moe_dispatcher":"","expert_products":"","fused":[],"savers":[],"reentrant":null,"logs_each_step":false},"device":"cuda","steps":10,"warm_up":3}
REQUEST
exec torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=0 --node-rank \
  "${NODE_RANK:?set it to 0 on the first host, 1 on the next}" --master-addr \
  "${MASTER_ADDR:?set it to the address of the first host}" --master-port=29500 -m executor.run.worker \
  --request=meshwright-5344c953691cf60c/request.json --out=meshwright-5344c953691cf60c/records
