"""Implicit kernels that start near the softmax attention they replace."""

from ikattn.conversion.calibration.calibrate import calibrate
from ikattn.conversion.calibration.report import CalibratedModule, CalibrationReport

__all__ = ["CalibratedModule", "CalibrationReport", "calibrate"]
