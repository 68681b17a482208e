#!/bin/sh
# One plan: step time and memory by category, by flags and from a case file.
planner estimate --model llama3-8b --cluster dgx-h100 --dp-shard 8 --micro-batch 1 --global-batch 64 --recompute selective-op
planner estimate --case examples/plans/qwen3_8b_tp2_fsdp4.json
