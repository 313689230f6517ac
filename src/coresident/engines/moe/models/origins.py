"""Where expert weights come from: the files of a checkpoint, or numbers drawn for a shape that nobody trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from coresident.engines.moe.layout.record import DTYPES
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.checkpoint import Checkpoint, dense_shapes, read
from coresident.engines.moe.models.stored import Piece

# Numbers drawn once; records are windows of them at places of their own, so that 13 GB of weights cost one copy each.
_TABLE = 1 << 24


@dataclass(frozen=True)
class Files:
    """A checkpoint's own weights."""

    checkpoint: Checkpoint

    @property
    def architecture(self) -> Architecture:
        return self.checkpoint.architecture

    @property
    def identity(self) -> str:
        return self.checkpoint.identity

    @property
    def layers(self) -> int:
        return len(self.checkpoint.experts)

    @property
    def experts(self) -> int:
        return self.architecture.experts

    @property
    def encoding(self) -> str:
        """The dtype of experts as they are stored."""
        return self.checkpoint.expert_dtype

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (tensor(piece) for piece in self.checkpoint.experts[layer][expert])
        return gate, up, down

    def dense(self, name: str) -> Tensor:
        """A tensor that is no expert, as it is stored."""
        return tensor(self.checkpoint.dense[name])


@dataclass(frozen=True)
class Drawn:
    """Random weights of a shape, the same for the same seed: for timing, and for tests of bits."""

    architecture: Architecture
    seed: int
    encoding: str = "BF16"

    @property
    def identity(self) -> str:
        return hashlib.sha256(f"drawn {self.architecture} {self.seed} {self.encoding}".encode()).hexdigest()

    @property
    def layers(self) -> int:
        return len(self.architecture.mixtures)

    @property
    def experts(self) -> int:
        return self.architecture.experts

    @cached_property
    def _table(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        # Twice as long as it is random: a window may start anywhere.
        drawn = torch.empty(_TABLE).normal_(generator=generator).to(DTYPES[self.encoding])
        return torch.cat((drawn, drawn))

    @cached_property
    def _scaled(self) -> dict[float, Tensor]:
        """The table at the spreads of experts' matrices."""
        spreads = {1.0 / size**0.5 for size in (self.architecture.width, self.architecture.expert_width)}
        return {spread: self._table * spread for spread in spreads}

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Windows of one table, not to be written to."""
        width, inner = self.architecture.width, self.architecture.expert_width
        start = f"{layer}/{expert}"
        return (
            self._window(f"{start}/gate", (inner, width), 1.0),
            self._window(f"{start}/up", (inner, width), 1.0),
            self._window(f"{start}/down", (width, inner), 1.0),
        )

    def dense(self, name: str) -> Tensor:
        """Norms are one; an embedding has spread one; matrices keep their input's variance."""
        shape = dense_shapes(self.architecture)[name]
        if len(shape) == 1:
            return torch.ones(shape)
        # A copy, since a product's path depends on where its matrix begins.
        return self._window(name, shape, shape[1] ** 0.5 if "embed" in name else 1.0).clone()

    def _window(self, name: str, shape: tuple[int, ...], gain: float) -> Tensor:
        count, spread = shape[0] * shape[1], gain / shape[1] ** 0.5
        hashed = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        start = int.from_bytes(hashed[:8], "little") % _TABLE
        scaled = self._scaled.get(spread)
        table = self._table if scaled is None else scaled
        parts = [table[start : start + min(count, _TABLE)]]
        while sum(map(len, parts)) < count:
            parts.append(table[: min(_TABLE, count - sum(map(len, parts)))])
        window: Tensor = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(shape)
        return window * spread if scaled is None else window


Origin = Files | Drawn


def tensor(piece: Piece) -> Tensor:
    """The whole of a stored tensor."""
    data = bytearray(read(piece, piece.size))
    return torch.frombuffer(data, dtype=DTYPES[piece.dtype]).reshape(piece.shape)
