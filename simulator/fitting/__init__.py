"""Fit a calibration to a profile's samples (`calibration_fit.calibrated`).

May import every other package; only code that loads a profile imports this one.
"""
