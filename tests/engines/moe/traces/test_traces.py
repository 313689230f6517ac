"""Traces on disk: what is written comes back, and what is torn, foreign or none of a router's is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coresident.engines.moe.traces.files import read, write
from coresident.engines.moe.traces.manifest import MANIFEST, ROUTING
from coresident.engines.moe.traces.traces import Trace, Traces, same_model
from coresident.errors import UserError


def _one(traces: Traces, change: Callable[[Trace], Trace]) -> Traces:
    return replace(traces, prompts=(change(traces.prompts[0]), *traces.prompts[1:]))


def _ahead(traces: Traces) -> Traces:
    prompts = tuple(
        replace(one, ahead=np.zeros((len(one.tokens), 2, 4, 5), np.uint8)) for one in traces.prompts
    )
    return replace(traces, prompts=prompts, depths=(1, 3))


@pytest.mark.parametrize("kept", ["float32", "float16", "none", "ahead"])
def test_what_is_written_is_what_is_read(made: Callable, tmp_path: Path, kept: str) -> None:
    traces = _ahead(made()) if kept == "ahead" else made()
    if kept == "none":
        traces = replace(traces, prompts=tuple(replace(one, logits=None) for one in traces.prompts))
    elif kept == "float16":
        prompts = tuple(replace(one, logits=one.logits.astype(np.float16)) for one in traces.prompts)
        traces = replace(traces, prompts=prompts)
    write(traces, tmp_path / "set")
    back = read(tmp_path / "set")
    assert (back.model, back.sampling, back.depths) == (traces.model, traces.sampling, traces.depths)
    for one, other in zip(back.prompts, traces.prompts, strict=True):
        assert (one.name, one.family, one.split, one.prefill) == (
            other.name,
            other.family,
            other.split,
            other.prefill,
        )
        for name in ("tokens", "experts", "logits", "ahead"):
            first, second = getattr(one, name), getattr(other, name)
            assert (first is None) == (second is None)
            if first is not None:
                np.testing.assert_array_equal(first, second)
                assert first.dtype == second.dtype


def test_many_experts_take_two_bytes(made: Callable, tmp_path: Path) -> None:
    traces = made(prompts=2, experts=300)
    traces = replace(traces, prompts=tuple(_wide(one) for one in traces.prompts))
    write(traces, tmp_path / "set")
    assert read(tmp_path / "set").prompts[0].experts.max() > 255


def _wide(one: Trace) -> Trace:
    assert one.logits is not None
    return replace(one, experts=np.argsort(-one.logits, axis=-1)[..., :3].astype(np.uint16))


def test_splits_and_families_are_taken_out(made: Callable) -> None:
    traces = made()
    assert {one.split for one in traces.of("fit").prompts} == {"fit"}
    assert len(traces.of("held-out", "code").prompts) == 2
    with pytest.raises(UserError, match="no prompt of family 'poems'"):
        traces.of(family="poems")


def test_traces_of_another_model_are_told(made: Callable) -> None:
    same_model(made(), "0" * 64, "the layout file")
    with pytest.raises(UserError, match="the layout file is of model 222222222222"):
        same_model(made(), "2" * 64, "the layout file")


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _json(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        loaded = json.loads(content)
        change(loaded)
        return json.dumps(loaded).encode()

    return changed


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (ROUTING, _cut, "it is torn or of another set"),
        (ROUTING, _flip, "its checksum differs"),
        (MANIFEST, _cut, "is not JSON"),
        (MANIFEST, _json(lambda it: it.update(schema_version=7)), "schema version 7"),
        (MANIFEST, _json(lambda it: it.update(prompts=[])), "holds no prompt"),
        (MANIFEST, _json(lambda it: it["prompts"].pop()), "and the manifest says"),
        (MANIFEST, _json(lambda it: it["model"].update(top_k=2)), "'experts' is [232, 4, 3]"),
        (MANIFEST, _json(lambda it: it["model"].update(experts=20)), "'logits' is [232, 4, 16]"),
        (MANIFEST, _json(lambda it: it["prompts"][0].update(split="both")), "prompts.0.split"),
        (MANIFEST, _json(lambda it: it["prompts"][0].update(prefill=99)), "prefill 99"),
    ],
)
def test_a_set_that_is_torn_or_edited_is_refused_in_one_sentence(
    made: Callable, tmp_path: Path, file: str, change: Callable[[bytes], bytes], said: str
) -> None:
    write(made(), tmp_path / "set")
    path = tmp_path / "set" / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        read(tmp_path / "set")
    assert said in error.value.problem
    assert "\n" not in error.value.problem
    assert "trace" in error.value.remedy


def test_a_directory_without_traces_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no set of traces"):
        read(tmp_path)


def test_a_set_appears_whole_or_not_at_all(made: Callable, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="already there"):
        write(made(), tmp_path / "taken")
    broken = _one(made(), lambda one: replace(one, experts=one.experts * 0))
    with pytest.raises(UserError, match="chosen twice"):
        write(broken, tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
