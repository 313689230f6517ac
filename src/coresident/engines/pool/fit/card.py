"""What a process takes of a card beside its allocator's memory, measured on an H200 (driver 580.159, CUDA 13.0, PyTorch
2.11): the records in evidence/h200/pool-scale, where each figure was the same in every repetition.

A context with the kernels that a training loads is most of it. Another card's, another driver's or another PyTorch's
may differ by some tens of MiB a process.
"""

from __future__ import annotations

MIB = 1 << 20
# A learner over a base that another process holds: what it adds to the card at the barrier, less what its allocator
# reserves (4319.6 - 3554.0; under MPS 4314.8 - 3554.0).
LEARNER, LEARNER_UNDER_MPS = 765.6 * MIB, 760.8 * MIB
# One that reads a base of its own (7336.3 - 6500.0; under MPS 7331.0 - 6500.0).
LOADING_LEARNER, LOADING_LEARNER_UNDER_MPS = 836.3 * MIB, 831.0 * MIB
# A pack, whatever its number of learners (evidence/h200/pool-high-n: 35532.8 - 34746.0 with 64 of them, and as much with
# 16 and 32; in pool-speed, unquantised and kept whole, 778.8).
PACK = 786.8 * MIB
# The golden process beside its base: what is in use with the learners gone, less the base (3755.8 - 2944.4; under MPS,
# whose server is the next figure, 3822.6 - 2944.4 - 74.6).
GOLDEN, GOLDEN_UNDER_MPS = 811.4 * MIB, 803.6 * MIB
MPS_SERVER = 74.6 * MIB
