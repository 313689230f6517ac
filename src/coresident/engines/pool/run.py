"""One pool run as the lab and a user ask for it: what is checked first, the course, and what is reported.

It holds no base and imports no torch: what it adds to the pool's memory is an interpreter.
"""

from __future__ import annotations

from typing import NoReturn

from coresident.engines.pool.base.base import ensure
from coresident.engines.pool.base.loading import check_mappable
from coresident.engines.pool.card import device_rules
from coresident.engines.pool.findings import Findings, report
from coresident.engines.pool.job import HOLDS, Hold, Job
from coresident.engines.pool.packed import rules as packed_rules
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.course import GOLDEN, ZYGOTE, Course
from coresident.engines.pool.processes.crew import Casualty, Patience
from coresident.engines.pool.processes.pack_course import PackCourse
from coresident.engines.pool.sharing import page_cache
from coresident.errors import MachineError
from coresident.workload import Reporter

PATIENCE = Patience()


def run(parameters: DPO, cell: Reporter) -> None:
    """Train the pool and report it. Raises `MemoryError`, `FloatingPointError` or `MachineError` naming what
    failed.
    """
    if parameters.sharing == "smolvm":
        from coresident.engines.pool.peers.smolvm import harness

        device_rules.check_on(parameters, cell.device)
        harness.run(parameters, cell)
    else:
        drive(parameters, cell)


def drive(
    parameters: DPO, cell: Reporter, hold: Hold | None = None, patience: Patience = PATIENCE
) -> Findings:
    """`run`, with the seams that a test needs: `hold` is how learners hold the base whatever
    `parameters.sharing` asks.
    """
    device_rules.check_on(parameters, cell.device)
    packed_rules.check(parameters)
    hold = HOLDS[parameters.sharing] if hold is None else hold
    with cell.phase("base"):
        directory = ensure(parameters.base, parameters.dtype)
        if hold == "mapped":
            check_mappable(directory, parameters.dtype)
    cell.work.mkdir(parents=True, exist_ok=True)
    job = Job(
        parameters=parameters,
        hold=hold,
        base=str(directory.path),
        events=str(cell.events),
        work=str(cell.work),
        cpus=[list(cores) for cores in cell.cpus],
        device=cell.device,
    )
    with cell.phase("page cache"):
        cached = page_cache.arrange(directory.files, parameters.page_cache)
    try:
        led = PackCourse if parameters.sharing == "packed" else Course
        findings = led(job, cell, job.layout(directory).size, patience).run()
    except Casualty as casualty:
        _end_with(casualty)
    findings.cached = cached
    if parameters.page_cache == "cold":
        largest = max(directory.files, key=lambda file: file.stat().st_size)
        findings.raw_rate = page_cache.raw_rate(largest)
    report(parameters, findings, cell)
    return findings


def _end_with(casualty: Casualty) -> NoReturn:
    said = str(casualty)
    if casualty.member in (GOLDEN, ZYGOTE):
        # None of the user's learners: what happened to it, happened to all of them.
        said = f"the pool ended: {casualty.reason}"
    killed = casualty.reason.removeprefix("it was killed by ")
    if casualty.member in (GOLDEN, ZYGOTE) and killed != casualty.reason:
        said = f"the {casualty.member} process died ({killed})"
    if casualty.status == "oom":
        raise MemoryError(said) from None
    if casualty.status == "nonfinite":
        raise FloatingPointError(said) from None
    remedy = casualty.remedy or "see the cell's log for what that process wrote last"
    raise MachineError(said.removesuffix(f"; {casualty.remedy}"), remedy) from None
