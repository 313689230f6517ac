"""One expert as one record: gate, up, down, then (4-bit) their scales and minima, padded to whole pages.

So that one read brings an expert into memory and one copy installs it in a slot. The gate and the up projection lie together
as one [2 I, H] matrix, the gate first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.errors import UserError

Encoding = Literal["BF16", "F16", "F32", "Q4"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
PAGE = 4096
GROUP = 64
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Weights(NamedTuple):
    """An expert's matrices: gate_up [2 I, H], the gate first, and down [H, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class RecordFormat:
    """Where everything lies in a record of a model of `width` H and experts of `inner` width I.

    Q4 keeps w = q * scale + minimum for q of 0 to 15 in groups of 64 along a row, scale and minimum in float16: 4.5 bits a
    weight. Of a group's 32 bytes the low halves are its first 32 weights.
    """

    width: int
    inner: int
    encoding: Encoding

    def __post_init__(self) -> None:
        if self.encoding == "Q4" and (self.width % GROUP or self.inner % GROUP):
            raise UserError(
                f"4-bit groups of {GROUP} do not divide rows of {self.width} and {self.inner} weights",
                "leave --bits out (in a study, encoding: stored)",
            )

    @property
    def weights(self) -> int:
        """Bytes of gate, up and down."""
        return 3 * self.width * self.inner * self._bits // 8

    @property
    def payload(self) -> int:
        """Bytes that mean something."""
        groups = 3 * self.width * self.inner // GROUP
        return self.weights + (4 * groups if self.encoding == "Q4" else 0)

    @property
    def size(self) -> int:
        """Bytes of the whole record: the payload in whole pages."""
        return -(-self.payload // PAGE) * PAGE

    @property
    def _bits(self) -> int:
        return {"BF16": 16, "F16": 16, "F32": 32, "Q4": 4}[self.encoding]

    def stored(self, records: Tensor) -> Stored:
        """Views of `records`, uint8 [S, size]: all S experts at once, as they are stored."""
        both, half = 2 * self.inner * self.width, self.width * self.inner
        if self.encoding != "Q4":
            rows = records.view(DTYPES[self.encoding])
            return Stored(
                _split(rows[:, :both], 2 * self.inner, self.width),
                _split(rows[:, both : both + half], self.width, self.inner),
                None,
                None,
            )
        codes = records[:, : self.weights]
        scales = records[:, self.weights : self.payload].view(torch.float16)
        first, second = both // GROUP, half // GROUP
        upper = _split(scales[:, : 2 * first], 2, 2 * self.inner, self.width // GROUP)
        lower = _split(scales[:, 2 * first : 2 * (first + second)], 2, self.width, self.inner // GROUP)
        return Stored(
            _split(codes[:, : both // 2], 2 * self.inner, self.width // 2),
            _split(codes[:, both // 2 :], self.width, self.inner // 2),
            upper,
            lower,
        )

    def encode(self, gate: Tensor, up: Tensor, down: Tensor, into: Tensor | None = None) -> Tensor:
        """The record, uint8 [size], of gate [I, H], up [I, H] and down [H, I] of any float dtype; written `into` one."""
        record = torch.empty(self.size, dtype=torch.uint8) if into is None else into
        record[self.payload :] = 0
        places = self.stored(record[None])
        half = self.inner
        for weight, place, scales in (
            (gate, places.gate_up[0, :half], _of(places.upper_scales, slice(None, half))),
            (up, places.gate_up[0, half:], _of(places.upper_scales, slice(half, None))),
            (down, places.down[0], _of(places.lower_scales, slice(None))),
        ):
            if scales is None:
                place.copy_(weight)
            else:
                codes, found = quantise(weight.float())
                place.copy_(codes)
                scales.copy_(found)
        return record


class Stored(NamedTuple):
    """Records as views [S, ...]: weights, or 4-bit codes with scales and minima [S, 2, rows, groups]."""

    gate_up: Tensor
    down: Tensor
    upper_scales: Tensor | None
    lower_scales: Tensor | None

    def expert(self, slot: int, dtype: torch.dtype) -> Weights:
        """The matrices of the expert in `slot`, in `dtype`: views where they are stored so."""
        if self.upper_scales is None or self.lower_scales is None:
            return Weights(self.gate_up[slot].to(dtype), self.down[slot].to(dtype))
        return Weights(
            dequantise(self.gate_up[slot], self.upper_scales[slot]).to(dtype),
            dequantise(self.down[slot], self.lower_scales[slot]).to(dtype),
        )


def _of(scales: Tensor | None, rows: slice) -> Tensor | None:
    """Scales and minima [2, rows, groups] of some rows of the first record."""
    return None if scales is None else scales[0, :, rows]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [R, C] to codes uint8 [R, C / 2] and float16 [2, R, C / 64] of scales and minima, rounded to nearest.

    Each group's range is cut into 15 steps (asymmetric round-to-nearest, as MLX and llama.cpp's Q4_1 do).
    """
    groups = _split(weight, -1, GROUP)
    least = groups.amin(-1).half()
    # From the minimum as it is kept: then the largest weight is reached whatever the rounding did.
    scale = ((groups.amax(-1) - least.float()) / 15).half()
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    # In place: an arena is filled by many threads, and what they allocate they also wait for.
    codes = (groups - least.float()[..., None]).div_(safe[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    packed = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return packed.flatten(1), torch.stack((scale, least))


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 [R, C] that codes [R, C / 2] and scales [2, R, C / 64] stand for."""
    halves = _split(codes, -1, GROUP // 2)
    values = torch.cat((halves & 15, halves >> 4), -1).float()
    return (values * scales[0].float()[..., None] + scales[1].float()[..., None]).flatten(1)


def _split(rows: Tensor, *sizes: int) -> Tensor:
    """Rows [S, ...] as views [S, *sizes]."""
    return rows.unflatten(1, sizes)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x: Tensor, weights: Weights) -> Tensor:
    """An expert on rows x [M, H]: down(silu(gate x) * up x), [M, H]."""
    gate, up = F.linear(x, weights.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weights.down)
