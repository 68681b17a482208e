"""Measurements of one machine: samples, the profile that holds them, and the store of profiles on disk.

May import `rates` and the modules at the top of `topology`.
"""
