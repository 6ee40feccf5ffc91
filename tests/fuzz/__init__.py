"""Calls that are drawn from a number, and what must hold of each.

``python -m fuzz --calls 2000`` with ``tests`` on the path; docs/internals/fuzzing.md.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))
