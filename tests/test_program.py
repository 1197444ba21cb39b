"""The program from end to end: flags, files, failures. In this process where that proves the same, else in one of its own."""

import csv
import gc
import json
import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest
import torch
from torchvision import datasets

import data
import train
import utils
from helpers import ROOT, download_host, finish, small_task, start, write_mnist


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own for the run, with the made data set of 60 + 20 pictures."""
    small_task(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, *args, out="run"):
    """main() in this process, with results in folder/out. Returns run.json, the rows of metrics.csv and best.pt."""
    threads, out = torch.get_num_threads(), folder / out
    train.main(["--out", str(out), *args])
    assert torch.get_num_threads() == threads
    with open(out / "metrics.csv", newline="") as file:
        return json.loads((out / "run.json").read_text()), list(csv.DictReader(file)), utils.load_checkpoint(out / "best.pt")


def fails(capfd, *args):
    """main() must end with status 2 and one line, which is returned."""
    with pytest.raises(SystemExit) as end:
        train.main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: error: "), err
    return err


# -------------------------------------------------------------------------------------------------------- bad input

WRONG = (
    "--amp False|--amp fp8|--epochs 0|--epochs -1|--epochs 1.5|--batch-size 0|--accum 0|--lr -1|--lr 0|--lr nan|--lr inf|--seed -1|"
    "--seed 4294967296|--workers -1|--val-size -1|--width 0|--dropout 1|--dropout -0.1|--warmup -0.1|--warmup 12|--clip -1|"
    "--label-smoothing 2|--weight-decay -1|--schedule none|--dataset imagenet|--model transformer|--tokens some|--attention-kernel flash|--model attention --width 30|--device quantum|--device cpu:x|--no-such-flag|--lr|surplus"
).split("|")


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flag_is_one_line(flags, capfd):
    line = fails(capfd, *flags.split())
    assert flags.split()[-1] in line or "expected one argument" in line, line
    print(line)


def test_flags_are_not_abbreviated(capfd):
    assert "--epoch" in fails(capfd, "--epoch", "3")


@pytest.mark.parametrize("flags, lines", [
    ("--tokens all", ["--tokens: has no effect with --model cnn"]),
    ("--model attention --norm batch", ["--norm: has no effect with --model attention"]),
    ("--sync-bn", ["--sync-bn: has no effect without --norm batch"]),
    ("--force", ["--force: has no effect without --init"]),
    ("--model attention --pictures", ["--pictures: has no effect without --evaluate"]),
    ("--evaluate a.pt --save-every 3 --lr 1", ["--save-every: has no effect without training", "--lr: has no effect without training"]),
    ("--sync-bn --norm batch --width 8", []),
    ("--model attention --tokens all --grad-checkpoint", []),
])
def test_flags_without_effect_are_said(flags, lines):
    assert train.without_effect(train.parse_args(flags.split())) == lines


@pytest.mark.parametrize("where", ["build_model", "loss_and_metrics"])
@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_errors_of_the_users_own_code_keep_their_traceback(where, kind, folder, monkeypatch):
    def own_bug(*args):
        raise kind("too many values to unpack")

    monkeypatch.setattr(train, where, own_bug)
    with pytest.raises(kind, match="too many values"):
        train.main(["--out", str(folder / "run"), "--dry-run"])


def test_command_to_go_on_can_be_pasted():
    assert train.resume_command(pathlib.Path("my runs/1"), 1) == "python train.py --resume 'my runs/1/last.pt'"
    assert train.resume_command(pathlib.Path("a"), 3) == "torchrun --standalone --nproc-per-node 3 train.py --resume a/last.pt"


def test_every_flag_is_explained_with_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        train.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    options = [option for option in vars(train.parse_args([]))]
    assert len(options) > 20 and text.count("default") >= len(options)


@pytest.mark.parametrize("file, content, words", [
    ("train-images-idx3-ubyte", b"<html>no such bucket</html>", ["2051"]),
    ("t10k-images-idx3-ubyte", b"", ["16+ bytes", "0 bytes found"]),
    ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x3c" + bytes([255] * 60), ["255", "10 classes"]),
])
def test_broken_file_is_one_line_before_training(file, content, words, tmp_path, capfd):
    (write_mnist(tmp_path / "data") / file).write_bytes(content)
    line = fails(capfd, "--data-dir", tmp_path / "data", "--out", tmp_path / "run")
    assert file in line and all(word in line for word in words)
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_folder_that_holds_a_run_is_refused(folder, capfd):
    run(folder, "--dry-run")
    before = (folder / "run/last.pt").read_bytes()
    capfd.readouterr()
    assert str(folder / "run") in fails(capfd, "--out", folder / "run")
    assert (folder / "run/last.pt").read_bytes() == before


def test_unwritable_folder_is_one_line(folder, capfd):
    (folder / "file").write_text("")
    assert "file" in fails(capfd, "--out", folder / "file/run")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on the size of files on Windows")
def test_full_disk_is_one_line_and_spares_the_old_checkpoint(folder, capfd, monkeypatch):
    """The system refuses, from the third epoch on, to write more than 100 kB to a file; a checkpoint has 5 MB."""
    import resource

    before, epochs = resource.getrlimit(resource.RLIMIT_FSIZE), []
    train_one_epoch = train.train_one_epoch

    def then_full(*args):
        epochs.append(1)
        if len(epochs) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        return train_one_epoch(*args)

    monkeypatch.setattr(train, "train_one_epoch", then_full)
    try:
        line = fails(capfd, "--out", folder / "run", "--epochs", "5", "--batch-size", "60")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print(line)
    assert "File too large" in line and len(epochs) == 3
    for name in ("last.pt", "best.pt"):
        assert utils.load_checkpoint(folder / "run" / name)["epoch"] in (1, 2)


def test_infinite_pixel_stops_and_spares_the_checkpoints(folder, capfd, monkeypatch):
    calls, augment = [], data.augment

    def broken(images, generator):
        calls.append(1)
        images = augment(images, generator)
        if len(calls) == 5:  # epoch 2, batch 2, of 55 digits in batches of 20
            images[0, 0, 3, 3] = float("inf")
        return images

    monkeypatch.setattr(data, "augment", broken)
    line = fails(capfd, "--out", folder / "run", "--epochs", "3", "--batch-size", "20")
    print(line)
    assert "epoch 2, step 2" in line
    for name in ("last.pt", "best.pt"):
        checkpoint = utils.load_checkpoint(folder / "run" / name)
        assert checkpoint["epoch"] == 1 and checkpoint["best"]["val_loss"] < float("inf")
        assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


# ------------------------------------------------------------------------------------------------------------- files


def test_a_run_leaves_what_is_needed_to_repeat_it(folder, capfd):
    facts, rows, best = run(folder, "--epochs", "3", "--batch-size", "16", "--accum", "2", "--seed", "4")
    out = capfd.readouterr().out
    print(out)
    assert facts["args"]["seed"] == 4 and facts["args"]["amp"] == "off" and facts["versions"] == utils.versions()
    assert facts["dataset"] == {"name": "small", "train": 55, "val": 5, "test": 20, "seed": 4, "stream": False} and facts["parameters"] == 421_642
    assert facts["epochs_done"] == 3 and facts["device"] == "cpu" and facts["train_seconds"] > 0
    assert 0 <= facts["test_accuracy"] <= 1 and facts["test_loss"] > 0
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and [row["step"] for row in rows] == ["2", "4", "6"]
    best_row = max(rows, key=lambda row: (float(row["val_accuracy"]), -float(row["val_loss"])))
    assert best["best"]["epoch"] == int(best_row["epoch"]) == best["epoch"]
    assert facts["val_accuracy"] == float(best_row["val_accuracy"])
    last = utils.load_checkpoint(folder / "run/last.pt")
    assert (last["epoch"], last["step"]) == (3, 6) and len(last["metrics"]) == 3 and last["classes"] == list("0123456789")
    assert list(last["model"]) == list(train.networks.SimpleCNN().state_dict())
    for text in ("421,642 parameters", "16 a batch x 2 accumulated x 1 processes = 32 a step; 55 / 32 = 2 steps an epoch, x 3 epochs = 6"):
        assert text in out
    for line in out.splitlines():
        assert "accuracy" not in line or "% (small, " in line  # no accuracy without its data set
    assert f"test accuracy {100 * facts['test_accuracy']:.2f} % (small, 20 pictures)" in out


def test_best_is_the_best_and_the_test_reads_it(folder, monkeypatch):
    evaluate, seen = train.evaluate, []

    def worse_and_worse(model, loader, device, amp, classes=0):
        seen.append((len(loader.dataset), {key: value.clone() for key, value in model.state_dict().items()}))
        return {**evaluate(model, loader, device, amp, classes), "accuracy": 1 / len(seen)}

    monkeypatch.setattr(train, "evaluate", worse_and_worse)
    _, rows, best = run(folder, "--epochs", "3", "--batch-size", "55", "--width", "8")
    assert [size for size, _ in seen] == [5, 5, 5, 20]  # the test set is read once, at the end
    assert best["best"]["epoch"] == 1 and best["best"]["val_accuracy"] == 1.0
    for key, value in best["model"].items():
        assert torch.equal(value, seen[0][1][key]) and torch.equal(value, seen[3][1][key])


@pytest.mark.parametrize("size, batch_size", [(3, 4), (1, 1), (5, 2)])
def test_tiny_training_sets(size, batch_size, tmp_path, monkeypatch):
    small_task(monkeypatch, size, 3)
    facts, rows, best = run(tmp_path, "--epochs", "2", "--batch-size", str(batch_size), "--width", "8")
    assert facts["dataset"] == {"name": "small", "train": size, "val": 0, "test": 3, "seed": 0, "stream": False}
    assert all(float(row["train_loss"]) > 0.1 for row in rows) and rows[0]["val_loss"] == ""
    assert best["epoch"] == 2 and facts["val_accuracy"] is None  # without a validation set the last is taken


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_mixed_precision_on_a_cpu(amp, folder):
    facts, _, best = run(folder, "--dry-run", "--amp", amp, "--width", "8")
    assert facts["args"]["amp"] == amp and facts["test_loss"] < 3
    assert {tensor.dtype for tensor in best["model"].values()} == {torch.float32}
    assert bool(best["scaler"]) == (amp == "fp16")


@pytest.mark.parametrize("flags", ["--no-channels-last", "--deterministic", "--val-size 0", "--no-augment --dropout 0 --clip 0 --schedule constant"])
def test_dry_run_with(flags, folder):
    run(folder, "--dry-run", *flags.split())
    torch.use_deterministic_algorithms(False)


def test_same_seed_same_run_for_all_numbers_of_workers(folder):
    weights = [run(folder, "--epochs", "2", "--batch-size", "10", "--workers", str(workers), "--width", "8", out=f"{workers}-{again}")[2]["model"]
               for workers, again in ((0, 0), (0, 1), (1, 0), (2, 0))]
    other = run(folder, "--epochs", "2", "--batch-size", "10", "--seed", "1", "--width", "8", out="other")[2]["model"]
    for key in weights[0]:
        assert all(torch.equal(weights[0][key], again[key]) for again in weights[1:])
    assert not torch.equal(weights[0]["fc2.weight"], other["fc2.weight"])


# ------------------------------------------------------------------------------------------------------- as a process


def test_import_prints_and_starts_nothing(tmp_path):
    code = "import threading, train; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


IMPORTS_TAKE_THEIR_TIME = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, without Ctrl-C
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C in the middle of the imports
sys.meta_path.insert(0, Finder())
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/train.py", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others on Windows")
def test_ctrl_c_during_the_imports_is_no_traceback():
    done = subprocess.run([sys.executable, "-c", IMPORTS_TAKE_THEIR_TIME, ROOT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of urllib
@pytest.mark.parametrize("status", [403, 503])
def test_no_download_falls_back_and_says_so(status, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.MNIST, "mirrors", [])  # for monkeypatch to put the real ones back
    monkeypatch.setattr(datasets.MNIST, "resources", [])
    with download_host(status) as (point, asked):
        exec(point)  # torchvision asks that host now
        train.main(["--dry-run", "--width", "4"])
        out, err = capfd.readouterr()
        print(out)
        assert asked and str(status) in out.splitlines()[0] and "sample" in out.splitlines()[0]
        assert all("(sample, " in line for line in out.splitlines() if "accuracy" in line)
        assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
        assert (tmp_path / "runs/sample-cnn-1/run.json").exists() and "Warning" not in err
        line = fails(capfd, "--dry-run", "--dataset", "mnist")
    gc.collect()  # here, where the marks above hold: urllib leaves the sockets of refused requests to the collector
    assert str(status) in line and "data/MNIST/raw" in line and "train-images-idx3-ubyte" in line
    assert not (tmp_path / "runs/mnist-cnn-1").exists()


def test_sample_learns_and_a_file_gets_plain_lines(tmp_path, capfd):
    train.main(["--dataset", "sample", "--epochs", "2", "--width", "16", "--out", str(tmp_path / "run")])
    out, err = capfd.readouterr()
    print(out)
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert err == "" and "\r" not in out and facts["test_accuracy"] > 0.85  # 10 % would be chance
    assert f"\ntest accuracy {100 * facts['test_accuracy']:.2f} % (sample, 1,000 digits)" in out
    *_, hardest, seconds, confusion, on = out.splitlines()
    assert hardest.startswith("hardest classes: ") and hardest.count("% right") == 3 and " s from start to end" in seconds
    assert confusion == f"confusion matrix: python train.py --evaluate {tmp_path}/run/best.pt"
    assert on == f"continue: python train.py --resume {tmp_path}/run/last.pt --epochs 4"


# Each look at the clock is a second later than the one before: a line of progress is due at every step.
FAST_CLOCK = """
import itertools, time
ticks = itertools.count()
time.perf_counter = lambda: float(next(ticks))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals on Windows")
def test_terminal_gets_one_line_that_rewrites_itself(tmp_path, monkeypatch):
    import pty

    ours, theirs = pty.openpty()  # 80 columns
    small_task(monkeypatch)
    flags = ("--epochs", "1", "--width", "8", "--batch-size", "7")  # 55 pictures: 8 steps
    process = start(*flags, cwd=tmp_path, before=FAST_CLOCK, output=os.ttyname(theirs))
    text = b""
    while process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            text += os.read(ours, 4096)
    assert finish(process)[0] == 0
    os.close(theirs)
    os.close(ours)
    lines = text.decode().replace("\r\n", "\n").split("\n")
    rewritten = next(line for line in lines if line.count("\r") > 1).split("\r")
    print(*rewritten, sep="\n")
    assert len(rewritten) == 10  # nothing, 8 lines of progress, and what overwrites the last of them
    for word in ("epoch 1/1", "step ", "loss", "acc", "lr", "images/s", "left"):
        assert word in rewritten[1]
    assert {len(line) for line in rewritten[1:-1]} == {79}  # a longer line would wrap, and stay


def test_evaluation_that_is_not_finite_stops_the_run(folder, capfd):
    flags = ["--amp", "fp16", "--lr", "1000", "--warmup", "0", "--clip", "0", "--schedule", "constant", "--epochs", "1", "--width", "8"]
    line = fails(capfd, "--out", folder / "run", "--batch-size", "55", *flags)
    assert "not finite" in line and not (folder / "run/best.pt").exists()


def test_runs_that_leads_nowhere_is_one_line(folder, capfd, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "runs").symlink_to(folder / "unmounted")
    assert "runs" in fails(capfd)


# -------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("flags", [
    "", "--tokens padded --attention-kernel fused", "--tokens all", "--grad-checkpoint --amp fp16 --accum 2", "--amp bf16 --workers 1 --val-size 0",
])
def test_attention_trains_is_evaluated_and_drawn(flags, folder, capfd):
    figures, rows, best = run(folder, "--model", "attention", "--width", "16", "--epochs", "2", "--batch-size", "16", *flags.split())
    assert figures["epochs_done"] == len(rows) == 2 and figures["parameters"] == 7835
    assert all(weight.dtype == torch.float32 for weight in best["model"].values())
    capfd.readouterr()
    train.main(["--evaluate", str(folder / "run/best.pt"), "--pictures"])
    out, err = capfd.readouterr()
    assert f"test accuracy {100 * figures['test_accuracy']:.2f} % (small, 20 pictures)" in out and not err
    assert (folder / "run/attention.png").stat().st_size > 1000


def test_the_models_have_their_own_defaults_and_the_command_line_wins():
    cnn, attention = train.parse_args([]), train.parse_args(["--model", "attention"])
    assert (cnn.width, cnn.dropout) == (32, 0.25) and (attention.width, attention.dropout) == (64, 0.0)
    assert train.parse_args(["--model", "attention", "--dropout", "0.5"]).dropout == 0.5
    assert train.parse_args([], {"model": "attention", "width": 24}).width == 24
