"""Expandable segments on a card: in every learner, not in the golden process whose memory is exported, and with the same
learning bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.workload import Reporter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PLAIN = "plain"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"sharing": "fork"},
    "fork": {"sharing": "fork", "expandable_segments": True},
    "fork-copy": {"sharing": "fork-copy", "expandable_segments": True},
    "none": {"sharing": "none", "expandable_segments": True},
}
# Has whoever exports memory, which is the golden process alone, write down of which kind its segments are.
EXPORTER = """
import importlib.abc, importlib.util, json, os, sys

class Exporter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "coresident.engines.pool.sharing.ipc" or "EXPORTED" not in os.environ:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            export = module.export
            def noted(memory):
                import torch
                kinds = [bool(found["is_expandable"]) for found in torch.cuda.memory_snapshot()]
                with open(os.environ["EXPORTED"], "w") as stream:
                    json.dump(kinds, stream)
                return export(memory)
            module.export = noted
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Exporter())
"""


@pytest.fixture(scope="module")
def pools(card: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each way's processes reported, by event and name."""
    root = tmp_path_factory.mktemp("pools")
    (root / "sitecustomize.py").write_text(EXPORTER)
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        known = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(root), known))))
        for way, values in WAYS.items():
            patch.setenv("EXPORTED", str(root / f"{way}.json"))
            place = root / way
            given = {"base": {"config": "tiny"}, "learners": 2, "steps": 4, "max_length": 64}
            given |= {"data": {"pairs": 8}, "deterministic": True}
            drive(
                DPO.model_validate(given | values),
                Reporter(events=place / "events", work=place / "work", device=card),
            )
            kinds: dict[str, dict[str, Any]] = {"series": {}, "digest": {}, "control": {}}
            for file in (place / "events").iterdir():
                for line in map(json.loads, file.read_text().splitlines()):
                    if line["event"] in kinds:
                        kinds[line["event"]][line["name"]] = line
            exported = root / f"{way}.json"
            seen[way] = {**kinds, "exported": json.loads(exported.read_text()) if exported.exists() else None}
        yield seen


@pytest.mark.parametrize("way", [way for way in WAYS if way != PLAIN])
def test_all_that_a_learner_takes_is_in_expandable_segments(
    pools: dict[str, dict[str, Any]], way: str
) -> None:
    for name, control in pools[way]["control"].items():
        assert control["passed"] is True, (name, control["reason"])
    for one in pools[way]["control"]["sharing-engaged"]["ran"]["learners"]:
        assert one["expandable_mib"] == one["reserved_mib"] > 0


def test_without_them_nothing_is(pools: dict[str, dict[str, Any]]) -> None:
    for one in pools[PLAIN]["control"]["sharing-engaged"]["ran"]["learners"]:
        assert one["expandable_mib"] == 0 < one["reserved_mib"]


@pytest.mark.parametrize("way", ["fork", "fork-copy"])
def test_what_the_golden_process_exports_is_plain_memory(pools: dict[str, dict[str, Any]], way: str) -> None:
    assert pools[way]["exported"]
    assert not any(pools[way]["exported"])


@pytest.mark.parametrize("way", [way for way in WAYS if way != PLAIN])
def test_learning_is_the_same_bit_for_bit(pools: dict[str, dict[str, Any]], way: str) -> None:
    def learned(one: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {name: line["values"] for name, line in pools[one]["series"].items()},
            {name: line["value"] for name, line in pools[one]["digest"].items()},
        )

    assert len(learned(PLAIN)[0]["learner-0.loss"]) == 4
    assert len(learned(PLAIN)[1]) == 3
    assert learned(way) == learned(PLAIN)
