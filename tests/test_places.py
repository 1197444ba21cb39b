"""Where people run it: pipes that close, full disks behind them, notebooks, schedulers that start a job again."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import train
import utils
from helpers import ROOT, SIGNAL_AT, finish, run_program, start, until

FLAGS = ["--batch-size", "8", "--width", "4", "--amp", "off"]


def shell(command, folder):
    """(status of the first program of a pipe, what is shown on both outputs) of a line for bash."""
    program = f"{sys.executable} {ROOT / 'train.py'}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", f"{command.replace('PROGRAM', program)}; echo status ${{PIPESTATUS[0]}} >&2"],
        cwd=folder, capture_output=True, text=True, timeout=120, env=environment,
    )
    status = int(done.stderr.split("status ")[-1])
    return status, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is what a full disk looks like")
def test_a_failed_print_is_no_failed_run(tmp_path):
    common = "PROGRAM --dataset sample --epochs 1 --batch-size 500 --width 4 --out"
    status, out, err = shell(f"{common} head | head -1", tmp_path)
    assert status == 0 and out.count("\n") == 1 and err == "status 0\n", err
    status, out, err = shell(f"{common} full > /dev/full", tmp_path)
    assert status == 0 and err == "status 0\n", err
    for run in ("head", "full"):
        assert json.loads((tmp_path / run / "run.json").read_text())["test_accuracy"] > 0


class WriteAlone:
    """What some programs put in the place of standard output."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_standard_output_may_be_an_object_with_write_alone_or_none(folder, monkeypatch):
    lines = WriteAlone()
    monkeypatch.setattr(sys, "stdout", lines)
    train.main(["--epochs", "1", *FLAGS, "--out", "a"])
    monkeypatch.setattr(sys, "stdout", None)
    train.main(["--epochs", "1", *FLAGS, "--out", "b"])
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    train.main(["--epochs", "1", *FLAGS, "--out", "c"])
    assert "test accuracy" in lines.text and all(Path(run, "run.json").exists() for run in "abc")


def test_a_stop_is_said_where_somebody_reads(folder, monkeypatch, capfd):
    """Ctrl-C with `| tee`: tee ends at once, and standard output takes nothing any more."""
    stop = SIGNAL_AT.format(at=3, name="SIGINT") + "\nimport os\nos.dup2(os.open('closed', os.O_WRONLY), 1)"
    os.mkfifo("closed")
    reader = os.open("closed", os.O_RDONLY | os.O_NONBLOCK)
    process = start("--epochs", "3", *FLAGS, "--out", "run", cwd=folder, before=stop)
    until(lambda: Path("run/last.pt").exists(), process)
    os.close(reader)
    status, out, err = finish(process)
    print(err)
    assert status == 130 and "stopped by SIGINT after step 4; to go on: python train.py --resume run/last.pt" in err
    assert "Traceback" not in err


def test_a_locale_that_cannot_write_a_name_gets_it_escaped(tmp_path):
    """And a name with a space is quoted, so that the line can be pasted."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--dataset", "sample", "--dry-run", "--width", "4", "--out", "läufe eins"],
        cwd=tmp_path, capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0 and rb"--evaluate 'l\xe4ufe eins/best.pt'" in done.stdout, done


def test_paths_on_the_command_line(folder, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(folder / "home"))
    train.main(["--epochs", "1", *FLAGS, "--out", "~/run"])
    assert (folder / "home/run/best.pt").exists() and not (folder / "~").exists()
    for flag in ("--resume", "--evaluate", "--init", "--out", "--data-dir", "--dataset"):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            train.main([flag, ""])
        assert end.value.code == 2 and capfd.readouterr().err == f"train.py: error: argument {flag}: an empty path (see --help)\n"


def test_the_same_command_begins_a_run_and_goes_on_with_it(folder, capfd):
    command = ["--epochs", "3", *FLAGS, "--dropout", "0.2", "--out", "run", "--resume", "auto"]
    train.main(["--epochs", "3", *FLAGS, "--dropout", "0.2", "--out", "straight"])
    status, out, err = run_program(*command, cwd=folder, before=SIGNAL_AT.format(at=9, name="SIGTERM"))
    assert status == 143 and "stopped by SIGTERM after step 10" in out, err
    capfd.readouterr()
    train.main(command)
    assert "epoch 1/3" not in capfd.readouterr().out
    straight, again = (utils.load_checkpoint(f"{run}/last.pt")["model"] for run in ("straight", "run"))
    assert all(torch.equal(straight[key], again[key]) for key in straight)
    train.main(command)
    assert "nothing to do, 3 epochs are done" in capfd.readouterr().out
    with pytest.raises(SystemExit) as end:
        train.main(["--resume", "auto"])
    assert end.value.code == 2 and "--resume auto: needs --out" in capfd.readouterr().err


def test_a_folder_belongs_to_one_run_at_a_time(folder, capfd):
    train.main(["--epochs", "1", *FLAGS, "--out", "run"])
    process = start("--resume", "run/last.pt", "--epochs", "100000", cwd=folder, output=str(folder / "said"))
    until(lambda: Path("said").exists() and "epoch 2/" in Path("said").read_text(), process)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(["--resume", "run/last.pt", "--epochs", "9"])
    assert end.value.code == 2 and "run: another run is writing into it" in capfd.readouterr().err
    os.kill(process.pid, signal.SIGKILL)  # who is killed has claimed nothing
    finish(process)
    train.main(["--resume", "run/last.pt", "--epochs", str(utils.load_checkpoint("run/last.pt")["epoch"] + 1)])


def test_from_a_thread_and_with_half_of_torchruns_variables(folder, capfd, monkeypatch):
    done = []

    def in_a_thread():
        train.main(["--epochs", "1", *FLAGS, "--out", "run"])
        done.append(True)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert done
    monkeypatch.setenv("RANK", "0")
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(["--epochs", "1", *FLAGS, "--out", "other"])
    assert end.value.code == 2 and "WORLD_SIZE expected, but not set (torchrun sets RANK and what belongs to it)" in capfd.readouterr().err


def test_a_port_that_is_taken_is_one_line(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        status, out, err = finish(start("--epochs", "1", *FLAGS, cwd=folder, environment=variables))
    errors = [line for line in err.splitlines() if line.startswith("train.py: error: ")]
    print(err)
    assert status == 2 and len(errors) == 1 and f"the processes cannot meet at 127.0.0.1:{port}" in errors[0] and "Traceback" not in err


def test_what_does_not_fit_into_memory_is_said_before_it_is_built(folder, capfd):
    for flags in (["--width", "1000000"], ["--width", "999999996", "--model", "attention"]):
        with pytest.raises(SystemExit) as end:
            train.main(["--epochs", "1", *flags])
        err = capfd.readouterr().err
        print(err)
        assert end.value.code == 2 and "parameters, to train them takes" in err and err.count("\n") == 1


def test_compile_without_a_compiler_is_one_line(folder, capfd, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit) as end:
        train.main(["--epochs", "1", *FLAGS, "--compile"])
    assert end.value.code == 2 and "--compile: needs a C++ compiler such as g++, and there is none" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are read from /proc")
@pytest.mark.parametrize("kind", ["killed", "waits for ever"])
def test_a_lost_worker_is_one_line_and_all_is_saved(kind, folder):
    before = """
    import time, data
    data.PATIENCE = 2
    class Waits(data.Digits):
        calls = 0
        def __getitems__(self, indices):
            self.calls += 1  # of this worker: 4 or 3 in the first epoch, and then 1 or 2 more
            if self.calls > 5 and KIND and data.get_worker_info():
                time.sleep(1000)
            return super().__getitems__(indices)
    data.Digits = Waits
    """.replace("KIND", str(kind != "killed"))
    process = start("--epochs", "100000", *FLAGS, "--workers", "2", "--out", "run", cwd=folder, before=before)
    until(Path("run/metrics.csv").exists, process)
    if kind == "killed":
        workers = (Path("/proc") / f"{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[0]), signal.SIGKILL)
    status, out, err = finish(process)
    print(err)
    assert status == 2 and err.count("\n") == 1 and err.startswith("train.py: error: --workers: DataLoader ")
    assert "python train.py --resume run/last.pt" in out + err
    saved = utils.load_checkpoint("run/last.pt")
    assert saved["step"] == 7 * saved["epoch"] + saved["batch"] > 0
    assert kind == "killed" or saved["batch"] > 0  # not what the end of the epoch has saved
