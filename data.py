"""From files on disk to batches on their way out.

fetch_mnist                         downloads the four files of MNIST or Fashion-MNIST, once, safely
read_idx, load_mnist, load_dataset  files -> images uint8 (N, 28, 28), labels int64 (N,), class names, checked
split_validation                    N -> two disjoint sets of indices, by seed
Digits, augment                     indices -> images float (B, 1, 28, 28) in 0..1, labels int64 (B,)
collate_images, normalize           that -> what the CNN takes
collate_tokens, collate_packed      that -> what attention takes: patches with ink, padded or in one row
make_sampler, make_loader           the order of an epoch, and the loader that walks it

This file knows nothing of models, devices or training. `python data.py` shows a batch on its way.

Letters: N samples in a data set, B in a batch, H x W pixels, K classes, L tokens of a batch's longest sample, T of all
its samples. "Needs" in a docstring: what to copy along.
"""

import gzip
import math
import os
import socket
import struct
import tempfile
import threading
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two processes fetch each for itself, which is slow but does no harm
    fcntl = None

# Mean and standard deviation over all pixels of the 60,000 training images, in 0..1. Never the test set's: a statistic
# of the test set is a piece of it. Fashion-MNIST takes the same two: what counts is that training and use agree.
MEAN, STD = 0.1307, 0.3081

SAMPLE = Path(__file__).resolve().parent / "sample"  # 4,000 + 1,000 real digits in MNIST's layout: load_mnist(SAMPLE)
FASHION_CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(",")
IDX_FILES = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


# ---------------------------------------------------------------------------------------------------- files -> tensors


def has_mnist(root, name="MNIST"):
    """Whether all four IDX files lie in root/name/raw, each as it is or as .gz. Needs: IDX_FILES."""
    raw = Path(root) / name / "raw"
    return all((raw / file).is_file() or (raw / f"{file}.gz").is_file() for file in IDX_FILES)


def fetch_mnist(root, name="MNIST", stall=10.0, limit=300.0):
    """Downloads MNIST or FashionMNIST (`name`) into root/name/raw if it is not there. Needs: has_mnist, IDX_FILES.

    Returns None if the files are there now, else the reason in one line: being offline is no exception. A connection
    may be silent for `stall` seconds, the whole may take `limit` seconds. Files appear whole or not at all. Of several
    processes one fetches and the others wait for it; what it could not get, they do not try again.
    """
    raw, lock, failures = Path(root) / name / "raw", None, []

    def download(folder):
        try:
            from torchvision import datasets  # here, for it takes a second and most runs have their data already

            getattr(datasets, name)(folder, download=True)  # knows the mirrors, checks the md5, unpacks
        except Exception as error:  # in a thread; of a list of mirrors that were tried, the last line is the reason
            failures.append((str(error).strip() or repr(error)).splitlines()[-1])

    default = socket.getdefaulttimeout()
    try:
        if has_mnist(root, name):
            return None
        raw.mkdir(parents=True, exist_ok=True)
        waited = False
        if fcntl:
            lock = os.open(raw, os.O_RDONLY)  # the folder is its own lock, lifted when its holder closes it or dies
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(lock, fcntl.LOCK_EX)
        if waited or has_mnist(root, name):
            return None if has_mnist(root, name) else "the process that fetched it failed"
        # torchvision sets no time limit and writes in place: hence a folder, and a thread that can be left behind.
        with tempfile.TemporaryDirectory(dir=raw, ignore_cleanup_errors=True) as folder:
            socket.setdefaulttimeout(stall)
            thread = threading.Thread(target=download, args=(folder,), daemon=True)
            thread.start()
            thread.join(limit)
            if thread.is_alive():
                failures.append(f"not finished after {limit:.0f} s")
            for file in IDX_FILES if not failures else ():
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

    Reads `path`, or else `path`.gz. Raises ValueError with the file's name, what was expected and what was found.
    By hand, for torchvision's reader stops at a bare assert, if at all, and reads no .gz that it has not fetched.

    The format, big-endian: the magic number 00 00 08 dims (08 means uint8), the size of each dimension, the bytes.
    Two labels, 7 and 2: 00 00 08 01 | 00 00 00 02 | 07 02.
    """
    path = Path(path)
    try:
        if path.exists():
            content = path.read_bytes()
        else:
            path = path.with_name(path.name + ".gz")
            content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes are no whole gzip file ({error}); remove it") from None

    header, magic = 4 + 4 * dims, 0x800 + dims
    if len(content) < header:
        raise ValueError(f"{path}: at least {header} bytes expected, {len(content)} found; remove it")
    found, *shape = struct.unpack(f">{1 + dims}I", content[:header])
    if found != magic:
        raise ValueError(f"{path}: magic {magic} expected, {found} found in {len(content):,} bytes; remove it")
    if dims == 3 and shape[1:] != [28, 28]:
        raise ValueError(f"{path}: images of 28x28 pixels expected, {shape[1]}x{shape[2]} found")
    expected = header + math.prod(shape)
    if len(content) != expected or shape[0] == 0:
        raise ValueError(f"{path}: {expected:,} bytes for {shape[0]} items expected, {len(content):,} found; remove it")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)  # writable memory


def check_labels(images, labels, classes, where="data set"):
    """ValueError unless each image has one label, in 0..K-1. cross_entropy would leave out a -100 in silence."""
    if len(images) != len(labels):
        raise ValueError(f"{where}: {len(images)} images, but {len(labels)} labels")
    low, high = (labels.min().item(), labels.max().item()) if len(labels) else (0, 0)
    if low < 0 or high >= len(classes):
        raise ValueError(f"{where}: labels from {low} to {high}, but {len(classes)} classes, 0 to {len(classes) - 1}")


def load_mnist(root, train=True, name="MNIST"):
    """MNIST or FashionMNIST (`name`) from root/name/raw. Needs: read_idx, check_labels, FASHION_CLASSES.

    Returns images uint8 (N, 28, 28), labels int64 (N,), a list of K class names. Raises ValueError for a file that is
    not what its name says, OSError for one that cannot be read.
    """
    prefix = f"{root}/{name}/raw/{'train' if train else 't10k'}"
    images = read_idx(f"{prefix}-images-idx3-ubyte", 3)
    labels = read_idx(f"{prefix}-labels-idx1-ubyte", 1).long()
    classes = FASHION_CLASSES if name == "FashionMNIST" else [str(digit) for digit in range(10)]
    check_labels(images, labels, classes, f"{prefix}-labels-idx1-ubyte")
    return images, labels, classes


def load_dataset(choice, root, once=lambda function: function(), say=print):
    """Training and test set of `choice`: mnist, fashion-mnist, sample, or auto.

    Needs: load_mnist, fetch_mnist, SAMPLE, IDX_FILES.

    auto is mnist if it is in `root` or can be downloaded, else the bundled sample, which is said in one line to `say`.
    Returns (name, training, test), both as load_mnist returns them. `once` runs a function in one process of several
    and gives all of them its result. Raises OSError if a data set asked for by name is not to be had.
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
    """Indices of the training and the validation part of n samples: two int64 tensors, disjoint, together everything.

    A function of its arguments alone, so every rank, every rerun and every resume gets the same split. Holds out at
    most a twelfth: whoever has 60 pictures needs them for training.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    size = min(val_size, n // 12)
    return order[size:], order[:size]


# --------------------------------------------------------------------------------------------- tensors -> batches


class Digits(Dataset):
    """Images in memory, fetched and augmented a batch at a time. Needs: check_labels, augment.

    images     uint8 (N, 28, 28)
    labels     int64 (N,); a label outside 0..K-1 is a ValueError
    classes    K names
    augment    draw a small distortion for each image each time (training only)
    seed       of the augmentation
    transform  optional function of one image, float (1, 28, 28) in 0..1, such as torchvision's; called after augment

    dataset[i] is one sample, float (1, 28, 28) and int64 (); dataset.__getitems__(indices) is a whole batch, float
    (B, 1, 28, 28) and int64 (B,). A DataLoader that finds __getitems__ calls it once a batch: one indexing operation in
    place of B calls, B small tensors and a stack, which is where most of a textbook loader's time goes.
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
        indices = torch.as_tensor(indices)
        images = self.images[indices].unsqueeze(1).float() / 255  # (B, 1, 28, 28); as uint8 it takes a quarter
        if self.augment:
            # A function of the seed and the batch: which samples, in which order. A shuffled epoch has new batches and
            # so new draws, the same for any number of workers, and a resumed run has no generator to restore.
            checksum = zlib.crc32(indices.numpy().tobytes(), self.seed)
            images = augment(images, torch.Generator().manual_seed(checksum))
        if self.transform:
            images = torch.stack([self.transform(image) for image in images])
        return images, self.labels[indices]


def augment(images, generator, shift=2.0, degrees=10.0, scale=0.1):
    """Shifts each image of a batch, then turns and scales it about its centre, by uniform draws of its own.

    images float (B, C, H, W), black = 0 and H = W -> the same shape. At most `shift` pixels in x and in y, `degrees`
    either way, a factor of 1 - scale to 1 + scale. By hand, because a random transform of torchvision draws once for a
    whole batch, and on one image at a time it takes longer than the training step. No flips: a mirrored 2 is no digit.
    """
    B, _, H, W = images.shape
    draw = torch.rand(B, 4, 1, 1, generator=generator) * 2 - 1
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
    """The pair that Digits.__getitems__ returns, not a list of samples, with the images normalized. Needs: normalize.

    A function of the module, not a lambda, for spawned workers unpickle it by its name.
    """
    images, labels = batch
    return normalize(images), labels


def collate_padded(sequences):
    """Ragged tensors (L_1, ...), (L_2, ...), a length may be 0 -> padded (B, L, ...) and mask bool (B, L). Needs: pad.

    The mask is True for what is real; the rest is 0.
    """
    return pad(torch.cat(sequences), torch.tensor([len(sequence) for sequence in sequences]))


def pad(flat, lengths):
    """All sequences in one row (T, ...) and their lengths int64 (B,) -> padded (B, L, ...), mask bool (B, L)."""
    mask = torch.arange(max(1, lengths.max().item())) < lengths[:, None]  # (B, L)
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat  # True elements are counted row by row, and that is the order of `flat`
    return padded, mask


def find_tokens(images, blank=False):
    """The patches of 4 x 4 pixels that have ink, or with `blank` all of them. Needs: normalize.

    images float (B, 1, 28, 28) in 0..1 -> of the T patches, image after image, each from left to right and from top to
    bottom: tokens float (T, 16), normalized, positions int64 (T,) in 0..48, segments int64 (T,) in 0..B-1; and the
    number of patches of each image, int64 (B,).
    """
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(images), 49, 16)  # any memory format
    inked = (patches != 0).any(2) | blank  # (B, 49)
    segments, positions = inked.nonzero(as_tuple=True)
    return normalize(patches[inked]), positions, segments, inked.sum(1)


def collate_tokens(batch, blank=False):
    """What Digits.__getitems__ returns -> (tokens float (B, L, 16), positions int64 (B, L), mask bool (B, L)), labels.

    An image has as many tokens as patches with ink, 18.5 on average, and zeros up to the L of the one with most.
    Needs: find_tokens, pad. Two of the sample, both a 1, cut from a grid of 7 x 7 places:

    >>> two = Digits(*load_mnist(SAMPLE, train=False)).__getitems__([361, 241])
    >>> (tokens, positions, mask), labels = collate_tokens(two)
    >>> positions
    tensor([[10, 17, 24, 31, 38,  0],
            [10, 17, 24, 31, 38, 39]])
    >>> mask
    tensor([[ True,  True,  True,  True,  True, False],
            [ True,  True,  True,  True,  True,  True]])
    >>> ((tokens[0, 0] * STD + MEAN) * 255).round().int().view(4, 4)
    tensor([[ 48, 255, 100,   0],
            [ 48, 254, 155,   0],
            [ 93, 243, 226,  14],
            [  0, 216, 254,  47]], dtype=torch.int32)
    """
    images, labels = batch
    tokens, positions, _, lengths = find_tokens(images, blank)
    tokens, mask = pad(tokens, lengths)
    return (tokens, pad(positions, lengths)[0], mask), labels


def collate_packed(batch):
    """The same tokens in one row, T in all: (tokens (T, 16), positions (T,), mask (B, L), segments (T,)), labels.

    The mask is that of collate_tokens: it says where each token would stand. A segment id is the sample that a token
    belongs to: 0 0 0 0 0 1 1 1 1 1 1 for the two digits above. Attention within segments only has the block-diagonal
    mask (T, T) segments[:, None] == segments. Needs: find_tokens, pad.
    """
    images, labels = batch
    tokens, positions, segments, lengths = find_tokens(images)
    return (tokens, positions, pad(positions, lengths)[1], segments), labels


class BalancedSampler(DistributedSampler):
    """WeightedRandomSampler, split over ranks, as a function of (seed, epoch): all classes equally often on average.

    labels int64 (N,). N draws an epoch over all ranks, with replacement: a rare sample comes often, so augment it.
    """

    def __init__(self, labels, num_replicas, rank, seed=0):
        super().__init__(labels, num_replicas=num_replicas, rank=rank, seed=seed)
        self.weights = (1.0 / labels.bincount().double())[labels]  # (N,): one for each sample, not for each class

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        draws = WeightedRandomSampler(self.weights, self.total_size, generator=generator)
        return iter(list(draws)[self.rank :: self.num_replicas])


def make_sampler(labels, seed=0, world_size=1, rank=0, balanced=False):
    """The order of the training samples. Call its set_epoch(epoch) before each epoch. Needs: BalancedSampler.

    The order is a function of seed + epoch, so a resumed run repeats it and passes over what it has seen. Works without
    a process group, so one process takes the same path as many. If the ranks do not divide N, a few samples
    come twice in an epoch, so that all ranks take the same number of steps.
    """
    if balanced:
        return BalancedSampler(labels, world_size, rank, seed)
    return DistributedSampler(labels, num_replicas=world_size, rank=rank, seed=seed)


def seed_worker(worker_id):
    """Prepares a worker process of a DataLoader, whose global generators, NumPy's too, torch has seeded already.

    Ctrl-C reaches all processes of a terminal's group, and a worker that it ends takes the step with it that the main
    process wants to finish. In a group of its own it is out of reach, and the main process can still terminate it.
    """
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()


def make_loader(dataset, batch_size, sampler=None, workers=0, pin_memory=False, seed=0, collate=collate_images):
    """A DataLoader over Digits: pairs of what `collate` makes of images and labels. Needs: collate_images, seed_worker.

    Without a sampler in order. workers 0 loads in this process, the fastest for data in memory; more pay off if there
    is a slow `transform`. pin_memory lets .to(device, non_blocking=True) overlap with a GPU's work. seed: one per rank.
    """
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=collate, pin_memory=pin_memory,
        worker_init_fn=seed_worker, persistent_workers=workers > 0,
        # Its own: each epoch draws its workers' seed, which from the global generator would change the dropout.
        generator=torch.Generator().manual_seed(seed),
    )


if __name__ == "__main__":
    images, labels, classes = load_mnist(SAMPLE)
    pixels = images / 255
    print(f"images {images.dtype} {tuple(images.shape)}, labels {labels.dtype} {tuple(labels.shape)}, {classes}")
    print(f"mean {pixels.mean():.4f}, std {pixels.std():.4f} (all of MNIST: {MEAN}, {STD})")
    print("\nthree digits, and the same three augmented:")
    for augmented in (False, True):
        three, _ = Digits(images, labels, classes, augmented).__getitems__([3, 4, 5])
        for rows in zip(*three[:, 0, 2:26, 2:26].tolist()):  # the same row of each
            print("   ".join("".join(" .:-=+*#%@"[min(9, int(10 * pixel))] for pixel in row) for row in rows))
    x, y = next(iter(make_loader(Digits(images, labels, classes, augment=True), 128, make_sampler(labels))))
    print(f"\na batch: images {x.dtype} {tuple(x.shape)} in {x.min():.4f} to {x.max():.4f}, labels {tuple(y.shape)}")
