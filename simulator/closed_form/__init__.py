"""Step time and memory of all plans at once, without simulating.

May import every package but `lowering`, `fitting`, `legality` and `engine`.
"""
