"""Bad input is found before anything runs or is written, and what a run needs is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.base import base, writer
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.workload import dpo
from coresident.errors import UserError

MIB = 2**20
inspect = dpo.inspect


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv(base.CACHE, str(directory))
    return directory


def pair(**changes: Any) -> str:
    return json.dumps({"prompt": "Say yes.", "chosen": " yes", "rejected": " no"} | changes)


def settings(tiny_base: Path, file: Path | None = None, **values: Any) -> DPO:
    given: dict[str, Any] = {"base": {"path": str(tiny_base)}, "max_length": 64} | values
    if file is not None:
        given["data"] = {"source": "files", "files": [str(file)]}
    return DPO.model_validate(given)


@pytest.mark.parametrize(
    ("lines", "values", "said"),
    [
        ([pair(), "{"], {}, "data.jsonl line 2: not JSON"),
        ([pair(), pair(), '{"prompt": "x", "chosen": "y"}'], {}, "data.jsonl line 3: 'rejected' is missing"),
        ([pair(chosen=" ")], {}, "data.jsonl line 1: 'chosen' is empty"),
        ([], {}, "data.jsonl holds no preference pair"),
        ([pair(), pair(prompt="word " * 40)], {"max_length": 16}, "data.jsonl line 2: the prompt is"),
    ],
)
def test_bad_pairs_are_named_by_file_and_line(
    tiny_base: Path, tmp_path: Path, lines: list[str], values: Mapping[str, Any], said: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        inspect(settings(tiny_base, file, **values))
    assert said in caught.value.problem
    assert caught.value.remedy


def test_truncation_is_found_for_a_base_that_is_not_written_yet(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(pair(prompt="word " * 40))
    data = {"source": "files", "files": [str(file)]}
    with pytest.raises(UserError, match=r"data\.jsonl line 1: the prompt is"):
        inspect(DPO.model_validate({"base": {"config": "tiny"}, "data": data, "max_length": 16}))
    assert list(cache.iterdir()) == []


def test_two_files_for_three_learners_are_refused(tiny_base: Path, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    asked = settings(tiny_base, learners=3).model_copy(
        update={"data": DPO.model_validate({"data": {"source": "files", "files": files}}).data}
    )
    with pytest.raises(UserError, match="2 files for 3 learners"):
        inspect(asked)


def test_a_missing_base_and_one_without_weights_are_named(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"base\.path: .*nowhere is not a directory"):
        inspect(settings(tmp_path / "nowhere"))
    empty = Path(shutil.copytree(tiny_base, tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        inspect(settings(empty))


def test_mapped_in_another_type_is_refused_before_it_runs(tiny_base: Path) -> None:
    with pytest.raises(UserError, match="mapped cannot convert"):
        inspect(settings(tiny_base, sharing="mapped", dtype="bfloat16"))


def test_a_named_base_is_not_written_by_looking(cache: Path) -> None:
    inspect(DPO.model_validate({"base": {"config": "qwen2.5-7b"}, "data": {"source": "python-docs"}}))
    assert list(cache.iterdir()) == []


def test_a_copy_each_needs_a_base_each() -> None:
    def need(**values: Any) -> int:
        return inspect(DPO.model_validate({"base": {"config": "qwen2.5-0.5b"}, **values})).memory

    one = 494_032_768 * 4
    assert need(sharing="none", learners=4) - need(sharing="none", learners=3) > one
    assert need(sharing="mapped", learners=4) - need(sharing="mapped", learners=3) < one / 2
    assert (
        need(sharing="fork", learners=4)
        < need(sharing="mapped", learners=4)
        < need(sharing="none", learners=4)
    )
    assert need(sharing="none", schedule="solo", learners=4) == need(sharing="none", learners=1)


def test_bases_are_what_lies_on_a_card_where_the_run_has_one() -> None:
    def need(sharing: str) -> int:
        asked = DPO.model_validate({"base": {"config": "qwen2.5-0.5b"}, "sharing": sharing, "learners": 4})
        return dpo.inspect(asked).on_card

    one = need("fork")
    assert (need("none"), need("fork-copy")) == (4 * one, 5 * one)


def test_each_learner_that_runs_at_once_asks_for_its_cores() -> None:
    needs = inspect(DPO.model_validate({"learners": 3, "cpus": 2}))
    assert (needs.workers, needs.cpus_per_worker) == (3, 2)
    assert inspect(DPO.model_validate({"learners": 3, "cpus": 2, "schedule": "solo"})).workers == 1


def test_the_files_whose_content_matters_are_named(tiny_base: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(pair())
    needs = inspect(settings(tiny_base, file))
    assert set(needs.inputs) == {file, tiny_base / "config.json", tiny_base / "tokenizer.json"}


def test_the_tokenizer_used_for_looking_is_the_one_that_is_written(tmp_path: Path) -> None:
    writer.write("tiny", "float32", 0, tmp_path / "base")
    writer.write_tokenizer(512, tmp_path / "alone")
    assert (tmp_path / "alone" / "tokenizer.json").read_bytes() == (
        tmp_path / "base" / "tokenizer.json"
    ).read_bytes()
