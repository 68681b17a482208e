"""Annotations and formulas as text: parsed, never run. Imports topology.errors."""
