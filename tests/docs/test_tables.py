"""README's numbers are those of the records under evidence/, and nobody typed them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_shows_what_the_evidence_gives(tables: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == tables.written(readme, ROOT / "evidence"), "run: make readme"


def test_a_changed_record_changes_the_table(tables: ModuleType, tmp_path: Path) -> None:
    source = ROOT / "evidence" / "cpu" / "demo"
    copy = tmp_path / "evidence" / "here" / source.name
    (copy / "records").mkdir(parents=True)
    for path in [source / "study.yaml", source / "plan.json", *(source / "records").iterdir()]:
        (copy / path.relative_to(source)).write_bytes(path.read_bytes())
    before = tables.table(tmp_path / "evidence")
    next(iter(sorted((copy / "records").glob("fork*.json")))).unlink()
    assert tables.table(tmp_path / "evidence") != before


def test_no_evidence_holds_a_path_of_somebodys_home() -> None:
    for path in (ROOT / "evidence").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text and "/root/" not in text, path
