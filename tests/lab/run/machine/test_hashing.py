"""Hashes follow content, are taken once while a file stays as it is, and say so where they cannot be."""

import hashlib

from coresident.lab.run.machine import hashing


def test_a_files_hash_is_its_contents(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"one")
    assert hashing.of(path) == hashlib.sha256(b"one").hexdigest()


def test_a_changed_file_has_another_hash_and_an_unchanged_one_is_not_read_again(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"one")
    first = hashing.of(path)
    misses = hashing._file.cache_info().misses
    assert hashing.of(path) == first
    assert hashing._file.cache_info().misses == misses
    path.write_bytes(b"two")
    assert hashing.of(path) != first


def test_a_folders_hash_follows_names_and_contents_and_not_its_own_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x").write_bytes(b"1")
    assert hashing.of(tmp_path / "a") == hashing.of(tmp_path / "b")
    (tmp_path / "b/sub/x").rename(tmp_path / "b/sub/y")
    assert hashing.of(tmp_path / "a") != hashing.of(tmp_path / "b")


def test_only_wanted_files_count(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = hashing.tree(tmp_path, lambda name: name.endswith(".py"))
    (tmp_path / "a.pyc").write_text("2")
    assert hashing.tree(tmp_path, lambda name: name.endswith(".py")) == before


def test_a_very_large_file_is_known_by_length_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "WHOLE", 10)
    monkeypatch.setattr(hashing, "_EDGE", 4)
    path = tmp_path / "large"
    path.write_bytes(b"head........tail")
    first = hashing.of(path)
    assert first.startswith("edges:")
    path.write_bytes(b"head........TAIL")
    assert hashing.of(path) != first


def test_what_is_not_there_is_missing(tmp_path):
    assert hashing.of(tmp_path / "none") == "missing"
    (tmp_path / "dangling").symlink_to("nowhere")
    assert hashing.of(tmp_path / "dangling") == "missing"
    assert len(hashing.of(tmp_path)) == 64
