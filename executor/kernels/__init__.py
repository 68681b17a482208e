"""Triton kernels that combine communication and arithmetic, and small helpers of copies and clocks.

Imported only where Triton is installed, inside functions of `gpu`, `model` and `overlap`. May import nothing else.
"""
