#!/bin/sh
# meshwright 0.3.0, plan d3146bdfd7ac2913, for meshwright's executor under torchrun 2.13
# model "qwen3-30b-a3b" on "dgx-h200"
# 8 = dp 1 x fsdp 8 x tp 1 x pp 1; ep 8, micro batch 1, recompute full
# ranks: pp x dp_replicate x dp_shard x cp x tp = 1 x 1 x 8 x 1 x 1, the last fastest
# needed: torch and meshwright on every host: pip install "meshwright[exec]"
# needed: to run: sh torchrun.sh
# note: predicted for torchtitan, whose kernels are others than the executor's: steps and memory will differ; planner suggest --framework meshwright
# planned: {"model": "qwen3-30b-a3b"}
#
set -eu
# memory is predicted for torch's growing segments, which are hardly fragmented
export PYTORCH_ALLOC_CONF=expandable_segments:True
# NVLink multicast stays off: in virtual machines and on shared hosts it can hang the fabric
export NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export NVSHMEM_DISABLE_NVLS=1
mkdir -p meshwright-d3146bdfd7ac2913/records
cat > meshwright-d3146bdfd7ac2913/request.json <<'REQUEST'
{"schema_version":1,"plan":{"dp_replicate":1,"dp_shard":8,"zero_stage":null,"tp":1,"sequence_parallel":false,"cp":1,"pp":1,"ep":8,"etp":null,"virtual_stages":1,"schedule":null,"micro_batch_size":1,"recompute":"full","tp_overlap":"none","reshard_after_forward":null,"layers_per_stage":[],"placement":[],"cp_method":null,"recompute_per_stage":[],"capacity_factor":null,"offload":"none","offload_layers":null,"ep_overlap":"none","fsdp_exchange":"nccl"},"model":{"name":"qwen3-30b-a3b","family":"qwen3_moe","layers":48,"hidden":2048,"heads":32,"kv_heads":4,"head_dim":128,"ffn":6144,"vocab":151936,"gated_mlp":true,"tied_embeddings":false,"learned_positions":0,"norm":"rmsnorm","norm_bias":false,"norms_per_layer":2,"final_norm":true,"qk_norm":true,"qk_norm_wide":false,"qkv_bias":false,"attention_out_bias":false,"mlp_bias":false,"head_bias":false,"latent":null,"attention_gate":false,"linear":null,"moe":{"experts":128,"experts_per_token":8,"ffn":768,"shared_ffn":0,"shared_gate":false,"expert_bias":false,"router_bias":false,"dense_layers":0,"dense_layer_ids":[],"groups":1,"groups_per_token":1},"sliding_window":0,"sliding_layers":0,"max_positions":40960,"multi_token_layers":0,"rotary":true,"parallel_residual":false,"assumed":[]},"workload":{"task":"train","seq_len":4096,"global_batch_size":64,"expert_imbalance":1.0,"routing":"","expert_counts":[],"document_len":0},"runtime":{"name":"torchtitan","version":null,"compile":false,"param_dtype":"float32","compute_dtype":"bfloat16","reduce_dtype":"float32","optimizer":"adamw","low_precision_recipe":"","wide_layers":[0,0],"cuda_graph":false,"adapter":null,"graph_scopes":[],"moe_dispatcher":"","expert_products":"","fused":[],"savers":[],"reentrant":null,"logs_each_step":false},"device":"cuda","steps":10,"warm_up":3}
REQUEST
exec torchrun --standalone --nproc-per-node=8 --max-restarts=0 -m executor.run.worker \
  --request=meshwright-d3146bdfd7ac2913/request.json --out=meshwright-d3146bdfd7ac2913/records
