"""Access to a GPU and its driver: state, clocks, timing, stream operations, symmetric memory.

May import `launch` and `kernels`, `topology` and `simulator`.
"""
