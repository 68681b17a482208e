"""What is asked of a serving plan: from flags and a file of requests to a question, and what releases of engines can
do.

May import `simulator`, `topology` and `io`; the search and the answers are the folder above.
"""
