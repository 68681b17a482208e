"""Rules of functions: what each does along the axes of its arguments. `known.py` lists them."""
