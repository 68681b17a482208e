#!/bin/sh
# Where the pieces of a sharded layer lie, which collectives that takes and why, and how long all of it runs.
planner shard examples/sharding/layer.json --cluster dgx-h100 --gpus 32
