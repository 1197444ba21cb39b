"""A checkpoint is a stranger's file: what it may say, what is checked when it is opened, and where nothing is written."""

import os
import sys
from pathlib import Path

import pytest

import utils

# ------------------------------------------------------------------------------------------------- scratch files


def test_a_link_under_the_scratch_files_name_is_not_followed(tmp_path, monkeypatch):
    """Others may write in the folder, and guess the name: the content must not go where their link leads."""
    monkeypatch.setattr(utils.os, "urandom", lambda count: b"\0" * count)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    guessed = tmp_path / f".last.pt.{'00' * 8}.tmp"
    monkeypatch.setattr(utils, "remove_scratch", lambda path: guessed.symlink_to(victim))
    with pytest.raises(utils.UserError, match="last.pt"):
        utils.write_atomically(tmp_path / "last.pt", lambda file: file.write(b"weights"))
    assert victim.read_text() == "precious" and not (tmp_path / "last.pt").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no links for everybody on Windows")
def test_a_link_that_lies_there_is_removed_and_what_it_leads_to_stays(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".last.pt.tmp").symlink_to(victim)
    (tmp_path / ".last.pt.folder.tmp").mkdir()
    utils.write_atomically(tmp_path / "last.pt", lambda file: file.write(b"weights"))
    assert victim.read_text() == "precious" and (tmp_path / "last.pt").read_bytes() == b"weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".last.pt.folder.tmp", "last.pt", "victim"]


def test_what_killed_runs_have_left_does_not_pile_up(tmp_path):
    for number in range(5):
        (tmp_path / f".last.pt.{number}.tmp").write_bytes(b"half")
    (tmp_path / ".best.pt.0.tmp").write_bytes(b"another file's")
    utils.write_atomically(tmp_path / "last.pt", lambda file: file.write(b"whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".best.pt.0.tmp", "last.pt"]


def test_an_error_in_the_middle_leaves_no_scratch_file(tmp_path):
    def write(file):
        file.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        utils.write_atomically(tmp_path / "last.pt", write)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_permissions_that_the_system_asks_for(tmp_path):
    """Not those of tempfile, which nobody else may read."""
    utils.write_atomically(tmp_path / "last.pt", lambda file: file.write(b"x"))
    (tmp_path / "other").write_bytes(b"x")
    assert os.stat(tmp_path / "last.pt").st_mode == os.stat(tmp_path / "other").st_mode
