"""Many plans at once, as columns: the form in which rules and costs are applied to thousands of candidates.

May import `config`.
"""
