"""Pipeline schedules, one file each, registered by name in `registry`.

A file says how the schedule is laid out, how many micro batches its ranks hold, and what it has in common with others.
"""
