"""A verdict as it is read: every number and reason is there, states are words, JSON is strict."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coresident.lab.records.schema import Control
from coresident.lab.report import verdict_text
from coresident.lab.verdict.model import State, Verdict

MEMORY = {
    "claim": "fork needs [at most] half | a *half*",
    "metric": "speed",
    "compare": {"arm": "fork", "to": "native"},
    "expect": {"ratio": {"at_most": 0.5}},
}
AT_MOST = ("at", "most", "0.5")
SAME = {"claim": "they are the same", "compare": {"arm": "fork", "to": "native"}, "expect": {"same": True}}


@pytest.fixture
def verdict(lab: Any) -> Verdict:
    run = lab({"H1": MEMORY, "H2": SAME}, factors={"learners": [2, 4]})
    for generation, driver in enumerate(("550.1", "560.2")):
        for repetition in range(3):
            for learners, ratio in ((2, 0.4), (4, 0.6)):
                for arm, value in (("native", 100.0), ("fork", 100.0 * ratio)):
                    run.add(
                        arm,
                        repetition,
                        {"speed": value},
                        at={"learners": learners},
                        generation=generation,
                        conditions={"driver": driver},
                        digests={"adapter": "aa"},
                    )
    return run.verdict(post_hoc=["H2"])


def terminal(verdict: Verdict, is_terminal: bool) -> str:
    stream = io.StringIO()
    verdict_text.terminal(verdict, Console(file=stream, width=100, force_terminal=is_terminal))
    return stream.getvalue()


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_plain_text_has_a_table_then_one_sentence_a_hypothesis(verdict: Verdict) -> None:
    text = terminal(verdict, is_terminal=False)
    assert text.startswith("a-study: refuted (1 supported, 1 refuted)\nDoes it pay?\n\nhypothesis ")
    rows = [line.split() for line in text.splitlines() if line.startswith("H1 ") and "learners=" in line][:2]
    assert rows[0] == ["H1", "learners=2", "3", "0.4000", "[0.3992,", "0.4008]", *AT_MOST, "supported"]
    assert rows[1] == ["H1", "learners=4", "3", "0.6000", "[0.5988,", "0.6012]", *AT_MOST, "refuted"]
    said = one_line(text)
    assert (
        "H1 is refuted: fork needs [at most] half | a *half* (speed, fork / native): at 1 of 2 points; "
        "learners=4: none of [0.5988, 0.6012] is at most 0.5." in said
    )
    assert "H2 (post hoc) is supported: they are the same" in said
    assert "0 series and 1 digest equal in each of 3 blocks" in said


def test_what_was_not_pooled_is_told_with_what_changed(verdict: Verdict) -> None:
    for text in (terminal(verdict, is_terminal=False), verdict_text.markdown(verdict)):
        assert "Not pooled: 12 records under other conditions (driver: 550.1 -> 560.2)." in text


def test_a_terminal_shows_the_same_words_in_colour(verdict: Verdict) -> None:
    text = terminal(verdict, is_terminal=True)
    assert "\x1b[1;31mrefuted" in text and "\x1b[1;32msupported" in text
    assert "\x1b" not in terminal(verdict, is_terminal=False)


def test_markdown_is_a_table_that_claims_cannot_break(verdict: Verdict) -> None:
    lines = verdict_text.markdown(verdict).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4
    assert {line.replace("\\|", "").count("|") for line in table} == {9}
    assert (
        table[3]
        == "| H1 | speed, fork / native | learners=4 | 3 | 0.6000 | [0.5988, 0.6012] | at most 0.5 | refuted |"
    )
    assert "H2 (post hoc)" in table[4]
    assert any("half \\| a \\*half\\*" in line for line in lines)


def test_json_is_strict_and_whole(verdict: Verdict) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    told = json.loads(verdict_text.as_json(verdict), parse_constant=refuse)
    assert (told["study"], told["state"], told["exit_status"]) == ("a-study", "refuted", 1)
    finding = told["hypotheses"]["H1"]["findings"][1]
    assert finding["limits"] == [None, 0.5]
    assert finding["estimate"] == pytest.approx(0.6)
    assert (finding["at"], finding["pairs"], finding["state"]) == ({"learners": 4}, 3, "refuted")
    assert told["hypotheses"]["H2"]["post_hoc"] is True
    assert told["set_aside"][0]["differing"] == {"driver": {"then": "550.1", "now": "560.2"}}


def test_a_verdict_on_nothing_is_readable_everywhere(lab: Any) -> None:
    empty = lab({"H1": MEMORY}).verdict()
    assert "H1 is pending" in terminal(empty, is_terminal=False)
    assert json.loads(verdict_text.as_json(empty))["exit_status"] == 3
    without = lab({}).verdict()
    assert terminal(without, is_terminal=False).startswith(
        "a-study: no hypotheses; 0 of 6 measurements done\n"
    )
    assert json.loads(verdict_text.as_json(without))["state"] is None
    assert "|" not in verdict_text.markdown(without)


def test_a_run_that_was_to_go_on_says_so_whatever_its_verdict(lab: Any, ratio: Any) -> None:
    settings = {"repetitions": {"min": 3, "max": 9, "until": {"half_width": 0.02}}}
    verdict = lab({"H1": ratio}, settings=settings).pairs([1.9, 2.1, 2.0]).verdict()
    note = (
        "The run is not at its end: after 3 blocks, the interval of H1 is, or was a block ago, wider than the "
        "half_width that is asked for."
    )
    assert verdict.state is State.SUPPORTED
    assert note in one_line(terminal(verdict, is_terminal=False)) and note in verdict_text.markdown(verdict)
    told = json.loads(verdict_text.as_json(verdict))
    assert (told["unfinished"], told["wide"]) == (True, ["H1"])
    at_most = {"repetitions": {"min": 3, "max": 3, "until": {"half_width": 0.02}}}
    ended = lab({"H1": ratio}, settings=at_most).pairs([1.9, 2.1, 2.0]).verdict()
    assert "After as many as there may be, 3 blocks, the interval of H1 is" in one_line(
        terminal(ended, is_terminal=False)
    )
    assert not ended.unfinished


def test_what_a_reader_must_know_besides_is_told_in_every_form(lab: Any) -> None:
    run = lab({"H1": MEMORY})
    for repetition in range(2):
        for arm in ("native", "fork"):
            answered = {
                "exclusive-device": Control(asked=1, ran=None, state="unverified", reason="others used 2 s")
            }
            run.add(arm, repetition, {"speed": 1.0}, controls=answered)
    run.retracted = {run.records[-1].id: "the fan was off", run.records[-2].id: "a | b"}
    verdict = replace(run.verdict(post_hoc=["H1"]), stopped="interrupted")
    for text in (
        one_line(terminal(verdict, is_terminal=False)),
        verdict_text.markdown(verdict).replace("\\", ""),
    ):
        assert "1 of 3 blocks measured." in text
        assert "The run was stopped before all planned blocks were measured." in text
        assert (
            f"2 records retracted after they were seen: {run.records[-2].id} (a | b), {run.records[-1].id}"
            in text
        )
        assert "exclusive-device unverified in 2 of 2 records: others used 2 s." in text
        assert "H1 (post hoc, after retraction) is" in text
    told = json.loads(verdict_text.as_json(verdict))
    assert told["blocks"] == {"measured": 1, "needed": 3} and told["records"] == {"ok": 2}
    assert (told["stopped"], told["exit_status"]) == ("interrupted", 3)
    assert told["retracted"][1]["reason"] == "the fan was off"
    assert told["controls"] == [
        {
            "control": "exclusive-device",
            "state": "unverified",
            "count": 2,
            "of": 2,
            "reason": "others used 2 s",
        }
    ]
    assert told["hypotheses"]["H1"]["after_retraction"] is True


def test_no_more_than_three_changed_conditions_are_told_and_long_values_are_shortened(lab: Any) -> None:
    run = lab({"H1": MEMORY})
    for generation, value in enumerate(("a" * 64, "b" * 64)):
        run.add("native", 0, generation=generation, conditions=dict.fromkeys("vwxyz", value))
        run.add("fork", 0, generation=generation, conditions=dict.fromkeys("vwxyz", value))
    text = one_line(terminal(run.verdict(), is_terminal=False))
    assert f"v: {'a' * 23}… -> {'b' * 23}…, w: " in text and "and 2 more" in text
