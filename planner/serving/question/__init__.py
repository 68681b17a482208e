"""Questions about serving: made from flags and a file of requests, and checked against what releases of engines can do.

May import `simulator`, `topology` and `io`; the search and the answers are the folder above.
"""
