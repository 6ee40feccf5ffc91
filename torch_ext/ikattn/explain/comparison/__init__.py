"""Two models side by side, and one model's maps while it trains."""

from ikattn.explain.comparison.compare import compare
from ikattn.explain.comparison.comparison import Comparison, MapDistance
from ikattn.explain.comparison.probe import MapProbe

__all__ = ["Comparison", "MapDistance", "MapProbe", "compare"]
