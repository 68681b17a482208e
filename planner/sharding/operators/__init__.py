"""How one operator may be sharded: its annotation, formula and options. Imports `layouts` and topology.errors."""
