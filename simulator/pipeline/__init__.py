"""Pipeline schedules as data, and how layers spread over stages.

May import `config`, `columns`, `runtimes` and `program`.
"""
