"""From files on disk to batches on their way out. `python data.py` shows some.

load_dataset           files -> images uint8 (N, 28, 28), labels int64 (N,), class names
Digits or DigitStream  indices -> images float (B, 1, 28, 28) in 0..1, labels int64 (B,)
collate_...            that -> what a model takes

This file knows nothing of models, devices or training. "Needs" in a docstring: what to copy along. Letters: N samples
in a data set, B in a batch, H x W pixels, K classes, L tokens of a batch's longest sample, T of all its samples.
"""

import gzip
import math
import mmap
import os
import random
import socket
import struct
import tempfile
import threading
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

try:
    import fcntl
except ImportError:  # Windows: there, two processes fetch each for itself, which is slow but does no harm
    fcntl = None

# Over the pixels of the 60,000 training images, in 0..1: a statistic of the test set would be a piece of it.
MEAN, STD = 0.1307, 0.3081
SAMPLE = Path(__file__).resolve().parent / "sample"  # 4,000 + 1,000 real digits in MNIST's layout: load_mnist(SAMPLE)
FASHION_CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(",")
IDX_FILES = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


# ---------------------------------------------------------------------------------------------------- files -> tensors


def fetch_mnist(root, name="MNIST", stall=10.0, limit=300.0):
    """Downloads MNIST or FashionMNIST (`name`) into root/name/raw if it is not there. Needs: IDX_FILES.

    Returns None if the files are there now, else the reason in one line. A connection may be silent for `stall`
    seconds, the whole may take `limit`. Files appear whole or not at all. Of several processes one fetches and the
    others wait; what it could not get, they do not try again.
    """
    raw, lock, failures, default = Path(root) / name / "raw", None, [], socket.getdefaulttimeout()
    complete = lambda: all((raw / file).is_file() or (raw / f"{file}.gz").is_file() for file in IDX_FILES)

    def download(folder):
        try:
            from torchvision import datasets  # here, for it takes a second and most runs have their data already

            getattr(datasets, name)(folder, download=True)  # knows the mirrors, checks the md5, unpacks
        except Exception as error:  # in a thread; of a list of mirrors that were tried, the last line is the reason
            failures.append((str(error).strip() or repr(error)).splitlines()[-1])

    try:
        if complete():
            return None
        raw.mkdir(parents=True, exist_ok=True)
        if fcntl:
            lock = os.open(raw, os.O_RDONLY)  # the folder is its own lock, lifted when its holder closes it or dies
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return None if complete() else "the process that fetched it failed"
        # torchvision sets no time limit and writes in place: hence a folder, and a thread that can be left behind.
        with tempfile.TemporaryDirectory(dir=raw, ignore_cleanup_errors=True) as folder:
            socket.setdefaulttimeout(stall)
            thread = threading.Thread(target=download, args=(folder,), daemon=True)
            if not complete():  # who held the lock a moment ago may have fetched it
                thread.start()
                thread.join(limit)
            if thread.is_alive():
                failures.append(f"not finished after {limit:.0f} s")
            for file in IDX_FILES if not failures and not complete() else ():
                os.replace(Path(folder) / name / "raw" / file, raw / file)
    except OSError as error:  # no permission, no space
        failures.append(str(error))
    finally:
        socket.setdefaulttimeout(default)
        if lock is not None:
            os.close(lock)
    return failures[0] if failures else None


def read_idx(path, dims):
    """The uint8 tensor in an IDX file: (N, 28, 28) for dims = 3, images; (N,) for dims = 1, labels.

    `path` is mapped into memory, so that only what is used is read; or `path`.gz is unpacked. ValueError with what was
    expected and what was found. By hand, for torchvision's reader stops at a bare assert, if at all.
    Big-endian, two labels, 7 and 2: 00 00 08 01 (08 means uint8, 1 dimension) | 00 00 00 02 | 07 02.
    """
    path = Path(path)
    try:
        if path.exists():
            with open(path, "rb") as file:  # ACCESS_COPY: writing to the tensor leaves the file as it is
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if path.stat().st_size else b""
        else:
            path = path.with_name(path.name + ".gz")
            content = bytearray(gzip.decompress(path.read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes are no whole gzip file ({error}); remove it") from None

    header, magic, size = 4 + 4 * dims, 0x800 + dims, len(content)
    found, *shape = struct.unpack(f">{1 + dims}I", content[:header].ljust(header, b"\0"))
    if found != magic or size < header:
        raise ValueError(f"{path}: magic {magic}, {header}+ bytes expected, {found}, {size} bytes found; remove it")
    if dims == 3 and shape[1:] != [28, 28]:
        raise ValueError(f"{path}: images of 28x28 pixels expected, {shape[1]}x{shape[2]} found")
    expected = header + math.prod(shape)
    if size != expected or shape[0] == 0:
        raise ValueError(f"{path}: {expected:,} bytes for {shape[0]} items expected, {size:,} found; remove it")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def check_labels(images, labels, classes, where="data set"):
    """ValueError unless each image has one label, in 0..K-1. cross_entropy would leave out a -100 in silence."""
    if len(images) != len(labels):
        raise ValueError(f"{where}: {len(images)} images, but {len(labels)} labels")
    low, high = (labels.min().item(), labels.max().item()) if len(labels) else (0, 0)
    if low < 0 or high >= len(classes):
        raise ValueError(f"{where}: labels from {low} to {high}, but {len(classes)} classes, 0 to {len(classes) - 1}")


def load_mnist(root, train=True, name="MNIST"):
    """MNIST or FashionMNIST (`name`) from root/name/raw: images uint8 (N, 28, 28), labels int64 (N,), K class names.

    ValueError for a file that is not what its name says, OSError for one that cannot be read.
    Needs: read_idx, check_labels, FASHION_CLASSES, IDX_FILES.
    """
    image_file, label_file = (Path(root) / name / "raw" / file for file in (IDX_FILES[:2] if train else IDX_FILES[2:]))
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1).long()
    classes = FASHION_CLASSES if name == "FashionMNIST" else [str(digit) for digit in range(10)]
    check_labels(images, labels, classes, label_file)
    return images, labels, classes


def load_dataset(choice, root, once=lambda function: function(), say=print):
    """(name, training set, test set), as load_mnist returns them; auto is mnist or, if that is not to be had, sample.

    `once` runs a function in one process of several and gives all its result. `say` is told when auto falls back; a
    data set asked for by name is an OSError. Needs: load_mnist, fetch_mnist, SAMPLE, IDX_FILES.
    """
    if choice != "sample":
        name = {"auto": "MNIST", "mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[choice]
        reason = once(lambda: fetch_mnist(root, name))
        if reason is None:
            return name, load_mnist(root, True, name), load_mnist(root, False, name)
        reason = f"{name} is not in {root}/{name}/raw, and its download failed ({reason})"
        if choice != "auto":
            raise OSError(f"{reason}; put {', '.join(IDX_FILES)} there, unpacked or as .gz, or take --dataset sample")
        say(f"{reason}: going on with the bundled sample of 5,000 digits")
    return "sample", load_mnist(SAMPLE, True), load_mnist(SAMPLE, False)


def split_validation(n, val_size, seed):
    """Indices of the training part and the validation part (val_size, n // 12 at most) of n samples: two int64 tensors.

    A function of its arguments alone: the same for every rank, rerun and resume.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    size = min(val_size, n // 12)
    return order[size:], order[:size]


# --------------------------------------------------------------------------------------------- tensors -> batches


class Digits(Dataset):
    """Images uint8 (N, 28, 28) and labels int64 (N,) in memory, of K classes (names). Needs: check_labels, take.

    augment    distort each image a little, by `seed` and the batch that it is in; for training only
    transform  optional function of one image, float (1, 28, 28) in 0..1, such as torchvision's, that stays in 0..1

    dataset[i], i >= 0, is one sample, float (1, 28, 28) and int64 (). dataset.__getitems__(indices), which a DataLoader
    calls if it is there, is a whole batch, float (B, 1, 28, 28) and int64 (B,): one indexing operation in place of B
    calls, B small tensors and a stack, where most of a textbook loader's time goes.
    """

    def __init__(self, images, labels, classes, augment=False, seed=0, transform=None):
        check_labels(images, labels, classes)
        self.images, self.labels, self.classes = images, labels, classes
        self.augment, self.seed, self.transform = augment, seed, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        images, labels = take(self.images, self.labels, indices, self.augment, self.seed)
        if self.transform:
            images = torch.stack([self.transform(image) for image in images])
        return images, labels


def take(images, labels, indices, augmented=False, seed=0):
    """Of uint8 (N, 28, 28) and (N,) the batch with these indices: float (B, 1, 28, 28) in 0..1, int64 (B,).

    The index -1 is nobody, some image with the label -100: see EpochSampler. Needs: augment.
    """
    indices = torch.as_tensor(indices)
    batch = images[indices].unsqueeze(1).float() / 255  # as uint8 the whole takes a quarter of the memory
    if augmented:
        # A function of the seed and the batch: which samples, in which order. So shuffled epochs differ (unless a batch
        # is one image), the number of workers makes no difference, and a resumed run has no generator to restore.
        batch = augment(batch, torch.Generator().manual_seed(zlib.crc32(indices.numpy().tobytes(), seed)))
    return batch, labels[indices].long().masked_fill(indices < 0, -100)


class DigitStream(IterableDataset):
    """Batches from two IDX files that need not fit in memory, shuffled through a bounded buffer.

    files     paths of images and labels, unpacked; mapped anew for each batch, so what was read is given back
    total     it yields the first so many samples
    left_out  int64 indices below `total`, each once, to pass over: the validation set
    buffer    how many indices wait to be drawn; should exceed the longest run of one class in the file

    Yields float (B, 1, 28, 28) in 0..1, int64 (B,). Each worker of each rank walks through all indices in an order that
    is a function of seed + epoch and reads its own batches alone: every sample comes once, for any number of workers,
    and ranks get equally many batches, with nobody at the end (see EpochSampler). Needs: read_idx, take.
    """

    def __init__(self, files, total, batch_size, left_out=(), augment=False, seed=0, world_size=1, rank=0, buffer=9999):
        if missing := [str(file) for file in files if not Path(file).is_file()]:
            raise ValueError(f"{missing}: not there; a stream maps unpacked files, so gunzip them first")
        self.files, self.total, self.left_out, self.buffer = files, total, torch.as_tensor(left_out), buffer
        self.batch_size, self.augment, self.seed, self.epoch = batch_size, augment, seed, 0
        self.world_size, self.rank = world_size, rank

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):  # batches of each rank
        return math.ceil((self.total - len(self.left_out)) / (self.batch_size * self.world_size))

    def __iter__(self):
        worker, step = torch.utils.data.get_worker_info(), self.batch_size * self.world_size
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        number, waiting = 0, torch.empty(0, dtype=torch.int64)
        for start in range(0, self.total, self.buffer):
            new = torch.arange(start, min(start + self.buffer, self.total))
            waiting = torch.cat([waiting, new[~torch.isin(new, self.left_out)]])
            waiting = waiting[torch.randperm(len(waiting), generator=generator)]
            end = start + self.buffer >= self.total
            while len(waiting) >= self.buffer + step or end and len(waiting):
                batch, waiting = waiting[:step], waiting[step:]
                if worker is None or number % worker.num_workers == worker.id:
                    batch = F.pad(batch, (0, -len(batch) % self.world_size), value=-1)[self.rank :: self.world_size]
                    yield take(read_idx(self.files[0], 3), read_idx(self.files[1], 1), batch, self.augment, self.seed)
                number += 1


def augment(images, generator, shift=2.0, degrees=10.0, scale=0.1):
    """Shifts each image of a batch, then turns and scales it about its centre, by uniform draws of its own.

    images float (B, C, H, W), black = 0, H = W -> the same shape. By hand, for a random transform of torchvision draws
    once for a whole batch, and image by image takes longer than the training step. No flips: a mirrored 2 is no digit.
    """
    B, _, H, W = images.shape
    draw = torch.rand(B, 4, 1, 1, generator=generator) * 2 - 1  # -1..1
    dx, dy = draw[:, 0] * shift * 2 / W, draw[:, 1] * shift * 2 / H  # (B, 1, 1); a picture is 2 wide to grid_sample
    angle, zoom = draw[:, 2] * math.radians(degrees), 1 + draw[:, 3] * scale
    cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom  # divided: the grid leads from output to input
    x = ((torch.arange(W) * 2 + 1) / W - 1).view(1, 1, W)  # centres of the pixels, in -1..1
    y = ((torch.arange(H) * 2 + 1) / H - 1).view(1, H, 1)
    # Written out: F.affine_grid does it by a batch of tiny matrix products and takes longer than all the rest together.
    grid = torch.stack([cos * x - sin * y + dx, sin * x + cos * y + dy], dim=-1)  # (B, H, W, 2): where pixels come from
    return F.grid_sample(images, grid, align_corners=False)  # bilinear; outside is 0


def normalize(images):
    """Images in 0..1 -> mean 0 and variance 1 over MNIST: black is -0.4242, white 2.8215. Needs: MEAN, STD."""
    return (images - MEAN) / STD


def collate_images(batch):
    """What Digits.__getitems__ returns, normalized. No lambda: spawned workers find it by name. Needs: normalize."""
    return normalize(batch[0]), batch[1]


def collate_padded(sequences):
    """Ragged tensors (L_1, ...), (L_2, ...), a length may be 0 -> padded (B, L, ...), mask bool (B, L). Needs: pad."""
    return pad(torch.cat(sequences), torch.tensor([len(sequence) for sequence in sequences]))


def pad(flat, lengths):
    """Sequences in one row (T, ...), lengths int64 (B,) -> (B, L, ...) with zeros; mask bool (B, L), True = real."""
    mask = torch.arange(max(1, lengths.max().item())) < lengths[:, None]  # (B, L)
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat  # True elements are counted row by row, and that is the order of `flat`
    return padded, mask


def collate_packed(batch, blank=False):
    """Images as tokens, their patches of 4 x 4 pixels that have ink (or `blank`: all of them), in one row.

    What Digits.__getitems__ returns -> (tokens float (T, 16), positions int64 (T,) in a grid of 7 x 7, mask bool
    (B, L), segments int64 (T,)), labels. The mask says where each would stand in collate_tokens; segments are
    0 0 0 0 0 1 1 1 1 1 1 in the example there, and segments[:, None] == segments a block-diagonal mask (T, T).
    Needs: normalize, pad.
    """
    images, labels = batch
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(images), 49, 16)
    inked = (patches != 0).any(2) | blank  # (B, 49)
    segments, positions = inked.nonzero(as_tuple=True)
    return (normalize(patches[inked]), positions, pad(positions, inked.sum(1))[1], segments), labels


def collate_tokens(batch, blank=False):
    """The same tokens padded: (tokens float (B, L, 16), positions int64 (B, L), mask bool (B, L)), labels.

    An image has 5 to 32, 18.5 on average, augmented 22; L is the largest number in the batch. Two images of the sample,
    both a 1, and the pixels of the first patch. Needs: collate_packed, pad.

    >>> two = Digits(*load_mnist(SAMPLE, train=False)).__getitems__([361, 241])
    >>> (tokens, positions, mask), labels = collate_tokens(two)
    >>> positions.tolist()
    [[10, 17, 24, 31, 38, 0], [10, 17, 24, 31, 38, 39]]
    >>> mask.int().tolist()
    [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    >>> ((tokens[0, 0] * STD + MEAN) * 255).round().int().tolist()
    [48, 255, 100, 0, 48, 254, 155, 0, 93, 243, 226, 14, 0, 216, 254, 47]
    """
    (tokens, positions, mask, _), labels = collate_packed(batch, blank)
    lengths = mask.sum(1)
    return (pad(tokens, lengths)[0], pad(positions, lengths)[0], mask), labels


COLLATES = {"images": collate_images, "packed": collate_packed, "padded": collate_tokens}
COLLATES["all"] = partial(collate_tokens, blank=True)


class EpochSampler(DistributedSampler):
    """The order of an epoch, dealt to the ranks: a function of seed + epoch. Call set_epoch(epoch) before each.

    labels int64 (N,). balanced: N draws with replacement, by WeightedRandomSampler, all classes equally often on
    average; else all, shuffled. If the ranks do not divide N, the last get the index -1, nobody, whose label -100
    cross_entropy leaves out (batch norm does not): all take equally many steps and no sample counts twice.
    DistributedSampler itself repeats the first samples or drops the last.
    """

    def __init__(self, labels, seed=0, world_size=1, rank=0, balanced=False):
        super().__init__(labels, num_replicas=world_size, rank=rank, seed=seed)  # works without a process group
        self.weights = (1.0 / labels.bincount().double())[labels] if balanced else None  # (N,): by sample, not by class

    def __iter__(self):
        generator, N = torch.Generator().manual_seed(self.seed + self.epoch), len(self.dataset)
        if self.weights is None:
            order = torch.randperm(N, generator=generator).tolist()
        else:
            order = list(WeightedRandomSampler(self.weights, N, generator=generator))
        return iter((order + [-1] * (self.total_size - N))[self.rank :: self.num_replicas])


def seed_worker(worker_id):
    """Prepares a worker process of a DataLoader, whose global generators torch has seeded already, NumPy's too.

    Generators that are attributes of the data set are copies, equal in all workers: they get seeds of their own here.
    """
    if hasattr(os, "setsid"):  # so that Ctrl-C in a terminal does not kill a worker in the middle of a step
        os.setsid()
    kept = getattr(torch.utils.data.get_worker_info().dataset, "__dict__", {})
    for seed, (name, value) in enumerate(kept.items(), torch.initial_seed() + 1):
        if hasattr(value, "bit_generator"):  # NumPy's Generator
            kept[name] = type(value)(type(value.bit_generator)(seed))
        elif isinstance(value, (torch.Generator, random.Random)):
            (value.manual_seed if isinstance(value, torch.Generator) else value.seed)(seed)


def make_loader(dataset, batch_size, sampler=None, workers=0, pin_memory=False, seed=0, collate=collate_images):
    """A DataLoader over Digits or a DigitStream: pairs of what `collate` makes of images, and labels int64 (B,).

    workers 0 loads in this process, the fastest for data in memory; more pay off with a slow transform. pin_memory lets
    .to(device, non_blocking=True) overlap with a GPU's work. seed: one per rank. Needs: collate_images, seed_worker.
    """
    stream = isinstance(dataset, IterableDataset)  # makes whole batches; a worker that stays would not see set_epoch
    return DataLoader(
        dataset, None if stream else batch_size, sampler=sampler, num_workers=workers, collate_fn=collate,
        pin_memory=pin_memory, worker_init_fn=seed_worker, persistent_workers=workers > 0 and not stream,
        # Its own: each epoch draws its workers' seed, which from the global generator would change the dropout.
        generator=torch.Generator().manual_seed(seed),
    )


if __name__ == "__main__":
    images, labels, classes = load_mnist(SAMPLE)
    print(f"images {images.dtype} {tuple(images.shape)}, labels {labels.dtype} {tuple(labels.shape)}, {classes}")
    for augmented in (False, True):  # three digits, and the same three augmented
        three, _ = Digits(images, labels, classes, augmented).__getitems__([3, 4, 5])
        for row in zip(*three[:, 0, 2:26, 2:26].tolist()):
            print("   ".join("".join(" .:-=+*#%@"[min(9, int(10 * pixel))] for pixel in digit) for digit in row))
