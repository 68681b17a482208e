"""Timelines on a canvas: what the browser is told, and the component that draws it."""
