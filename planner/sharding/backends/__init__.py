"""What the compiler writes out of a plan.

forward.py       the plan's steps as instructions: kernels on a rank's pieces, exchanges between ranks
duals.py         the same instructions in reverse: gradients, and the exchanges that are dual to those before; a
  kernel's backward
                 is autograd's. (`planner.sharding.operators.backward` derives formulas instead, for graphs without
                 kernels, so that gradients have operators and layouts of their own.)
lifetimes.py     how long buffers live, and the memory of a rank at its peak
recomputation.py buffers that are dropped after the forward pass and made again in the backward pass, where memory is
limited
kernel_times.py  what its kernels take; local_copies.py, what ranks copy before and after exchanges
runnable.py      all of it as a program that the executor runs and the simulator times
"""
