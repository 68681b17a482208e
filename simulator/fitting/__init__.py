"""From samples to numbers: a profile's measurements become a calibration (`calibration_fit.calibrated`).

May import every other package; only those who load a profile import this one.
"""
