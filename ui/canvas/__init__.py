"""Timelines on a canvas: what the browser gets, and the component that draws it."""
