#!/bin/sh
# Four A6000 with bridges on two pairs only: tensor parallel belongs on the pairs, the pipeline between them.
planner suggest --model llama3.2-3b --cluster examples/clusters/four_a6000_two_bridges.json --seq-len 4096 --global-batch 32 --top 3
