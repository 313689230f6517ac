"""A simulation beside demand, Belady's rule, the oracle and all resident; and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.moe.predictors.fitted import fit, save
from coresident.engines.moe.simulate import told
from coresident.engines.moe.simulate.parameters import Simulate
from coresident.engines.moe.simulate.simulation import simulate
from coresident.errors import UserError

_COST = {"expert_bytes": 1000, "bytes_per_second": 1e6, "resident_seconds": 4e-3, "sync_seconds": 1e-5}


def _asked(**values: Any) -> Simulate:
    return Simulate.model_validate({"traces": "here", "capacity": 6, **values})


def test_hit_rates_stand_in_the_order_that_they_must(made: Callable) -> None:
    found = simulate(made(), _asked(predictor="transition", width=3))
    assert found.demand.hit_rate <= found.belady.hit_rate
    assert found.demand.hit_rate < found.oracle.hit_rate
    assert found.asked.hit_rate < found.oracle.hit_rate


def test_an_oracle_misses_only_where_it_says_nothing(made: Callable) -> None:
    found = simulate(made(layers=5), _asked(predictor="oracle", depth=1))
    assert found.asked.predicted.recall == 1
    assert found.asked.predicted.covered == pytest.approx(4 / 5)
    alone = simulate(made(layers=5), _asked())
    assert found.asked.misses <= alone.demand.misses / 5 * 1.5
    assert found.asked.used == 1
    assert found.asked.wasted == 0


def test_all_resident_hits_always_and_takes_the_resident_time(made: Callable) -> None:
    found = simulate(made(), _asked(capacity=16, cost={**_COST, "sync_seconds": 0.0}))
    assert found.asked.hit_rate == found.asked.complete == 1
    assert found.asked.times.simulated == pytest.approx(found.asked.times.resident)


def test_a_layer_stalls_unless_all_hit(made: Callable) -> None:
    found = simulate(made(), _asked()).asked
    assert found.independent == pytest.approx(found.hit_rate**3)
    assert found.complete < found.hit_rate
    assert found.misses == pytest.approx((1 - found.hit_rate) * 4 * 3)


def test_bytes_a_token_are_those_of_misses_and_of_fetches_ahead(made: Callable) -> None:
    found = simulate(made(), _asked(predictor="chance", width=4, cost=_COST)).asked
    assert found.fetched > found.misses
    assert found.times.bytes == pytest.approx(found.fetched * 1000)
    assert 0 < found.times.wasted_bytes < found.times.bytes


def test_only_held_out_prompts_are_decoded_and_only_fit_prompts_fitted_on(made: Callable) -> None:
    traces = made()
    scrambled = replace(
        traces,
        prompts=tuple(
            replace(one, experts=one.experts[:, ::-1].copy(), logits=None) if one.split == "held-out" else one
            for one in traces.prompts
        ),
    )
    asked = _asked(policy="static")
    assert simulate(traces, asked).asked.hit_rate != simulate(scrambled, asked).asked.hit_rate
    assert len(simulate(traces, asked).asked.prompts) == 4


def test_families_are_chosen_and_reported(made: Callable) -> None:
    whole = simulate(made(), _asked()).asked
    code = simulate(made(), _asked(families=["code"])).asked
    assert set(whole.families) == {"code", "prose"}
    assert code.families == {"code": pytest.approx(whole.families["code"])}
    with pytest.raises(UserError, match="family 'cod'"):
        simulate(made(), _asked(families=["cod"]))


def test_capacities_may_differ_by_layer(made: Callable) -> None:
    found = simulate(made(), _asked(capacity=[16, 3, 3, 16])).asked
    assert found.hit_rate > simulate(made(), _asked(capacity=3)).asked.hit_rate


def test_a_predictor_that_was_kept_is_the_one_that_is_fitted_here(made: Callable, tmp_path: Path) -> None:
    traces = made()
    save(fit("transition", 2, traces), tmp_path / "kept")
    here = simulate(traces, _asked(predictor="transition", depth=2))
    kept = simulate(traces, _asked(predictor="transition", depth=2, fitted=str(tmp_path / "kept")))
    assert here.asked == kept.asked


def test_the_directory_of_all_that_was_kept_will_do(made: Callable, tmp_path: Path) -> None:
    """Kind and depth choose in it; what has nothing to fit is not looked for there, and no predictor may stand beside."""
    traces, kept = made(), tmp_path / "kept"
    for kind, depth in (("transition", 2), ("static", 1)):
        save(fit(kind, depth, traces), kept / f"{kind}-{depth}")  # type: ignore[arg-type]
    for values in ({"predictor": "transition", "depth": 2}, {"predictor": "chance"}, {}):
        here, there = _asked(**values), _asked(**values, fitted=str(kept))
        assert simulate(traces, here).asked == simulate(traces, there).asked
    with pytest.raises(UserError, match="no predictor transition at depth 1, but static-1, transition-2"):
        simulate(traces, _asked(predictor="transition", fitted=str(kept)))
    with pytest.raises(UserError, match="is no fitted predictor; make one: coresident moe fit-predictor"):
        simulate(traces, _asked(predictor="transition", fitted=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capacity": 2}, "2 slots cannot hold the 3 experts"),
        ({"capacity": 17}, "17 slots for 16 experts"),
        ({"capacity": [4, 4]}, "names 2 layers, and the traces have 4"),
        ({"predictor": "probe", "depth": 4}, "cannot look 4 layers ahead"),
        ({"predictor": "next-router"}, "the traces have none"),
        ({"predictor": "chance", "width": 17}, "17 experts cannot be predicted of 16"),
        ({"split": "fit", "predictor": "probe"}, "was fitted on prompt"),
    ],
)
def test_what_does_not_go_with_the_traces_is_refused_in_one_sentence(
    made: Callable, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        simulate(made(), _asked(**values))
    assert said in error.value.problem
    assert error.value.remedy


def test_a_predictor_of_another_kind_or_model_is_refused(made: Callable, tmp_path: Path) -> None:
    save(fit("static", 1, made()), tmp_path / "static")
    asked = _asked(predictor="transition", fitted=str(tmp_path / "static"))
    with pytest.raises(UserError, match="is predictor static at depth 1, not transition"):
        simulate(made(), asked)
    other = made(identity="1" * 64)
    with pytest.raises(UserError, match="of model 000000000000, and the traces are of model 111111111111"):
        simulate(other, _asked(predictor="static", fitted=str(tmp_path / "static")))


def test_belady_takes_no_predictor() -> None:
    with pytest.raises(ValueError, match="without fetching ahead"):
        _asked(policy="belady", predictor="chance")


def test_rows_name_all_that_a_figure_is_read_beside_once(made: Callable) -> None:
    traces, rows = made(), []
    for predictor in (None, "transition"):
        asked = _asked(predictor=predictor, cost=_COST)
        rows += told.rows(asked, simulate(traces, asked), last=rows)
    names = [(row["policy"], row["fetching"]) for row in rows]
    assert names == [("resident", ""), ("belady", ""), ("lru", "oracle"), ("lru", ""), ("lru", "transition")]
    text = told.table(rows)
    assert len(text.splitlines()) == 6
    assert "tok/s" in text
