"""Step time and memory of all plans at once, without simulating.

May import every room but `lowering`, `fitting`, `legality` and `engine`.
"""
