"""Stopped anywhere and resumed, a run ends as the run that was never stopped: to the bit, from files, across processes."""

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import data
import train
import utils
from helpers import SIGNAL_AT, finish, load_small, run_program, small_task, start, torchrun, until, write_mnist

TIMES = ("seconds", "images_per_second", "waiting")  # what two equal runs may differ in
# 55 training pictures in batches of 8, two accumulated: 4 steps an epoch, the last of one batch of 7; 12 steps in all
FLAGS = ["--epochs", "3", "--batch-size", "8", "--accum", "2", "--width", "8"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small_task(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_same(one, other, path=""):
    """Equal to the bit, all the way down."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other)):
            assert_same(*pair, f"{path}/{index}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    else:
        assert one == other, path


def end_of(run):
    """All that a run has come to: weights, optimizer, scaler, learning rates, losses, random states."""
    checkpoint = utils.load_checkpoint(f"{run}/last.pt")
    for row in [*checkpoint["metrics"], checkpoint["best"]]:
        for key in TIMES:
            row.pop(key, None)
    checkpoint["args"].pop("save_every")
    return checkpoint


def straight(*flags, out="straight"):
    train.main([*FLAGS, *flags, "--out", out])
    return end_of(out)


def signal_in_step(at, real=utils.lr_at):
    """An lr_at in whose call for step `at` this process gets SIGTERM."""

    def lr_at(step, *args):
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(step, *args)

    return lr_at


def stopped_and_resumed(monkeypatch, at, *flags, out="stopped"):
    """Stops in step `at`, resumes to the end; both in this process, by way of the file."""
    real = utils.lr_at
    monkeypatch.setattr(utils, "lr_at", signal_in_step(at))
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, *flags, "--out", out])
    assert end.value.code == 128 + signal.SIGTERM
    del end  # a circle through this frame: its loader would be collected at some later time, and wait for its workers
    monkeypatch.setattr(utils, "lr_at", real)
    assert utils.load_checkpoint(f"{out}/last.pt")["step"] == at + 1  # the step was finished
    torch.rand(7), torch.manual_seed(123)  # nothing of this process's state may matter
    train.main(["--resume", f"{out}/last.pt"])
    return end_of(out)


@pytest.mark.parametrize("flags, stops", [
    ("", (0, 3, 5, 7, 11)),  # the first step, the last of an epoch, in the middle, the very last
    ("--workers 2", (5,)),
    ("--amp fp16", (5,)),
    ("--amp bf16", (5,)),
    ("--model attention --dropout 0.1 --grad-checkpoint", (5,)),
    ("--balanced", (5,)),
    ("--schedule step", (5, 7)),
    ("--schedule one-cycle", (5, 7)),
    ("--schedule constant", (5, 7)),
    ("--schedule plateau --lr 1e-9 --epochs 6", (9, 17)),  # nothing improves: it drops
    ("--val-size 0 --no-augment", (6,)),
], ids=lambda value: value.replace("--", "").replace(" ", "-") or "default" if isinstance(value, str) else "")
def test_resume_equals_the_straight_run(flags, stops, folder, monkeypatch):
    expected = straight(*flags.split())
    for at in stops:
        assert_same(expected, stopped_and_resumed(monkeypatch, at, *flags.split(), out=f"stopped-{at}"))
    lrs = [row["lr"] for row in expected["metrics"]]
    print("learning rates by epoch", lrs)
    if "plateau" in flags:
        assert expected["drops"] >= 1 and lrs[-1] < lrs[1]


def test_transform_that_draws_from_the_global_generator_resumes(folder, monkeypatch):
    """Passing over the batches before the stop draws for them once more; the run must go on as if it had not."""
    noisy = functools.partial(data.Digits, transform=lambda image: image + 0.1 * torch.rand(()))
    monkeypatch.setattr(data, "Digits", noisy)
    assert_same(straight(), stopped_and_resumed(monkeypatch, 5))


def test_fp16_scale_and_growth_counter_go_on(folder, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, init_scale=2.0**20, growth_interval=3, enabled=enabled))
    expected = straight("--amp", "fp16")
    resumed = stopped_and_resumed(monkeypatch, 6, "--amp", "fp16")
    print("skipped", expected["skipped"], "scale", expected["scaler"]["scale"], "counter", expected["scaler"]["_growth_tracker"])
    assert expected["skipped"] > 0
    assert_same(expected, resumed)


def test_resume_in_another_process_after_kill(folder):
    """What --save-every left when the process was killed without warning, resumed in a new process with other flags set."""
    expected = straight("--workers", "2")
    kill = SIGNAL_AT.format(at=7, name="SIGKILL")
    status, out, err = run_program(*FLAGS, "--workers", "0", "--out", "killed", "--save-every", "3", cwd=folder, before=kill)
    assert status == -signal.SIGKILL and utils.load_checkpoint("killed/last.pt")["step"] == 6, err
    status, out, err = run_program("--resume", "killed/last.pt", "--workers", "2", cwd=folder)
    print(out)
    assert status == 0 and err == "", err
    assert "--workers: 0 in killed/last.pt, 2 from now on" in out and "--save-every" not in out
    assert_same(expected, end_of("killed"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are read from /proc")
@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_signal_ends_the_step_and_leaves_no_worker(name, status, folder):
    """Sent to the whole process group, as a terminal does, to the workers, as a scheduler does, and then all of it again."""
    flags = ("--epochs", "100000", "--batch-size", "8", "--workers", "2", "--out", "run")
    process = start(*flags, cwd=folder, before="import os; os.setsid()")
    until((folder / "run/metrics.csv").exists, process)
    workers = [int(pid) for pid in (Path("/proc") / f"{process.pid}/task/{process.pid}/children").read_text().split()]
    sent = time.monotonic()
    for _ in range(2):
        for pid in workers:
            os.kill(pid, getattr(signal, name))
        os.killpg(process.pid, getattr(signal, name))
    ended, out, err = finish(process)
    print(out.splitlines()[-1], err, f"{time.monotonic() - sent:.1f} s")
    assert ended == status and err.count("Traceback") == 0
    assert f"stopped by {name}" in out and "--resume run/last.pt" in out
    assert len(workers) == 2 and not any((Path("/proc") / str(pid)).exists() for pid in workers)
    assert utils.load_checkpoint("run/last.pt")["step"] > 0


@pytest.mark.parametrize("at, finished", [(1, 1), (3, 3), (4, 3)])  # the first validation, the last one, the test
def test_signal_in_evaluation_is_answered_after_it(at, finished, folder, monkeypatch, capfd):
    expected = straight()
    evaluate, calls = train.evaluate, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, "--out", "stopped"])
    assert end.value.code == 130 and len(calls) == at and "stopped by SIGINT" in capfd.readouterr().out
    monkeypatch.setattr(train, "evaluate", evaluate)
    assert utils.load_checkpoint("stopped/last.pt")["epoch"] == finished
    train.main(["--resume", "stopped/last.pt"])
    assert_same(expected, end_of("stopped"))


def test_two_processes_stop_together_and_resume(folder):
    flags = [*FLAGS[:2], "--batch-size", "4", "--accum", "2", "--width", "8"]
    status, out, err = run_program(*flags, "--out", "straight", cwd=folder, ranks=2)
    assert status == 0, err
    # One rank alone gets the signal, in step 6; both must stop after the same step, one later, when the other has heard.
    stop = SIGNAL_AT.format(at=5, name="SIGTERM")
    status, out, err = torchrun(*flags, "--out", "stopped", cwd=folder, ranks=2, before=stop)
    assert status != 0 and "stopped by SIGTERM after step 7" in out and "Traceback (most recent call last):\n  File" not in out, err
    assert utils.load_checkpoint("stopped/last.pt")["step"] == 7
    assert "to go on: torchrun --standalone --nproc-per-node 2 train.py --resume stopped/last.pt" in out
    status, out, err = run_program("--resume", "stopped/last.pt", cwd=folder, ranks=2)
    assert status == 0, err
    expected = end_of("straight")
    assert len(expected["rng"]) == 2 and not torch.equal(expected["rng"][0]["torch"], expected["rng"][1]["torch"])
    assert_same(expected, end_of("stopped"))


@pytest.mark.parametrize("at", [2, 3])  # in mid-epoch, and in its last step
def test_one_process_goes_on_as_two_and_then_as_one(at, folder, monkeypatch):
    """What was summed up before the stop is counted once, whoever goes on."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(utils, "lr_at", signal_in_step(at))
        train.main([*FLAGS, "--out", "run"])
    status, out, err = run_program("--resume", "run/last.pt", "--batch-size", "4", "--epochs", "2", cwd=folder, ranks=2)
    assert status == 0 and "1 processes in the checkpoint, 2 here" in out, err
    rows = utils.load_checkpoint("run/last.pt")["metrics"]
    right = [55 * row["train_accuracy"] for row in rows]  # of all 55 samples, each once
    assert right == pytest.approx([round(each) for each in right]) and len(rows) == 2
    train.main(["--resume", "run/last.pt", "--epochs", "3"])
    assert utils.load_checkpoint("run/last.pt")["epoch"] == 3


def test_finished_run_has_nothing_to_do_and_more_epochs_go_on(folder, capfd):
    straight()
    before = os.stat("straight/last.pt").st_mtime_ns
    capfd.readouterr()
    train.main(["--resume", "straight/last.pt"])
    assert "nothing to do" in capfd.readouterr().out and os.stat("straight/last.pt").st_mtime_ns == before
    train.main(["--resume", "straight/last.pt", "--epochs", "4"])
    out = capfd.readouterr().out
    assert "--epochs: 3 in straight/last.pt, 4 from now on" in out and "test accuracy" in out
    checkpoint = utils.load_checkpoint("straight/last.pt")
    assert (checkpoint["epoch"], checkpoint["step"], len(checkpoint["metrics"])) == (4, 16, 4)


def test_command_line_wins(folder, capfd):
    straight("--weight-decay", "0.1")
    train.main(["--resume", "straight/last.pt", "--epochs", "4", "--weight-decay", "0.3", "--batch-size", "55", "--accum", "1"])
    out = capfd.readouterr().out
    for line in ("weight-decay: 0.1 in", "batch-size: 8 in", "accum: 2 in"):
        assert f"--{line}" in out
    checkpoint = utils.load_checkpoint("straight/last.pt")
    assert [group["weight_decay"] for group in checkpoint["optimizer"]["param_groups"]] == [0.3, 0.0]
    assert checkpoint["step"] == 4  # 12 steps of 16 are 3 of 55: the same place in the schedule; then one more
    assert checkpoint["args"]["width"] == 8  # not given, so as stored


@pytest.mark.parametrize("first, then", [("off", "fp16"), ("fp16", "off"), ("bf16", "off")])
def test_mixed_precision_may_change(first, then, folder, monkeypatch, capfd):
    straight("--amp", first, "--epochs", "1")
    train.main(["--resume", "straight/last.pt", "--epochs", "2", "--amp", then])
    out = capfd.readouterr().out
    assert out.count(f"--amp: {first} in straight/last.pt, {then} from now on") == 1
    checkpoint = utils.load_checkpoint("straight/last.pt")
    assert checkpoint["epoch"] == 2 and {t.dtype for t in checkpoint["model"].values()} == {torch.float32}


# --------------------------------------------------------------------------------------------- what is not a checkpoint


def fails(capfd, *args):
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: error: "), err
    print(err)
    return err


@pytest.mark.parametrize("flag", ["--resume", "--evaluate", "--init"])
def test_what_is_not_a_checkpoint_is_one_line(flag, folder, capfd):
    straight("--epochs", "1")
    whole = (folder / "straight/last.pt").read_bytes()
    weight = utils.load_checkpoint("straight/last.pt")["model"]["fc1.weight"].numpy().tobytes()
    at = whole.index(weight[:64]) + 400
    broken = {
        "half.pt": whole[: len(whole) // 2], "empty.pt": b"", "text.pt": b"epoch 1\n" * 50,
        "bit.pt": whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
    }
    for name, content in broken.items():
        (folder / name).write_bytes(content)
        line = fails(capfd, flag, name)
        assert name in line and (name != "bit.pt" or "checksum" in line)
    (folder / "folder").mkdir()
    for name in ("absent.pt", "folder"):
        assert name in fails(capfd, flag, name)


def test_another_structure_is_an_error_with_keys_and_shapes(folder, capfd):
    straight("--epochs", "1")
    line = fails(capfd, "--resume", "straight/last.pt", "--width", "16")
    assert "conv1.weight" in line and "[8, 1, 3, 3]" in line and "[16, 1, 3, 3]" in line


def test_other_data_is_an_error(folder, monkeypatch, capfd):
    straight("--epochs", "1")
    small_task(monkeypatch, 72)
    line = fails(capfd, "--resume", "straight/last.pt")
    assert "'small'" in line and "'train': 55" in line and "'train': 66" in line


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_other_pictures_of_the_same_number_are_an_error(kind, folder, monkeypatch, capfd):
    straight("--epochs", "1")

    def one_changed(*args):
        (images, labels), test_part, about = load_small(60, 20, *args)
        changed = images if kind == "images" else labels
        changed.view(-1)[-1] = (changed.view(-1)[-1] + 1) % 10
        return (images, labels), test_part, data.describe(images, labels, about["classes"], about["name"], about["items"])

    monkeypatch.setattr(data, "load_dataset", one_changed)
    line = fails(capfd, "--resume", "straight/last.pt", "--epochs", "2")
    assert "pictures or labels of small are not those" in line


def test_all_hyperparameters_given_at_a_resume_reach_the_optimizer(folder, capfd):
    straight()
    args = ["--resume", "straight/last.pt", "--epochs", "4", "--lr", "0.002", "--weight-decay", "0.3"]
    train.main(args)
    out = capfd.readouterr().out
    groups = utils.load_checkpoint("straight/last.pt")["optimizer"]["param_groups"]
    assert [(group["peak_lr"], group["weight_decay"]) for group in groups] == [(0.002, 0.3), (0.002, 0.0)]
    assert groups[0]["lr"] == 0.002 * utils.lr_at(15, 16, 0.1)
    line = next(line for line in out.splitlines() if line.startswith("--epochs: 3 "))
    assert "the learning rate jumps from 2.0e-05 to" in line  # a cosine that had ended rises again


def test_weights_alone_cannot_be_resumed_but_can_begin(folder, capfd):
    straight("--epochs", "1")
    utils.save_checkpoint("weights.pt", {"model": utils.load_checkpoint("straight/last.pt")["model"]})
    assert "--init" in fails(capfd, "--resume", "weights.pt", "--width", "8")
    train.main([*FLAGS, "--init", "weights.pt", "--out", "begun", "--epochs", "1"])
    assert "took conv1.weight" in capfd.readouterr().out


def test_state_of_an_absent_gpu_is_skipped_with_one_line(folder, capfd):
    straight("--epochs", "1", "--device", "cpu")
    checkpoint = utils.load_checkpoint("straight/last.pt")
    assert "device" not in checkpoint["args"]  # a run may go on where there is another
    checkpoint["rng"][0] |= {"device": "cuda", "own": torch.zeros(16, dtype=torch.uint8)}
    utils.save_checkpoint("straight/last.pt", checkpoint)
    train.main(["--resume", "straight/last.pt", "--epochs", "2", "--device", "cpu"])
    assert capfd.readouterr().out.count("random state of cuda in the checkpoint, cpu here") == 1


def test_another_seed_is_another_split_and_an_error(folder, capfd):
    straight("--epochs", "1")
    assert "'seed': 1" in fails(capfd, "--resume", "straight/last.pt", "--seed", "1", "--epochs", "2")


def test_resume_into_another_folder_takes_the_best_along(folder):
    straight("--epochs", "2")
    train.main(["--resume", "straight/last.pt", "--out", "other", "--epochs", "3"])
    assert utils.load_checkpoint("other/last.pt")["epoch"] == 3 and (folder / "other/best.pt").exists()
    assert utils.load_checkpoint("straight/last.pt")["epoch"] == 2


@pytest.mark.parametrize("flags", ["--accum 2 --batch-size 5", "--accum 3 --batch-size 5", "--accum 1 --batch-size 55"])
def test_other_windows_in_mid_epoch_train_on_all_that_is_left(flags, folder, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(utils, "lr_at", signal_in_step(2))
        train.main([*FLAGS[:2], "--batch-size", "5", "--accum", "1", "--width", "8", "--out", "run"])
    seen, train_one_epoch = [], train.train_one_epoch
    monkeypatch.setattr(train, "train_one_epoch", lambda *args: seen.append(train_one_epoch(*args)) or seen[-1])
    train.main(["--resume", "run/last.pt", *flags.split()])
    if "55" not in flags:
        assert [round(55 * row["train_accuracy"]) / 55 for row in seen] == pytest.approx([row["train_accuracy"] for row in seen])
    assert len(seen) == 3 and utils.load_checkpoint("run/last.pt")["epoch"] == 3


# ------------------------------------------------------------------------------------------------ weights, evaluation


def test_load_matching_takes_what_fits_and_reports():
    small, large = train.networks.SimpleCNN(8, classes=10), train.networks.SimpleCNN(8, classes=5)
    taken, left = utils.load_matching(large, small.state_dict() | {"extra": torch.zeros(2)})
    assert taken == [f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1") for kind in ("weight", "bias")]
    assert [line.split(" ")[0] for line in left] == ["fc2.weight", "fc2.bias", "extra"]
    assert "(10, 32)" in left[0] and "(5, 32)" in left[0] and "none" in left[2]
    assert torch.equal(large.fc1.weight, small.fc1.weight)
    _, left = utils.load_matching(large, {"fc2.bias": torch.zeros(5)}, force=True)
    assert len(left) == 7 and all("only here" in line for line in left)


def test_init_that_fits_nowhere_is_an_error(folder, capfd):
    utils.save_checkpoint("other.pt", {"model": {"layer.weight": torch.zeros(3)}})
    assert "only 0 of 421,642 parameters" in fails(capfd, "--init", "other.pt")
    straight("--epochs", "1")
    narrow = ["--init", "straight/best.pt", "--width", "9", "--dry-run"]
    assert "--width" in fails(capfd, *narrow)  # the last bias fits, and nothing else
    train.main([*narrow, "--force"])
    assert "took fc2.bias; left" in capfd.readouterr().out


def test_evaluate_gives_the_best_logged_value_and_the_confusion(folder, monkeypatch, capfd):
    straight()
    facts = __import__("json").loads((folder / "straight/run.json").read_text())
    capfd.readouterr()
    train.main(["--evaluate", "straight/best.pt"])
    out = capfd.readouterr().out
    print(out)
    assert f"test accuracy {100 * facts['test_accuracy']:.2f} % (small, 20 pictures), loss {facts['test_loss']:.4f}" in out
    table = [line.split() for line in out.splitlines()[:11]]
    assert table[0] == [*"0123456789", "right"] and [row[0] for row in table[1:]] == list("0123456789")
    counts = torch.tensor([[0 if cell == "." else int(cell) for cell in row[1:11]] for row in table[1:]])
    labels = data.load_dataset()[1][1]
    assert torch.equal(counts.sum(1), labels.bincount(minlength=10))  # a row is a true class
    assert counts.diag().sum().item() == round(20 * facts["test_accuracy"])


def test_evaluate_on_another_data_set_says_so(folder, monkeypatch, capfd):
    straight("--epochs", "1")
    capfd.readouterr()

    def another(*args):
        *parts, about = load_small(60, 30, *args)
        return *parts, {**about, "name": "another"}

    monkeypatch.setattr(data, "load_dataset", another)
    train.main(["--evaluate", "straight/best.pt"])
    out = capfd.readouterr().out
    assert "(another, 30 pictures)" in out and "trained on small, evaluated on another" in out


def test_evaluate_and_export_read_no_training_images(tmp_path, monkeypatch, capfd):
    write_mnist(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    straight("--epochs", "1", "--data-dir", "data")
    expected = utils.load_checkpoint("straight/last.pt")["test"]["loss"]
    for file in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (tmp_path / "data/MNIST/raw" / file).write_bytes(b"not to be read")
    train.main(["--evaluate", "straight/best.pt"])
    assert f"loss {expected:.4f}" in capfd.readouterr().out
    for path in (tmp_path / "data/MNIST/raw").iterdir():
        path.write_bytes(b"")
    train.main(["--export", "straight/best.pt"])
    assert "best.int8.pt" in capfd.readouterr().out


def test_a_run_without_its_best_weights_goes_on(folder, capfd):
    train.main([*FLAGS, "--out", "run"])
    Path("run/best.pt").unlink()
    train.main(["--resume", "run/last.pt", "--epochs", "4"])
    out = capfd.readouterr().out
    assert "run: no best.pt in it; the best epoch is chosen among those to come" in out and "run/best.pt, of epoch 4" in out


@pytest.mark.parametrize("damage", ["cut", "another network", "another run"])
def test_best_weights_are_looked_at_before_a_run_goes_on(damage, folder, capfd):
    train.main([*FLAGS, "--out", "run"])
    best = Path("run/best.pt")
    if damage == "cut":
        best.write_bytes(best.read_bytes()[:1000])
    else:
        other = ["--width", "4"] if damage == "another network" else ["--seed", "1"]
        train.main([*FLAGS, *other, "--out", "other"])
        best.write_bytes(Path("other/best.pt").read_bytes())
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(["--resume", "run/last.pt", "--epochs", "4"])
    out, err = capfd.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1 and "best.pt" in err and "epoch 4/4" not in out


def test_out_may_name_the_folder_that_is_resumed(folder):
    train.main([*FLAGS, "--out", "run"])
    train.main(["--resume", "run/last.pt", "--out", "./run", "--epochs", "4"])
    assert utils.load_checkpoint("run/last.pt")["epoch"] == 4


def test_a_distilled_model_is_evaluated_without_its_teacher(folder, capfd):
    train.main([*FLAGS, "--out", "teacher"])
    train.main([*FLAGS, "--out", "run", "--teacher", "teacher/best.pt", "--schedule", "plateau"])
    Path("teacher/best.pt").unlink()
    capfd.readouterr()
    train.main(["--evaluate", "run/best.pt", "--val-size", "0"])
    assert "test accuracy" in capfd.readouterr().out


def test_resume_init_and_evaluate_exclude_each_other(capfd):
    assert "not allowed with" in fails(capfd, "--resume", "a", "--init", "b")
