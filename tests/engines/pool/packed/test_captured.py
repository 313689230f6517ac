"""A captured step on a CPU, by a stand-in for CUDA graphs: what its graphs read is there for as long as they are."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from coresident.engines.pool.packed.captured import Captured
from coresident.engines.pool.packed.kinds import Kind
from coresident.engines.pool.packed.pack import Pack
from coresident.engines.pool.parameters import DPO


class DanglingError(Exception):
    """A replay read memory that is gone."""


class OverwrittenError(Exception):
    """A graph reads what lies where another graph's replay writes."""


class Pool(TorchDispatchMode):
    """The graphs' memory while nothing is captured: knows which tensors were made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.id, self.open = (0, 1), False
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __enter__(self) -> Any:
        self.open = True
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        for leaf in tree_flatten(found)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given and not func.is_view:
                self._made[_memory(leaf)] = weakref.ref(leaf)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in what was made here and is held since."""
        there = self._made.get(_memory(tensor))
        return there is not None and there() is not None


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graph(TorchDispatchMode):
    """Operations with the tensors that they read, to be done again by `replay`.

    As a CUDA graph it holds its own memory and none that came from outside. A replay that would read what nobody holds any
    more, which on a card is whatever lies there by then, raises instead. So does a capture that reads what was made in the
    `pool` before it: an earlier graph may have taken that memory for its own, and another replay of it writes there.
    """

    made: ClassVar[list[Graph]] = []
    pools: ClassVar[list[Pool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self._calls: list[Callable[[], None]] = []
        # By the identity that a tensor of the graph's own memory had at the capture: that tensor, and what it is now.
        self._first: dict[int, torch.Tensor] = {}
        self._now: dict[int, torch.Tensor] = {}
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        read = [self._read(leaf) for leaf in leaves]
        given = {id(leaf) for leaf in leaves}
        keys = []
        for leaf in tree_flatten(found)[0]:
            fresh = isinstance(leaf, torch.Tensor) and id(leaf) not in given
            keys.append(id(leaf) if fresh else None)
            if fresh:
                self._first[id(leaf)] = self._now[id(leaf)] = leaf

        def call() -> None:
            args, kwargs = tree_unflatten([one() for one in read], form)
            for key, leaf in zip(keys, tree_flatten(func(*args, **kwargs))[0], strict=True):
                if key is not None:
                    self._now[key] = leaf

        self._calls.append(call)
        self._last = keys
        return found

    def _read(self, leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, torch.Tensor):
            return lambda: leaf
        key = id(leaf)
        if key in self._first:
            return lambda: self._now[key]
        if any(pool.has(leaf) for pool in self.pools):
            raise OverwrittenError("a graph reads what was made in the graphs' memory before it")
        there = weakref.ref(leaf)

        def outside() -> torch.Tensor:
            value: torch.Tensor | None = there()
            if value is None:
                raise DanglingError("a replay reads memory that nobody holds any more")
            return value

        return outside

    def replay(self) -> None:
        """All of it again. What the last operation made is what is read afterwards, where it was at the capture."""
        with torch.no_grad():
            for call in self._calls:
                call()
            for key in self._last:
                if key is not None:
                    self._first[key].copy_(self._now[key])


@contextlib.contextmanager
def capturing(graph: Graph, **_: Any) -> Iterator[None]:
    graph.open = True
    with graph:
        yield
    graph.open = False


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Puts the stand-in in place of what `packed.captured` uses of torch.cuda. Returns the graphs that are made."""
    stream = SimpleNamespace(wait_stream=lambda _: None)

    def pool() -> Pool:
        Graph.pools.append(Pool())
        return Graph.pools[-1]

    for name, value in {
        "CUDAGraph": Graph,
        "graph": capturing,
        "MemPool": pool,
        "use_mem_pool": lambda pool: pool,
        "Stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made: list[Graph] = []
    monkeypatch.setattr(Graph, "made", made)
    monkeypatch.setattr(Graph, "pools", [])
    return made


CAPTURED = Kind("captured", partial(Captured, compile=False))


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., DPO]:
    """Three learners with alpha / r of 2, 1 and 2 whose rows are of many lengths; the second one's steps are over first."""
    pairs = [
        {"prompt": "Say it " + "again " * (more // 4), "chosen": "yes " * (1 + more), "rejected": "no"}
        for more in (1, 30, 3, 14, 7, 22)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    own = [
        {"rank": 4, "alpha": 8.0},
        {"rank": 8, "alpha": 8.0, "steps": 9},
        {"rank": 8, "alpha": 16.0},
    ]
    given: dict[str, Any] = {
        "sharing": "packed", "learners": 3, "steps": 14, "max_length": 96, "own": own, "learning_rate": 1e-3,
        "data": {"source": "files", "files": [str(tmp_path / "pairs.jsonl")]}, "dtype": "float64", "batch": 1,
    }  # fmt: skip
    return lambda **values: DPO.model_validate(given | values)


def run(pack: Pack) -> Pack:
    while not pack.over:
        pack.step()
    pack.close()
    return pack


@pytest.mark.parametrize(
    "change", [{}, {"checkpointing": True}, {"reference": "precomputed"}, {"optimizer": "adamw8bit"}], ids=str
)
def test_over_rows_of_many_shapes_it_is_the_plain_step(
    make: Any, settings: Callable[..., DPO], graphs: list[Graph], change: dict[str, Any]
) -> None:
    asked = settings(**change)
    # A last bit can move a moment to its next code of 8 bits.
    within = 1e-4 if asked.optimizer == "adamw8bit" else 1e-6
    plain, captured = run(make(asked)), run(make(asked, kind=CAPTURED))
    assert len(graphs) >= 5, "there are to be several graphs of the same learners"
    for number, adapter in plain.finished.items():
        mine, true = (
            torch.cat([value.flatten() for _, value in sorted(one.items())])
            for one in (captured.finished[number], adapter)
        )
        assert (mine - true).norm() <= within * true.norm()
        assert captured.series[number]["loss"] == pytest.approx(plain.series[number]["loss"], rel=within)


def test_a_graph_that_lets_go_of_what_it_reads_is_seen(
    make: Any, settings: Callable[..., DPO], graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Captured._record
    monkeypatch.setattr(Captured, "_record", lambda *all_of: replace(right(*all_of), current=None))
    with pytest.raises(DanglingError):
        run(make(settings(), kind=CAPTURED))


def test_one_that_reads_what_another_writes_over_is_seen(
    make: Any, settings: Callable[..., DPO], graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, recording = Captured.at, Captured._record

    def record(step: Captured, *given: Any) -> Any:
        # As if nothing had been made before the graphs' memory is opened.
        monkeypatch.setattr(Captured, "at", lambda step, rows: right(step, rows) if graphs_memory() else None)
        try:
            return recording(step, *given)
        finally:
            monkeypatch.setattr(Captured, "at", right)

    def graphs_memory() -> bool:
        return any(pool.open for pool in Graph.pools) or bool(graphs and graphs[-1].open)

    monkeypatch.setattr(Captured, "_record", record)
    with pytest.raises(OverwrittenError):
        run(make(settings(), kind=CAPTURED))


def test_the_others_are_as_in_the_pack_in_which_it_is_masked_bit_for_bit(
    make: Any, settings: Callable[..., DPO], graphs: list[Graph]
) -> None:
    asked = settings(dtype="float32")
    own = list(asked.own)
    own[2] = own[2].model_copy(update={"learning_rate": 1e30, "warmup_steps": 0})
    asked = asked.model_copy(update={"own": tuple(own)})
    with_it, without = (run(make(asked, kind=CAPTURED, masked=masked)) for masked in ((), {2}))
    assert list(with_it.failed) == [2]
    for number in (0, 1):
        assert with_it.series[number] == without.series[number]
        for name, value in with_it.finished[number].items():
            assert torch.equal(value, without.finished[number][name])
