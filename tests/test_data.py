"""data.py: files, splits, batches, against torchvision and by arithmetic."""

import gzip
import math
import pickle
import random
import struct
import threading

import pytest
import torch
import torch.nn.functional as F
from torchvision import datasets, transforms

import data
from helpers import PATIENCE, ROOT, download_host, finish, gzip_files, has_mnist, start, until, write_mnist

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
    assert torch.equal(images, reference.data) and torch.equal(labels, reference.targets)
    assert images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert labels.bincount().tolist() == [count // 10] * 10 and labels[:12].tolist() == [*range(10), 0, 1]
    assert classes == [name.split(" ")[0] for name in reference.classes]


def test_sample_has_no_test_digit_in_training():
    train = {image.numpy().tobytes() for image in data.load_mnist(data.SAMPLE, True)[0]}
    test = {image.numpy().tobytes() for image in data.load_mnist(data.SAMPLE, False)[0]}
    assert len(train) == 4000 and len(test) == 1000 and not train & test


def test_fashion_classes_are_torchvisions():
    assert data.FASHION_CLASSES == datasets.FashionMNIST.classes


def test_normalization_is_the_training_sets_own(sample):
    images = sample[0]
    for root in (data.SAMPLE, ROOT / "data"):  # the sample always; the complete MNIST where a user has it
        if has_mnist(root):
            images = data.load_mnist(root)[0]
            pixels = images.double() / 255
            tolerance = 5e-5 if len(images) == 60000 else 5e-4
            assert pixels.mean().item() == pytest.approx(data.MEAN, abs=tolerance)
            assert pixels.std().item() == pytest.approx(data.STD, abs=tolerance)
    x = data.normalize(torch.tensor([0.0, 1.0]))
    assert x.tolist() == pytest.approx([-0.4242, 2.8215], abs=5e-5)


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
    with pytest.raises(ValueError) as error:
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
    with pytest.raises(ValueError, match=f"{IMAGES}.gz"):
        data.load_mnist(tmp_path)


@pytest.mark.parametrize("label", [10, -1, -100])
def test_labels_outside_the_classes_are_refused(label, sample):
    images, labels, classes = sample[0][:20], sample[1][:20].clone(), sample[2]
    labels[7] = label
    with pytest.raises(ValueError) as error:
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


def test_two_processes_one_fetches(tmp_path):
    packed, gate = write_mnist(tmp_path / "host"), threading.Event()
    gzip_files(packed)
    with download_host("files", packed, gate) as (point, asked):
        processes = [fetch(tmp_path / "data", point, name) for name in ("one", "two")]
        for process, name in zip(processes, ("one", "two")):
            until((tmp_path / name).exists, process)
        gate.set()
        answers = [finish(process)[:2] for process in processes]  # torchvision shows its progress on standard error
    print("asked for", asked)
    assert answers == [(0, "None\n")] * 2
    # One process asked: twice for each file, for torchvision looks for redirects first.
    assert sorted(asked) == sorted(2 * [f"{file}.gz" for file in data.IDX_FILES])
    assert sorted(path.name for path in left_over(tmp_path / "data")) == sorted(data.IDX_FILES)
    write_mnist(tmp_path / "same")
    assert torch.equal(data.load_mnist(tmp_path / "data")[0], data.load_mnist(tmp_path / "same")[0])


def test_failed_download_ends_all_processes_and_leaves_nothing(tmp_path):
    with download_host("silence") as (point, asked):
        processes = [fetch(tmp_path / "data", point, name, stall=1) for name in ("one", "two")]
        answers = [finish(process)[1] for process in processes]
    print(answers)
    assert any("timed out" in answer for answer in answers) and "None\n" not in answers
    assert not left_over(tmp_path / "data")


def test_whole_download_has_a_time_limit(tmp_path, monkeypatch):
    drips, done = threading.Event(), threading.Event()

    def without_end(self, root, download):
        drips.wait()
        done.set()

    monkeypatch.setattr(datasets.MNIST, "__init__", without_end)
    assert "not finished after 0 s" in data.fetch_mnist(tmp_path, limit=0.3)  # it comes back although ...
    assert not done.is_set() and not left_over(tmp_path)
    drips.set()
    assert done.wait(PATIENCE)  # ... the host was still at it


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
    images, labels = data.collate_images(data.Digits(*sample).__getitems__(indices))
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


def test_augment_equals_affine_grid(sample):
    images = data.Digits(*sample).__getitems__(list(range(64)))[0]
    got = data.augment(images, torch.Generator().manual_seed(5))
    draw = torch.rand(64, 4, generator=torch.Generator().manual_seed(5)) * 2 - 1
    angle, zoom = draw[:, 2] * math.radians(10), 1 + draw[:, 3] * 0.1
    rows = [angle.cos() / zoom, -angle.sin() / zoom, draw[:, 0] * 2 / 14, angle.sin() / zoom, angle.cos() / zoom, draw[:, 1] * 2 / 14]
    theta = torch.stack(rows, dim=1).view(64, 2, 3)
    expected = F.grid_sample(images, F.affine_grid(theta, images.shape, align_corners=False), align_corners=False)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_augment_by_nothing_changes_nothing_and_by_whole_pixels_shifts(sample):
    images = data.Digits(*sample).__getitems__([0, 1])[0]
    still = data.augment(images, torch.Generator(), shift=0, degrees=0, scale=0)
    torch.testing.assert_close(still, images, atol=1e-5, rtol=0)
    moved = data.augment(images, torch.Generator(), shift=3, degrees=0, scale=0)
    assert all((moved[i] - images[i]).abs().max() > 0.1 for i in range(2))


def test_augment_draws_for_each_image(sample):
    same = sample[0][:1].unsqueeze(1).float().expand(16, 1, 28, 28) / 255
    images = data.augment(same, torch.Generator().manual_seed(0))
    assert len({image.numpy().tobytes() for image in images}) == 16


def test_augmentation_is_a_function_of_seed_and_indices(sample):
    dataset = data.Digits(*sample, augment=True, seed=1)
    first = dataset.__getitems__([3, 1, 2])[0]
    torch.rand(10)
    assert torch.equal(first, dataset.__getitems__([3, 1, 2])[0])
    assert not torch.equal(first, dataset.__getitems__([1, 3, 2])[0][[1, 0, 2]])
    assert not torch.equal(first, data.Digits(*sample, augment=True, seed=2).__getitems__([3, 1, 2])[0])


def epoch(dataset, workers=0, epochs=1, start_method=None, **kwargs):
    loader = data.make_loader(dataset, 100, data.EpochSampler(dataset.labels, seed=1), workers, **kwargs)
    if start_method:
        loader.multiprocessing_context = start_method
    batches = []
    for number in range(epochs):
        loader.sampler.set_epoch(number)
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
        images.append(data.collate_images(dataset.__getitems__(indices))[0])
    torch.set_num_threads(threads)
    assert torch.equal(*images)


def test_loader_leaves_the_global_generator_alone(sample):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(data.make_loader(data.Digits(*sample, augment=True), 500, data.EpochSampler(sample[1])))
    assert torch.equal(torch.rand(3), expected)


def test_everything_given_to_a_loader_pickles_and_spawns(sample):
    dataset = data.Digits(sample[0][:200], sample[1][:200], sample[2], augment=True)
    loader = data.make_loader(dataset, 100, data.EpochSampler(dataset.labels), workers=1)
    for part in (loader.dataset, loader.sampler, loader.collate_fn, loader.worker_init_fn):
        pickle.loads(pickle.dumps(part))
    for one, other in zip(epoch(dataset), epoch(dataset, workers=1, start_method="spawn"), strict=True):
        assert torch.equal(one[0], other[0])


def order_of_one(epoch_number):
    sampler = data.EpochSampler(torch.zeros(103, dtype=torch.int64), 7)
    sampler.set_epoch(epoch_number)
    return list(sampler)


def test_ranks_share_an_epoch_and_epochs_differ():
    labels = torch.zeros(103, dtype=torch.int64)
    for world_size in (1, 2, 3):
        orders = []
        for epoch_number in (0, 1):
            samplers = [data.EpochSampler(labels, 7, world_size, rank) for rank in range(world_size)]
            for sampler in samplers:
                sampler.set_epoch(epoch_number)
            ranks = [list(sampler) for sampler in samplers]
            assert len({len(rank) for rank in ranks}) == 1  # equal numbers of steps
            everything = [index for rank in ranks for index in rank]
            assert sorted(index for index in everything if index >= 0) == list(range(103))  # each once
            assert everything.count(-1) == -103 % world_size and -1 not in ranks[0]
            assert [ranks[i % world_size][i // world_size] for i in range(103)] == order_of_one(epoch_number)
            orders.append(ranks)
        assert orders[0] != orders[1]


def test_balanced_sampler_draws_classes_equally():
    labels = torch.tensor([0] * 9000 + [1] * 900 + [2] * 100)
    draws = {}
    for epoch_number in (0, 1, 0):
        ranks = [data.EpochSampler(labels, 0, 2, rank, balanced=True) for rank in (0, 1)]
        for sampler in ranks:
            sampler.set_epoch(epoch_number)
        order = [list(sampler) for sampler in ranks]
        assert draws.setdefault(epoch_number, order) == order  # a function of (seed, epoch)
    assert draws[0] != draws[1]
    counts = labels[torch.tensor(draws[0]).flatten()].bincount()
    print("draws of classes with 9000, 900 and 100 samples:", counts.tolist())
    assert len(draws[0][0]) == 5000 and (counts - 10000 / 3).abs().max() < 5 * math.sqrt(10000 * 2 / 9)  # 5 sigma
