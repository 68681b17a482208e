"""The machine that runs a Program, on SimPy: host threads, streams, contention, memory over time.

May import `program`.
"""
