#!/bin/sh
# A machine as `nvidia-smi topo -m` prints it (this one has four H200), and a model of your own.
planner probe --from examples/clusters/h200x4_topo_m.txt --gpu h200-sxm --explain
planner suggest --model examples/models/my_llama_1b_wide.json --cluster examples/clusters/h200x4_topo_m.txt --gpu h200-sxm --top 2
