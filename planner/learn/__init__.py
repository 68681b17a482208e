"""Fit the costs of a runtime to runs with measured time and memory, and find the runs that would teach most."""
