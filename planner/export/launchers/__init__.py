"""One launcher per file: each starts a framework's program on the hosts of a plan."""
