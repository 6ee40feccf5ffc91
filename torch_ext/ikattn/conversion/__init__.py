"""Implicit-kernel attention in the place of a model's own, and back."""

from ikattn.conversion.calibration.calibrate import calibrate
from ikattn.conversion.convert import convert, revert
from ikattn.conversion.modules import conversion_report

__all__ = ["calibrate", "conversion_report", "convert", "revert"]
