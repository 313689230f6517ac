"""The verdict tests' study and records serve the reports' tests too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[1] / "verdict" / "conftest.py"
_spec = importlib.util.spec_from_file_location("coresident_verdict_fixtures", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)

lab = _module.lab
ratio = _module.ratio
