"""C4 and other datasets on the Hugging Face hub, read by `datasets`.

Where there is a network, `source: {kind: hub, dataset: allenai/c4, subset: en}` streams the corpus itself, with its own
validation split. Where there is none, copy some of its shards (`en/c4-train.00000-of-01024.json.gz`, ...) and name them as
files: `source: {kind: files, files: {web: [TRAIN, ...]}, validation: {web: [VALIDATION, ...]}}`. Both give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coresident.errors import MachineError, UserError


def hub(name: str, subset: str | None, field: str) -> tuple[Iterator[str], Iterator[str] | None]:
    """A dataset's training and validation texts, streamed; None where it has no validation split.

    Raises MachineError where the hub cannot be reached.
    """
    datasets = _datasets()
    try:
        splits = datasets.load_dataset(name, subset, streaming=True)
    except Exception as error:
        raise MachineError(
            f"the dataset {name} cannot be opened on the Hugging Face hub: {_first_line(error)}",
            "check its name and the network, or give its shards as files (source.kind: files)",
        ) from error
    if "train" not in splits:
        raise UserError(f"the dataset {name} has no split 'train'", "name another dataset (source.dataset)")
    held = _rows(splits["validation"], field, name) if "validation" in splits else None
    return _rows(splits["train"], field, name), held


def _rows(rows: Any, field: str, name: str) -> Iterator[str]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield _text(row, field, f"{name} row {number}")
    except UserError:
        raise
    except Exception as error:
        raise MachineError(
            f"the dataset {name} broke off after row {number}: {_first_line(error)}",
            "check the network, and prepare again",
        ) from error


def _text(row: Any, field: str, origin: str) -> str:
    text = row.get(field)
    if not isinstance(text, str):
        raise UserError(
            f"{origin}: {field!r} is {'missing' if text is None else 'no string'}",
            "give every row its text, or name another key (source.field)",
        )
    return text


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise MachineError("reading the hub needs `datasets`", "pip install 'coresident[data]'") from None
    datasets.disable_progress_bars()
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
