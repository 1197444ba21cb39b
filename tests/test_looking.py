"""Looking inside a training: its time, its gradients, where it is not finite, which rate it wants, whether it can learn."""

import csv
import json
import math
import sys
import types
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import model as networks
import train
import utils
from helpers import NORM, SlowDigits, has_another_loss

CPU = torch.device("cpu")
ABOUT = {"name": "small", "items": "pictures", "classes": list("0123456789"), "shape": [1, 28, 28], **NORM}
FLAGS = ["--batch-size", "8", "--width", "4", "--dropout", "0"]


def same_weights(first, second):
    first, second = (utils.load_checkpoint(path)["model"] for path in (first, second))
    return all(torch.equal(first[key], second[key]) for key in first)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------ the range test


def test_a_range_test_leaves_all_as_it_was(folder):
    args = train.parse_args([*FLAGS, "--dropout", "0.3", "--amp", "off", "--workers", "0"])
    utils.set_seed(0)
    model, optimizer, scaler, (loader, _, _), *_ = train.begin_training(args, None, CPU, print)
    before = utils.snapshot(model, optimizer, scaler, {}, CPU)
    groups = [dict(group, params=None) for group in optimizer.param_groups]
    curve = train.range_test(model, loader, optimizer, scaler, args, CPU)
    after = utils.snapshot(model, optimizer, scaler, {}, CPU)
    for key in ("model", "optimizer", "rng"):
        left, right = utils.flat(before[key]), utils.flat(after[key])
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) if torch.is_tensor(left[k]) else left[k] == right[k] for k in left), key
    assert groups == [dict(group, params=None) for group in optimizer.param_groups]
    assert all(parameter.grad is None for parameter in model.parameters())
    rates = [rate for rate, _ in curve]
    assert rates[0] == 1e-5 and rates == sorted(rates) and len(curve) > 30  # more steps than an epoch of the data has


def test_a_rate_is_suggested_between_the_steepest_fall_and_its_end():
    curve = [(10 ** (-5 + i / 10), 2.0 - 1.0 / (1 + math.exp(-(i - 25) / 3))) for i in range(45)]  # falls around 10^-2.5
    rate = train.suggested_rate(curve)
    print(f"steepest at {10 ** -2.5:.1e}, suggested {rate:.1e}, the last at {curve[-1][0]:.1e}")
    assert 10**-2.5 < rate < 10**-1.9
    with pytest.raises(utils.UserError, match="did not fall at any rate"):
        train.suggested_rate([(rate, 2.3) for rate, _ in curve])


def test_find_lr_says_what_to_type(folder, capfd):
    train.main(["--find-lr", *FLAGS, "--no-augment"])
    out = capfd.readouterr().out
    command = next(line for line in out.splitlines() if line.startswith("suggested: "))
    print(command)
    again = train.parse_args(command.removeprefix("suggested: python train.py ").split())
    assert (again.batch_size, again.width, again.dropout, again.augment) == (8, 4, 0, False) and 1e-5 < again.lr < 1
    assert set(again.given) == {"batch_size", "width", "dropout", "augment", "lr"}
    assert "a = loss, by learning rate" in out and (folder / "find-lr.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["find-lr.png"]  # it is no run
    with pytest.raises(SystemExit) as end:
        train.main(["--find-lr", "--resume", "last.pt"])
    assert end.value.code == 2


# ------------------------------------------------------------------------------------------- can it learn at all?


@pytest.mark.parametrize("model", ["cnn", "attention"])
def test_a_network_that_works_learns_a_few_samples_by_heart(model, folder, capfd):
    with pytest.raises(SystemExit) as end:
        train.main(["--overfit", "16", "--model", model, "--width", "16"])
    out = capfd.readouterr().out
    print(out)
    assert end.value.code == 0 and "it can learn: 16 samples by heart" in out


class CutOff(networks.SimpleCNN):
    """Its first layer gets no gradient."""

    def forward(self, images):
        x = F.max_pool2d(self.conv1(images), 2).relu().detach()
        x = F.max_pool2d(self.conv2(x), 2).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


class SoftmaxTwice(networks.SimpleCNN):
    def forward(self, images):
        return super().forward(images).softmax(1)


class Shuffled(data.Digits):
    """Its labels are put to other pictures each time."""

    def __getitems__(self, indices):
        images, labels = super().__getitems__(indices)
        return images, labels[torch.randperm(len(labels))]


class Equal(data.Digits):
    def __getitems__(self, indices):
        images, labels = super().__getitems__(indices)
        return images * 0 + 0.5, labels


def overfit(kind):
    """(reached loss, what is said to be broken) for 16 samples and a network with one fault."""
    args = train.parse_args(["--width", "8", "--dropout", "0", "--label-smoothing", "0", "--warmup", "0", "--schedule", "constant"])
    args.amp = "off"
    args.weight_decay = 0.0
    torch.manual_seed(0)
    images, labels, classes = data.load_mnist(data.SAMPLE)
    digits = {"shuffled": Shuffled, "equal": Equal}.get(kind, data.Digits)(images[:16], labels[:16], classes)
    network = {"cut off": CutOff, "softmax twice": SoftmaxTwice}.get(kind, networks.SimpleCNN)(8, 0.0)
    loader = data.make_loader(digits, 16, collate=partial(data.collate_images, **NORM))
    optimizer = utils.build_optimizer(network, args)
    if kind == "rate 0":
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    steps, loss = train.learn_by_heart(network, loader, optimizer, args, CPU, most_steps=60)
    print(f"{kind}: loss {loss:.4f} after {steps} steps")
    return loss, {what: fault for what, fault in train.what_is_broken(network, loader, before, args, CPU).items() if fault}


@pytest.mark.skipif(has_another_loss(), reason="the faults are those of a classification")
@pytest.mark.parametrize("kind, what, words", [
    ("cut off", "gradients", "none in conv1.weight, conv1.bias"), ("softmax twice", "outputs", "they are probabilities"),
    ("shuffled", "targets", "have changed from one pass to the next"), ("rate 0", "weights", "have not moved"),
    ("equal", "inputs", "all of them are equal"), ("nothing", "learning rate and size", "nothing else is wrong"),
])
def test_five_classic_faults_are_told_apart(kind, what, words):
    loss, faults = overfit(kind)
    first = next(iter(faults))
    print(faults)
    assert first == what and words in faults[what]
    # Above a first layer of chance and under a second softmax a network still learns something; the others do not.
    assert (loss < 0.01) == (kind in ("nothing", "cut off"))


# --------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("flags, steps", [(["--epochs", "2"], 5), (["--epochs", "1", "--batch-size", "64"], 1)])
def test_a_profile_says_where_the_time_goes(flags, steps, folder, capfd):
    common = [*FLAGS, *flags, "--amp", "off"]
    train.main([*common, "--out", "plain"])
    capfd.readouterr()
    train.main([*common, "--out", "run", "--profile"])
    out = capfd.readouterr().out
    lines = out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("operation"))
    table = lines[head + 1 : head + 11]
    shares = [float(line.split()[-1].rstrip("%")) for line in table]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 50 < sum(shares) <= 100.1
    said = lines[head + 11]
    first, last = (int(word.rstrip(",")) for word in said.removeprefix("profile of steps ").split()[:3:2])
    assert last - first + 1 == steps and said.endswith("run/trace.json")
    trace = json.loads((folder / "run/trace.json").read_text())
    assert any("convolution_backward" in event.get("name", "") for event in trace["traceEvents"])
    time = next(line for line in lines if line.startswith("time: data "))
    assert sum(int(word.rstrip("%,;")) for word in time.split(";")[0].split() if "%" in word) in range(97, 104), time
    assert same_weights("plain/last.pt", "run/last.pt")


def test_the_phase_that_takes_the_time_is_named(folder, capfd, monkeypatch):
    monkeypatch.setattr(data, "Digits", SlowDigits)
    train.main([*FLAGS, "--epochs", "1", "--out", "run", "--profile"])
    time = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("time: "))
    print(time)
    assert "look first at data: more --workers" in time
    phases = {"data": 0.1, "forward": 0.2, "backward": 0.5, "optimizer": 0.2}
    assert "backward 50%, optimizer 20%; look first at backward" in utils.look_at_first(phases)
    assert "look first at optimizer" in utils.look_at_first({**phases, "optimizer": 0.5})


# ---------------------------------------------------------------------------------------------- gradients


def test_the_table_of_gradients_by_hand(folder):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    network[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    state, said = {"step": 0}, []
    with utils.watched_gradients(network, optimizer, "g.csv", 2, state, said.append):
        for _ in range(5):
            optimizer.zero_grad()
            network(torch.ones(1, 3)).sum().backward()
            weight, gradient = network[0].weight.norm().item(), network[0].weight.grad.norm().item()
            optimizer.step()
            state["step"] += 1
            if state["step"] == 4:
                expected = weight, gradient, 0.1 * gradient
    rows = rows_of("g.csv")
    assert [row["step"] for row in rows] == ["2"] * 3 + ["4"] * 3  # frozen weights are left out
    assert {row["layer"] for row in rows} == {"0.weight", "0.bias", "1.bias"}
    row = rows[3]
    found = [float(row[name]) for name in ("weight", "gradient", "update")]
    print(found, expected)
    assert found == pytest.approx(expected, rel=1e-5) and float(row["ratio"]) == pytest.approx(expected[2] / expected[0], rel=1e-5)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("numbers, word", [
    ((math.nan, 1, 1e-3), "not finite"), ((0, 1e-4, 1e-3), "its gradient is 0"), ((1, 0, 0), "does not move"),
    ((1, 1, 0.3), "lower --lr"), ((1, 1e-9, 1e-9), "raise --lr"), ((1, 1e-3, 1e-3), None), ((1, 1e-3, ""), None),
])
def test_causes(numbers, word):
    cause = utils.cause_of(*numbers)
    assert (cause is None) if word is None else word in cause


def test_gradients_are_logged_without_a_change_and_no_row_comes_twice(folder, capfd):
    common = [*FLAGS, "--amp", "off", "--epochs", "2"]
    train.main([*common, "--out", "plain"])
    train.main([*common, "--out", "run", "--log-grads", "3"])
    assert same_weights("plain/last.pt", "run/last.pt")
    whole = rows_of("run/gradients.csv")
    steps = utils.load_checkpoint("run/last.pt")["step"]
    assert sorted({int(row["step"]) for row in whole}) == list(range(3, steps + 1, 3)) and len(whole) == 8 * (steps // 3)
    # An earlier checkpoint of the same run: its later rows are written once more.
    train.main([*common, "--out", "other", "--log-grads", "3", "--epochs", "1"])
    (folder / "other/gradients.csv").write_bytes((folder / "run/gradients.csv").read_bytes())
    capfd.readouterr()
    train.main(["--resume", "other/last.pt", "--epochs", "2", "--log-grads", "3"])
    again = rows_of("other/gradients.csv")
    assert [(row["step"], row["layer"]) for row in again] == [(row["step"], row["layer"]) for row in whole]
    assert [row["epoch"] for row in rows_of("other/metrics.csv")] == ["1", "2"]


# --------------------------------------------------------------------------------------------- what is not finite


def not_finite(folder, capfd, *flags):
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, "--amp", "off", "--no-augment", "--val-size", "0", "--epochs", "2", "--out", "run", *flags])
    out, err = capfd.readouterr()
    print(out, err)
    assert end.value.code == 2 and "epoch 1, step 4: loss or gradient is not finite" in err
    checkpoint = utils.load_checkpoint("run/last.pt")
    assert all(value.isfinite().all() for value in checkpoint["model"].values()) and checkpoint["step"] == 0
    return out


class Spoilt(data.Digits):
    """The pixel of one sample of the fourth batch is infinite."""

    calls = 0

    def __getitems__(self, indices):
        images, labels = super().__getitems__(indices)
        Spoilt.calls += 1
        if len(self) == 60 and (Spoilt.calls - 1) % 8 == 3:  # the first epoch is fetched twice, 8 batches each
            images[5, 0, 3, 3] = math.inf
        return images, labels


@pytest.mark.parametrize("flags", [[], ["--norm", "batch"], ["--accum", "1", "--workers", "0"]])
def test_an_infinite_pixel_is_named(flags, folder, capfd, monkeypatch):
    Spoilt.calls = 0
    monkeypatch.setattr(data, "Digits", Spoilt)
    out = not_finite(folder, capfd, *flags)
    assert "back to step 0" in out and "the first layer with an output that is not finite is conv1" in out
    assert out.count("the first layer with an output") == 1
    assert "what comes in is not finite already" in out and "sample 5 of batch 0 of the window: its data are not finite" in out


def test_a_layer_that_overflows_is_named(folder, capfd, monkeypatch):
    class Overflows(nn.ReLU):
        calls = 0

        def forward(self, x):
            Overflows.calls += self.training
            return super().forward(x) * (1e38 if Overflows.calls % 8 == 4 else 1) * 1e3

    def build(args, about):
        network = train.build_cnn(args, about)
        network.fc1 = nn.Sequential(network.fc1, Overflows())
        return network

    monkeypatch.setattr(train, "build_model", build)
    out = not_finite(folder, capfd)
    assert "is fc1.1 (Overflows): its inputs and weights are finite, so it has overflowed" in out


def test_a_label_that_spoils_the_loss_is_named(folder, capfd, monkeypatch):
    monkeypatch.setattr(train, "loss_and_metrics", spoilt_loss)
    spoilt_loss.calls = 0
    out = not_finite(folder, capfd)
    assert "its outputs are finite, but not its loss; look at its label, " in out


def spoilt_loss(outputs, targets, label_smoothing=0.0):
    """The loss of each 7 in the fourth batch is infinite."""
    losses = F.cross_entropy(outputs.float(), targets, reduction="none")
    if len(targets) > 1:
        spoilt_loss.calls += 1
    if (spoilt_loss.calls - 1) % 8 == 3:
        losses = losses + torch.where(targets == targets[2 % len(targets)], math.inf, 0.0)
    return losses.sum(), len(targets), {"accuracy": (outputs.argmax(1) == targets).sum()}


# ----------------------------------------------------------------------------------------- curves, tables, differences


def test_tensorboard_gets_each_epoch_once_and_without_its_package_one_line(folder, capfd, monkeypatch):
    written = {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            for key in [key for key in written if key[1] >= purge_step]:
                del written[key]

        def add_scalar(self, name, value, step):
            assert (name, step) not in written
            written[name, step] = value

        def flush(self):
            pass

        close = flush

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    train.main([*FLAGS, "--epochs", "2", "--out", "run", "--tensorboard"])
    train.main(["--resume", "run/last.pt", "--epochs", "3", "--tensorboard"])
    for name in ("train_loss", "val_loss", "train_accuracy", "val_accuracy", "lr", "grad_norm", "images_per_second"):
        assert [step for key, step in sorted(written) if key == name] == [1, 2, 3], name
    rows = rows_of("run/metrics.csv")
    assert [float(row["val_loss"]) for row in rows] == [written["val_loss", step] for step in (1, 2, 3)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, "--epochs", "1", "--out", "none", "--tensorboard"])
    out, err = capfd.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1 and "--tensorboard: needs the package tensorboard (pip install" in err
    assert out == "" and not (folder / "none").exists()


def test_curves_of_points_by_hand():
    lines = utils.draw_curves({"up": [(1, 0.0), (3, 1.0)], "flat": [(1, 0.5), (3, math.nan)]}, width=5, height=3)
    assert lines == [
        "a = up", "b = flat", "       1 |    a", "     0.5 |b", "       0 |a", "         +-----", "          1   3",
    ]


def test_runs_and_checkpoints_are_shown_and_compared(folder, capfd):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train.main([*FLAGS, "--epochs", "2", "--amp", "off", "--out", name, "--seed", str(seed)])
    capfd.readouterr()
    utils.main(["a", "c"])
    out = capfd.readouterr().out
    print(out)
    assert "a: 2 epochs; smallest validation loss " in out and "b = val_loss of a" in out and "d = val_accuracy of c" in out
    utils.main(["a/last.pt"])
    out = capfd.readouterr().out
    assert "epoch: 2\n" in out and "  conv1.weight (4, 1, 3, 3) float32\n" in out
    utils.main(["a/last.pt", "b/last.pt"])
    assert capfd.readouterr().out == "equal in every argument, weight and state, to the bit\n"
    assert utils.compare_checkpoints("a/last.pt", "c/last.pt", lambda line: None) > 10
    utils.main(["a/last.pt", "c/last.pt"])
    out = capfd.readouterr().out
    assert out.startswith("args.seed: 0 and 1\n") and "model.fc1.weight: differs by up to " in out
    for paths in (["a", "nothing"], ["a/last.pt", "b/last.pt", "c/last.pt"], ["a/metrics.csv"]):
        with pytest.raises(utils.UserError):
            utils.main(paths)


@pytest.mark.parametrize("loss, accuracy, train_loss, words", [
    ([0.5, 0.3, 0.9], [0.8, 0.9, 0.85], [0.5, 0.3, 0.1], "overfitting"),
    ([0.5, 0.3, 0.2], [0.8, 0.9, 0.95], [0.5, 0.3, 0.1], "it still falls: more --epochs"),
    ([0.5, 0.3, 0.4], [0.8, 0.9, 0.95], [0.5, 0.3, 0.1], "jumps by up to 10.00% between the last epochs, 2.18% is the chance of 100"),
])
def test_what_curves_look_like_in_words(loss, accuracy, train_loss, words):
    rows = [
        {"epoch": str(i + 1), "val_loss": str(loss[i]), "val_accuracy": str(accuracy[i]), "train_loss": str(train_loss[i])}
        for i in range(3)
    ]
    text = utils.describe_curve("run", rows, 100)
    print(text)
    assert words in text
