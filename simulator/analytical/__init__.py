"""Step time and memory of many plans at once, without simulating: by adding up the operations that a step issues.

May import every package but `lowering`, `fitting`, `legality` and `engine`.
"""
