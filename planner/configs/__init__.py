"""Configurations that people have: read into a plan, judged, improved, and written back into the same text.

The tables that map keys to plans are those of the exports (`planner.export.frameworks`): what one writes the other
reads.
"""
