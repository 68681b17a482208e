"""What is asked: cases and flags as what the simulator takes, with a list of all that was left unsaid.

May import `io`, and every package of `simulator`.
"""
