"""A block's generations: each rule of the design as one line of a table.

A block is written as its records in order of time: `A0ok` is cell A, generation 0, ok. Attempts count up
per cell. A suffix sets conditions apart (`A0ok/c2`), a leading `-` retracts (`-A0ok`).
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coresident.lab.records.generations import counting, state
from coresident.lab.records.schema import Record
from coresident.lab.study.cells import Cell

WORDS = re.compile(r"(-?)([ABC])(\d)([a-z]+)(?:/(c\d))?")
NOTHING = ""


@pytest.fixture
def block(cell, record):
    """Records (active, retracted) of a history, with every generation planned for `members`."""

    def block(history: str, members: str = "AB", repetition: int = 0):
        cells = {name: cell(name) for name in "ABC"}
        attempts: Counter[str] = Counter()
        active, retracted = [], []
        for word in history.split():
            found = WORDS.fullmatch(word)
            assert found, word
            gone, name, generation, status, conditions = found.groups()
            attempts[name] += 1
            one = record(
                cells[name],
                repetition,
                int(generation),
                attempts[name],
                status,
                conditions or "c1",
                tuple(cells[member] for member in members),
                speed=10.0 * int(generation) + attempts[name],
            )
            (retracted if gone else active).append(one)
        return cells, active, retracted

    return block


# history, generation, missing, closed, part of why (attempts: 2, conditions now: c1)
STATES = {
    "nothing yet": (NOTHING, 0, "AB", False, ""),
    "no record is missing": ("A0ok", 0, "B", False, "1 of 2 missing"),
    "interrupted is missing": ("A0ok B0interrupted", 0, "B", False, "1 of 2 missing"),
    "interrupted, then ok": ("A0ok B0interrupted B0ok", 0, "", True, "complete"),
    "complete": ("A0ok B0ok", 0, "", True, "complete"),
    "out of memory is an outcome": ("A0ok B0oom", 0, "", True, "complete"),
    "not finite is an outcome": ("A0nonfinite B0ok", 0, "", True, "complete"),
    "timeout is an outcome": ("A0ok B0timeout", 0, "", True, "complete"),
    "a failed member opens the next generation for all": ("A0ok B0failed", 1, "AB", False, "B failed"),
    "so does a failed control": ("A0ok B0invalid", 1, "AB", False, "B invalid"),
    "at once, before the others are measured": ("A0failed", 1, "AB", False, "A failed"),
    "the next generation lacks what it lacks": ("A0ok B0failed A1ok", 1, "B", False, "1 of 2 missing"),
    "the next generation completes": ("A0ok B0failed A1ok B1ok", 1, "", True, "complete"),
    "attempts are limited": ("A0ok B0failed A1ok B1failed", 1, "", True, "B used up its attempts (2 of 2)"),
    "the last generation is measured to its end": ("A0ok B0failed B1failed", 1, "A", False, "B used up"),
    "each cell has its own attempts": ("A0failed B0ok A1ok B1failed", 2, "AB", False, "B failed"),
    "one used up closes for all": ("A0failed B1failed A1failed", 1, "", True, "A used up"),
    "interruptions cost no attempt": (
        "B0interrupted B0interrupted A0ok B0failed",
        1,
        "AB",
        False,
        "B failed",
    ),
    "measuring anew costs no attempt": ("A0ok B0failed A1ok B1ok A1ok", 1, "", True, "complete"),
    "other conditions open the next generation": ("A0ok/c0", 1, "AB", False, "conditions changed"),
    "of a complete one too": ("A0ok/c0 B0ok/c0", 1, "AB", False, "conditions changed"),
    "and of one that gave up": (
        "A0ok/c0 B0failed/c0 A1ok/c0 B1failed/c0",
        2,
        "AB",
        False,
        "conditions changed",
    ),
    "failures under other conditions are forgotten": (
        "B0failed/c0 B1failed/c0 B2failed",
        3,
        "AB",
        False,
        "B failed",
    ),
    "back to the old conditions is another generation": (
        "A0ok A1ok/c2",
        2,
        "AB",
        False,
        "conditions changed",
    ),
    "a retracted member opens the next generation": ("A0ok -B0ok", 1, "AB", False, "counts no more"),
    "even alone": ("-A0ok", 1, "AB", False, "counts no more"),
    "a retracted outcome does too": ("A0ok -B0oom", 1, "AB", False, "counts no more"),
    "a retracted interruption is only missing": ("A0ok -B0interrupted", 0, "B", False, "1 of 2"),
    "a retraction in an older generation changes nothing": (
        "-A0ok B0failed A1ok B1ok",
        1,
        "",
        True,
        "complete",
    ),
    "a retracted failure costs no attempt": ("-B0failed A1ok B1failed", 2, "AB", False, "B failed"),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_open_and_what_it_lacks(block, name):
    history, generation, missing, closed, why = STATES[name]
    cells, active, retracted = block(history)
    found = state([cells["A"].id, cells["B"].id], active, "c1", 0, attempts=2, gone=retracted)
    assert found.generation == generation
    assert found.missing == tuple(cells[one].id for one in missing)
    assert found.closed is closed
    assert why in found.why.replace(cells["A"].id, "A").replace(cells["B"].id, "B")


def test_an_added_arm_opens_the_next_generation(block):
    cells, active, _ = block("A0ok B0ok", members="AB")
    found = state([cells[one].id for one in "ABC"], active, "c1", 0, attempts=2)
    assert (found.generation, len(found.missing)) == (1, 3)
    assert found.why == f"{cells['C'].id} was added"


def test_a_removed_arm_leaves_the_generation_open(block):
    cells, active, _ = block("A0ok C0failed", members="ABC")
    found = state([cells[one].id for one in "AB"], active, "c1", 0, attempts=2)
    assert (found.generation, found.missing) == (0, (cells["B"].id,))


def test_blocks_that_were_joined_get_a_generation_above_both(block):
    cells, first, _ = block("A0failed A1ok", members="A")
    _, second, _ = block("B0ok", members="B")
    found = state([cells["A"].id, cells["B"].id], first + second, "c1", 0, attempts=2)
    assert (found.generation, len(found.missing)) == (2, 2)


def test_one_attempt_means_no_second(block):
    cells, active, _ = block("A0failed B0ok")
    found = state([cells["A"].id, cells["B"].id], active, "c1", 0, attempts=1)
    assert (found.generation, found.closed) == (0, True)


def test_outcomes_that_are_to_be_run_again_open_the_next_generation(block):
    cells, active, _ = block("A0ok B0oom")
    ids = [cells["A"].id, cells["B"].id]
    again = [record for record in active if record.status == "oom"]
    kept = [record for record in active if record.status != "oom"]
    assert state(ids, kept, "c1", 0, attempts=1, gone=again).generation == 1
    _, after, _ = block("A0ok B0oom A1ok B1oom")
    kept = [record for record in after if record.id != again[0].id]
    assert state(ids, kept, "c1", 0, attempts=1, gone=again).closed


def test_repetitions_are_blocks_of_their_own(block):
    cells, active, _ = block("A0ok B0failed", repetition=3)
    assert state([cells["A"].id, cells["B"].id], active, "c1", 0, attempts=2).generation == 0


# history -> the generation whose pair counts (None: no pair)
COUNTS = {
    "a complete pair": ("A0ok B0ok", 0),
    "half a pair is none": ("A0ok", None),
    "pairs never cross generations": ("A0ok B0failed B1ok", None),
    "nor with a failed one between": ("A0ok B0failed A1failed B1ok", None),
    "the newest complete one counts": ("A0ok B0ok A1ok B1ok", 1),
    "an incomplete one does not hide it": ("A0ok B0ok A1ok", 0),
    "nor does a failed one": ("A0ok B0ok A1ok B1failed", 0),
    "nor an invalid one": ("A0ok B0ok A1invalid B1ok", 0),
    "an outcome is complete, and no number takes its place": ("A0ok B0ok A1ok B1oom", None),
    "an outcome is no number": ("A0ok B0timeout", None),
    "an interruption made good within its generation": ("A0interrupted B0ok A0ok", 0),
    "a retracted member leaves the generation": ("A0ok -B0ok", None),
    "and the one before it counts again": ("A0ok B0ok A1ok -B1ok", 0),
    "one conditions hash": ("A0ok/c1 B0ok/c2", None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_which_pair_counts(block, name):
    history, generation = COUNTS[name]
    cells, active, _ = block(history)
    pairs = counting(active, cells["A"], cells["B"])
    assert [one.block.generation for pair in pairs for one in pair] == (
        [] if generation is None else [generation] * 2
    )
    for first, second in pairs:
        assert (first.cell.arm, second.cell.arm) == ("A", "B")
        assert first.status == second.status == "ok"


def test_a_cell_alone_counts_by_the_same_rules(block):
    cells, active, _ = block("A0ok B0failed A1ok")
    [(one,)] = counting(active, cells["A"], None)
    assert one.block.generation == 1


def test_what_was_not_planned_together_is_no_pair(block):
    cells, first, _ = block("A0ok", members="A")
    _, second, _ = block("B0ok", members="B")
    assert counting(first + second, cells["A"], cells["B"]) == []


def test_older_conditions_are_set_apart(block):
    cells, *_ = block(NOTHING)
    old = [one for repetition in range(3) for one in block("A0ok/c1 B0ok/c1", repetition=repetition)[1]]
    new = block("A1ok/c2 B1ok/c2", repetition=2)[1]
    half = block("A1ok/c2", repetition=1)[1]
    pairs = counting(old + new + half, cells["A"], cells["B"])
    assert [(pair[0].block.repetition, pair[0].conditions.hash) for pair in pairs] == [(2, "c2")]


def test_repetitions_come_in_order(block):
    cells, *_ = block(NOTHING)
    records = [one for repetition in (2, 0, 1) for one in block("A0ok B0ok", repetition=repetition)[1]]
    assert [pair[0].block.repetition for pair in counting(records, cells["A"], cells["B"])] == [0, 1, 2]


@given(
    st.lists(st.sampled_from(["ok"] * 4 + ["failed", "invalid", "oom", "timeout"]), min_size=40, max_size=40)
)
def test_any_course_of_a_block_ends_and_gives_at_most_one_pair_of_one_generation(statuses):
    cells = [Cell(f"{name}-{name * 8}", "toy", name, {}, {}, name * 64) for name in "abc"]
    ids = [cell.id for cell in cells]
    records: list[Record] = []
    while not (now := state(ids, records, "c1", 0, attempts=2)).closed:
        cell = next(cell for cell in cells if cell.id == now.missing[0])
        attempt = 1 + sum(record.cell.id == cell.id for record in records)
        records.append(record_of(cell, now.generation, attempt, statuses[len(records)], ids))
    newest = [record for record in records if record.block.generation == now.generation]
    assert sorted(record.cell.id for record in newest) == ids
    # Each of three cells may fail once without closing the block, so there are at most four generations.
    assert len(records) <= 4 * len(ids)
    for pair in counting(records, cells[0], cells[1]):
        assert len({record.block.generation for record in pair}) == 1
    assert len(counting(records, cells[0], cells[1])) <= 1


def record_of(cell: Cell, generation: int, attempt: int, status: str, members: list[str]) -> Record:
    return Record.model_validate(
        {
            "study": {"name": "s", "fingerprint": "f"},
            "cell": {
                "id": cell.id,
                "workload": "toy",
                "arm": cell.arm,
                "factors": {},
                "parameters": {},
                "hash": cell.hash,
            },
            "conditions": {"hash": "c1", "values": {}},
            "block": {"repetition": 0, "generation": generation, "members": members, "position": 0},
            "attempt": attempt,
            "status": status,
            "started": f"2026-01-01T00:00:{attempt:02}+00:00",
            "duration": 1.0,
        }
    )
