"""Implicit kernels that start near the softmax attention they replace."""

from ikattn.conversion.calibration.calibrate import calibrate

__all__ = ["calibrate"]
