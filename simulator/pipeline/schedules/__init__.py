"""Pipeline schedules, one file each, registered by name in `registry`.

A file has the order of actions, the micro batches that ranks hold, and the schedule's properties.
"""
