"""Predictors in a directory: what was fitted comes back, and what is torn does not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coresident.engines.moe.predictors.fitted import DESCRIPTION, TABLES, fit, load, save
from coresident.engines.moe.predictors.kinds import FITTED, KINDS, Kind
from coresident.errors import UserError


@pytest.mark.parametrize("kind", sorted(FITTED))
def test_what_is_saved_is_what_is_loaded(made: Callable, tmp_path: Path, kind: Kind) -> None:
    fitted = fit(kind, 1, made())
    save(fitted, tmp_path / "one")
    back = load(tmp_path / "one")
    assert back.described.model_copy(update={"tables_sha256": ""}) == fitted.described
    assert set(back.tables) == set(fitted.tables)
    for name, table in fitted.tables.items():
        np.testing.assert_array_equal(back.tables[name], table)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (TABLES, lambda content: content[:-8]),
        (TABLES, lambda content: content[:-8] + b"\0" * 7 + b"?"),
        (DESCRIPTION, lambda content: content[:-9]),
        (DESCRIPTION, lambda content: content.replace(b'"static"', b'"statik"')),
    ],
)
def test_a_torn_predictor_is_refused(made: Callable, tmp_path: Path, file: str, change: Callable) -> None:
    save(fit("static", 1, made()), tmp_path / "one")
    path = tmp_path / "one" / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        load(tmp_path / "one")
    assert "fit it again" in error.value.remedy


def test_a_place_that_is_taken_is_refused(made: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already there"):
        save(fit("chance", 1, made()), tmp_path)
    with pytest.raises(UserError, match="no fitted predictor"):
        load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_depth_that_leaves_no_layer_is_refused(made: Callable, kind: Kind) -> None:
    with pytest.raises(UserError, match="cannot look 5 layers ahead"):
        fit(kind, 5, made(layers=4))
