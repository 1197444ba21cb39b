"""data.py: files, splits, batches, against torchvision and by arithmetic."""

import functools
import gzip
import math
import pickle
import random
import re
import signal
import struct
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torchvision import datasets, transforms

import data
from helpers import FORKS, NORM, PATIENCE, ROOT, download_host, finish, gzip_files, has_mnist, start, until, write_mnist

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.fixture(scope="module")
def sample():
    return data.load_mnist(data.SAMPLE)


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("train, count", [(True, 4000), (False, 1000)])
def test_sample_is_what_torchvision_reads(train, count):
    images, labels, classes = data.load_mnist(data.SAMPLE, train)
    reference = datasets.MNIST(data.SAMPLE, train)
    assert images.shape == (count, 1, 28, 28)
    assert torch.equal(images[:, 0], reference.data) and torch.equal(labels, reference.targets)
    assert images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert labels.bincount().tolist() == [count // 10] * 10 and labels[:12].tolist() == [*range(10), 0, 1]
    assert classes == [name.split(" ")[0] for name in reference.classes]


def test_sample_has_no_test_digit_in_training():
    train = {image.numpy().tobytes() for image in data.load_mnist(data.SAMPLE, True)[0]}
    test = {image.numpy().tobytes() for image in data.load_mnist(data.SAMPLE, False)[0]}
    assert len(train) == 4000 and len(test) == 1000 and not train & test


def test_fashion_classes_are_torchvisions():
    assert data.FASHION_CLASSES == datasets.FashionMNIST.classes


def test_mean_and_std_are_the_training_sets_own():
    for root in (data.SAMPLE, ROOT / "data"):  # the sample always; the complete MNIST where a user has it
        if has_mnist(root):
            images, labels, classes = data.load_mnist(root)
            about = data.describe(images, labels, classes, "MNIST", "digits")
            pixels = images.double() / 255
            assert about["mean"] == pytest.approx([pixels.mean().item()], abs=1e-9)
            assert about["std"] == pytest.approx([pixels.std(correction=0).item()], abs=1e-9)
            if len(images) == 60000:
                assert [round(about["mean"][0], 4), round(about["std"][0], 4)] == [0.1307, 0.3081]
    x = data.normalize(torch.tensor([[[0.0, 1.0]]]), **NORM)
    assert x.flatten().tolist() == pytest.approx([-0.4242, 2.8215], abs=5e-5)


def test_description_of_pictures_in_colour():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (50, 3, 8, 12), generator=generator).to(torch.uint8)
    images[:, 1] //= 3
    images[:, 2] = 7  # a channel that says nothing
    labels = torch.arange(50) % 4
    about = data.describe(images, labels, ("a", "b", "c", "d"), "colours", "pictures")
    pixels = images.double() / 255
    assert about["mean"] == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert about["std"][:2] == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist()[:2], abs=1e-12)
    normalized = data.normalize(images / 255, about["mean"], about["std"])
    assert normalized[:, :2].mean((0, 2, 3)).abs().max() < 1e-5 and normalized[:, 2].abs().max() < 1e-6
    assert normalized[:, :2].std((0, 2, 3)).sub(1).abs().max() < 1e-3
    assert [about[key] for key in ("name", "items", "classes", "shape")] == ["colours", "pictures", ["a", "b", "c", "d"], [3, 8, 12]]


def test_checksum_changes_with_any_pixel_and_label(sample):
    images, labels, classes = sample[0][:50], sample[1][:50], sample[2]
    checksum_of = lambda *parts: data.describe(*parts, classes, "sample", "digits")["checksum"]
    seen = {checksum_of(images, labels)}
    assert checksum_of(images.clone(), labels.clone()) in seen
    for number in (0, 17, 49):
        other = images.clone()
        other[number, 0, 13, 27] ^= 1
        seen.add(checksum_of(other, labels))
        other = labels.clone()
        other[number] = 9 - other[number]
        seen.add(checksum_of(images, other))
    seen.add(checksum_of(images.flip(0), labels))
    assert len(seen) == 8


def test_test_part_alone_reads_no_training_image(tmp_path):
    raw = write_mnist(tmp_path)
    whole = data.load_dataset("mnist", tmp_path)
    (raw / IMAGES).write_bytes(b"damaged")
    (raw / LABELS).write_bytes(b"damaged")
    train_part, test_part, about = data.load_dataset("mnist", tmp_path, train=False)
    assert train_part is None and all(torch.equal(*pair) for pair in zip(test_part, whole[1], strict=True))
    assert about == {key: whole[2][key] for key in ("name", "items", "classes", "shape")}
    with pytest.raises(data.DataError, match=IMAGES):
        data.load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("choice, name, items", [("sample", "sample", "digits"), ("fashion-mnist", "FashionMNIST", "images")])
def test_a_data_set_brings_what_is_true_of_it(choice, name, items, tmp_path):
    if choice != "sample":
        write_mnist(tmp_path, name=name)
    (images, labels), test_part, about = data.load_dataset(choice, tmp_path)
    assert about == data.describe(images, labels, about["classes"], name, items)
    assert about["classes"][1] == ("1" if choice == "sample" else "Trouser") and len(test_part[0]) == len(test_part[1])


def test_absent_data_falls_back_only_if_nobody_asked_for_it_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "fetch_mnist", lambda root, name: "no network")
    said = []
    train_part, _, about = data.load_dataset("auto", tmp_path, log=said.append)
    assert about["name"] == "sample" and len(train_part[0]) == 4000 and len(said) == 1 and "no network" in said[0]
    with pytest.raises(data.DataError) as error:
        data.load_dataset("mnist", tmp_path, log=said.append)
    assert len(said) == 1 and "no network" in str(error.value) and all(file in str(error.value) for file in data.IDX_FILES)


def test_file_that_cannot_be_read_is_the_users_to_put_right(tmp_path):
    raw = write_mnist(tmp_path)
    (raw / IMAGES).unlink()
    with pytest.raises(data.DataError, match=IMAGES):  # absent
        data.load_mnist(tmp_path)
    (raw / IMAGES).mkdir()
    with pytest.raises(data.DataError, match=IMAGES) as error:  # a folder in its place
        data.load_mnist(tmp_path)
    assert "\n" not in str(error.value)


def test_plain_packed_and_both_give_the_same_tensors(tmp_path):
    for name in ("plain", "packed", "both"):
        write_mnist(tmp_path / name)
    gzip_files(tmp_path / "packed/MNIST/raw")
    raw = tmp_path / "both/MNIST/raw"
    for file in data.IDX_FILES:
        (raw / f"{file}.gz").write_bytes(gzip.compress((raw / file).read_bytes()))
    plain, *others = (data.load_mnist(tmp_path / name, train) for train in (True,) for name in ("plain", "packed", "both"))
    for other in others:
        assert torch.equal(plain[0], other[0]) and torch.equal(plain[1], other[1])
    assert has_mnist(tmp_path / "packed") and not has_mnist(tmp_path)


def labels_file(*labels):
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


BROKEN = {
    "half": (IMAGES, lambda content: content[: len(content) // 2], ["47,056", "23,528"]),
    "empty": (IMAGES, lambda content: b"", ["16", "0"]),
    "html": (IMAGES, lambda content: b"<html><body>403 Forbidden</body></html>", ["2051", str(int.from_bytes(b"<htm", "big")), "39 bytes"]),
    "trailing": (LABELS, lambda content: content + b"\n\n", ["68", "70"]),
    "magic": (IMAGES, lambda content: struct.pack(">I", 2049) + content[4:], ["2051", "2049"]),
    "counts": (LABELS, lambda content: labels_file(0, 1, 2, 3), ["60 images", "4 labels"]),
    "label": (LABELS, lambda content: labels_file(*[200] + [1] * 59), ["200", "10 classes"]),
    "pixels": (IMAGES, lambda content: struct.pack(">4I", 2051, 60, 28, 0), ["28x28", "28x0"]),
    "none": (IMAGES, lambda content: struct.pack(">4I", 2051, 0, 28, 28), ["0 items"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_named_with_both_numbers(kind, tmp_path):
    file, damage, words = BROKEN[kind]
    path = write_mnist(tmp_path) / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(data.DataError) as error:
        data.load_mnist(tmp_path)
    message = str(error.value)
    assert file.split("-")[1] in message and "\n" not in message
    for word in words:
        assert word in message, message
    path.unlink()
    assert not has_mnist(tmp_path)  # so the next run fetches it, or falls back
    write_mnist(tmp_path)
    assert len(data.load_mnist(tmp_path)[0]) == 60


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"<html>", lambda c: c[:30] + b"xx" + c[32:]])
def test_broken_gzip_is_named(damage, tmp_path):
    raw = write_mnist(tmp_path)
    gzip_files(raw)
    path = raw / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(data.DataError, match=f"{IMAGES}.gz"):
        data.load_mnist(tmp_path)


@pytest.mark.parametrize("label", [10, -1, -100])
def test_labels_outside_the_classes_are_refused(label, sample):
    images, labels, classes = sample[0][:20], sample[1][:20].clone(), sample[2]
    labels[7] = label
    with pytest.raises(data.DataError) as error:
        data.Digits(images, labels, classes)
    low, high = min(label, 0), max(label, 9)
    assert f"from {low} to {high}" in str(error.value) and "10 classes" in str(error.value)


# ---------------------------------------------------------------------------------------------------------- download


def fetch(root, point, name, stall=600):
    """A process that fetches into `root` and prints the reason or None; `name` is a file that it makes just before."""
    code = f"import data, pathlib\n{point}\npathlib.Path({name!r}).touch()\nprint(data.fetch_mnist({str(root)!r}, stall={stall}))"
    return start(cwd=root.parent, script=None, before=code)


def left_over(root):
    return [path for path in root.rglob("*") if path.is_file()]


def test_two_processes_that_fetch_at_once_both_end_well(tmp_path):
    packed, gate = write_mnist(tmp_path / "host"), threading.Event()
    gzip_files(packed)
    with download_host("files", packed, gate) as (point, asked):
        processes = [fetch(tmp_path / "data", point, name) for name in ("one", "two")]
        until(lambda: len(asked) == 2, processes[0])  # both have begun, and none has a file yet
        gate.set()
        answers = [finish(process)[:2] for process in processes]  # torchvision shows its progress on standard error
    assert answers == [(0, "None\n")] * 2
    assert sorted(path.name for path in left_over(tmp_path / "data")) == sorted(data.IDX_FILES)
    write_mnist(tmp_path / "same")
    assert torch.equal(data.load_mnist(tmp_path / "data")[0], data.load_mnist(tmp_path / "same")[0])


def test_failed_download_ends_all_processes_and_leaves_nothing(tmp_path):
    with download_host("silence") as (point, asked):
        processes = [fetch(tmp_path / "data", point, name, stall=1) for name in ("one", "two")]
        answers = [finish(process)[:2] for process in processes]
    print(answers)
    assert all(status == 0 and "timed out" in answer and answer.count("\n") == 1 for status, answer in answers)
    assert not left_over(tmp_path / "data")


# Only the mirror that stays silent is asked with the short time limit: the other one may be as slow as it likes.
PATIENT_WITH = """
import socket
def connect(address, *args, real=socket.create_connection, **kwargs):
    connection = real(address, *args, **kwargs)
    if address[1] == {port}:
        connection.settimeout({seconds})
    return connection
socket.create_connection = connect
"""


def test_a_silent_mirror_does_not_keep_the_next_from_being_asked(tmp_path):
    packed, gate = write_mnist(tmp_path / "host"), threading.Event()
    gzip_files(packed)
    gate.set()
    with download_host("silence") as (silent, asked_first), download_host("files", packed, gate) as (good, asked):
        port = good.split("127.0.0.1:")[1].split("/")[0]
        patient = PATIENT_WITH.format(port=port, seconds=PATIENCE)
        both = f"{patient}\n{silent}\nfirst = datasets.MNIST.mirrors\n{good}\ndatasets.MNIST.mirrors = first + datasets.MNIST.mirrors"
        status, out, err = finish(fetch(tmp_path / "data", both, "one", stall=1))
    assert (status, out) == (0, "None\n"), err
    assert len(asked_first) == 1 and len(asked) == 8  # twice for each file: torchvision looks for redirects first
    assert sorted(path.name for path in left_over(tmp_path / "data")) == sorted(data.IDX_FILES)


def test_all_mirrors_and_their_reasons_are_named(tmp_path):
    with download_host(403) as (first, _), download_host(503) as (second, _):
        both = f"{first}\nfirst = datasets.MNIST.mirrors\n{second}\ndatasets.MNIST.mirrors = first + datasets.MNIST.mirrors"
        status, out, err = finish(fetch(tmp_path / "data", both, "one"))
    assert status == 0 and out.count("\n") == 1 and out.count("http://127.0.0.1") == 2, err
    assert out.index("403") < out.index("503") and not left_over(tmp_path / "data")


def test_sigterm_during_a_download_leaves_nothing(tmp_path):
    packed, gate = write_mnist(tmp_path / "host"), threading.Event()
    gzip_files(packed)
    with download_host("files", packed, gate) as (point, asked):
        process = fetch(tmp_path / "data", point, "one")
        until(lambda: asked, process)
        assert list((tmp_path / "data").iterdir())  # it has a folder to write to
        process.terminate()
        status, out, err = finish(process)
        gate.set()
    assert (status, out) == (128 + signal.SIGTERM, ""), err
    assert not list((tmp_path / "data").iterdir())


def test_sigterm_that_somebody_handles_already_stays_his(monkeypatch):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with data.sigterm_cleans_up():
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_folder_without_permission_or_space_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "file" in data.fetch_mnist(tmp_path / "file")


# ------------------------------------------------------------------------------------------------------------- split


def test_split_is_a_function_of_the_seed(sample):
    train, val = data.split_validation(60000, 5000, seed=3)
    random.random(), torch.rand(5)
    again = data.split_validation(60000, 5000, seed=3)
    assert torch.equal(train, again[0]) and torch.equal(val, again[1])
    assert len(val) == 5000 and sorted(train.tolist() + val.tolist()) == list(range(60000))  # disjoint, and everything
    assert not torch.equal(val, data.split_validation(60000, 5000, seed=4)[1])


@pytest.mark.parametrize("n, wanted, size", [(4000, 5000, 333), (60000, 5000, 5000), (3, 5000, 0), (60000, 0, 0), (12, 5, 1)])
def test_split_holds_out_at_most_a_twelfth(n, wanted, size):
    train, val = data.split_validation(n, wanted, seed=0)
    assert (len(train), len(val)) == (n - size, size)


# ----------------------------------------------------------------------------------------------------------- batches


def test_batch_equals_torchvisions_transforms(sample):
    indices = [5, 0, 17, 3999]
    images, labels = data.collate_images(data.Digits(*sample).__getitems__(indices), **NORM)
    reference = datasets.MNIST(
        data.SAMPLE, transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    )
    expected = [reference[i] for i in indices]
    torch.testing.assert_close(images, torch.stack([image for image, _ in expected]))
    assert labels.tolist() == [label for _, label in expected] and labels.dtype == torch.int64


def test_one_item_is_the_batch_of_one(sample):
    dataset = data.Digits(*sample, augment=True)
    image, label = dataset[7]
    images, labels = dataset.__getitems__([7])
    assert image.shape == (1, 28, 28) and torch.equal(image, images[0]) and torch.equal(label, labels[0])
    assert 0 <= image.min() and image.max() <= 1


def test_transform_is_called_for_each_image(sample):
    shapes = []
    dataset = data.Digits(*sample, transform=lambda image: shapes.append(image.shape) or 1 - image)
    images, _ = dataset.__getitems__([1, 2, 3])
    assert shapes == [(1, 28, 28)] * 3 and torch.equal(images, 1 - data.Digits(*sample).__getitems__([1, 2, 3])[0])


@pytest.mark.parametrize("W", [28, 40])
def test_augment_equals_affine_grid(W, sample):
    images = F.pad(data.Digits(*sample).__getitems__(list(range(64)))[0], (0, W - 28))
    draws = data.uniform_draws(5, 0, range(64), 4)
    got = data.augment(images, draws)
    angle, zoom = draws[:, 2] * math.radians(10), 1 + draws[:, 3] * 0.1
    rows = [
        angle.cos() / zoom, -angle.sin() / zoom * 28 / W, draws[:, 0] * 4 / W,
        angle.sin() / zoom * W / 28, angle.cos() / zoom, draws[:, 1] * 4 / 28,
    ]
    theta = torch.stack(rows, dim=1).view(64, 2, 3)
    expected = F.grid_sample(images, F.affine_grid(theta, images.shape, align_corners=False), align_corners=False)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_augment_by_nothing_changes_nothing_and_by_whole_pixels_shifts(sample):
    images = data.Digits(*sample).__getitems__([0, 1])[0]
    torch.testing.assert_close(data.augment(images, torch.zeros(2, 4)), images, atol=1e-5, rtol=0)
    draws = torch.tensor([[1.0, 0, 0, 0], [0, -1, 0, 0]])  # to the left, down
    moved = data.augment(images, draws, shift=3)
    torch.testing.assert_close(moved[0], F.pad(images[0], (0, 3))[:, :, 3:], atol=1e-4, rtol=0)
    torch.testing.assert_close(moved[1], F.pad(images[1], (0, 0, 3, 0))[:, :28], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------- draws without a state


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


def test_uniform_draws_are_uniform_and_neighbours_know_nothing_of_each_other():
    n = 100_000
    draws = data.uniform_draws(3, 5, range(n), 4)
    assert draws.shape == (n, 4) and draws.dtype == torch.float32 and -1 < draws.min() and draws.max() < 1
    bound = 5 / math.sqrt(4 * n)  # five standard deviations of a correlation, and more than five of the mean
    assert abs(draws.mean().item()) < bound and abs(draws.var().item() - 1 / 3) < bound
    counts = torch.histc(draws, bins=64, min=-1, max=1)
    assert (counts - 4 * n / 64).abs().max() < 5 * math.sqrt(4 * n / 64)
    neighbours = {
        "index": (draws[1:], draws[:-1]),
        "column": (draws[:, 1:], draws[:, :-1]),
        "epoch": (draws, data.uniform_draws(3, 6, range(n), 4)),
        "seed": (draws, data.uniform_draws(4, 5, range(n), 4)),
        "seed an epoch before": (draws, data.uniform_draws(4, 4, range(n), 4)),
        "index of the next epoch": (draws[1:], data.uniform_draws(3, 6, range(n), 4)[:-1]),
    }
    found = {name: correlation(a, b) for name, (a, b) in neighbours.items()}
    print(found)
    assert all(abs(value) < 5 / math.sqrt(3 * n) for value in found.values())
    by_epoch = torch.stack([data.uniform_draws(0, number, [7], 2)[0] for number in range(5000)])
    by_seed = torch.stack([data.uniform_draws(number, 0, [7], 2)[0] for number in range(5000)])
    for table in (by_epoch, by_seed):
        assert abs(correlation(table[1:], table[:-1])) < 5 / math.sqrt(10_000) and abs(table.mean()) < 5 / math.sqrt(30_000)


def scramble(x):
    """The published steps of splitmix64 after its addition, in integers without a sign."""
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_uniform_draws_are_splitmix64():
    golden = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [scramble(1234567 + golden * i) for i in (1, 2, 3)] == published  # so the reference is right
    for seed, epoch, index in ((0, 0, 0), (5, 3, 59_999), (2**32 - 1, 1000, 10**9)):
        expected = []
        for column in range(4):
            upper = scramble(data.mix(seed, epoch) + golden * (4 * index + column)) >> 40
            expected.append(((upper - 2**24 if upper >= 2**23 else upper) + 0.5) / 2**23)
        assert data.uniform_draws(seed, epoch, [index], 4).tolist() == [expected]


def test_the_table_in_the_docstring_is_what_is_drawn():
    for number in (0, 1):
        table = re.findall(rf"sample {number} (.+)", data.uniform_draws.__doc__)[0].split()
        drawn = [data.uniform_draws(0, epoch, [number], 4)[0] for epoch in (0, 1)]
        assert [float(cell) for cell in table] == pytest.approx(torch.cat(drawn).tolist(), abs=0.006)


def test_uniform_draws_depend_on_the_sample_alone():
    together = data.uniform_draws(1, 2, [9, 4, 7], 4)
    assert torch.equal(together[1:], data.uniform_draws(1, 2, torch.tensor([4, 7]), 4))
    assert data.uniform_draws(2**63 - 1, 10**9, [2**40], 1).isfinite().all()  # large numbers are as good as small ones


def test_mix_gives_each_tuple_a_number_of_its_own():
    numbers = [data.mix(seed, epoch) for seed in range(300) for epoch in range(300)]
    numbers += [data.mix(seed) for seed in range(300)] + [data.mix(0, 0, index) for index in range(300)]
    assert len(set(numbers)) == len(numbers) and 0 <= min(numbers) and max(numbers) < 2**63
    assert data.mix(1, 0) != data.mix(0, 1)
    assert torch.Generator().manual_seed(data.mix(2**64, -1)).initial_seed() == data.mix(2**64, -1)
    changed = [bin(data.mix(5, 1 << bit) ^ data.mix(5, 0)).count("1") for bit in range(63)]
    print("of 63 bits so many change with one bit of the last number:", changed)
    assert 10 < min(changed) and max(changed) < 53


class Noise:
    """Adds one draw from each kind of generator, global and its own: a fork's transform at its worst."""

    def __init__(self):
        self.own = {"python": random.Random(0), "torch": torch.Generator().manual_seed(0)}
        self.numpys = [np.random.default_rng(0), np.random.RandomState(0)]

    def __call__(self, image):
        draws = [
            random.random(), torch.rand(()).item(), np.random.random(), self.own["python"].random(),
            torch.rand((), generator=self.own["torch"]).item(), self.numpys[0].random(), self.numpys[1].random_sample(),
        ]
        return torch.cat([image.flatten()[:1], torch.tensor(draws)])


def noisy_draws(dataset, epochs=(0, 1), workers=0, batch_size=3, order=(5, 0, 7, 3, 2, 9), start_method=None):
    """{(epoch, index): what was drawn for it} of a data set of ten digits, whose labels are their indices."""
    digits = dataset.dataset if isinstance(dataset, Subset) else dataset
    loader = data.make_loader(dataset, batch_size, list(order), workers)
    if start_method:
        loader.multiprocessing_context = start_method
    found = {}
    for number in epochs:
        digits.set_epoch(number)
        for rows, indices in loader:
            found |= {(number, index): tuple(row.tolist()) for index, row in zip(indices.tolist(), rows)}
    return found


def test_draws_of_a_transform_are_a_function_of_seed_epoch_and_index(sample):
    transform = transforms.Compose([transforms.RandomAffine(20), functools.partial(Noise().__call__)])
    digits = data.Digits(sample[0][:10], torch.arange(10), sample[2], augment=True, seed=4, transform=transform)
    random.seed(0), torch.manual_seed(0), np.random.seed(0)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    expected = noisy_draws(digits)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    assert len(expected) == 12
    for column in zip(*(draws[1:] for draws in expected.values())):  # the same kind of generator, 6 samples x 2 epochs
        assert len(set(column)) == 12
    assert all(len(set(draws[1:])) == 7 for draws in expected.values())  # and no two kinds draw the same
    for again in (
        noisy_draws(digits, batch_size=1), noisy_draws(digits, workers=1), noisy_draws(digits, workers=2),
        noisy_draws(digits, workers=2, batch_size=2, order=(9, 2, 0, 3, 5, 7)), noisy_draws(Subset(digits, range(10))),
        noisy_draws(Subset(digits, range(10)), workers=2),
    ):
        assert again == expected
    assert noisy_draws(digits, epochs=[1], order=(3, 2)) == {key: expected[key] for key in ((1, 3), (1, 2))}  # a resume
    other = data.Digits(*[digits.images, digits.labels, sample[2]], augment=True, seed=5, transform=transform)
    assert not set(noisy_draws(other).values()) & set(expected.values())


def test_a_transform_that_fails_leaves_the_generators_as_they_were(sample):
    def broken(image):
        raise RuntimeError(f"a fork's own mistake {random.random()}")

    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="own mistake"):
        data.Digits(*sample, transform=broken)[3]
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


def test_generators_are_found_where_they_are_kept():
    one, two, three = random.Random(0), torch.Generator(), np.random.default_rng(0)

    def closed_over(image):
        return image + one.random()

    class Holder:
        def __init__(self, *parts):
            self.parts, self.myself = parts, self  # a circle

        def method(self, image):
            return image

    assert data.generators_in(closed_over) == [one]
    assert data.generators_in(Holder(two).method) == [two]
    assert data.generators_in(functools.partial(Holder().method, generator=three)) == [three]
    found = data.generators_in(transforms.Compose([Holder({"a": [one]}), torch.nn.Sequential(torch.nn.ReLU()), Holder((two, three), two)]))
    assert {id(generator) for generator in found} == {id(one), id(two), id(three)} and len(found) == 3
    assert data.generators_in([random, np, torch, torch.rand, "text", None, 3]) == []


# ------------------------------------------------------------------------------------------------ epochs, workers


def test_augmentation_is_a_function_of_seed_epoch_and_index(sample):
    digits = data.Digits(*sample, augment=True, seed=1)
    first = digits.__getitems__([3, 1, 2])[0]
    torch.rand(10)
    assert torch.equal(first, digits.__getitems__([3, 1, 2])[0])
    assert torch.equal(first, digits.__getitems__([1, 2, 3])[0][[2, 0, 1]])  # not of the order
    assert torch.equal(first[0], digits[3][0])  # nor of the batch
    digits.set_epoch(1)
    assert not torch.equal(first[0], digits[3][0])
    digits.set_epoch(0)
    assert torch.equal(first[0], digits[3][0])
    assert not torch.equal(first, data.Digits(*sample, augment=True, seed=2).__getitems__([3, 1, 2])[0])
    same = data.Digits(sample[0][:1].expand(16, 1, 28, 28), sample[1][:1].expand(16), sample[2], augment=True)
    assert len({image.numpy().tobytes() for image in same.__getitems__(list(range(16)))[0]}) == 16


@pytest.mark.parametrize("workers, start_method", [(0, None), (1, None), (2, "fork"), (2, FORKS.get_start_method())])
def test_an_unshuffled_loader_differs_from_epoch_to_epoch(workers, start_method, sample):
    digits = data.Digits(sample[0][:40], sample[1][:40], sample[2], augment=True, seed=1)
    loader = data.make_loader(digits, 16, workers=workers)
    assert loader.persistent_workers == (workers > 0)
    if start_method:
        loader.multiprocessing_context = start_method
    for number in (0, 1, 5):
        digits.set_epoch(number)
        images = torch.cat([images for images, _ in loader])
        expected = data.augment(digits.images / 255, data.uniform_draws(1, number, range(40), 4))
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_images_without_a_channel_are_refused(sample):
    with pytest.raises(ValueError, match=r"\(N, C, H, W\).*\(4000, 28, 28\)"):
        data.Digits(sample[0][:, 0], *sample[1:])


def test_targets_of_a_regression_need_no_classes(sample):
    targets = torch.linspace(-5, 300, 4000)
    _, drawn = data.Digits(sample[0], targets, [], augment=True).__getitems__([0, 3999])
    assert drawn.dtype == torch.float32 and drawn.tolist() == [-5, 300]


def epoch(dataset, workers=0, epochs=1, start_method=None, **kwargs):
    loader = data.make_loader(dataset, 100, data.EpochSampler(len(dataset), seed=1), workers, **kwargs)
    if start_method:
        loader.multiprocessing_context = start_method
    batches = []
    for number in range(epochs):
        loader.sampler.set_epoch(number)
        dataset.set_epoch(number)
        batches += list(loader)
    return batches


def test_batches_do_not_depend_on_the_number_of_workers(sample):
    dataset = data.Digits(sample[0][:1050], sample[1][:1050], sample[2], augment=True)
    reference = epoch(dataset, workers=0, epochs=2)
    assert not torch.equal(reference[0][1], reference[11][1])  # the second epoch has another order
    assert [len(labels) for _, labels in reference[:11]] == [100] * 10 + [50]  # the short batch is not dropped
    for workers in (1, 2):
        for one, other in zip(reference, epoch(dataset, workers, epochs=2), strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_batches_do_not_depend_on_the_number_of_threads(sample):
    dataset, indices, threads = data.Digits(*sample, augment=True), list(range(128)), torch.get_num_threads()
    images = []
    for count in (1, 2):
        torch.set_num_threads(count)
        images.append(dataset.__getitems__(indices)[0])
    torch.set_num_threads(threads)
    assert torch.equal(*images)


def test_loader_leaves_the_global_generator_alone(sample):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(data.make_loader(data.Digits(*sample, augment=True), 500, data.EpochSampler(4000)))
    assert torch.equal(torch.rand(3), expected)


def test_everything_given_to_a_loader_pickles_and_spawns(sample):
    dataset = data.Digits(sample[0][:200], sample[1][:200], sample[2], augment=True)
    collate = functools.partial(data.collate_images, **NORM)
    loader = data.make_loader(dataset, 100, data.EpochSampler(200), workers=1, collate=collate)
    for part in (loader.dataset, loader.sampler, loader.collate_fn, loader.worker_init_fn):
        pickle.loads(pickle.dumps(part))
    for one, other in zip(epoch(dataset, collate=collate), epoch(dataset, workers=1, start_method="spawn", collate=collate), strict=True):
        assert torch.equal(one[0], other[0])


class Numbers(IterableDataset):
    def __iter__(self):
        yield from range(5)


def test_without_a_collate_a_batch_is_what_the_data_set_or_torch_makes_of_it(sample):
    digits = data.Digits(sample[0][:5], sample[1][:5], sample[2])
    for dataset in (digits, Subset(digits, range(5))):
        (images, labels), (last, _) = data.make_loader(dataset, 3)
        assert torch.equal(images, digits.images[:3] / 255) and torch.equal(labels, digits.labels[:3]) and len(last) == 2
    rows = TensorDataset(torch.rand(5, 2), torch.arange(5.0))
    for ours, theirs in zip(data.make_loader(rows, 3), DataLoader(rows, 3), strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    for workers in (0, 1):
        loader = data.make_loader(Numbers(), 3, workers=workers)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4]] and not loader.persistent_workers


# ------------------------------------------------------------------------------------------------ order of an epoch


def test_ranks_share_an_epoch_and_epochs_differ():
    for world_size in (1, 2, 3):
        orders = []
        for epoch_number in (0, 1):
            samplers = [data.EpochSampler(103, 7, world_size, rank) for rank in range(world_size)]
            for sampler in samplers:
                sampler.set_epoch(epoch_number)
            ranks = [list(sampler) for sampler in samplers]
            assert {len(rank) for rank in ranks} == {len(samplers[0])}  # equal numbers of steps
            padding = [sampler.padding for sampler in samplers]
            assert padding == sorted(padding) and sum(padding) == -103 % world_size and padding[0] == 0
            everything = [index for rank, extra in zip(ranks, padding) for index in rank[: len(rank) - extra]]
            assert sorted(everything) == list(range(103))  # each once
            assert all(0 <= index < 103 for rank in ranks for index in rank)
            alone = data.EpochSampler(103, 7)
            alone.set_epoch(epoch_number)
            assert [ranks[i % world_size][i // world_size] for i in range(103)] == list(alone)
            orders.append(ranks)
        assert orders[0] != orders[1]


def test_a_seed_is_not_another_one_an_epoch_later():
    zero, one = data.EpochSampler(50, seed=0), data.EpochSampler(50, seed=1)
    zero.set_epoch(1)
    assert list(zero) != list(one)


@pytest.mark.parametrize("size, world_size", [(13, 1), (13, 2), (14, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("subset", [False, True])
def test_each_sample_of_any_data_set_counts_once(size, world_size, subset):
    dataset = TensorDataset(torch.arange(100, 100 + size))
    if subset:
        dataset = Subset(TensorDataset(torch.arange(90, 120)), range(10, 10 + size))
    counted = []
    for rank in range(world_size):
        sampler = data.EpochSampler(len(dataset), 3, world_size, rank)
        seen = [number for (batch,) in data.make_loader(dataset, 2, sampler, workers=rank % 2) for number in batch.tolist()]
        assert len(seen) == len(sampler) and sampler.padding in (0, 1)
        counted += seen[: len(seen) - sampler.padding]
    assert sorted(counted) == list(range(100, 100 + size))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_begins_where_it_stopped_and_loads_nothing_twice(workers):
    asked = []

    class Watched(data.Digits):
        def __getitems__(self, indices):
            asked.extend(indices)
            return super().__getitems__(indices)

    images = torch.zeros(21, 1, 4, 4, dtype=torch.uint8)
    digits = Watched(images, torch.arange(21), range(21))
    sampler = data.EpochSampler(21, 5, world_size=2, rank=1)
    loader = data.make_loader(digits, 3, sampler, workers)
    epoch_of = lambda: [label for _, labels in loader for label in labels.tolist()]
    sampler.set_epoch(4)
    whole = epoch_of()
    assert len(whole) == len(sampler) == 11
    asked.clear()
    sampler.set_epoch(4, start=6)
    assert epoch_of() == whole[6:] and len(sampler) == 11 and len(loader) == 4
    if workers == 0:
        assert asked == whole[6:]
    assert epoch_of() == whole  # `start` was for one iteration
    sampler.set_epoch(4, start=6)
    sampler.set_epoch(5)
    assert len(epoch_of()) == 11


def test_balanced_sampler_draws_classes_equally():
    labels = torch.tensor([0] * 9000 + [1] * 900 + [2] * 100)
    draws = {}
    for epoch_number in (0, 1, 0):
        ranks = [data.EpochSampler(10000, 0, 2, rank, labels) for rank in (0, 1)]
        for sampler in ranks:
            sampler.set_epoch(epoch_number)
        order = [list(sampler) for sampler in ranks]
        assert draws.setdefault(epoch_number, order) == order  # a function of (seed, epoch)
    assert draws[0] != draws[1]
    counts = labels[torch.tensor(draws[0]).flatten()].bincount()
    print("draws of classes with 9000, 900 and 100 samples:", counts.tolist())
    assert len(draws[0][0]) == 5000 and (counts - 10000 / 3).abs().max() < 5 * math.sqrt(10000 * 2 / 9)  # 5 sigma
    with pytest.raises(ValueError, match="20 samples, but 10000 labels"):
        data.EpochSampler(20, labels=labels)


# ------------------------------------------------------------------------------------------ tokens, padding, pictures


def test_patches_of_colour_pictures_are_in_their_places():
    images = torch.rand(2, 3, 8, 12)
    images[0, :, 4:, :4] = 0  # position 3 of picture 0 is blank
    images[1, 0, :4, 4:8] = 0  # position 1 of picture 1 is not: two channels have something there
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    (tokens, positions, mask), labels = data.collate_tokens((images, torch.arange(2)), mean, std)
    assert tokens.shape == (2, 6, 48) and positions.tolist() == [[0, 1, 2, 4, 5, 0], [0, 1, 2, 3, 4, 5]]
    assert mask.sum(1).tolist() == [5, 6] and labels.tolist() == [0, 1]
    for picture in (0, 1):
        for token, position, real in zip(tokens[picture], positions[picture].tolist(), mask[picture]):
            if real:
                y, x = position // 3 * 4, position % 3 * 4
                expected = (images[picture, :, y : y + 4, x : x + 4] - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
                torch.testing.assert_close(token.view(3, 4, 4), expected)
    (packed, where, same, places), _ = data.collate_packed((images, torch.arange(2)), mean, std)
    assert torch.equal(packed, tokens[mask]) and torch.equal(where, positions[mask]) and torch.equal(same, mask)
    assert places.dtype == torch.int64 and places.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]  # 5 is padding
    everything = data.collate_packed((images, torch.arange(2)), mean, std, blank=True)[0]
    assert everything[0].shape == (12, 48)
    with pytest.raises(data.DataError, match="30x28"):
        data.collate_tokens((torch.rand(2, 1, 30, 28), torch.arange(2)), **NORM)


def test_collate_padded_takes_lists_arrays_and_labels():
    padded, mask, labels = data.collate_padded([([1, 2, 3], 7), ([], 8), (np.array([4]), 9)], value=-1)
    assert padded.tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]] and padded.dtype == torch.int64
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert labels.tolist() == [7, 8, 9] and labels.dtype == torch.int64
    rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    rows.flags.writeable = False  # as from a file that is mapped into memory
    padded, mask, labels = data.collate_padded([(rows, torch.tensor([0.5, 1.5])), (rows[:1], torch.tensor([2.5, 3.5]))])
    assert padded.tolist() == [rows.tolist(), [[0, 1], [0, 0], [0, 0]]] and labels.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    padded, mask = data.collate_padded([[], []])
    assert padded.shape == (2, 1) and not mask.any()
    padded, _ = data.collate_padded([[1, 2], [0.5]])
    assert padded.tolist() == [[1, 2], [0.5, 0]]
    loader = DataLoader([([1, 2], 0), ([3], 1)], 2, collate_fn=functools.partial(data.collate_padded, value=9))
    assert [part.tolist() for part in next(iter(loader))] == [[[1, 2], [3, 9]], [[True, True], [True, False]], [0, 1]]


def test_pictures_are_four_times_as_large_and_red_where_the_heat_is(tmp_path):
    from PIL import Image

    images = torch.zeros(9, 1, 28, 28)
    images[:, 0, 4, 9] = 1
    heat = torch.zeros(9, 49)
    heat[0, 10] = 0.2  # rows 4 to 7, columns 12 to 15; the largest of its picture
    for given in (None, heat):
        data.save_pictures(tmp_path / "a.png", images, given)
        picture = Image.open(tmp_path / "a.png")
        assert picture.mode == "RGB" and picture.size == (8 * 120 + 8, 2 * 120 + 8)
        first = picture.crop((8, 8, 120, 120))
        assert [first.getpixel(place) for place in ((35, 16), (36, 16), (39, 19), (40, 16))] == [(0,) * 3, (255,) * 3, (255,) * 3, (0,) * 3]
        red = (0, 0, 0) if given is None else (255, 0, 0)
        assert [first.getpixel(place) for place in ((48, 16), (63, 31))] == [red, red] and first.getpixel((64, 16)) == (0, 0, 0)
    colours = torch.zeros(1, 3, 8, 8)
    colours[0, 1] = 1
    data.save_pictures(tmp_path / "b.png", colours)
    assert Image.open(tmp_path / "b.png").getpixel((10, 10)) == (0, 255, 0)
    data.save_pictures(tmp_path / "c.png", torch.ones(1, 2, 8, 8) * 0.5)
    assert len(set(Image.open(tmp_path / "c.png").getpixel((10, 10)))) == 1
