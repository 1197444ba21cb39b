"""train.py: the loop's arithmetic, against numbers worked out by hand."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import train
import utils
from helpers import NORM

CPU = torch.device("cpu")
ABOUT = {"classes": list("0123456789"), "shape": [1, 28, 28]}


OUR_LOSS, OUR_QUALITY = train.loss_and_metrics, train.quality


class TwoClasses(nn.Module):
    """logits (0, w . x): at w = 0 a sample of label 0 has the gradient x / 2, whatever else is in the batch."""

    def __init__(self, features):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), x @ self.w], dim=1)


class Rows(torch.utils.data.Dataset):
    """Given rows x (N, ...) and labels (N,), with the attribute that evaluate asks for."""

    def __init__(self, x, labels=None, classes=2):
        self.x, self.labels = torch.as_tensor(x), torch.zeros(len(x), dtype=torch.int64) if labels is None else labels
        self.classes = list(range(classes))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.labels[index]


class InOrder(torch.utils.data.SequentialSampler):
    def set_epoch(self, epoch):
        """Keeps the order."""


def loader_of(dataset, batch_size):
    return torch.utils.data.DataLoader(dataset, batch_size, sampler=InOrder(dataset))


def arguments(**changes):
    settings = dict(accum=1, warmup=0.0, schedule="constant", label_smoothing=0.0, clip=0.0, amp="off")
    return SimpleNamespace(**{**settings, **changes})


def state_of(total_steps=1):
    return train.new_state(total_steps)


def off():
    return torch.amp.GradScaler("cpu", enabled=False)


class RecordingSGD(torch.optim.SGD):
    """SGD that notes the learning rate of each step."""

    def step(self, *args, **kwargs):
        self.lrs = getattr(self, "lrs", []) + [self.param_groups[0]["lr"]]
        return super().step(*args, **kwargs)


def run(model, dataset, batch_size, scaler=None, state=None, show=print, **changes):
    """One epoch of SGD; returns (metrics, state, optimizer)."""
    optimizer, state = RecordingSGD(model.parameters(), lr=changes.pop("lr", 1.0)), state or state_of()
    loader = loader_of(dataset, batch_size)
    metrics = train.train_one_epoch(model, loader, optimizer, scaler or off(), state, arguments(**changes), CPU, show)
    return metrics, state, optimizer


# ------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_sum_of_cross_entropies_by_hand(smoothing):
    logits, targets = torch.tensor([[2.0, 1.0, -1.0], [0.0, 3.0, 0.5]]), torch.tensor([0, 2])
    expected = 0.0
    for row, target in zip(logits.tolist(), targets.tolist()):
        surprise = [math.log(sum(math.exp(x) for x in row)) - x for x in row]  # -log of each class's probability
        expected += (1 - smoothing) * surprise[target] + smoothing * sum(surprise) / 3
    loss, count, metrics = OUR_LOSS(logits.requires_grad_(), targets, smoothing)
    assert loss.item() == pytest.approx(expected) and loss.requires_grad
    assert count == 2 and metrics["accuracy"].item() == 1 and not metrics["accuracy"].requires_grad
    in_16_bits, _, _ = OUR_LOSS(logits.bfloat16(), targets, smoothing)
    assert in_16_bits.dtype == torch.float32 and in_16_bits.item() == pytest.approx(expected)


def test_the_better_epoch_has_more_right_or_as_many_and_a_smaller_loss():
    rows = [{"val_accuracy": a, "val_loss": b} for a, b in ((0.8, 0.1), (0.9, 0.3), (0.9, 0.2))]
    assert sorted(rows, key=OUR_QUALITY) == rows


# ------------------------------------------------------------------------------------- averages, windows, clipping


def test_accumulated_gradient_is_the_mean_over_samples():
    model = TwoClasses(1)  # per-sample gradients 1, 2, 6 in micro-batches of 2 and 1: the mean of means would be 3.75
    metrics, _, _ = run(model, Rows([[2.0], [4.0], [12.0]]), 2, accum=2)
    assert model.w.item() == -3.0 and metrics["grad_norm"] == 3.0


@pytest.mark.parametrize("batches, accum, steps", [(10, 4, 3), (3, 4, 1), (4, 4, 1), (5, 1, 5), (1, 7, 1)])
def test_number_of_steps_and_short_last_window(batches, accum, steps):
    model = TwoClasses(1)
    metrics, state, optimizer = run(model, Rows(torch.rand(batches, 1)), 1, accum=accum)
    assert state["step"] == metrics["step"] == len(optimizer.lrs) == steps and model.w.item() != 0


@pytest.mark.parametrize("accum", [1, 2, 5])
def test_windows_equal_big_batches(accum):
    """Over two epochs, so that a gradient which leaked from one window or epoch into the next would show."""
    torch.manual_seed(0)
    x, labels = torch.rand(26, 1, 28, 28), torch.randint(10, (26,))  # 26 = 2 x 10 + 6: a short window, a short batch
    weights = []
    for batch_size, accumulated in ((10, 1), (10 // accum, accum)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        state, optimizer = state_of(6), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in (0, 1):
            loader = loader_of(Rows(x, labels, 10), batch_size)
            args = arguments(accum=accumulated, clip=1.0, label_smoothing=0.1)
            train.train_one_epoch(model, loader, optimizer, off(), state, args, CPU)
        assert state["step"] == 6
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    print("largest difference", (weights[0] - weights[1]).abs().max().item())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [None, 1024.0, 65536.0])
def test_clipping_sees_the_gradient_not_the_scaled_gradient(scale):
    model = TwoClasses(2)  # x = (6, 8): gradient (3, 4), norm 5; clipped to 1 it is (0.6, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else off()
    metrics, _, _ = run(model, Rows([[6.0, 8.0]]), 1, scaler, clip=1.0)
    assert metrics["grad_norm"] == 5.0
    assert (-model.w.detach()).tolist() == pytest.approx([0.6, 0.8], abs=1e-6)


def test_clip_0_is_off():
    model = TwoClasses(2)
    metrics, _, _ = run(model, Rows([[600.0, 800.0]]), 1, clip=0.0)
    assert (-model.w.detach()).tolist() == [300.0, 400.0] and metrics["grad_norm"] == 500.0


def test_metrics_are_sums_over_samples():
    x = torch.tensor([[-1.0]] * 8 + [[1.0]] * 2)  # w = 1: logits (0, -1) are right for label 0, (0, 1) are wrong
    for batch_size in (1, 3, 4, 10):
        model = TwoClasses(1)
        model.w.data.fill_(1.0)
        metrics, _, _ = run(model, Rows(x), batch_size, lr=1e-9, accum=2)
        right, wrong = math.log1p(math.exp(-1)), math.log1p(math.exp(1))
        assert metrics["train_accuracy"] == 0.8  # batches of 4, 4, 2 have 4, 4, 0: the mean of batches is 0.667
        assert metrics["train_loss"] == pytest.approx((8 * right + 2 * wrong) / 10, abs=1e-6)


# --------------------------------------------------------------------------------------- learning rate, skipped steps


def test_schedule_counts_steps_of_the_optimizer():
    model, state, lrs = TwoClasses(1), state_of(9), []
    for epoch in range(3):  # 3 epochs of 10 batches, accumulation 4: 3 steps an epoch
        lrs += run(model, Rows(torch.rand(10, 1)), 1, state=state, accum=4, warmup=0.25, schedule="cosine")[2].lrs
    peak = lrs.index(max(lrs))
    assert len(lrs) == 9 and lrs[-1] == min(lrs) and lrs[peak:] == sorted(lrs[peak:], reverse=True)
    assert lrs == [utils.lr_at(step, 9, 0.25) for step in range(9)] and lrs.count(1.0) == 1


def test_schedule_scales_the_own_rate_of_each_group():
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    optimizer = torch.optim.SGD([
        {"params": layers[0].parameters(), "lr": 1e-4}, {"params": layers[1].parameters(), "lr": 1e-2},
    ])
    for step in range(10):
        utils.set_lr(optimizer, utils.lr_at(step, 10, 0.3))
        low, high = (group["lr"] for group in optimizer.param_groups)
        assert high / low == pytest.approx(100)
    assert high == 1e-4  # a hundredth of its peak


def test_skipped_step_changes_nothing_and_does_not_advance_the_schedule():
    model = TwoClasses(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)  # gradient 4 x 2^127: infinity
    metrics, state, _ = run(model, Rows([[8.0], [2.0]]), 1, scaler, state_of(2), schedule="cosine", warmup=0.0)
    assert (state["step"], state["skipped"]) == (1, 1)
    assert model.w.item() == -1.0  # the second sample's gradient, 1, at the learning rate of step 0, 1
    assert metrics["lr"] == 1.0 and metrics["grad_norm"] == 1.0


# ------------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("amp", ["off", "fp16", "bf16"])
def test_loss_that_is_not_finite_stops_with_epoch_and_step(bad, amp):
    x = torch.ones(6, 1, 28, 28)
    x[3, 0, 5, 5] = bad  # the second batch of two
    state = {**state_of(3), "epoch": 4}
    scaler = torch.amp.GradScaler("cpu", enabled=amp == "fp16")
    with pytest.raises(utils.UserError, match="epoch 5, step 2: "):
        run(train.networks.SimpleCNN(2), Rows(x, classes=10), 2, scaler, state, amp=amp, lr=0.01)


def test_gradient_that_is_not_finite_stops_in_the_last_step_too():
    class Cliff(TwoClasses):
        def forward(self, x):  # sqrt at 0: a finite loss with an infinite gradient
            return torch.stack([torch.zeros(len(x)), (self.w.sum() * x[:, 0]).sqrt()], dim=1)

    with pytest.raises(utils.UserError, match="epoch 1, step 1: .*inf"):
        run(Cliff(1), Rows([[1.0]]), 1)


def test_nothing_to_train_on_or_to_evaluate_is_an_error():
    empty = torch.utils.data.TensorDataset(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    loader = torch.utils.data.DataLoader(empty, 4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(utils.UserError, match="nothing to train on"):
        train.train_one_epoch(TwoClasses(1), loader, optimizer, off(), {}, arguments(), CPU)
    with pytest.raises(utils.UserError, match="nothing to evaluate"):
        train.evaluate(TwoClasses(1), loader, CPU)


def test_a_loader_that_ends_early_is_an_error():
    class Short(torch.utils.data.IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            yield torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)

    model = TwoClasses(1)
    loader = torch.utils.data.DataLoader(Short(), batch_size=None)
    with pytest.raises(utils.UserError, match="epoch 1: a window without a sample"):
        train.train_one_epoch(model, loader, torch.optim.SGD(model.parameters()), off(), {}, arguments(), CPU)


@pytest.mark.parametrize("growing, words", [(False, "no finite gradient in 20 tries"), (True, "scale 0.5")])
def test_gradients_that_are_never_finite_in_fp16_stop_the_run(growing, words):
    """An infinite gradient at every step: skipped without end, until the scale is 0 and the steps count as taken."""

    class Cliff(TwoClasses):
        def forward(self, x):
            return torch.stack([torch.zeros(len(x)), (self.w.sum() * x[:, 0]).sqrt()], dim=1)

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0 if growing else 2.0**30)
    state = state_of(100)
    with pytest.raises(utils.UserError, match=words):
        run(Cliff(1), Rows(torch.ones(40, 1)), 1, scaler, state)
    assert state["step"] == 0


# ----------------------------------------------------------------------------- data sets, loaders and losses of others


@pytest.mark.parametrize("form", [tuple, dict])
def test_plain_loader_and_a_state_of_the_callers_own_over_epochs(form):
    """What somebody copies: DataLoader(TensorDataset(...), shuffle=True), nothing to keep books of between epochs."""
    torch.manual_seed(0)
    x = torch.randn(50, 3)
    dataset = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())

    def as_dict(samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return {"features": inputs, "targets": targets}

    class Linear(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs["features"] if form is dict else inputs)

    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True, collate_fn=as_dict if form is dict else None)
    model = Linear(3, 2)
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.5), {"mine": "stays"}
    rows = [train.train_one_epoch(model, loader, optimizer, off(), state, arguments(), CPU) for _ in range(5)]
    print([round(row["train_loss"], 3) for row in rows])
    assert state["step"] == 35 and state["epoch"] == 5 and state["mine"] == "stays"
    assert rows[4]["train_loss"] < rows[1]["train_loss"] < rows[0]["train_loss"]
    assert train.evaluate(model, loader, CPU)["accuracy"] > 0.9


def test_another_loss_and_metric_with_float_targets(monkeypatch):
    def regression(outputs, targets, label_smoothing=0.0):
        difference = outputs.float() - targets
        return difference.square().sum(), len(targets), {"mae": difference.detach().abs().sum()}

    monkeypatch.setattr(train, "loss_and_metrics", regression)
    x = torch.arange(6.0)[:, None]
    dataset = torch.utils.data.TensorDataset(x, torch.cat([2 * x, 3 * x], dim=1))  # (B, 2) floats
    model = nn.Linear(1, 2)
    loader = torch.utils.data.DataLoader(dataset, 4)
    state, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [train.train_one_epoch(model, loader, optimizer, off(), state, arguments(), CPU) for _ in range(200)]
    result = train.evaluate(model, loader, CPU)
    print(result)
    assert rows[-1]["train_mae"] < 0.1 * rows[0]["train_mae"] and result["mae"] < 0.5 and result["samples"] == 6


def test_a_window_does_not_hold_the_shared_memory_of_workers():
    """Each shared tensor is an open file, and a window of some hundred batches would run out of them."""
    dataset = torch.utils.data.TensorDataset(torch.rand(12, 3), torch.zeros(12, dtype=torch.int64))
    batches = iter(torch.utils.data.DataLoader(dataset, 2, num_workers=1))
    assert next(batches)[0].is_shared()
    window = train.draw_window(batches, 5, padding=1)
    assert not any(inputs.is_shared() or targets.is_shared() for inputs, targets, _ in window)
    assert [real for _, _, real in window] == [2, 2, 2, 2, 1]


# ------------------------------------------------------------------------------------------------------------- speed


def test_loop_does_not_wait_for_the_device(monkeypatch):
    waits = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _m=method, _n=name, **k: waits.append(_n) or _m(self, *a, **k))
    counts = []
    for batches in (2, 20):
        waits.clear()
        run(TwoClasses(1), Rows(torch.rand(batches, 1)), 1, state=state_of(batches))
        counts.append(len(waits))
    print("reads from the device in epochs of 2 and of 20 steps:", counts)
    assert counts[1] == counts[0]  # all of them are at the end of the epoch


def test_progress_line(monkeypatch):
    clock = iter(range(0, 10000, 6))  # each look at the clock is 6 s later: a line is due at every step
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    lines = []
    run(TwoClasses(1), Rows(torch.rand(4, 1)), 1, state=state_of(8), show=lines.append, lr=0.5)
    assert len(lines) == 4 and all(word in lines[0] for word in ("step 1/4", "loss", "acc", "lr 5.0e-01", "images/s"))
    print(*lines, sep="\n")
    assert lines[0].startswith("step 1/4 ") and " left " in lines[0] and "step 4/4 1:12 left" in lines[-1]


# --------------------------------------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def digits():
    images, labels, classes = data.load_mnist(data.SAMPLE, train=False)
    return data.Digits(images[:300], labels[:300], classes)


def loader_of_digits(digits, batch_size, sampler=None):
    return data.make_loader(digits, batch_size, sampler, collate=functools.partial(data.collate_images, **NORM))


def test_evaluation_is_the_same_for_all_batch_sizes(digits):
    torch.manual_seed(0)
    model = train.networks.SimpleCNN(8)
    results = [train.evaluate(model, loader_of_digits(digits, size), CPU, classes=10) for size in (1, 7, 256, 300)]
    results.append(train.evaluate(model, loader_of_digits(digits, 7, torch.randperm(300).tolist()), CPU, classes=10))  # shuffled
    model.eval()
    with torch.no_grad():
        logits = model(data.normalize(digits.images / 255, **NORM))
    for result in results:
        assert result["accuracy"] == (logits.argmax(1) == digits.labels).double().mean().item()
        assert result["loss"] == pytest.approx(F.cross_entropy(logits, digits.labels).item(), abs=1e-6)
        assert torch.equal(result["confusion"], results[0]["confusion"]) and result["samples"] == 300
    i, j = digits.labels[0], logits[0].argmax()
    assert results[0]["confusion"].sum(1).equal(digits.labels.bincount(minlength=10))  # row = label
    assert results[0]["confusion"][i, j] == ((digits.labels == i) & (logits.argmax(1) == j)).sum()


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_model_as_it_was(training, digits):
    model = nn.Sequential(train.networks.SimpleCNN(2), nn.BatchNorm1d(10)).train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append((module.training, output.requires_grad)))
    train.evaluate(model, loader_of_digits(digits, 100), CPU)
    assert model.training == training and seen == [(False, False)] * 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------ the optimizer


def test_decay_is_for_weights_only():
    args = train.parse_args(["--weight-decay", "0.3"])
    model = train.build_model(args, ABOUT)
    optimizer = utils.build_optimizer(model, args)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        f"{layer}.{kind}": 0.3 if kind == "weight" else 0.0 for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")
    }


# ----------------------------------------------------------------------------------------------------- it can learn


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"))]


@pytest.mark.parametrize("device", DEVICES)
def test_overfits_a_tiny_batch(device):
    device = torch.device(device)
    images, labels, classes = data.load_mnist(data.SAMPLE)
    tiny = data.Digits(images[:16], labels[:16], classes)
    args = train.parse_args(["--lr", "5e-3", "--label-smoothing", "0", "--dropout", "0", "--warmup", "0"])
    args.amp = utils.pick_amp(None, device)  # with mixed precision on a GPU
    utils.set_seed(0)
    model = train.build_model(args, ABOUT).to(device, memory_format=torch.channels_last)
    optimizer, loader = utils.build_optimizer(model, args), loader_of_digits(tiny, 16, data.EpochSampler(16))
    state = state_of(40)
    for epoch in range(40):
        train.train_one_epoch(model, loader, optimizer, off(), state, args, device)
    result = train.evaluate(model, loader, device, args.amp)
    print(f"16 digits after 40 steps: loss {result['loss']:.5f}, accuracy {result['accuracy']}")
    assert result["loss"] < 0.01 and result["accuracy"] == 1.0
