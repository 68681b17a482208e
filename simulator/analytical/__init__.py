"""Step time and memory of many plans at once, without simulating: an account of what a step issues.

May import every package but `lowering`, `fitting`, `legality` and `engine`.
"""
