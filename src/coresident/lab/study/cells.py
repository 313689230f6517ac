"""Cells: every combination of an arm and factor levels, with the parameters it asks for and a hash of all that is asked."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coresident.errors import UserError
from coresident.lab.study.schema import Level, Study
from coresident.workload import Workload


@dataclass(frozen=True)
class Cell:
    """One point of a study: what was asked, all of it.

    `parameters` are complete (defaults filled in), JSON-ready. `hash` covers workload, arm, factors, parameters and
    controls; `id` is a readable name that ends in the hash's first eight digits and serves as file name.
    """

    id: str
    workload: str
    arm: str
    factors: Mapping[str, Level]
    parameters: Mapping[str, Any]
    hash: str


def canonical(value: Any) -> str:
    """One text for one JSON value: keys sorted, no spaces, no NaN. What hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON value's canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
