"""Never pooled: control and treatment, two amounts of work, two drivers. Never lost: what was retracted."""

from __future__ import annotations

from coresident.lab.records import query
from coresident.lab.records.generations import counting


def test_what_was_asked_differently_or_ran_otherwise_is_never_pooled(store, cell, record):
    ten_on, ten_off = cell("fork", steps=10), cell("none", steps=10)
    twenty_on, twenty_off = cell("fork", steps=20), cell("none", steps=20)
    members = (ten_on, ten_off, twenty_on, twenty_off)
    expected = {}
    for driver, shift in (("driver-1", 0.0), ("driver-2", 1000.0)):
        for one, speed in zip(members, (100.0, 200.0, 300.0, 400.0), strict=True):
            expected[one.hash, driver] = {speed + shift + repetition for repetition in range(3)}
            for repetition in range(3):
                first = driver == "driver-1"
                store.add(
                    record(
                        one,
                        repetition,
                        generation=0 if first else 1,
                        attempt=1 if first else 2,
                        conditions=driver,
                        members=members,
                        speed=speed + shift + repetition,
                    )
                )
    table = query.aggregate(store.run)
    assert len(table) == 8
    for row in table.itertuples():
        values = expected.pop((row.cell_hash, row.conditions_hash))
        assert (row.min, row.median, row.max, row.n) == (min(values), sorted(values)[1], max(values), 3)
    assert not expected

    pairs = counting(store.active(), ten_on, ten_off)
    assert [(one.metrics["speed"].value, other.metrics["speed"].value) for one, other in pairs] == [
        (1100.0 + repetition, 1200.0 + repetition) for repetition in range(3)
    ]

    taken = pairs[1][0]
    store.retract(taken.id, "fan was off", "2026-01-02")
    table = query.aggregate(store.run).set_index(["cell_hash", "conditions_hash"])
    row = table.loc[(ten_on.hash, "driver-2")]
    assert (row["min"], row["median"], row["max"], row["n"]) == (1100.0, 1101.0, 1102.0, 2)
    # Its block falls back on the older driver's generation, which must not come in beside the newer.
    assert [pair[0].block.repetition for pair in counting(store.active(), ten_on, ten_off)] == [0, 2]
    shown = query.records(store.run).set_index("record")
    assert bool(shown.loc[taken.id, "retracted"]) and shown.loc[taken.id, "value"] == 1101.0
    assert shown["retracted"].sum() == 1 and len(shown) == 24
