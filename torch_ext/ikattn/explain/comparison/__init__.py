"""Two models side by side, and one model's maps while it trains."""

from ikattn.analysis.comparison.compare import compare
from ikattn.analysis.comparison.comparison import Comparison, MapDistance
from ikattn.analysis.comparison.probe import MapProbe

__all__ = ["Comparison", "MapDistance", "MapProbe", "compare"]
