"""coresident: put more models on one accelerator, and prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coresident.lab.records.query import records

__version__ = "0.1.0"
__all__ = ["__version__", "records"]


def __getattr__(name: str) -> Any:
    """Import `records` only when asked for: DuckDB and pandas are too heavy for `coresident --help`."""
    if name == "records":
        from coresident.lab.records.query import records

        return records
    raise AttributeError(f"module 'coresident' has no attribute {name!r}")
