"""A module for one GPU on many: its graph captured, placements asked of the planner, the program run and checked.

exported.py a module as torch.export has it: what that changes is kept or refused capture.py the same as a graph of
named operators call.py a call is the one that was captured; pieces of its arguments api.py `shard(module, ...)`:
captured, planned, run function.py the same of a function of DTensors run_program.py a program on the streams of one
rank, forward and backward saved_tensors.py what autograd saves of a kernel, and buffers that are made again
operations.py what an operator of the program computes on a rank's own pieces by_rows.py operators of rows, in the order
in which they lie in memory merged.py operators that exchange statistics: softmax, norms, attention over a sharded axis
exchanges.py what a collective of the program, or a kernel that exchanges while it multiplies, does to a rank's piece
places.py where a rank is in the mesh, which elements its piece has, layouts as placements of DTensors
"""

from executor.sharding.api import ShardedModule, shard
from executor.sharding.capture import capture
from executor.sharding.function import ShardedFunction

__all__ = ["ShardedFunction", "ShardedModule", "capture", "shard"]
