"""Many plans at once, as columns: the form in which thousands of candidates are judged and costed.

May import `config`.
"""
