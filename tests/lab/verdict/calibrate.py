"""Simulates studies to see how often the decision procedure decides falsely, and how often it decides at all.

    python tests/lab/verdict/calibrate.py

Each simulated study is two arms measured one run after another on a stand-in clock, in the lab's own order of
blocks. What disturbs the machine acts on the clock and on the order of runs, never on arms, so that pairing
by block has to earn its keep. The decisions are `procedure`'s own; only the machine is simulated. The truth
is put exactly at the claim's threshold, where supported and refuted are both false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from coresident.lab.study.blocks import Group, order
from coresident.lab.study.cells import Cell
from coresident.lab.verdict import procedure
from coresident.lab.verdict.model import State

STUDIES = 2000
BASE = 15.0  # seconds of an undisturbed run
Array = NDArray[np.float64]
# (random, studies, runs) -> seconds of every run, [studies, runs], in the order of time; no arm is favoured.
Machine = Callable[[np.random.Generator, int, int], Array]


@dataclass(frozen=True)
class Design:
    """How many blocks: `smallest` to `largest`, stopping once the comparison is `half_width` narrow."""

    name: str
    smallest: int
    largest: int
    half_width: float = 0.0


NINE = Design("9 blocks", 9, 9)
DESIGNS = (
    Design("3 blocks", 3, 3),
    Design("5 blocks", 5, 5),
    NINE,
    Design("12 blocks", 12, 12),
    Design("3 to 9, until 1 %", 3, 9, 0.01),
    Design("3 to 9, until 3 %", 3, 9, 0.03),
    Design("3 to 12, until 2 %", 3, 12, 0.02),
)


def quiet(noise: float, drift: float = 0.0) -> Machine:
    """Normal noise (relative) on top of a drift (relative, a run)."""

    def seconds(random: np.random.Generator, studies: int, runs: int) -> Array:
        logs = noise * random.standard_normal((studies, runs)) + math.log1p(drift) * np.arange(runs)
        return BASE * np.exp(logs)

    return seconds


def bursts(every: float, lasting: float, slower: float, noise: float) -> Machine:
    """Foreign load by the clock: a run that starts within a burst takes `slower` times as long."""

    def seconds(random: np.random.Generator, studies: int, runs: int) -> Array:
        taken = np.empty((studies, runs))
        clock = np.zeros(studies)
        loaded = random.random(studies) < lasting / (every + lasting)
        switch = random.exponential(np.where(loaded, lasting, every))
        for run in range(runs):
            while (behind := switch <= clock).any():
                loaded = loaded ^ behind
                switch = np.where(
                    behind, switch + random.exponential(np.where(loaded, lasting, every)), switch
                )
            length = BASE * np.where(loaded, slower, 1.0) * np.exp(noise * random.standard_normal(studies))
            taken[:, run] = length
            clock += length
        return taken

    return seconds


def mixture(slow: float, noise: float = 0.01) -> Machine:
    """Runs of 15 s or, with probability `slow`, of 156 s: a cache that is warm or not."""

    def seconds(random: np.random.Generator, studies: int, runs: int) -> Array:
        mode = np.where(random.random((studies, runs)) < slow, 156.0, 15.0)
        return mode * np.exp(noise * random.standard_normal((studies, runs)))

    return seconds


def heavy(scale: float) -> Machine:
    """Delays with a Pareto tail of index 1.5: no variance, and now and then a run many times as long."""

    def seconds(random: np.random.Generator, studies: int, runs: int) -> Array:
        return BASE * (1 + scale * random.pareto(1.5, (studies, runs)))

    return seconds


MACHINES: dict[str, Machine] = {
    "2 % noise": quiet(0.02),
    "drift 1 % a run, 0.1 % noise": quiet(0.001, 0.01),
    "drift 1 % a run, 0.3 % noise": quiet(0.003, 0.01),
    "drift 1 % a run, 2 % noise": quiet(0.02, 0.01),
    "bursts": bursts(every=240.0, lasting=45.0, slower=1.4, noise=0.005),
    "15 s / 156 s, one in two": mixture(0.5),
    "15 s / 156 s, one in five": mixture(0.2),
    "heavy tails": heavy(0.01),
}


@dataclass(frozen=True)
class Tally:
    """What a procedure did with the studies of one machine and one design."""

    machine: str
    design: str
    floor: float
    studies: int
    supported: int
    refuted: int

    @property
    def decided(self) -> float:
        return (self.supported + self.refuted) / self.studies


def simulate(
    machine: str,
    design: Design,
    truth: float = 0.95,
    threshold: float = 0.95,
    floor: float = 0.002,
    studies: int = STUDIES,
) -> Tally:
    """Judge `studies` simulated studies, whose true ratio is `truth`, by the claim "at least `threshold`"."""
    supported = refuted = 0
    for pairs in measured(machine, design.largest, truth, studies):
        state = decision(pairs, design, threshold, floor)
        supported += state is State.SUPPORTED
        refuted += state is State.REFUTED
    return Tally(machine, design.name, floor, studies, supported, refuted)


def measured(machine: str, blocks: int, truth: float, studies: int) -> Iterator[list[tuple[float, float]]]:
    """The seconds of (arm, to) in each block, study after study; the arm takes `truth` times as long."""
    random = np.random.default_rng([blocks, *machine.encode()])
    orders = _orders(blocks)
    arm_first = orders[np.arange(studies) % len(orders)]
    runs = MACHINES[machine](random, studies, 2 * blocks).reshape(studies, blocks, 2)
    # From the order of time to (arm, to).
    seconds = np.where(arm_first[:, :, None], runs, runs[:, :, ::-1])
    seconds[:, :, 0] *= truth
    for study in seconds.tolist():
        yield [(arm, to) for arm, to in study]


def decision(pairs: list[tuple[float, float]], design: Design, threshold: float, floor: float) -> State:
    """Measure block after block as the lab does: at least the fewest, then until narrow, then judge once."""
    found = procedure.ratio(pairs[: design.smallest - 1], floor)
    for blocks in range(design.smallest, design.largest + 1):
        before, found = found, procedure.ratio(pairs[:blocks], floor)
        if blocks == design.largest or procedure.narrow(found, before, design.half_width):
            return procedure.decide(found, (threshold, math.inf))
    raise AssertionError("a design has at least one look")


@cache
def _orders(blocks: int) -> NDArray[np.bool_]:
    """Whether the arm runs first, [seeds, blocks]: the lab's own orders, for many seeds of a study."""
    arms = ("arm", "to")
    group = Group("all", tuple(Cell(arm, "command", arm, {}, {}, arm) for arm in arms))
    return np.array(
        [[order(group, block, seed)[0].arm == "arm" for block in range(blocks)] for seed in range(97)]
    )


def false_decisions(studies: int = STUDIES) -> Iterator[Tally]:
    """Every machine under every design, the truth at the threshold, so that either decision is false.

    With a study's default noise floor, and, where runs stop on width, with none, which is harder.
    """
    for machine in MACHINES:
        for design in DESIGNS:
            yield simulate(machine, design, studies=studies)
            if design.half_width > 0:
                yield simulate(machine, design, floor=0.0, studies=studies)


def power(studies: int = STUDIES) -> Iterator[Tally]:
    """A planted effect of 5 % under 2 % noise, nine blocks, with and without drift."""
    for machine in ("2 % noise", "drift 1 % a run, 2 % noise"):
        yield simulate(machine, NINE, truth=1.05, threshold=1.0, studies=studies)


def _line(what: str, tally: Tally) -> str:
    return f"{what:16} {tally.decided:6.2%}  {tally.design:18} floor {tally.floor:.1%}  {tally.machine}"


if __name__ == "__main__":
    for tally in false_decisions():
        print(_line("false decisions", tally))
    for tally in power():
        print(_line("power, 5 %", tally))
