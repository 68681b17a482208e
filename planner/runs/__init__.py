"""Run plans: launch them, report on a run, store the history of runs, and add their operators to a profile.

May import `export` and the packages below it.
"""
