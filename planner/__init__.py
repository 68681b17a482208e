"""Which plan: legality, enumeration, search, and the command line."""
