#!/bin/sh
# The fewest GPUs that train Llama-3 70B at all.
planner suggest --model llama3-70b --cluster dgx-h200 --gpus min --global-batch 64 --top 1
