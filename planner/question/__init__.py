"""Questions: cases and flags converted to the simulator's types, with a list of all assumptions.

May import `io`, and every package of `simulator`.
"""
