"""Configurations of other tools: read into a plan, judged, improved, and written back into the same text.

The exports (`planner.export.frameworks`) use the same tables of keys, so what one writes the other reads.
"""
