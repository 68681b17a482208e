"""What to measure on a machine, the process that measures it, and what it found.

May import `question` and the packages below it.
"""
