"""One launcher a file: it starts a framework's program on the hosts of a plan."""
