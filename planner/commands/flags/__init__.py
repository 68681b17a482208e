"""Flags that several commands share. May import what commands may; imported by the commands only."""
