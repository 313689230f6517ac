"""A result file of smolvm's fork-pool harness, as it is published: checked, and with its bare NaN read as what it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coresident.errors import UserError


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _numbers_or_text(value: Any) -> Any:
    """The same with NaN and infinities as text: what a record can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _numbers_or_text(one) for key, one in value.items()}
    return [_numbers_or_text(one) for one in value] if isinstance(value, list) else value


def _measured(value: Any) -> Any:
    return None if isinstance(value, float) and not abs(value) < 1e15 else value


def _not_below_zero(value: float | None) -> float | None:
    if value is not None and value < 0:
        raise ValueError("is below zero")
    return value


def _printable(value: str) -> str:
    if not 0 < len(value) <= 64 or not value.isprintable():
        raise ValueError("is not a name of 1 to 64 printable characters")
    return value


Measured = Annotated[float | None, BeforeValidator(_measured), AfterValidator(_not_below_zero)]
NotNegative = Annotated[float | None, AfterValidator(_not_below_zero)]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_text), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1, le=1 << 31)]


class _Lenient(BaseModel):
    # Later versions of the harness write more; NaN is what this is about.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class PublishedLearner(_Lenient):
    """One learner that said it was done. `train_s` includes building its trainer; losses are rounded to 4 places."""

    lid: Name
    train_s: NotNegative = None
    step_ms: Measured = None
    tok_s: NotNegative = None
    loss0: float | None = None
    lossN: float | None = None  # noqa: N815 - the file's name
    peak_gb: Measured = None

    @property
    def finite(self) -> bool:
        """Whether both losses are numbers."""
        return all(loss is not None and math.isfinite(loss) for loss in (self.loss0, self.lossN))


class Published(_Lenient):
    """The whole file. `share_mode` and `shared_ranges` are written by later versions only."""

    arm: Name
    n: Annotated[int, Field(ge=1, le=4096)]
    steps: Some
    batch: Some
    maxseq: Some
    cpus_per_learner: Count = 0
    cold_cache: bool = False
    alloc_conf: str = ""
    share_weights_env: str = "unset"
    share_mode: str = ""
    shared_ranges: Text = ""
    wall_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    golden_load_s: NotNegative = None
    fork_s: NotNegative = None
    peak_gpu_mib: Measured
    agg_tok_s: float | None = None
    learners: list[PublishedLearner]
    env: Annotated[dict[str, Any], BeforeValidator(_numbers_or_text)] = Field(default_factory=dict)


def read(file: Path) -> Published:
    """A result file. Raises `UserError` naming the file, and its key, for anything else."""
    remedy = "move it away, or give a directory that holds result files only"
    try:
        # Unlike records, these files hold NaN, which Python's reader takes.
        value = json.loads(file.read_text(encoding="utf-8"))
        # Half a surrogate, which an escape can say, is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}", remedy) from None
    try:
        return Published.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{file} is no result of smolvm's harness: {key}: {said[0].lower()}{said[1:]}",
            remedy,
        ) from None
