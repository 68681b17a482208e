"""A module for one GPU on many: its graph captured, placements asked of the planner, the program run and checked.

exported.py     a module as torch.export returns it: what that changes is kept or refused
in_place.py     writes in place that autograd treats in a way of its own
capture.py      the same as a graph of named operators
call.py         checks that a call is the captured one; pieces of its arguments
api.py          `shard(module, ...)`: captures, plans, runs
function.py     the same for a function of DTensors
run_program.py  a program on the streams of one rank, forward and backward
saved_tensors.py  what autograd saves of a kernel, and buffers that are recomputed
operations.py   what an operator of the program computes on a rank's own pieces
by_rows.py      operators of rows, in the order of the rows in memory
merged.py       operators that exchange statistics: softmax, norms, attention over a sharded axis
exchanges.py    what a collective of the program, or a kernel that exchanges while it multiplies, does to a rank's piece
places.py       the place of a rank in the mesh, the elements of its piece, layouts as placements of DTensors
"""

from executor.sharding.api import ShardedModule, shard
from executor.sharding.capture import capture
from executor.sharding.function import ShardedFunction

__all__ = ["ShardedFunction", "ShardedModule", "capture", "shard"]
