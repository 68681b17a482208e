"""Triton kernels in which communication and arithmetic share a launch. Imported only where triton is."""
