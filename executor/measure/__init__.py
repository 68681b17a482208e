"""Bounded measurements of a machine: copies, compute, collectives, and one profiled training step.

May import `gpu`, `kernels` and `launch`, `topology` and `simulator`.
"""
