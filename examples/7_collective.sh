#!/bin/sh
# How long an all-reduce takes, by our model and by the formulas NCCL itself decides with.
planner collective --cluster dgx-h100 --op all_reduce --gpus 8 --bytes 8192,1048576,268435456
planner collective --cluster dgx-h100 --op all_reduce --gpus 8 --bytes 8192,1048576,268435456 --cost-model nccl
