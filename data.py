"""From files on disk to batches on their way out. `python data.py` shows some of them.

    load_dataset     files           ->  images uint8 (N, C, H, W), labels int64 (N,), and `about`
    EpochSampler     seed, epoch     ->  indices: the order of an epoch, dealt to the processes
    Digits           indices         ->  images float (B, C, H, W) in 0..1, labels int64 (B,)
    collate_images   those           ->  normalized images, for a network of convolutions
    collate_tokens   those           ->  patches, positions and a mask, for a network of attention
    make_loader      all of these    ->  an iterable of batches

Sections, in this order:

    1  files to tensors        read_idx, load_mnist, describe, load_dataset, split_validation
    2  chance without state    mix, uniform_draws
    3  tensors to samples      Digits, augment
    4  samples to batches      normalize, collate_images, _packed, _tokens and _padded
    5  order and loader        EpochSampler, make_loader, seed_worker
    -  extras, for a few       export, a transform that draws, the download, a stream, pictures

This file knows nothing of models, devices or training. The one place that a fork with its own
pictures changes is load_dataset.

Letters: N samples in a data set, B in a batch, C channels of H x W pixels, K classes,
P positions of patches in an image; L tokens of a batch's longest sample, T of all its samples.
"Needs" in a docstring says what to copy along with the object, imports included.
"""

import gzip
import http.client
import math
import mmap
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
from torch.utils.data import default_collate, get_worker_info

# 4,000 + 1,000 real digits in MNIST's own layout, so that the first run needs no network.
SAMPLE = Path(__file__).resolve().parent / "sample"

# Images and labels to train on, images and labels to test with.
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]


# ------------------------------------------------------------------------- 1  files to tensors


class DataError(ValueError):
    """What the user has to put right: a broken file, a failed download, labels out of range.

    Its text is one line that names the file or the value, and what helps. The program prints that
    line and nothing else. Every other exception from this file is a bug and keeps its traceback.
    """


def read_bytes(path):
    """Reads `path`, or unpacks `path`.gz if only that is there: (bytes, the path that was read).

    A plain file is mapped into memory: the system reads a page of it when somebody looks at it, so
    that a file larger than memory can be used like a tensor in memory.

    raises   DataError if there is no such file or it cannot be read

    Needs: gzip, mmap, zlib; DataError.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        if path.exists() or not packed.exists():
            with open(path, "rb") as file:
                if path.stat().st_size == 0:
                    return b"", path  # mmap refuses an empty file
                # ACCESS_COPY: to write into the tensor changes a copy in memory, never the file.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), path
        return bytearray(gzip.decompress(packed.read_bytes())), packed
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{packed}: is no whole gzip file ({error}); remove it") from None
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror})") from None


def read_idx(path, dims):
    """Reads an IDX file, the format of MNIST: a header of a few bytes, then the items in a row.

    The first 17 bytes of train-images-idx3-ubyte (the largest byte of a number comes first):

        00 00           always zero
        08              the type of a value: one unsigned byte
        03              the number of dimensions           these four are one number, 2051: "magic"
        00 00 EA 60     first dimension    60,000 images
        00 00 00 1C     second dimension   28 rows
        00 00 00 1C     third dimension    28 columns
        00 ...          60,000 x 28 x 28 pixels, row by row: 0 is black, 255 is white

    A file of labels has 01 in place of 03, one dimension, and then a byte for each label, 0 to 9.
    Without a check a broken file would be noticed somewhere in the training, or never. So all of it
    is checked here, where its name is known; torchvision's reader stops at a bare assertion, if it
    stops at all.

    path     a file, or its name without the .gz that is there
    dims     3 for images of 28 x 28 pixels, 1 for labels
    returns  uint8 (N, 28, 28) or (N,)
    raises   DataError with what was expected and what was found

    Needs: math, struct, Path, torch; read_bytes, DataError.
    """
    content, path = read_bytes(Path(path))
    size = len(content)
    header = 4 + 4 * dims
    if size < header:
        raise DataError(f"{path}: {header}+ bytes expected, {size} bytes found; remove it")
    expected_magic = 0x800 + dims
    magic, *shape = struct.unpack(f">{1 + dims}I", content[:header])
    if magic != expected_magic:
        raise DataError(
            f"{path}: magic number {expected_magic} expected, "
            f"{magic} found in {size} bytes; remove it"
        )
    if dims == 3 and shape[1:] != [28, 28]:
        raise DataError(f"{path}: images of 28x28 pixels expected, {shape[1]}x{shape[2]} found")
    if shape[0] == 0:
        raise DataError(f"{path}: 0 items are in it; remove it")
    expected = header + math.prod(shape)
    if size != expected:
        raise DataError(
            f"{path}: {expected:,} bytes for {shape[0]} items expected, {size:,} found; remove it"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def check_labels(images, labels, classes, where="data set"):
    """DataError unless each image has a label, and each label is one of 0 .. K-1.

    A label 10 among 10 classes ends in an error far from here, or on a GPU in one that names no
    line at all; a label -100 is worse, for cross_entropy leaves such a sample out and says nothing.
    Labels of floating point are a regression's targets: of those any value is right.

    Needs: DataError.
    """
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, but {len(labels)} labels")
    if len(labels) == 0 or labels.is_floating_point():
        return
    low = labels.min().item()
    high = labels.max().item()
    if low < 0 or high >= len(classes):
        raise DataError(
            f"{where}: labels from {low} to {high}, "
            f"but {len(classes)} classes, 0 to {len(classes) - 1}"
        )


def load_mnist(root, train=True, name="MNIST"):
    """Loads the training part (or the test part) of MNIST or FashionMNIST from root/name/raw.

    Both are 60,000 + 10,000 grey pictures of 28 x 28 pixels in 10 classes, in the same four files,
    unpacked or as .gz. One byte a pixel, 47 MB: as float32 the same would take 188 MB.

    returns  images uint8 (N, 1, 28, 28), labels int64 (N,), list of K class names
    raises   DataError for a file that is absent, unreadable or not what its name says

    Needs: Path; read_idx, check_labels, FASHION_CLASSES, IDX_FILES.
    """
    if train:
        image_file, label_file = IDX_FILES[:2]
    else:
        image_file, label_file = IDX_FILES[2:]
    folder = Path(root) / name / "raw"
    images = read_idx(folder / image_file, dims=3).unsqueeze(1)  # (N, 1, 28, 28)
    labels = read_idx(folder / label_file, dims=1).long()  # (N,)
    if name == "FashionMNIST":
        classes = FASHION_CLASSES
    else:
        classes = [str(digit) for digit in range(10)]
    check_labels(images, labels, classes, folder / label_file)
    return images, labels, classes


def describe(images, labels, classes, name, items):
    """Measures a data set: what the rest of the program has to know of it, in a dict, `about`.

    A network learns fastest from numbers around 0 that vary by about 1. Pixels are 0 to 255, so
    from each channel we take off its mean and divide by its standard deviation:

        MNIST   mean 0.1307, std 0.3081 (of pixels in 0..1)
        black   (0 - 0.1307) / 0.3081 = -0.4242
        white   (1 - 0.1307) / 0.3081 =  2.8215

    These two numbers are measured on training images alone, and then hold for every image: a
    statistic of the test set would be a piece of the test set that the network gets to know.

    60,000 images as float64 would be 376 MB. It is enough to count how often each of the 256 values
    of a byte occurs: the mean is then a sum of 256 terms, and exact.

    images, labels  of the training part: uint8 (N, C, H, W), (N,)
    classes         list of K names; of a regression, the names of what is predicted
    name, items     str: the data set's name, and what one calls its pictures, such as "digits"
    returns         dict of name, items, classes, shape [C, H, W], mean and std (lists of C floats),
                    and checksum, a str that changes if a training pixel or label does: by it a
                    resumed run knows that it still has its own data

    Needs: zlib, torch.
    """
    values = torch.arange(256, dtype=torch.float64) / 255  # what each byte stands for
    means = []
    stds = []
    for channel in range(images.shape[1]):
        pixels = images[:, channel].flatten()  # (N * H * W,)
        counts = torch.bincount(pixels, minlength=256)  # (256,)
        fractions = counts.double() / len(pixels)
        mean = (fractions * values).sum().item()
        variance = (fractions * (values - mean) ** 2).sum().item()
        std = variance**0.5
        if std == 0:  # the channel is the same everywhere: divided by 1 it becomes 0, and not NaN
            std = 1.0
        means.append(mean)
        stds.append(std)
    checksum = zlib.crc32(images.contiguous().numpy())
    checksum = zlib.crc32(labels.contiguous().numpy(), checksum)
    return {
        "name": name,
        "items": items,
        "classes": list(classes),
        "shape": list(images.shape[1:]),
        "mean": means,
        "std": stds,
        "checksum": f"{checksum:08x}",
    }


def run_here(function):
    """Runs a function and returns its result: for load_dataset, in a program of one process."""
    return function()


def load_dataset(
    choice, root, train=True, once=run_here, log=print, image_size=28, channels=None, seed=0
):
    """Loads a data set by the name that the command line has for it. Forks change this function.

    A fork needs no more than to return its own two parts, and `about` from describe: how many
    channels, pixels and classes there are is read from there by everything that follows.

    choice   "mnist", "fashion-mnist", "sample", or "auto": MNIST if it is there or can be fetched,
             else the bundled sample, and `log` is told so; or a folder of pictures
    root     folder of data sets, such as "data"; MNIST is in root/MNIST/raw
    train    False: no training image is read; the first value returned is None, and `about` has
             only name, items, classes and shape
    once     takes a function, runs it in one process of several, and returns its result in all:
             two downloads into one folder would be one too many. One process alone has run_here
    log      takes a line for the user
    image_size, channels, seed   of a folder of pictures, see load_folder
    returns  (images, labels) to train on, (images, labels) to test with, about
    raises   DataError: a data set asked for by its name is not to be had, or a file is broken

    Needs: load_folder, load_mnist, describe, fetch_mnist, run_here, DataError, SAMPLE, IDX_FILES,
    Path.
    """
    names = {"auto": "MNIST", "mnist": "MNIST", "fashion-mnist": "FashionMNIST", "sample": "sample"}
    if choice not in names:
        if not Path(choice).is_dir():
            raise DataError(f"--dataset {choice}: neither {', '.join(names)} nor a folder")
        return load_folder(choice, image_size, channels, seed, train, log)
    name = names[choice]
    if name != "sample":
        reason = once(lambda: fetch_mnist(root, name))
        if reason is not None:
            failure = f"{name} is not in {root}/{name}/raw, and its download failed ({reason})"
            if choice != "auto":
                raise DataError(
                    f"{failure}; put {', '.join(IDX_FILES)} there, unpacked or as .gz, "
                    "or take --dataset sample"
                )
            log(f"{failure}: going on with the bundled sample of 5,000 digits")
            name = "sample"

    folder = root
    layout = name
    if name == "sample":
        folder = SAMPLE
        layout = "MNIST"
    items = "images" if name == "FashionMNIST" else "digits"

    images, labels, classes = load_mnist(folder, False, layout)
    test_part = images, labels
    if not train:
        shape = list(images.shape[1:])
        return None, test_part, {"name": name, "items": items, "classes": classes, "shape": shape}
    images, labels, classes = load_mnist(folder, True, layout)
    return (images, labels), test_part, describe(images, labels, classes, name, items)


def split_validation(n, val_size, seed):
    """Chooses which of n training samples are held out for validation.

    The validation set decides which epoch was the best one, so no sample of it may be trained on,
    in any process and after any restart: the split depends on the arguments and on nothing else.
    At most a twelfth is held out: 5,000 of MNIST's 60,000, and 333 of the sample's 4,000.

    returns  indices of the training part, indices of the validation part: int64 tensors

    Needs: torch.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    size = min(val_size, n // 12)
    return order[size:], order[:size]


# --------------------------------------------------------------------- 2  chance without state


def mix(*numbers):
    """Makes one number of several, such as (seed, epoch, index), to seed a generator with.

    The tempting way is to add them. But then seed 1 in epoch 0 is seed 0 in epoch 1, and three runs
    with seeds 0, 1 and 2 draw almost the same numbers, an epoch apart. Here the sum is scrambled
    before the next number is added, so that one changed bit changes about half of the result's:

        >>> mix(0, 1)
        1534736266818221247
        >>> mix(1, 0)
        3395948882924712079

    returns an int from 0 to 2^63 - 1: what torch.Generator.manual_seed takes

    The scrambling is that of splitmix64 (Steele, Lea and Flood 2014). Needs nothing.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state = state ^ (state >> 31)
    return state >> 1


def uniform_draws(seed, epoch, indices, count):
    """Draws `count` uniform numbers for each sample: a function of (seed, epoch, index).

    A generator has a state: what it gives next depends on all that was drawn before, by whom and in
    which order. Then two workers draw other numbers than one, a resumed run has to restore each
    generator's state, and where somebody forgets that, nobody notices. A hash has no state. It is
    looked up, like a cell of a table that is too large to be stored:

                   epoch 0                      epoch 1                 seed 0
        sample 0   -0.27  0.75 -0.50  0.32       0.54 -0.56  0.98  0.39
        sample 1    0.63 -0.96 -0.36 -0.83      -0.36  0.28 -0.22 -0.41

    So it does not matter with whom a sample shares its batch, or which worker has it.

    indices  int64 (B,), or a list
    returns  float32 (B, count), each above -1 and below 1

    Needs: torch; mix.
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    cells = indices[:, None] * count + torch.arange(count)  # (B, count): which cell of the table
    # The steps of mix, for all cells at once. Products of int64 wrap around, as they should. The
    # constants lose 2^64, for int64 has a sign; `&` takes away the copies of it that >> brings in.
    x = cells * (0x9E3779B97F4A7C15 - 2**64) + mix(seed, epoch)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    # The last step of mix is left out: it changes lower bits alone. The upper 24 bits are a whole
    # number from -2^23 to 2^23 - 1, which a float32 holds exactly, also with 0.5 added.
    return ((x >> 40).float() + 0.5) / 2**23


# ----------------------------------------------------------------------- 3  tensors to samples


class Digits(Dataset):
    """Pictures in memory, from which a DataLoader takes its batches: digits, or any of one size.

    A DataLoader asks a data set for its length, and for its samples one by one: dataset[5],
    dataset[2], ..., and stacks what it gets. With images as small as these that is where the time
    goes: MNIST's 60,000, one after the other as PIL pictures, take 10.8 s. With one indexing
    operation for each batch they take 0.2 s. If a data set has __getitems__, a DataLoader uses it:

        dataset.__getitems__([5, 2, 7])  ->  images float (3, C, H, W) in 0..1, labels (3,)
        dataset[5]                       ->  image float (C, H, W), label (): a batch of one

    What is drawn for a sample, by `augment` or `transform`, is a function of (seed, epoch, index).
    It differs from epoch to epoch, and it does not depend on the batch, the number of workers or
    what was drawn elsewhere; a run that is resumed has nothing to restore. Call set_epoch(epoch)
    before each epoch: it reaches workers that live on from the epoch before, too.

    images     uint8 (N, C, H, W)
    labels     (N,), int64 from 0 to K-1; or floats, any number for each sample
    classes    list of K names, kept as an attribute
    augment    True: each image is distorted a little, see augment(); for training only
    seed       of all draws
    transform  function of an image, float (C, H, W) in 0..1, after augment, such as torchvision's;
               its results have equal shapes. It may draw from torch, random or numpy
    raises     DataError for wrong labels, ValueError for images of other dimensions

    Needs: torch, Dataset; check_labels, gather_batch, mix, transform_each.
    """

    def __init__(self, images, labels, classes, augment=False, seed=0, transform=None):
        if images.dim() != 4:
            raise ValueError(f"images (N, C, H, W) expected, {tuple(images.shape)} found")
        check_labels(images, labels, classes)
        self.images = images
        self.labels = labels
        self.classes = classes
        self.augment = augment
        self.seed = seed
        self.transform = transform
        # In shared memory. A worker process has a copy of this object, made when the worker began;
        # of this tensor it has no copy, but sees the same eight bytes.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        epoch = self.epoch.item()
        images, labels = gather_batch(
            self.images, self.labels, indices, self.augment, self.seed, epoch
        )  # (B, C, H, W), (B,)
        if self.transform is not None:
            seeds = [mix(self.seed, epoch, int(index)) for index in indices]
            images = transform_each(self.transform, images, seeds)
        return images, labels


def gather_batch(images, labels, indices, augmented, seed, epoch):
    """Takes the samples with these indices out of a data set, as floats, augmented or not.

    images   uint8 (N, C, H, W)
    labels   (N,)
    indices  int64 (B,), or a list
    returns  images float (B, C, H, W) in 0..1, labels (B,)

    Needs: torch; augment, uniform_draws.
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    batch = images[indices].float() / 255  # (B, C, H, W): only what is in use becomes float
    if augmented:
        batch = augment(batch, uniform_draws(seed, epoch, indices, 4))
    return batch, labels[indices]


def augment(images, draws, shift=2.0, degrees=10.0, scale=0.1):
    """Shifts each image a little, turns it and scales it about its centre; each by its own draws.

    A 7 that is moved by two pixels is still a 7. A network that sees each training image a little
    different in every epoch cannot learn the pixels by heart; it has to learn what makes a 7. No
    image is mirrored: a mirrored 2 is no digit.

    The computation goes backwards. For each pixel of the result we compute where in the image it
    comes from, and take the mean of the four pixels around that point, weighted by how near they
    are (bilinear). The other way round, from image to result, would leave holes.

    It is written by hand, for a random transform of torchvision draws once for a whole batch, and
    to call it image by image takes longer than the training step.

    images   float (B, C, H, W), 0 = background: what comes from outside the image is 0
    draws    float (B, 4) in -1..1: shift to the left, shift upwards, angle, scale
    shift    of at most so many pixels
    degrees  of at most so many degrees
    scale    by at most this fraction
    returns  the shape of images

    Needs: math, torch, F.
    """
    B, C, H, W = images.shape
    draws = draws.view(B, 4, 1, 1)
    # grid_sample calls the left edge -1 and the right edge 1, whatever the number of pixels.
    dx = draws[:, 0] * shift * 2 / W  # (B, 1, 1)
    dy = draws[:, 1] * shift * 2 / H
    angle = draws[:, 2] * math.radians(degrees)
    zoom = 1 + draws[:, 3] * scale
    cos = torch.cos(angle) / zoom  # for what is drawn twice as large comes from half the image
    sin = torch.sin(angle) / zoom
    x = ((torch.arange(W) * 2 + 1) / W - 1).view(1, 1, W)  # the centres of the pixels
    y = ((torch.arange(H) * 2 + 1) / H - 1).view(1, H, 1)
    # F.affine_grid computes the same by a batch of tiny matrix products, and takes longer for it
    # than everything else here together. H / W: the angle is one between pixels, not in -1..1.
    from_x = cos * x - sin * (H / W) * y + dx  # (B, H, W)
    from_y = sin * (W / H) * x + cos * y + dy
    grid = torch.stack([from_x, from_y], dim=-1)  # (B, H, W, 2)
    return F.grid_sample(images, grid, align_corners=False)  # (B, C, H, W)


# ----------------------------------------------------------------------- 4  samples to batches


def normalize(images, mean, std):
    """Takes off each channel's mean and divides by its standard deviation: see describe.

    For MNIST 0 becomes -0.4242 and 1 becomes 2.8215.

    images     float (..., C, H, W) in 0..1
    mean, std  C floats each, such as about["mean"] and about["std"]
    returns    the shape of images

    Needs: torch.
    """
    mean = torch.as_tensor(mean, dtype=images.dtype, device=images.device)  # (C,)
    std = torch.as_tensor(std, dtype=images.dtype, device=images.device)  # (C,)
    return (images - mean[:, None, None]) / std[:, None, None]


def collate_images(batch, mean, std):
    """Normalizes a batch of images: what a network of convolutions takes.

    A collate function makes a batch of what the data set gave. It has to have a name at the top of
    a file: a worker process that does not begin as a copy of this one (as on macOS and Windows)
    looks it up by that name, and a lambda has none. functools.partial gives it its arguments:

        make_loader(dataset, 128, collate=partial(collate_images, mean=[0.1307], std=[0.3081]))

    batch    images float (B, C, H, W) in 0..1, labels (B,), from Digits
    returns  normalized images (B, C, H, W), labels

    Needs: normalize.
    """
    images, labels = batch
    return normalize(images, mean, std), labels


def cut_patches(images):
    """Cuts images into patches of 4 x 4 pixels, numbered row by row.

    An image of 28 x 28 pixels has 7 x 7 of them. To attention they are what words are in a
    sentence; their number, the position, tells where in the image a patch was:

         0  1  2  3  4  5  6
         7  8  9 10 11 12 13        position 10: pixels of rows 4 to 7 and of columns 12 to 15
        14 15 16 17 18 19 20
        21 22 23 24 25 26 27
        28 29 30 31 32 33 34
        35 36 37 38 39 40 41
        42 43 44 45 46 47 48

    images   float (B, C, H, W)
    returns  (B, P, C, 4, 4) with P = H/4 * W/4
    raises   DataError if H or W is no multiple of 4

    Needs: DataError.
    """
    H, W = images.shape[2:]
    if H % 4 != 0 or W % 4 != 0:
        raise DataError(
            f"images of {H}x{W} pixels: patches of 4x4 need multiples of 4; resize or pad them"
        )
    patches = images.unfold(2, 4, 4)  # (B, C, H/4, W, 4): rows in groups of four
    patches = patches.unfold(3, 4, 4)  # (B, C, H/4, W/4, 4, 4): and columns
    patches = patches.permute(0, 2, 3, 1, 4, 5)  # (B, H/4, W/4, C, 4, 4)
    return patches.flatten(1, 2)  # (B, P, C, 4, 4)


def lengths_to_mask(lengths):
    """Says what in a padded batch is real, and what is padding: lengths (B,) -> mask bool (B, L).

        lengths [3, 1]  ->  1 1 1        True, drawn as 1, is real
                            1 . .        False, drawn as a dot, is padding

    L is the largest length, or 1 if all are 0. True means real in all of this project, as in
    F.scaled_dot_product_attention; nn.MultiheadAttention's key_padding_mask is the opposite.

    Needs: torch.
    """
    longest = max(1, lengths.max().item())
    columns = torch.arange(longest)  # (L,)
    return columns < lengths[:, None]  # (B, L): compared with its own row's length


def unpack(x, mask, value=0):
    """Puts the tokens of a packed row where the mask is True, and `value` everywhere else.

        x   a b c d       mask  1 1 1       returned  a b c
                                1 . .                 d 0 0

    The same as unpack in model.py, which does it in the network; this one serves a data loader.

    x         (T, ...)
    mask      bool (B, L) with T times True
    returns   (B, L, ...)

    Needs nothing.
    """
    padded = x.new_full((*mask.shape, *x.shape[1:]), value)  # (B, L, ...)
    padded[mask] = x  # a mask as an index goes row by row, and so does the packed row
    return padded


def collate_packed(batch, mean, std, blank=False):
    """Makes tokens of images, those of all images in one row: no padding at all.

    Most of a digit is background: of 49 patches 18 have anything on them, and attention need not
    look at the others. But then images have different numbers of tokens, and the rows of a tensor
    have equal lengths. There are two ways out. Image a has 3 tokens here, image b has 5:

        padded (collate_tokens)                packed (this function)

        tokens  a a a . .    mask 1 1 1 . .    tokens  a a a b b b b b
                b b b b b         1 1 1 1 1    places  0 1 2 5 6 7 8 9

    Padded is what every layer understands, but the two dots are computed like all others and then
    thrown away. Packed computes 8 tokens in place of 10, and with real digits, in batches of 128,
    18.5 an image in place of 27.

    Attention, however, looks from token to token of one image. For this one step the packed tokens
    move into a padded grid, and back into their row afterwards. `places` says which cell of the
    grid belongs to each token. The cells are numbered row by row, place = row * L + column:

        0 1 2 3 4    The first token of image b is in row 1, column 0: place 1 * 5 + 0 = 5.
        5 6 7 8 9    Places 3 and 4 are padding, so no token has them.

    The mask tells the same: places are where it is True. But whoever looks for them on a GPU
    (mask.nonzero(), x[mask]) makes the program stop and wait, for the size of the answer depends on
    values that only the GPU has. Here the mask is in the CPU's memory, so we look once, and the
    places travel with the batch.

    batch      images float (B, C, H, W) in 0..1, labels (B,), from Digits; H and W multiples of 4
    mean, std  as in normalize
    blank      True: blank patches, which are 0 all over, are tokens as well
    returns    (tokens float (T, C * 16), positions int64 (T,), mask bool (B, L),
               places int64 (T,)), labels. A position is one in the image, see cut_patches; a place
               is one in the grid (B, L)
    raises     DataError, see cut_patches

    Needs: torch; cut_patches, normalize, lengths_to_mask.
    """
    images, labels = batch
    patches = cut_patches(images)  # (B, P, C, 4, 4)
    chosen = (patches != 0).flatten(2).any(2)  # (B, P): which patches are not blank
    if blank:
        chosen = torch.ones_like(chosen)
    tokens = normalize(patches[chosen], mean, std)  # (T, C, 4, 4)
    _, positions = chosen.nonzero(as_tuple=True)  # (T,): the columns of its True values
    mask = lengths_to_mask(chosen.sum(1))  # (B, L)
    places = mask.flatten().nonzero().squeeze(1)  # (T,): row by row, in the order of the tokens
    return (tokens.flatten(1), positions, mask, places), labels


def collate_tokens(batch, mean, std, blank=False):
    """Makes tokens of images, padded to the largest number in the batch. See collate_packed.

    The bundled sample's digits have 5 to 32 non-blank patches, 18.5 on average. Here are two, both
    a 1; for once they are not normalized, but multiplied by 255, to show the first token's pixels:

    >>> two = Digits(*load_mnist(SAMPLE, train=False)).__getitems__([361, 241])
    >>> (tokens, positions, mask), labels = collate_tokens(two, mean=[0], std=[1 / 255])
    >>> positions.tolist()
    [[10, 17, 24, 31, 38, 0], [10, 17, 24, 31, 38, 39]]
    >>> mask.int().tolist()
    [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    >>> tokens[0, 0].round().int().tolist()
    [48, 255, 100, 0, 48, 254, 155, 0, 93, 243, 226, 14, 0, 216, 254, 47]

    batch, mean, std, blank  as in collate_packed
    returns  (tokens float (B, L, C * 16), positions int64 (B, L), mask bool (B, L)), labels.
             Padding is 0, and so is its position: the mask alone tells it from a real token

    Needs: collate_packed, unpack.
    """
    (tokens, positions, mask, _), labels = collate_packed(batch, mean, std, blank)
    tokens = unpack(tokens, mask)  # (B, L, C * 16)
    positions = unpack(positions, mask)  # (B, L)
    return (tokens, positions, mask), labels


def collate_padded(batch, value=0):
    """Pads sequences of any kind to the longest: for time series, text, sets of points.

    This one is for your own data; images become tokens in collate_tokens, which does not use it.

        collate_padded([[1, 2, 3], [4]])               ->  padded  1 2 3      mask  1 1 1
                                                                   4 0 0            1 . .
        collate_padded([([1, 2, 3], 7), ([4], 8)])     ->  the same, and labels [7, 8]

    batch    list of sequences, or of tuples (sequence, label). A sequence is a tensor (L_i, ...), a
             NumPy array or a list; L_i may be 0. A label is a number, or a tensor of one shape
    value    what stands in the padding
    returns  padded (B, L, ...), mask bool (B, L) with True = real; and labels (B, ...) if there are

    Needs: torch; lengths_to_mask, unpack.
    """
    has_labels = isinstance(batch[0], tuple)
    sequences = []
    for item in batch:
        sequence = item[0] if has_labels else item
        if not isinstance(sequence, torch.Tensor):
            sequence = torch.tensor(sequence)  # a copy: a NumPy array may be read-only
        sequences.append(sequence)
    lengths = torch.tensor([len(sequence) for sequence in sequences])  # (B,)
    # An empty list becomes an empty row of floats, which would turn the others' integers to floats.
    filled = [sequence for sequence in sequences if len(sequence) > 0]
    if not filled:
        filled = sequences[:1]
    mask = lengths_to_mask(lengths)  # (B, L)
    padded = unpack(torch.cat(filled), mask, value)  # (T, ...) -> (B, L, ...)
    if not has_labels:
        return padded, mask
    labels = torch.stack([torch.as_tensor(label) for _, label in batch])  # (B, ...)
    return padded, mask, labels


# ------------------------------------------------------------------------- 5  order and loader


def padding_of_rank(size, world_size, rank):
    """How many samples of padding make this rank's part of `size` samples as long as the longest.

    Seven samples for three ranks are 3, 2 and 2: the first rank needs none, the others one each.

    returns  0 or 1

    Needs nothing.
    """
    remainder = size % world_size  # so many ranks, the first ones, need none
    if remainder > 0 and rank >= remainder:
        return 1
    return 0


class EpochSampler(Sampler):
    """The order of an epoch, shuffled, and the part of it that is this process's.

    Seven samples, two processes ("ranks") and batches of two; in each rank two workers load them:

        shuffled     3 0 6 1 5 2 4 | 3        one more at the end, so that both ranks get four
        rank 0       3 6 5 4                  every second, from the first
        rank 1       0 1 2 3                  every second, from the second; its last is padding

                     worker 0   worker 1
        rank 0       [3 6]      [5 4]         batches go to the workers in turn, and come back
        rank 1       [0 1]      [2 3]         in the order in which they were asked for

    Ranks wait for each other in every step, so all of them need equally many samples; but no sample
    may count twice. So a rank that has one too few repeats one, and `padding` says so: that many
    samples, 0 or 1, at the end of this rank's epoch are repeated, and have to be left out wherever
    losses are summed up. (torch's own DistributedSampler repeats samples too, and does not say
    which.)

    The order is a function of (seed, epoch). So all ranks know it without talking, and a run that
    was stopped goes on where it was: set_epoch(3, start=256) begins at this rank's 257th sample,
    and loads none of those before it.

    size        number of samples, of any data set that takes indices from 0 to size - 1
    labels      int64 (size,), for balanced draws: `size` draws with replacement, all classes
                equally often on average. None: each sample once
    set_epoch   call it before each epoch; `start` holds for the next iteration alone
    len()       samples of this rank in a whole epoch, padding included

    Needs: math, torch, Sampler, WeightedRandomSampler; mix, padding_of_rank.
    """

    def __init__(self, size, seed=0, world_size=1, rank=0, labels=None):
        self.size = size
        self.seed = seed
        self.world_size = world_size
        self.rank = rank
        self.epoch = 0
        self.start = 0
        self.padding = padding_of_rank(size, world_size, rank)
        self.weights = None
        if labels is not None:
            if len(labels) != size:
                raise ValueError(f"{size} samples, but {len(labels)} labels to balance them by")
            rarity = 1 / labels.bincount().double()  # (K,): of 900 and 100 samples, 1/900 and 1/100
            self.weights = rarity[labels]  # (size,): each sample weighs what its class does

    def set_epoch(self, epoch, start=0):
        self.epoch = epoch
        self.start = start

    def __len__(self):
        return math.ceil(self.size / self.world_size)

    def __iter__(self):
        # A generator function: nothing here happens before the first index is asked for. A
        # DataLoader with workers makes an iterator that it never uses, which must not take `start`.
        start = self.start
        self.start = 0
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        if self.weights is None:
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(WeightedRandomSampler(self.weights, self.size, generator=generator))
        missing = len(self) * self.world_size - self.size
        # Padding: any index of the data set will do, and the first one is at hand.
        order.extend(order[:1] * missing)
        yield from order[self.rank :: self.world_size][start:]


def collate_default(batch):
    """What make_loader does if it is given no collate: it guesses nothing, and normalizes nothing.

    A data set with __getitems__ may have made the batch already, as Digits does, also under a
    torch.utils.data.Subset: that batch stays as it is. A list is one of samples, which become a
    batch as everywhere in torch: tensors are stacked, numbers become tensors.

    Needs: default_collate.
    """
    if isinstance(batch, list):
        return default_collate(batch)
    return batch


def make_loader(
    dataset, batch_size, sampler=None, workers=0, pin_memory=False, seed=0, collate=None
):
    """Makes the DataLoader, which brings sampler, data set and collate function together.

        sampler    [5 2 7] [0 3 1] ...          in this process
        workers    dataset.__getitems__([5, 2, 7]), then collate, each for a batch of its own
        loop       for inputs, labels in loader: the batches, in the sampler's order

    Data in memory are loaded fastest without workers, for a batch that another process has made
    must still be brought here. Workers pay off with a slow transform.

    dataset     Digits, a DigitStream, or any other; without a sampler its order is 0, 1, 2 ...
    workers     processes that load; 0: this one does
    pin_memory  True with a GPU: memory that stays in its place, so that .to(device,
                non_blocking=True) copies from it while the GPU computes
    seed        of the workers' global generators; another one for each rank
    collate     for Digits a partial(collate_images, mean=..., std=...); None: collate_default,
                so batches of Digits stay as they are, and other data sets get torch's default

    Needs: torch, DataLoader, IterableDataset; DigitStream, collate_default, seed_worker.
    """
    if collate is None:
        collate = collate_default
    if isinstance(dataset, DigitStream):
        batch_size = None  # its items are whole batches
    # Workers that live on from epoch to epoch need not be started again. They hold a copy of the
    # data set: a stream's would never hear of set_epoch. (Digits keeps its epoch in shared memory.)
    persistent = workers > 0 and not isinstance(dataset, IterableDataset)
    # Each epoch draws a seed for its workers. Out of torch's global generator it would change what
    # dropout draws, and so would the number of epochs since a resume.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=seed_worker,
        persistent_workers=persistent,
        generator=generator,
    )


def seed_worker(worker_id):
    """Prepares a worker process: no two workers may draw the same numbers.

    torch gives each worker a seed of its own, and sets torch's, Python's and NumPy's global
    generators by it. It does not know of a generator that the data set keeps, such as
    self.rng = np.random.default_rng(0): all workers have equal copies of that one, and with four
    workers every "random" crop comes four times. Those get seeds of their own here.

    (The draws of Digits are functions of seed, epoch and index, and do not depend on this.)

    Needs: os, torch, get_worker_info; generators_in, outlive_a_stop, reseed.
    """
    # A group of its own: Ctrl-C in a terminal goes to the whole group, and would end the worker in
    # the middle of a step that the program wants to finish.
    if hasattr(os, "setsid"):
        os.setsid()
    outlive_a_stop()
    reseed(generators_in(get_worker_info().dataset), torch.initial_seed())


def outlive_a_stop(seconds=10):
    """Makes a worker deaf to requests to stop, for so long that the program can finish its step.

    A scheduler that ends a job sends SIGTERM to all of its processes, workers included. A program
    that finishes its step needs its workers for that, and tells them itself when it is done. Only
    if it does not, as when it was killed, the worker ends by its own alarm.

    Needs: signal.
    """

    def end_later(number, frame):
        signal.alarm(seconds)

    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, end_later)


# =============================================================================================
# Extras: what follows is for a few, and nothing above needs it to be understood.
# =============================================================================================

# --------------------------------------------------------------- tokens for an exported network


def collate_masked(batch, mean, std, blank=False):
    """Makes a token of each patch, and a mask that says which of them are not blank.

    collate_tokens moves the tokens of an image to the front, and pads to the longest image. How
    many there are depends on the pixels, so its shapes do, too. An exported network is a list of
    operations whose shapes are settled before there is a pixel. So nothing moves here: a blank
    patch stays where it is, as padding. An image of 2 x 2 patches with ink on two of them:

        patches     collate_tokens              collate_masked

          .  a      tokens     a  b             tokens     .  a  .  b
          .  b      positions  1  3             positions  0  1  2  3
                    mask       1  1             mask       .  1  .  1

    To attention tokens are a set and padding does not exist, so the answers are the same, but for
    rounding. The price is the work: 49 tokens for each digit, where 18.5 are not blank on average.

    batch, mean, std, blank  as in collate_packed; the labels may be None
    returns    (tokens float (B, P, C * 16), positions int64 (B, P), mask bool (B, P)), labels
    raises     DataError, see cut_patches

    Needs: torch; cut_patches, normalize.
    """
    images, labels = batch
    patches = cut_patches(images)  # (B, P, C, 4, 4)
    mask = (patches != 0).flatten(2).any(2)  # (B, P)
    if blank:
        mask = torch.ones_like(mask)
    tokens = normalize(patches, mean, std).flatten(2)  # (B, P, C * 16)
    positions = torch.arange(patches.shape[1], device=images.device)  # (P,)
    return (tokens, positions.expand(mask.shape), mask), labels


# ---------------------------------------------------------------------- a transform that draws


def generators_in(thing):
    """Lists the random generators that an object keeps: torch's, random's and NumPy's.

    It looks into attributes, lists, tuples, dicts, functools.partial, methods and what a function
    has closed over: in Compose([Noise(rng=...)]) the generator is three steps away. Modules and
    classes are passed by, for through them one reaches everything; so a generator that is a global
    variable of a file is not found.

    Needs: random, torch, partial, ModuleType.
    """
    found = []
    seen = {}  # objects by id; held here, for Python gives the id of one that is gone to another
    waiting = [thing]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:  # objects may hold each other in a circle
            continue
        seen[id(thing)] = thing
        # NumPy's are known by what they have: it may not be installed.
        is_numpys = hasattr(type(thing), "bit_generator") or hasattr(type(thing), "random_sample")
        if isinstance(thing, (torch.Generator, random.Random)) or is_numpys:
            found.append(thing)
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple)):
            waiting.extend(thing)
        elif isinstance(thing, partial):
            waiting.extend([thing.func, thing.args, thing.keywords])
        elif not isinstance(thing, (type, ModuleType)):
            waiting.append(getattr(thing, "__dict__", None))
            waiting.append(getattr(thing, "__self__", None))  # of a method: its object
            closure = getattr(thing, "__closure__", None)  # of a function within a function
            if closure:
                waiting.extend(cell.cell_contents for cell in closure)
    return found


def reseed(generators, seed):
    """Gives each generator of a list a seed of its own, made of `seed` and its place in the list.

    Needs: random, torch; mix.
    """
    for place, generator in enumerate(generators):
        own = mix(seed, place)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif hasattr(generator, "bit_generator"):  # numpy.random.default_rng()
            fresh = type(generator.bit_generator)(own)
            generator.bit_generator.state = fresh.state
        else:  # numpy.random.RandomState
            generator.seed(own % 2**32)


def transform_each(transform, images, seeds):
    """Calls a transform for each image, which may draw from any generator, with a seed for each.

    A transform of torchvision draws from torch's global generator; others from `random`, from NumPy
    or from a generator of their own. We cannot make a hash of what somebody else has written. But
    we can seed all of these before each image, and put the global ones back as they were: dropout,
    which draws from torch's as well, then never learns of it.

    images   float (B, C, H, W)
    seeds    list of B ints, such as mix(seed, epoch, index) for each
    returns  what the transform made of them, stacked (B, ...)

    Needs: random, sys, torch; generators_in, reseed.
    """
    numpy = sys.modules.get("numpy")  # a transform that draws from it has imported it
    own = generators_in(transform)
    before_python = random.getstate()
    before_torch = torch.get_rng_state()
    before_numpy = numpy.random.get_state() if numpy else None
    results = []
    try:
        for image, seed in zip(images, seeds):
            random.seed(seed)
            # Not torch.manual_seed: it seeds GPUs as well, where the model's dropout may draw.
            torch.default_generator.manual_seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            reseed(own, seed)
            results.append(transform(image))
    finally:
        random.setstate(before_python)
        torch.set_rng_state(before_torch)
        if numpy:
            numpy.random.set_state(before_numpy)
    return torch.stack(results)


# -------------------------------------------------------------------------------- the download


@contextmanager
def sigterm_cleans_up():
    """Turns SIGTERM, which ends a process at once, into SystemExit, which cleans up on its way.

    Needs: signal, threading, contextmanager.
    """

    def leave(number, frame):
        raise SystemExit(128 + number)

    main_thread = threading.current_thread() is threading.main_thread()
    # Python lets only the main thread ask for signals. Who handles this one already, keeps it.
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def fetch_mnist(root, name="MNIST", stall=10.0):
    """Downloads MNIST or FashionMNIST (`name`) into root/name/raw, unless it is there already.

    torchvision knows the mirrors, checks the md5 and unpacks. But it sets no time limit, does not
    ask the second mirror if the first accepts a connection and then says nothing, and writes in
    place, so that half a file may stay. So each mirror is asked alone, into a temporary folder
    beside the place where the files belong; they are renamed when all four are there. Two programs
    that fetch at the same time do it twice, and the second replaces files by equal ones.

    stall    seconds for which a mirror may be silent before the next one is asked
    returns  None if the files are there now, else the reason in one line

    Needs: http, socket, tempfile, os, Path; sigterm_cleans_up, IDX_FILES.
    """
    raw = Path(root) / name / "raw"
    reasons = []
    default = socket.getdefaulttimeout()
    try:
        if all((raw / file).is_file() or (raw / f"{file}.gz").is_file() for file in IDX_FILES):
            return None
        Path(root).mkdir(parents=True, exist_ok=True)
        from torchvision import datasets  # here: it takes a second, and most runs have their data

        kind = getattr(datasets, name)
        socket.setdefaulttimeout(stall)
        for mirror in kind.mirrors:
            asked = type(name, (kind,), {"mirrors": [mirror]})  # the same class with one mirror
            try:
                with sigterm_cleans_up(), tempfile.TemporaryDirectory(dir=root) as folder:
                    asked(folder, download=True)
                    raw.mkdir(parents=True, exist_ok=True)
                    for file in IDX_FILES:
                        os.replace(Path(folder) / name / "raw" / file, raw / file)
                return None
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                last_line = (str(error).strip() or repr(error)).splitlines()[-1]
                reasons.append(f"{mirror}: {last_line}")
    except OSError as error:  # no permission, no space
        reasons.append(str(error))
    finally:
        socket.setdefaulttimeout(default)
    return "; ".join(reasons)


# ------------------------------------------------------------------------- a stream from disk


class DigitStream(IterableDataset):
    """Batches straight from two IDX files, for those that do not fit in memory.

    A file that is larger than memory cannot be read in random order: each image would be a jump of
    the disk. It is walked through from its first image to its last, and shuffled on the way through
    a buffer: some indices wait, batches are drawn from those at random, and new ones move up. Here
    10 images go through a buffer of 4 in batches of 2:

        0 1 2 3              too few to draw from
        2 6 0 4 7 1 3 5      four more, and all shuffled: [2 6] and [0 4] go out, four stay
        8 3 1 9 5 7          the last two, and all shuffled: [8 3], [1 9] and [5 7] go out

    So a sample comes at most about two buffers before its turn, and what waits in memory are
    indices, not images.

    Each worker of each rank walks through all indices, in an order that is a function of
    (seed, epoch), and reads the images of its own batches alone: every sample comes once, for any
    number of workers and ranks, and nobody has to talk to anybody.

    files       paths of images and labels, unpacked. They are mapped anew for each batch: what was
                read through an old map can then be given back to the system
    total       the first so many samples are used
    left_out    int64 indices below `total`, each once, to leave out: the validation set
    augment, seed, world_size, rank    as in Digits and EpochSampler
    buffer      should exceed the longest run of one class in the file
    set_epoch   call it before each epoch. `start` is how many samples of this rank were seen
                already, a multiple of batch_size; it holds until the next call
    padding     0 or 1: how many samples at the end of this rank's last batch are padding
    yields      images float (B, 1, 28, 28) in 0..1, labels int64 (B,); len() counts batches
    raises      DataError if a file is not there, unpacked

    Needs: math, torch, Path, IterableDataset, get_worker_info;
    DataError, read_idx, gather_batch, mix, padding_of_rank.
    """

    def __init__(
        self, files, total, batch_size,
        left_out=(), augment=False, seed=0, world_size=1, rank=0, buffer=9999,
    ):
        for file in files:
            if not Path(file).is_file():
                raise DataError(
                    f"{file}: not there; a stream reads unpacked files, so gunzip it first"
                )
        self.files = files
        self.total = total
        self.batch_size = batch_size
        self.left_out = torch.as_tensor(left_out, dtype=torch.int64)
        self.augment = augment
        self.seed = seed
        self.world_size = world_size
        self.rank = rank
        self.buffer = buffer
        self.epoch = 0
        self.start = 0
        self.size = total - len(self.left_out)
        self.padding = padding_of_rank(self.size, world_size, rank)

    def set_epoch(self, epoch, start=0):
        if start % self.batch_size != 0:
            raise ValueError(f"start {start} is no multiple of the batch size {self.batch_size}")
        self.epoch = epoch
        self.start = start

    def __len__(self):
        return math.ceil(self.size / (self.batch_size * self.world_size))

    def __iter__(self):
        worker = get_worker_info()
        number_of_workers = worker.num_workers if worker else 1
        this_worker = worker.id if worker else 0
        first = self.start // self.batch_size
        for number, indices in enumerate(self.batches_of_indices()):
            if number < first or (number - first) % number_of_workers != this_worker:
                continue  # trained on already, or another worker's
            missing = -len(indices) % self.world_size  # as in EpochSampler; 0 but in the last batch
            indices = torch.cat([indices, indices[:1].expand(missing)])
            images = read_idx(self.files[0], dims=3).unsqueeze(1)  # (N, 1, 28, 28), not yet read
            labels = read_idx(self.files[1], dims=1)
            own = indices[self.rank :: self.world_size]  # (B,)
            images, labels = gather_batch(images, labels, own, self.augment, self.seed, self.epoch)
            yield images, labels.long()

    def batches_of_indices(self):
        """Yields the epoch's shuffled indices, each time as many as all ranks take together."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        step = self.batch_size * self.world_size
        waiting = torch.empty(0, dtype=torch.int64)
        for start in range(0, self.total, self.buffer):
            new = torch.arange(start, min(start + self.buffer, self.total))
            new = new[~torch.isin(new, self.left_out)]
            waiting = torch.cat([waiting, new])
            waiting = waiting[torch.randperm(len(waiting), generator=generator)]
            at_the_end = start + self.buffer >= self.total
            while len(waiting) >= self.buffer + step or (at_the_end and len(waiting) > 0):
                yield waiting[:step]
                waiting = waiting[step:]


# ------------------------------------------------------------------------------------ pictures


def save_pictures(path, images, heat=None, captions=None):
    """Writes images as one PNG, in a grid of eight columns, each four times as large.

    With `heat` one sees where a network has looked: a patch of 4 x 4 pixels gets the redder, the
    larger its number is, and each picture's largest is full red.

    images    float (B, C, H, W) in 0..1; of 3 channels they are red, green and blue, of any other
              number their mean is shown, in grey
    heat      float (B, P), at least 0: a number for each patch, numbered as in cut_patches
    captions  list of B str, one to stand below each picture, as much of it as fits

    Needs: F, torch.
    """
    from PIL import ImageDraw  # here, for these take a second
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    B, C, H, W = images.shape
    images = images.float().cpu()
    if C != 3:
        images = images.mean(1, keepdim=True).expand(B, 3, H, W)
    images = F.interpolate(images, scale_factor=4)  # (B, 3, 4H, 4W), each pixel as 4 x 4
    if heat is not None:
        heat = heat.float().cpu()
        heat = heat / heat.amax(1, keepdim=True).clamp(min=1e-9)  # (B, P) in 0..1
        heat = heat.view(B, 1, H // 4, W // 4)
        heat = F.interpolate(heat, scale_factor=16)  # (B, 1, 4H, 4W)
        dark = images * (1 - 0.6 * heat)
        red = (images[:, :1] + heat).clamp(max=1)
        images = torch.cat([red, dark[:, 1:]], dim=1)
    if captions:
        images = F.pad(images, (0, 0, 0, 14), value=1.0)  # (B, 3, 4H + 14, 4W): a white strip below
    picture = to_pil_image(make_grid(images, nrow=8, padding=8, pad_value=0.5))
    pen = ImageDraw.Draw(picture)
    for index, caption in enumerate(captions or []):
        left = 8 + index % 8 * (4 * W + 8)
        top = 8 + index // 8 * (4 * H + 14 + 8)
        while pen.textlength(caption) > 4 * W:
            caption = caption[:-1]
        pen.text((left + 1, top + 4 * H), caption, fill="black")
    picture.save(path)


if __name__ == "__main__":
    (images, labels), _, about = load_dataset("sample", "data")
    print(f"images {images.dtype} {tuple(images.shape)}")
    print(f"labels {labels.dtype} {tuple(labels.shape)}")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for augmented in (False, True):
        three, _ = Digits(images, labels, about["classes"], augmented).__getitems__([3, 4, 5])
        print("as they are" if not augmented else "the same three, augmented")
        for y in range(2, 26):
            lines = []
            for x_values in three[:, 0, y, 2:26].tolist():
                lines.append("".join(" .:-=+*#%@"[min(9, int(10 * pixel))] for pixel in x_values))
            print("   ".join(lines))
