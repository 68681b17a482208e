#!/bin/sh
# Where the pieces of a sharded layer lie, which collectives that takes, and why each of them is there.
planner shard examples/sharding/layer.json
