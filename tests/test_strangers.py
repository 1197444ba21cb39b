"""A checkpoint is a stranger's file: what it may say, what is checked when it is opened, and where nothing is written."""

import os
import sys
from pathlib import Path

import pytest

import torch

import data
import fuzz
import train
import utils
from helpers import small_task

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


# ---------------------------------------------------------------------------------------- what a checkpoint may say


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run of one epoch."""
    monkeypatch.chdir(tmp_path)
    small_task(monkeypatch)
    train.main(["--epochs", "1", "--width", "4", "--batch-size", "16", "--amp", "off", "--out", "run"])
    return tmp_path / "run"


def change(path, function):
    checkpoint = utils.load_checkpoint(path)
    function(checkpoint)
    torch.save(checkpoint, path)


def error_of(capfd, *words):
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main([str(word) for word in words])
    err = capfd.readouterr().err
    print(err)
    assert end.value.code == 2 and err.count("\n") == 1 and "weights_only" not in err and "\x1b" not in err and len(err) < 700
    return err


def test_stored_arguments_do_not_choose_the_verb_or_what_is_written(run, capfd):
    orders = {"export": "run/best.pt", "out": "elsewhere", "dry_run": True, "predict": ["run/best.pt", "a.png"], "profile": True}
    for name in ("last.pt", "best.pt"):
        change(run / name, lambda checkpoint: checkpoint["args"].update(orders))
    before = sorted(path.name for path in run.iterdir())
    train.main(["--evaluate", "run/best.pt"])
    assert "test accuracy" in capfd.readouterr().out
    train.main(["--resume", "run/last.pt", "--epochs", "2"])
    assert "(small, 20 pictures)" in capfd.readouterr().out and not Path("elsewhere").exists()
    assert sorted(path.name for path in run.iterdir()) == sorted({*before, "mistakes.png"})


@pytest.mark.parametrize("key, value, words", [
    ("label_smoothing", -1, "label-smoothing: -1 is not from 0 to 1"), ("amp", "foo", "invalid choice: 'foo'"),
    ("workers", 10**6, "1000000 is not from 0 to 256"), ("width", [4], "width: invalid int value: '[4]'"),
    ("augment", "yes", "ignored explicit argument 'yes'"), ("lr", "\x1b[31m", "invalid float value"),
])
def test_stored_arguments_are_checked_like_flags(key, value, words, run, capfd):
    change(run / "last.pt", lambda checkpoint: checkpoint["args"].update({key: value}))
    message = error_of(capfd, "--evaluate", "run/last.pt")
    assert words in message and "run/last.pt: its argument" in message


def test_an_argument_that_is_newer_than_the_checkpoint_has_its_default(run, capfd):
    change(run / "last.pt", lambda checkpoint: checkpoint["args"].pop("clip"))
    train.main(["--resume", "run/last.pt", "--epochs", "2"])
    assert utils.load_checkpoint(run / "last.pt")["args"]["clip"] == 1.0


def spoil_moments(checkpoint):
    checkpoint["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize("spoil, words", [
    (lambda c: c.update(epoch=-3), "epoch cannot be '-3'"), (lambda c: c.update(step=10**18), "step cannot be"),
    (spoil_moments, "exp_avg of the optimizer has the shape (3,), its parameter (4, 1, 3, 3)"),
    (lambda c: c["optimizer"]["state"][0].pop("exp_avg"), "no exp_avg for one of the parameters"),
    (lambda c: c["model"]["fc2.bias"].fill_(torch.nan), "fc2.bias is not finite"),
    (lambda c: c["data"].update(std=[0.0]), "data: std cannot be '[0.0]'"), (lambda c: c["data"].update(classes=[]), "data: classes"),
    (lambda c: c["rng"][0].update(torch=torch.zeros(5)), "its state does not fit"), (lambda c: c.pop("rng"), "no rng in it"),
    (lambda c: c.update(this_rank=["x"]), "this_rank cannot be"),
])
def test_what_cannot_be_is_said_with_its_key(spoil, words, run, capfd):
    change(run / "last.pt", spoil)
    assert words in error_of(capfd, "--resume", "run/last.pt", "--epochs", "2")


def test_a_type_that_is_refused_is_named_in_full(run, capfd):
    change(run / "last.pt", lambda checkpoint: checkpoint.update(where=Path("x")))
    message = error_of(capfd, "--evaluate", "run/last.pt")
    assert "pathlib.PosixPath" in message and "torch.serialization.add_safe_globals allows it" in message


def test_a_bare_state_dict_is_named_and_begins_a_run(run, capfd):
    torch.save(utils.load_checkpoint(run / "best.pt")["model"], "bare.pt")
    assert "a bare state_dict, which --init takes" in error_of(capfd, "--evaluate", "bare.pt")
    train.main(["--init", "bare.pt", "--epochs", "1", "--width", "4", "--out", "again"])
    assert "took conv1.weight" in capfd.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_and_a_file_that_would_unpack_to_more_are_refused(tmp_path, capfd, monkeypatch):
    import zipfile

    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.pt")
    assert "pipe.pt: not a checkpoint of this program, or damaged: no regular file" in error_of(capfd, "--evaluate", "pipe.pt")
    with zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", bytes(50_000_000))
    assert "compressed, to unpack it would take 50,000,000 bytes" in error_of(capfd, "--evaluate", "bomb.pt")


def test_best_weights_that_are_replaced_while_a_run_goes_on_are_found(run, capfd, monkeypatch):
    train.main(["--epochs", "1", "--width", "4", "--batch-size", "16", "--seed", "1", "--out", "other"])
    real = train.write_tables

    def replace_best(folder, *args):
        real(folder, *args)
        (folder / "best.pt").write_bytes(Path("other/best.pt").read_bytes())

    monkeypatch.setattr(train, "write_tables", replace_best)
    assert "run/best.pt: not of this run" in error_of(capfd, "--resume", "run/last.pt", "--epochs", "2")
    assert utils.load_checkpoint(run / "last.pt")["epoch"] == 2  # nothing is lost but the test


@pytest.mark.parametrize("kind", ["checkpoint", "data"])
def test_some_of_the_damaged_files(kind, tmp_path, monkeypatch):
    """All of them: python tests/fuzz.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load_dataset", data.load_dataset)  # fuzz changes these two
    monkeypatch.setattr(data, "fetch_mnist", data.fetch_mnist)
    threads = torch.get_num_threads()
    try:
        for words, wrong in fuzz.run_cases(kind, range(1000, 1025), seed=0):
            print(words[:150])
            assert wrong is None, words
    finally:
        torch.set_num_threads(threads)
