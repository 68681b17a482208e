"""Timelines on a canvas: the data sent to the browser, and the component that draws it."""
