"""Commands with `--task serve`. May import what commands may; imported by the commands of the same names."""
