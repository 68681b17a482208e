"""Triton kernels that combine communication and arithmetic, and small helpers of copies and clocks.

Other folders take kernels from `on_demand`, which loads them where Triton is installed. May import nothing else.
"""
