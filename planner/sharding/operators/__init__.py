"""How one operator may be sharded: its annotation, formula and options. Imports the layouts room and topology.errors."""
