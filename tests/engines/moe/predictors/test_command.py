"""`coresident moe fit-predictor`: a row for each predictor that the traces allow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.moe.predictors import command
from coresident.engines.moe.predictors.fitted import load
from coresident.engines.moe.traces.files import write
from coresident.errors import UserError


def test_all_are_those_that_the_traces_allow(made: Callable, tmp_path: Path) -> None:
    write(made(), tmp_path / "set")
    rows = command.fitted(tmp_path / "set", ["all"], [1, 2], None, tmp_path / "kept", 0)
    found = {(row["kind"], row["depth"]) for row in rows}
    assert ("probe", 2) in found
    assert ("previous-token", 1) in found
    assert not {kind for kind, _ in found} & {"next-router"}
    assert all(row["width"] == 3 for row in rows)
    text = command.table(rows)
    assert len(text.splitlines()) == len(rows) + 1
    assert "code" in text.splitlines()[0]
    assert load(tmp_path / "kept" / "transition-2").described.depth == 2
    popularity = json.loads((tmp_path / "kept" / "static-1" / "popularity.json").read_text())
    assert [len(row) for row in popularity] == [16] * 4


def test_a_depth_that_no_predictor_has_is_told_before_anything_is_kept(
    made: Callable, tmp_path: Path
) -> None:
    write(made(layers=2), tmp_path / "set")
    kept = tmp_path / "kept"
    with pytest.raises(UserError, match="cannot look 3 layers ahead in a model with 2 layers"):
        command.fitted(tmp_path / "set", ["all"], [1, 2, 3], None, kept, 0)
    with pytest.raises(UserError, match="probe cannot look 2 layers ahead"):
        command.fitted(tmp_path / "set", ["static", "probe"], [1, 2], None, kept, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    rows = command.fitted(tmp_path / "set", ["all"], [1, 2], None, kept, 0)
    assert {row["kind"] for row in rows if row["depth"] == 2} == {
        "chance", "static", "previous-token", "previous-rank",
    }  # fmt: skip
    assert sorted(path.name for path in kept.iterdir()) == ["probe-1", "static-1", "static-2", "transition-1"]


def test_predictors_are_kept_all_or_none(
    made: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(made(), tmp_path / "set")
    judge = command.judge

    def failing(*asked: Any) -> Any:
        if asked[0].described.kind == "probe":
            raise KeyboardInterrupt
        return judge(*asked)

    monkeypatch.setattr(command, "judge", failing)
    with pytest.raises(KeyboardInterrupt):
        command.fitted(tmp_path / "set", ["all"], [1], None, tmp_path / "kept", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_predictor_that_is_named_and_cannot_be_had_is_an_error(made: Callable, tmp_path: Path) -> None:
    write(made(), tmp_path / "set")
    with pytest.raises(UserError, match="next-router needs"):
        command.fitted(tmp_path / "set", ["next-router"], [1], None, None, 0)
    with pytest.raises(UserError, match="did you mean 'probe'"):
        command.fitted(tmp_path / "set", ["prob"], [1], None, None, 0)
