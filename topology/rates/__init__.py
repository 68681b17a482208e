"""Bandwidth and latency of groups of GPUs, derived from a cluster's links, and which GPU runs which rank.

May import the modules at the top of `topology` (cluster, codec, errors, finding).
"""
