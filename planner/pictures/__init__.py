"""Draw clusters, steps, memory and timelines as SVG text: pure functions of data, with a light and a dark theme.

All text is escaped. May import `explain` and the packages below it; the layouts and rows are also used by `ui.charts`.
"""
