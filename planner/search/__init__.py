"""Search for the best plans: candidates are bounded, costed and simulated; why the others lost, and when they would
win.

May import `io`, `question` and the packages below `planner`.
"""
