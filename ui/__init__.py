"""The explorer, a Streamlit app. Streamlit is imported only in this package; charts, layouts and rows are pure
functions.

May import `planner`, `simulator` and `topology`; nobody imports `ui`.
"""
