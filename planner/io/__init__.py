"""Input and output: profiles, clusters and plan files, text and JSON, child processes.

May import `topology` and `simulator`.
"""
