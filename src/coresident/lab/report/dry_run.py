"""What a study would run here, said without writing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coresident.lab.records.store import Store
from coresident.lab.run import preflight
from coresident.lab.run.campaign import read_plan
from coresident.lab.run.notices import notices
from coresident.lab.run.prepare import prepare
from coresident.lab.study.load import Loaded
from coresident.lab.study.plan import reconcile


def as_rows(loaded: Loaded, out: Path, devices: str) -> dict[str, Any]:
    """The plan as data: every cell with what it asks for, after every check that a real run would make."""
    study, begun = loaded.study, read_plan(out)
    records = [] if begun is None else Store(out).records()
    prepared = prepare(loaded, devices, records)
    plan = reconcile(begun, study, prepared.workload, has_data=bool(records))
    preflight.disk(out)
    return {
        "study": study.study,
        "question": study.question,
        "out": str(out),
        "devices": [device.name for device in prepared.devices],
        "blocks": {"min": study.repetitions.min, "max": study.repetitions.limit},
        "controls": list(study.controls),
        "hypotheses": {name: claim.claim for name, claim in study.hypotheses.items()},
        "notices": notices(study, prepared.workload, begun, plan),
        "cells": [
            {
                "cell": cell.id,
                "arm": cell.arm,
                "factors": dict(cell.factors),
                "parameters": dict(cell.parameters),
                "cores": prepared.cores[cell.id],
                "memory_mib": round(prepared.needs[cell.id].memory / 2**20, 1),
            }
            for cell in prepared.cells
        ],
    }


def describe(plan: dict[str, Any]) -> str:
    """The same for a person."""
    fewest, most = plan["blocks"]["min"], plan["blocks"]["max"]
    blocks = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    lines = [
        f"{plan['study']}: {plan['question']}",
        f"on {', '.join(plan['devices'])}, {len(plan['cells'])} cells x {blocks} blocks, "
        f"records would go to {plan['out']}",
        f"controls: {', '.join(plan['controls']) or 'none'}",
        *(f"claim {name}: {claim}" for name, claim in plan["hypotheses"].items()),
        *(f"note: {notice}" for notice in plan["notices"]),
    ]
    for cell in plan["cells"]:
        cores = f", cores {cell['cores']}" if any(cell["cores"]) else ""
        memory = f": at least {cell['memory_mib']:g} MiB" if cell["memory_mib"] else ""
        lines.append(f"cell {cell['cell']}{memory}{cores}")
    return "\n".join(lines)
