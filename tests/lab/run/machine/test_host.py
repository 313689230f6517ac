"""Facts about the interpreter's packages, without importing any."""

import importlib.metadata
import sys

from coresident.lab.run.machine import host


def test_packages_are_those_that_are_installed():
    found = host.packages()
    for name in ("torch", "numpy", "pydantic", "ruamel-yaml"):
        assert found[name] == importlib.metadata.version(name)


def test_the_first_on_the_path_wins(tmp_path, monkeypatch):
    for place, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / place / f"Some_Thing-{version}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none")])
    assert host.packages.__wrapped__() == {"some-thing": "2.0"}


def test_a_bracketed_choice_is_read(tmp_path):
    (tmp_path / "setting").write_text("always [madvise] never\n")
    assert host.chosen(str(tmp_path / "setting")) == "madvise"
    assert host.chosen(str(tmp_path / "none")) == ""


def test_nothing_heavy_is_imported_by_asking(python):
    process = python(
        "import sys; from coresident.lab.run.machine import environment, host; host.packages()\n"
        "from coresident.lab.run.doctor import findings; from coresident.lab.run.telemetry import sampler\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'pynvml'} & set(sys.modules)))"
    )
    assert process.stdout.readline() == "[]\n"
