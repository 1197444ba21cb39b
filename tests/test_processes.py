"""Many processes, one result: gradients, weights and sums of 1, 2 and 3 real processes; streams; failures."""

import csv
import json
import struct
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import data
import train
import utils
from helpers import NORM, SIGNAL_AT, run_program, small_task, torchrun, write_mnist
from model import SimpleCNN

FLAGS = ["--width", "4", "--no-augment", "--dropout", "0", "--epochs", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small_task(monkeypatch, 61, 19)  # 56 to train on, 5 to validate: 3 ranks divide neither
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The same number of digits as files, for a stream."""
    write_mnist(tmp_path / "data", train=61, test=19)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(run):
    with open(f"{run}/metrics.csv", newline="") as file:
        return list(csv.DictReader(file)), json.loads(Path(f"{run}/run.json").read_text())


# ---------------------------------------------------------------------------------------------------- one result


# 56 samples, batch 12: 12 12 12 12 8, the last window of two is a short one; 3 ranks: 4 each, and 3 3 2 at the end
@pytest.mark.parametrize("ranks, each", [(2, 6), (3, 4)])
def test_processes_train_as_one_with_the_whole_batch(ranks, each, folder):
    flags = [*FLAGS, "--accum", "2", "--clip", "0.5"]
    if ranks == 3:
        train.main([*FLAGS, "--out", "teacher"])
        flags += ["--teacher", "teacher/best.pt"]  # who has nothing to teach to nobody
    train.main([*flags, "--batch-size", "12", "--out", "one"])
    writes = "import utils, os\ndef write(path, *args, real=utils.write_atomically):\n    assert os.environ['RANK'] == '0'\n    return real(path, *args)\nutils.write_atomically = write"
    launch = torchrun if ranks == 2 else run_program
    status, out, err = launch(*flags, "--batch-size", each, "--out", "many", cwd=folder, ranks=ranks, before=writes)
    assert status == 0 and out.count("test accuracy") == 1 and out.count("epoch 2/2  validation") == 1, err
    assert f"{each} a batch x 2 accumulated x {ranks} processes = 24 a step; 56 / 24 = 3 steps an epoch" in out
    one, many = (utils.load_checkpoint(f"{run}/last.pt") for run in ("one", "many"))
    error = max((one["model"][key] - many["model"][key]).abs().max().item() for key in one["model"])
    print(f"{ranks} processes: largest difference of a weight after {one['step']} steps: {error:.1e}")
    assert error < 1e-5 and one["step"] == many["step"] == 6
    for (ours, alone), name in zip(zip(rows_of("many"), rows_of("one")), ("metrics", "run")):
        if name == "metrics":
            for mine, theirs in zip(ours, alone, strict=True):
                for key in ("train_loss", "train_accuracy", "grad_norm", "val_loss", "val_accuracy", "lr"):
                    assert float(mine[key]) == pytest.approx(float(theirs[key]), rel=1e-4), key
        else:
            assert ours["test_accuracy"] == pytest.approx(alone["test_accuracy"]) and ours["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
            assert ours["dataset"] == alone["dataset"] and ours["val_accuracy"] == alone["val_accuracy"]


WORKER = """
import os, sys, torch, torch.distributed as dist
from functools import partial
import data, train, utils
from model import SimpleCNN
from torch.nn.parallel import DistributedDataParallel
rank, world_size, device = utils.init_distributed(torch.device("cpu"))
"""


def run_ranks(ranks, body, folder):
    """Runs `body` on real processes; returns (status, standard output, standard error)."""
    lines = [WORKER, "def body():", textwrap.indent(textwrap.dedent(body), "    "), "body()", "utils.leave_distributed()"]
    return run_program(cwd=folder, ranks=ranks, script=None, before="\n".join(lines))


def test_gradients_are_exchanged_once_a_window_and_evaluation_counts_no_sample_twice(folder):
    """13 samples, batch 2, accumulation 3, two ranks: rank 0 has seven samples, rank 1 six."""
    status, out, err = run_ranks(2, """
        images, labels, classes = data.load_mnist(data.SAMPLE)
        digits = data.Digits(images[:13], labels[:13], classes)
        args = train.parse_args(["--accum", "3", "--batch-size", "2", "--clip", "0", "--amp", "off", "--lr", "1e-9"])
        torch.manual_seed(0)
        network = DistributedDataParallel(SimpleCNN(2, dropout=0.0))
        circle = [network]  # as a fork may have it: what only garbage collection frees
        circle.append(circle)
        exchanges = []
        def count(state, bucket):
            exchanges.append(1)
            return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])
        network.register_comm_hook(None, count)
        optimizer, off = torch.optim.SGD(network.parameters(), lr=0.0), torch.amp.GradScaler("cpu", enabled=False)
        collate = partial(data.collate_images, mean=[0.1307], std=[0.3081])
        loader = data.make_loader(digits, 2, data.EpochSampler(13, 0, 2, rank), collate=collate)
        seen = []
        grads = lambda: seen.append([p.grad.clone() for p in network.parameters()])
        train.train_one_epoch(network, loader, optimizer, off, train.new_state(2), args, device, after_step=grads)
        five = data.Digits(images[:5], torch.tensor([3, 1, 1, 1, 1]), classes)
        class Three(torch.nn.Module):
            def forward(self, x):
                return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10).float() * 9
        result = train.evaluate(Three(), data.make_loader(five, 2, range(rank, 5, 2), collate=collate), device, classes=10)
        torch.save({"grads": seen, "exchanges": len(exchanges), "result": result}, f"rank{rank}.pt")
    """, folder)
    assert status == 0, err
    found, other = (torch.load(f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    images, labels, classes = data.load_mnist(data.SAMPLE)
    digits = data.Digits(images[:13], labels[:13], classes)
    torch.manual_seed(0)
    network = SimpleCNN(2, dropout=0.0)
    x, y = data.collate_images(digits.__getitems__(list(data.EpochSampler(13))), **NORM)
    for grads, part in zip(found["grads"], (slice(0, 12), slice(12, 13)), strict=True):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(x[part]), y[part], label_smoothing=0.05).backward()
        error = max((a - p.grad).abs().max().item() for a, p in zip(grads, network.parameters(), strict=True))
        print(f"largest difference of a gradient: {error:.1e}")
        assert error < 1e-6
    assert found["exchanges"] == 2  # one bucket, two windows of 3 and 1 batches
    for result in (found["result"], other["result"]):
        assert result["accuracy"] == 1 / 5 and result["samples"] == 5 and result["confusion"][:, 3].tolist()[:4] == [0, 4, 0, 1]


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("train_size, batch", [(5, 2), (1, 4)])
def test_fewer_samples_than_a_batch_of_all_ranks_ends(train_size, batch, tmp_path, monkeypatch):
    small_task(monkeypatch, train_size, 3)
    status, out, err = run_program(*FLAGS, "--batch-size", batch, "--out", "run", cwd=tmp_path, ranks=2)
    assert status == 0, err
    assert json.loads((tmp_path / "run/run.json").read_text())["epochs_done"] == 2
    assert utils.load_checkpoint(tmp_path / "run/last.pt")["metrics"][0]["train_loss"] > 1


def test_a_rank_that_fails_ends_the_run_with_its_own_error(folder):
    fail = "import os, train\ndef broken(*args, real=train.F.cross_entropy, **kwargs):\n    if os.environ['RANK'] == '1' and kwargs.get('label_smoothing'):\n        raise RuntimeError('rank one has a bad day')\n    return real(*args, **kwargs)\ntrain.F.cross_entropy = broken"
    status, out, err = run_program(*FLAGS, "--out", "run", cwd=folder, ranks=2, before=fail)
    assert status != 0 and "rank one has a bad day" in err


def test_sync_bn_on_cpus_is_plain_batch_norm_and_one_line(folder):
    status, out, err = run_program(*FLAGS, "--norm", "batch", "--sync-bn", "--batch-size", "8", "--out", "run", cwd=folder, ranks=2)
    assert status == 0 and out.count("--sync-bn") == 1, err
    accuracy = rows_of("run")[1]["test_accuracy"]
    train.main(["--resume", "run/last.pt", "--epochs", "3"])  # in one process
    assert rows_of("run")[1]["epochs_done"] == 3 and 0 <= accuracy <= 1


# ---------------------------------------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_norms_are_torchs_and_none_adds_nothing(norm):
    torch.manual_seed(0)
    network, images = SimpleCNN(6, 0.0, norm=norm), torch.randn(5, 1, 28, 28)
    layers = {"none": [], "batch": [torch.nn.BatchNorm2d(6), torch.nn.BatchNorm2d(12)], "group": [torch.nn.GroupNorm(2, 6), torch.nn.GroupNorm(4, 12)]}[norm]
    first, second = layers or [torch.nn.Identity()] * 2
    textbook = torch.nn.Sequential(
        network.conv1, first, torch.nn.ReLU(), torch.nn.MaxPool2d(2), network.conv2, second, torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), network.fc1, torch.nn.ReLU(), network.fc2,
    )
    assert (network(images) - textbook(images)).abs().max() < 1e-6
    assert (network.eval()(images) - textbook.eval()(images)).abs().max() < 1e-6
    assert (set(network.state_dict()) == set(SimpleCNN(6).state_dict())) == (norm == "none")
    assert network(images[:1]).shape == (1, 10)


def test_batch_norm_with_a_batch_of_one(tmp_path, monkeypatch, capfd):
    small_task(monkeypatch, 9, 5)
    monkeypatch.chdir(tmp_path)
    flags = ["--norm", "batch", "--width", "4", "--epochs", "1", "--val-size", "0"]
    train.main([*flags, "--batch-size", "4", "--out", "four"])  # 4, 4 and 1
    assert utils.load_checkpoint("four/best.pt")["model"]["norm1.running_mean"].isfinite().all()
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main([*flags, "--batch-size", "1"])
    err = capfd.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and "--norm group" in err and "--batch-size" in err
    train.main([*flags, "--norm", "group", "--batch-size", "1", "--out", "one"])


def test_accumulation_equals_the_big_batch_with_group_norm_but_not_with_batch_norm():
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 28, 28), torch.arange(8)
    differences = {}
    for norm in ("group", "batch"):
        network = SimpleCNN(4, 0.0, norm=norm)
        whole = torch.autograd.grad(torch.nn.functional.cross_entropy(network(x), y), list(network.parameters()))
        halves = [torch.autograd.grad(torch.nn.functional.cross_entropy(network(x[i::2]), y[i::2]) / 2, list(network.parameters())) for i in (0, 1)]
        differences[norm] = max((w - a - b).abs().max().item() for w, a, b in zip(whole, *halves))
    print(differences)
    assert differences["group"] < 1e-6 < 1e-4 < differences["batch"]


# ---------------------------------------------------------------------------------------------------- streams


def numbered(folder, count, labels=None):
    """IDX files in which the first pixels of image i are i % 256 and i // 256. Returns their paths."""
    images = torch.zeros(count, 28, 28, dtype=torch.uint8)
    images[:, 0, 0], images[:, 0, 1] = torch.arange(count) % 256, torch.arange(count) // 256 % 256
    files = [folder / name for name in data.IDX_FILES[:2]]
    files[0].write_bytes(struct.pack(">4I", 2051, count, 28, 28) + images.numpy().tobytes())
    files[1].write_bytes(struct.pack(">2I", 2049, count) + bytes(labels or [i % 10 for i in range(count)]))
    return files


def numbers(batch):
    images, labels = batch
    pixels = (images[:, 0, 0, :2] * 255).round().long()
    assert images.dtype == torch.float32 and images.shape[1:] == (1, 28, 28) and labels.dtype == torch.int64
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 12])
def test_stream_gives_every_item_once(workers, ranks, tmp_path):
    files, found, lengths = numbered(tmp_path, 10), [], []
    for rank in range(ranks):
        stream = data.DigitStream(files, 10, 2, world_size=ranks, rank=rank, buffer=4)
        batches = list(DataLoader(stream, None, num_workers=workers))
        assert len(batches) == len(stream)
        lengths.append([len(labels) for _, labels in batches])
        own = [number for batch in batches for number in numbers(batch)]
        assert all(0 <= number < 10 for number in own)
        assert stream.padding == (1 if ranks == 3 and rank > 0 else 0)
        found += own[: len(own) - stream.padding]
    assert sorted(found) == list(range(10)) and all(each == lengths[0] for each in lengths)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_begins_where_it_stopped(workers, tmp_path):
    files, stream = numbered(tmp_path, 50), None

    def batches_of(epoch, **start):
        stream.set_epoch(epoch, **start)
        return [(numbers(batch), batch[0].tolist()) for batch in DataLoader(stream, None, num_workers=workers)]

    stream = data.DigitStream(files, 50, 4, seed=2, world_size=2, rank=1, buffer=20)
    whole = batches_of(3)
    assert len(whole) == len(stream) == 7
    assert batches_of(3, start=12) == whole[3:] and batches_of(3, start=28) == [] and batches_of(3) == whole
    assert batches_of(4) != whole
    with pytest.raises(ValueError, match="start 6 .* batch size 4"):
        stream.set_epoch(3, start=6)


def test_draws_of_a_stream_are_those_of_the_data_set_in_memory(tmp_path):
    files = numbered(tmp_path, 20)
    files[0].write_bytes(files[0].read_bytes()[:16] + (data.SAMPLE / "MNIST/raw" / files[0].name).read_bytes()[16 : 16 + 20 * 784])
    files[1].write_bytes(struct.pack(">2I", 2049, 20) + bytes(range(20)))  # the label is the index
    digits = data.Digits(data.read_idx(files[0], 3).unsqueeze(1), torch.arange(20), range(20), augment=True, seed=3)
    for epoch in (0, 2):
        digits.set_epoch(epoch)
        for batch_size, workers in ((3, 0), (4, 2)):
            stream = data.DigitStream(files, 20, batch_size, augment=True, seed=3)
            stream.set_epoch(epoch)
            for images, indices in data.make_loader(stream, 0, workers=workers):
                expected, _ = digits.__getitems__(indices.tolist())
                torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_stream_shuffles_within_its_buffer_repeats_and_differs_between_epochs(tmp_path):
    files, orders = numbered(tmp_path, 3000), {}
    for workers in (0, 2):
        for epoch in (0, 1):
            stream = data.DigitStream(files, 3000, 32, left_out=torch.arange(0, 3000, 12), buffer=500)
            stream.set_epoch(epoch)
            order = [number for batch in data.make_loader(stream, 0, workers=workers) for number in numbers(batch)]
            assert orders.setdefault(epoch, order) == order  # the same for any number of workers
            assert sorted(order) == [i for i in range(3000) if i % 12]
    assert orders[0] != orders[1]
    order = torch.tensor(orders[0])
    print(f"correlation of place and index {torch.corrcoef(torch.stack([torch.arange(2750.0), order.float()]))[0, 1]:.3f}")
    early = (order[:-500] - torch.arange(len(order) - 500) * 12 / 11).max()
    assert early < 1200  # at most about two buffers ahead of its turn: memory is bounded
    one_class = [int(i >= 1500) for i in range(3000)]
    stream = data.DigitStream(numbered(tmp_path, 3000, one_class), 3000, 32, buffer=4000)
    share = torch.stack([labels.float().mean() for _, labels in stream])
    assert 0.1 < share.min() and share.max() < 0.9  # a file sorted by class does not show


def test_stream_trains_resumes_and_has_its_own_split(files, capfd):
    flags = [*FLAGS, "--data-dir", "data", "--stream", "--batch-size", "8", "--accum", "2"]
    train.main([*flags, "--out", "straight"])
    assert "56 for training, 5 for validation" in capfd.readouterr().out
    status, out, err = run_program(*flags, "--out", "stopped", cwd=files, before=SIGNAL_AT.format(at=5, name="SIGTERM"))
    assert status == 143 and utils.load_checkpoint("stopped/last.pt")["batch"] == 4, err
    train.main(["--resume", "stopped/last.pt"])
    ours, theirs = (utils.load_checkpoint(f"{run}/last.pt") for run in ("stopped", "straight"))
    assert all(torch.equal(ours["model"][key], theirs["model"][key]) for key in theirs["model"])
    assert ours["metrics"][1]["train_loss"] == theirs["metrics"][1]["train_loss"]
    capfd.readouterr()
    for wrong in (["--resume", "straight/last.pt", "--no-stream", "--epochs", "3"], [*flags, "--balanced"]):
        with pytest.raises(SystemExit) as end:
            train.main(wrong)
        err = capfd.readouterr().err
        assert end.value.code == 2 and err.count("\n") == 1, err


@pytest.mark.parametrize("model", ["cnn", "attention"])
def test_stream_in_two_processes_equals_one(model, files):
    flags = ["--data-dir", "data", "--model", model, "--width", "8", "--dropout", "0", "--no-augment", "--epochs", "1", "--stream", "--lr", "1e-3"]
    train.main([*flags, "--batch-size", "12", "--out", "one"])
    status, out, err = run_program(*flags, "--batch-size", "6", "--workers", "1", "--out", "two", cwd=files, ranks=2)
    assert status == 0, err
    one, two = (utils.load_checkpoint(f"{run}/last.pt") for run in ("one", "two"))
    # The softmax does not feel these two: their gradient is 0 but for rounding, of which Adam makes steps of full size.
    keys = [key for key in one["model"] if not key.endswith(("qkv.bias", "score.bias"))]
    assert max((one["model"][key] - two["model"][key]).abs().max().item() for key in keys) < 1e-5
    assert two["metrics"][0]["train_accuracy"] == pytest.approx(one["metrics"][0]["train_accuracy"])


def test_dry_run_of_a_stream_and_a_packed_file(files, capfd):
    train.main([*FLAGS, "--data-dir", "data", "--stream", "--batch-size", "4", "--dry-run", "--out", "dry"])
    assert "2 steps an epoch" in capfd.readouterr().out
    import gzip

    path = files / "data/MNIST/raw/train-images-idx3-ubyte"
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, "--data-dir", "data", "--stream"])
    assert end.value.code == 2 and "gunzip" in capfd.readouterr().err


PEAK = """
    import sys
    import data
    files, count = sys.argv[1:3], int(sys.argv[3])
    if sys.argv[4] == "stream":
        seen = sum(len(labels) for _, labels in data.DigitStream(files, count, 128))
    else:
        images = data.read_idx(files[0], 3).unsqueeze(1).clone()
        digits = data.Digits(images, data.read_idx(files[1], 1).long(), range(10))
        seen = sum(len(labels) for _, labels in data.make_loader(digits, 128, data.EpochSampler(count)))
    assert seen == count
    status = open("/proc/self/status").read()  # ru_maxrss would begin with the parent's
    print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_peak_memory_of_a_stream_does_not_grow_with_the_file(tmp_path):
    peaks = {}
    for count in (60_000, 160_000):  # 47 MB and 125 MB
        files = numbered(tmp_path, count)
        for kind in ("stream", "memory"):
            status, out, err = run_program(*files, count, kind, cwd=tmp_path, script="", before=PEAK)
            assert status == 0, err
            peaks[kind, count] = int(out)
    grown = {kind: peaks[kind, 160_000] - peaks[kind, 60_000] for kind in ("stream", "memory")}
    print(f"with 78 MB more in the file the peak grows by {grown} MB")
    assert grown["stream"] < 40 and grown["memory"] > 78


# ---------------------------------------------------------------------------------------------------- classes, workers


def test_balanced_on_a_subset_and_over_ranks():
    labels = torch.tensor([0] * 900 + [1] * 90 + [7] * 10)
    part = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:500]
    kept = labels[part]
    ranks = [data.EpochSampler(500, 0, 2, rank, labels=kept) for rank in (0, 1)]
    drawn = torch.tensor([index for sampler in ranks for index in sampler])
    counts = kept[drawn].bincount(minlength=8)
    print(counts.tolist())
    assert len(drawn) == 500 and counts[2:7].sum() == 0 and (counts[[0, 1, 7]] - 500 / 3).abs().max() < 50


class Drawing(Dataset):
    """Draws once from each kind of generator for each item; its own are in a transform, as a fork may have them."""

    def __init__(self):
        import random

        import numpy as np

        self.transform = partial(self.draw, random.Random(0), np.random.default_rng(0), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import random

        import numpy as np

        return torch.tensor([random.random(), np.random.random(), torch.rand(()), *self.transform()])

    @staticmethod
    def draw(own_random, own_numpy, generator):
        return own_random.random(), own_numpy.random(), torch.rand((), generator=generator)


def test_draws_differ_between_workers_and_epochs_and_repeat_with_the_seed():
    def draws(seed):
        loader = data.make_loader(Subset(Drawing(), range(4)), 2, workers=2, seed=seed)
        return torch.cat([batch for _ in range(2) for batch in loader])  # 2 epochs x 2 workers x 2 items

    first = draws(5)
    for kind, column in enumerate(first.T):
        assert len(column.unique()) == 8, f"generator {kind}: {column.tolist()}"
    assert torch.equal(draws(5), first) and not torch.equal(draws(6), first)
