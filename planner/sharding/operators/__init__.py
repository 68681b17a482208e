"""How one operator may be sharded, and graphs of them. Imports `layouts`, `ops` and topology.errors."""
