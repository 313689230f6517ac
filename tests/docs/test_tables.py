"""The numbers of README and evidence/README are those of the records under evidence/, and nobody typed them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up what they are made of.
    monkeypatch.setitem(sys.modules, "tables", module)
    spec.loader.exec_module(module)
    return module


def test_readme_shows_what_the_evidence_gives(tables: ModuleType) -> None:
    for page, text in tables.pages(ROOT).items():
        assert page.read_text(encoding="utf-8") == text, "run: make readme"


def test_a_changed_record_changes_the_table(tables: ModuleType, tmp_path: Path) -> None:
    source = ROOT / "evidence" / "cpu" / "demo"
    copy = tmp_path / "evidence" / "here" / source.name
    (copy / "records").mkdir(parents=True)
    for path in [source / "study.yaml", source / "plan.json", *(source / "records").iterdir()]:
        (copy / path.relative_to(source)).write_bytes(path.read_bytes())
    made = (tables.summary, tables.claims)
    before = [one(tmp_path / "evidence") for one in made]
    next(iter(sorted((copy / "records").glob("fork*.json")))).unlink()
    after = [one(tmp_path / "evidence") for one in made]
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_every_run_has_its_heading_that_readme_points_to(tables: ModuleType) -> None:
    told = (ROOT / "evidence" / "README.md").read_text(encoding="utf-8").splitlines()
    for one in tables.runs(ROOT / "evidence"):
        assert told.count(f"### {one.verdict.study}") == 1


def test_no_evidence_holds_a_path_of_somebodys_home() -> None:
    for path in (ROOT / "evidence").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text and "/root/" not in text, path


def test_figures_stand_in_the_order_of_their_points_where_some_of_them_are_equal(tables: ModuleType) -> None:
    assert tables._each("; ", ["1", "2", "1"]) == "1; 2; 1"
    assert tables._each("; ", ["1", "1"]) == "1"
    assert tables._each("; ", []) == ""
