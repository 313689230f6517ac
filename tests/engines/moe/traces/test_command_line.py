"""`coresident moe trace | simulate | fit-predictor` as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.moe.traces import builtin
from coresident.engines.moe.traces.files import read, write
from coresident.engines.moe.traces.prompts import Prompt
from coresident.engines.moe.traces.prompts import write as write_prompts

Command = Callable[..., Any]


def _json(coresident: Command, *arguments: str) -> Any:
    told = coresident("moe", *arguments, "--json")
    assert told.status == 0, told.err
    return json.loads(told.out)


def test_a_model_is_traced_simulated_and_predicted(
    coresident: Command, tiny_model: Path, tmp_path: Path
) -> None:
    texts = ["Names refer", "The following", "if x in y:", "class Some"]
    prompts = [Prompt("", ("prose", "code")[number > 1], text) for number, text in enumerate(texts)]
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    place = str(tmp_path / "set")
    asked = ("--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "10", "--set", "prompt_tokens=6")
    told = _json(coresident, "trace", str(tiny_model), "--out", place, *asked)
    assert told["prompts"] == 4
    assert told["splits"] == {"fit": 2, "held-out": 2}
    assert read(tmp_path / "set").sampling.max_tokens == 10

    rows = _json(
        coresident,
        "simulate",
        place,
        "--capacity",
        "2,4",
        "--policy",
        "lru,lfu",
        "--predictor",
        "none,transition",
    )
    asked_rows = [(row["capacity"], row["policy"]) for row in rows if row["fetching"] == "transition"]
    assert asked_rows == [(2, "lru"), (2, "lfu"), (4, "lru"), (4, "lfu")]
    assert [row["capacity"] for row in rows if row["policy"] == "belady"] == [2, 4]

    rows = _json(coresident, "simulate", place, "--set", "capacity=[2,3,4,8]")
    assert [row["capacity"] for row in rows] == [None, *[[2, 3, 4, 8]] * 3]

    found = _json(coresident, "fit-predictor", place, "--depth", "1", "--out", str(tmp_path / "kept"))
    assert {"chance", "static", "probe", "next-router"} <= {row["kind"] for row in found}
    fitted = f"fitted={tmp_path / 'kept' / 'probe-1'}"
    kept = _json(coresident, "simulate", place, "--capacity", "4", "--predictor", "probe", "--set", fitted)
    assert kept[-1]["recall"] == next(row["recall"] for row in found if row["kind"] == "probe")


def test_built_in_prompts_that_this_python_lacks_stop_nothing(
    coresident: Command, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tests = builtin._documents
    monkeypatch.setattr(
        builtin,
        "_documents",
        lambda corpus: [one for one in with_tests(corpus) if "unittest" not in one.text],
    )
    short = ("--max-tokens", "2", "--set", "prompt_tokens=40")
    told = coresident("moe", "trace", str(tiny_model), "--out", str(tmp_path / "set"), "--each", "2", *short)
    assert told.status == 0, told.err
    assert told.out.startswith("tests: 0 prompts, not 2")
    assert read(tmp_path / "set").families == tuple(one for one in builtin.FAMILIES if one != "tests")


def test_a_table_says_what_a_figure_is_read_beside(
    coresident: Command, made: Callable, tmp_path: Path
) -> None:
    write(made(), tmp_path / "set")
    cost = 'cost={"expert_bytes":1000,"bytes_per_second":1e6,"resident_seconds":0.004}'
    found = coresident(
        "moe", "simulate", str(tmp_path / "set"), "--capacity", "6", "--predictor", "static", "--set", cost
    )
    lines = found.out.splitlines()
    assert len(lines) == 6
    assert [line.split()[1] for line in lines[1:]] == ["resident", "belady", "lru", "lru", "lru"]
    assert "tok/s" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "said", "remedy"),
    [
        (("simulate", "SET", "--capacity", "2"), "2 slots cannot hold the 3 experts", "at least 3 slots"),
        (("simulate", "SET", "--capacity", "six"), "no list of numbers", "16,32,48"),
        (("simulate", "SET"), "no number of slots", "--capacity"),
        (
            (
                "simulate",
                "SET",
                "--capacity",
                "6",
                "--set",
                "cost={expert_bytes: 9, bytes_per_second: 1.0, resident_seconds: 0.0}",
            ),
            "resident_seconds",
            "",
        ),
        (("simulate", "SET", "--capacity", "6", "--policy", "lruu"), "policy", "did you mean 'lru'?"),
        (("simulate", "SET/none", "--capacity", "6"), "is no set of traces", "moe trace"),
        (("fit-predictor", "SET", "--kind", "prob"), "there is no predictor 'prob'", "did you mean 'probe'?"),
        (("trace", "SET", "--out", "SET"), "SET is already there", "another directory"),
        (("trace", "SET", "--out", "SET-2", "--prompts", "none.jsonl"), "none.jsonl cannot be read", "JSONL"),
        (
            ("trace", "SET", "--out", "SET-2", "--set", "max_token=3"),
            "max_token",
            "did you mean 'max_tokens'?",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_a_remedy(
    coresident: Command, made: Callable, tmp_path: Path, arguments: tuple[str, ...], said: str, remedy: str
) -> None:
    write(made(), tmp_path / "set")
    place = str(tmp_path / "set")
    found = coresident("moe", *(word.replace("SET", place) for word in arguments))
    assert found.status == 2
    assert said.replace("SET", place) in found.err
    assert remedy in found.err
    assert "Traceback" not in found.err
