"""A small workload and a small study, on which each test changes one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from coresident.lab.study.cells import Cell, expand
from coresident.lab.study.load import Loaded, load
from coresident.workload import Metric, Parameters, Workload

STUDY = """\
study: scale                                   # line 1
question: Does sharing fit more learners?
workload: toy
parameters:
  steps: 20                                    # line 5
  base: {config: tiny, seed: 0}
arms:
  native: {sharing: none}
  fork: {sharing: fork}
factors:
  learners: [2, 4]                             # line 11
repetitions: {min: 3, max: 9, until: {half_width: 0.01}}
controls: [finite, base-unchanged]             # line 13
hypotheses:
  H1:
    claim: forked learners keep native throughput
    metric: speed
    compare: {arm: fork, to: native, at: {learners: 2}}
    expect: {ratio: {at_least: 0.95}}          # line 19
"""


class Base(Parameters):
    config: Literal["tiny", "large"] | None = None
    path: str | None = None
    seed: int = 0


class Toy(Parameters):
    sharing: Literal["none", "fork"] = "none"
    learners: Annotated[int, Field(ge=1)] = 1
    steps: int = 10
    rate: float = 0.5
    name: str = "x"
    targets: tuple[str, ...] = ("q", "v")
    base: Base = Base(config="tiny")


@pytest.fixture
def workload() -> Workload:
    return Workload(
        name="toy",
        about="for tests",
        parameters=Toy,
        metrics=(Metric("speed", "1/s", "more", "how fast"),),
        controls=frozenset({"base-unchanged"}),
        run=lambda parameters, cell: None,
    )


@pytest.fixture
def study_text() -> str:
    return STUDY


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Loaded]:
    """Load the small study with texts replaced and `--set` overrides applied."""

    def read(*replaced: tuple[str, str], overrides: Sequence[str] = ()) -> Loaded:
        text = STUDY
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "scale.yaml"
        path.write_text(text)
        return load(path, overrides)

    return read


@pytest.fixture
def cells(read: Callable[..., Loaded], workload: Workload) -> Callable[..., list[Cell]]:
    def cells(*replaced: tuple[str, str], overrides: Sequence[str] = ()) -> list[Cell]:
        loaded = read(*replaced, overrides=overrides)
        return expand(loaded.study, workload, loaded.source)

    return cells


@pytest.fixture
def by_point() -> Callable[[Sequence[Cell]], dict[Any, Cell]]:
    return lambda cells: {(cell.arm, *cell.factors.values()): cell for cell in cells}
