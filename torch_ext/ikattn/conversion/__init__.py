"""Implicit-kernel attention in the place of a model's ``nn.MultiheadAttention``, and back."""

from ikattn.conversion.calibration import (
    CalibratedModule,
    CalibrationReport,
    calibrate,
)
from ikattn.conversion.convert import convert, revert
from ikattn.nn.selection import ConversionReport, conversion_report

__all__ = [
    "CalibratedModule",
    "CalibrationReport",
    "ConversionReport",
    "calibrate",
    "conversion_report",
    "convert",
    "revert",
]
