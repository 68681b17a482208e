#!/bin/sh
# A plan in the words of the tools that shall run it: a batch script, and the torchtitan file of an older version.
planner export examples/plans/llama3_8b_two_nodes.json --to slurm
planner export examples/plans/qwen3_8b_tp2_fsdp4.json --to torchtitan@0.2.2
