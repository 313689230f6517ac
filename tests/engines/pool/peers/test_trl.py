"""TRL's own trainer as an arm: the same pairs, steps, seeds and start, and the same things told of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool import inspection
from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised import writer
from coresident.engines.pool.run import drive
from coresident.errors import UserError
from coresident.workload import Reporter


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def settings(**values: Any) -> DPO:
    given = {
        "base": {"config": "tiny"}, "learners": 2, "steps": 4, "max_length": 48, "data": {"pairs": 6},
        "learning_rate": 1e-3, "rank": 4, "warmup_steps": 3, "weight_decay": 5.0,
    }  # fmt: skip
    return DPO.model_validate(given | values)


def told(place: Path) -> dict[str, dict[str, Any]]:
    """What a run's processes reported: by kind of event, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for file in (place / "events").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            key = line.get("name", line.get("id", next(iter(line.get("values", {"": 0})))))
            found.setdefault(line["event"], {})[key] = line
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs a pool once for each set of parameters."""
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def run(**values: Any) -> dict[str, dict[str, Any]]:
        key = json.dumps(values, sort_keys=True)
        if key not in known:
            place = tmp_path_factory.mktemp("run")
            drive(settings(**values), Reporter(events=place / "events", work=place / "work"))
            known[key] = told(place) | {"place": {"": place}}
        return known[key]

    return run


WAYS: list[dict[str, Any]] = [
    {},
    {
        "reference": "precomputed",
        "checkpointing": True,
        "own": [{"learning_rate": 2e-3, "rank": 8}],
        "learners": 1,
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=["plain", "precomputed"])
def test_losses_rewards_and_tokens_are_natives(ran: Any, way: dict[str, Any]) -> None:
    native, peer = ran(sharing="none", **way), ran(sharing="trl", **way)
    for learner in range(settings(**way).learners):
        for name, close in {
            "loss": 2e-5,
            "margin": 1e-4,
            "chosen_reward": 1e-4,
            "accuracy": 0,
            "tokens": 0,
        }.items():
            ours, theirs = (one["series"][f"learner-{learner}.{name}"]["values"] for one in (native, peer))
            assert len(ours) == 4
            assert theirs == pytest.approx(ours, abs=close), name
        losses = peer["series"][f"learner-{learner}.loss"]["values"]
        assert losses[0] == pytest.approx(0.693147, abs=1e-6)
        assert max(losses) - min(losses) > 1e-3, "a training that would tell another order, rate or start"


@pytest.mark.slow
def test_it_ends_with_natives_adapter(ran: Any) -> None:
    from safetensors.torch import load_file

    ours, theirs = (
        load_file(ran(sharing=sharing)["place"][""] / "work" / "learner-1" / "adapter_model.safetensors")
        for sharing in ("none", "trl")
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_it_reports_what_native_reports(ran: Any) -> None:
    native, peer = ran(sharing="none"), ran(sharing="trl")
    assert peer["metric"].keys() == native["metric"].keys()
    assert {name: one["passed"] for name, one in peer["control"].items()} == dict.fromkeys(
        native["control"], True
    )
    assert peer["digest"].keys() == native["digest"].keys()
    assert peer["digest"]["base"]["value"] == native["digest"]["base"]["value"]
    windows = [peer["worker"][f"learner-{number}"] for number in (0, 1)]
    assert max(one["start"] for one in windows) < min(one["end"] for one in windows)
    assert windows[0]["work"] == sum(peer["series"]["learner-0.tokens"]["values"][1:])
    assert peer["environment"]["torch"]["values"]["trl"]


@pytest.mark.slow
def test_over_a_base_in_4_bits_it_learns_what_native_does(ran: Any) -> None:
    """Within the bfloat16 that TRL gives adapters there; and the base is left as it is."""
    pytest.importorskip("bitsandbytes")
    given = {"base": {"config": "tiny", "quantise": "nf4"}, "learners": 1, "dtype": "bfloat16"}
    native, peer = ran(sharing="none", **given), ran(sharing="trl", **given)
    assert {one["passed"] for one in peer["control"].values()} == {True}
    ours, theirs = (one["series"]["learner-0.loss"]["values"] for one in (native, peer))
    assert theirs == pytest.approx(ours, abs=2e-3)
    assert max(ours) - min(ours) > 1e-2


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_outcome_by_name(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"^learner 0: the loss is nan at step \d"):
        drive(
            settings(sharing="trl", learners=1, learning_rate=1e30, warmup_steps=0),
            Reporter(events=tmp_path / "events", work=tmp_path / "work"),
        )
    assert told(tmp_path)["series"]["learner-0.loss"]["values"][-1] is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"loss": "sft"}, "loss: sft"),
        ({"schedule": "solo"}, "schedule: solo"),
        ({"checkpoint_every": 2}, "checkpoint_every: 2"),
        ({"on_failure": "continue"}, "on_failure: continue"),
        ({"held_to": "start"}, "held_to: start"),
    ],
)
def test_what_it_cannot_do_is_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^sharing: trl does not know {named}"):
        inspection.inspect(settings(sharing="trl", **asked))


@pytest.mark.parametrize(
    ("asked", "said", "remedy"),
    [
        (
            {"base": {"config": "tiny", "quantise": "nf4"}},
            "computes in bfloat16 over this 4-bit base, and dtype is float32",
            "set dtype: bfloat16",
        ),
        ({"dtype": "float64"}, "loads no base in float64", "set dtype: float32 or bfloat16"),
    ],
)
def test_a_dtype_that_it_would_not_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str, remedy: str
) -> None:
    monkeypatch.setattr("coresident.engines.pool.peers.rules.find_spec", lambda _: object())
    with pytest.raises(UserError, match=said) as refused:
        inspection.inspect(settings(sharing="trl", **asked))
    assert remedy in refused.value.remedy


def test_a_checkpoint_in_4_bits_says_itself_what_is_computed_in(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coresident.engines.pool.peers.rules.find_spec", lambda _: object())
    writer.write_from(tiny_base, tmp_path / "nf4")
    given: dict[str, Any] = {"sharing": "trl", "base": {"path": str(tmp_path / "nf4")}}
    inspection.inspect(settings(dtype="bfloat16", **given))
    file = tmp_path / "nf4" / "config.json"
    file.write_text(
        file.read_text().replace(
            '"bnb_4bit_compute_dtype": "bfloat16"', '"bnb_4bit_compute_dtype": "float32"'
        )
    )
    inspection.inspect(settings(dtype="float32", **given))
    with pytest.raises(UserError, match="computes in float32 over this 4-bit base, and dtype is bfloat16"):
        inspection.inspect(settings(dtype="bfloat16", **given))


def test_without_trl_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "coresident.engines.pool.peers.rules.find_spec", lambda name: None if name == "trl" else found(name)
    )
    with pytest.raises(UserError, match="needs the package trl") as refused:
        inspection.inspect(settings(sharing="trl"))
    assert "coresident[peers]" in refused.value.remedy


@pytest.mark.parametrize(
    ("asked", "who"),
    [
        ({"base": {"config": "tiny", "quantise": "nf4"}}, "sharing: trl on a 4-bit base"),
        ({"optimizer": "adamw8bit"}, "sharing: trl with optimizer: adamw8bit"),
    ],
)
def test_four_and_eight_bits_need_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], who: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "coresident.engines.pool.peers.rules.find_spec",
        lambda name: None if name == "bitsandbytes" else found(name),
    )
    with pytest.raises(UserError, match=f"^{who} needs the package bitsandbytes"):
        inspection.inspect(settings(sharing="trl", **asked))


@pytest.mark.gpu
def test_on_a_card_losses_are_natives(tmp_path: Path, card: str) -> None:
    found = {}
    for sharing in ("none", "trl"):
        place = tmp_path / sharing
        drive(
            settings(sharing=sharing, base={"config": "small"}),
            Reporter(events=place / "events", work=place / "work", device=card),
        )
        found[sharing] = told(place)
    for name in ("learner-0.loss", "learner-1.loss"):
        ours, theirs = (found[sharing]["series"][name]["values"] for sharing in ("none", "trl"))
        assert theirs == pytest.approx(ours, abs=1e-3)
    assert all(one["passed"] for one in found["trl"]["control"].values())
