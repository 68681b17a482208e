"""A deployment run by the executor: what is asked of it, what is predicted of that, and both side by side."""
