#!/bin/sh
# Which plan for Llama-3 70B on two nodes of eight H100, and why not the others?
planner suggest --model llama3-70b --cluster dgx-h100 --gpus 16 --global-batch 64 --top 4
