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
import re
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import warnings
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
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


PATIENCE = 600  # seconds that a worker may take for a batch, before it counts as lost


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

    Needs: torch, DataLoader, IterableDataset; DigitStream, PATIENCE, collate_default, seed_worker.
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
        timeout=PATIENCE if workers else 0,
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


def save_curve(path, points, width=640, height=400):
    """Draws points (x, y), x above 0 on a logarithmic axis, as a line in a PNG: the loss over the
    learning rate. The ends of both axes are written beside it.

    Needs: Image, math.
    """
    from PIL import ImageDraw  # here: few need it

    xs = [math.log(x) for x, _ in points]
    ys = [y for _, y in points]
    line = []
    for x, y in zip(xs, ys):
        column = 40 + (x - min(xs)) / ((max(xs) - min(xs)) or 1) * (width - 60)
        row = 20 + (max(ys) - y) / ((max(ys) - min(ys)) or 1) * (height - 60)
        line.append((column, row))
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    pen.rectangle((40, 20, width - 20, height - 40), outline="grey")
    pen.line(line, fill="darkred", width=2)
    pen.text((4, 14), f"{max(ys):.2f}", fill="black")
    pen.text((4, height - 46), f"{min(ys):.2f}", fill="black")
    pen.text((40, height - 30), f"{points[0][0]:.1e}", fill="black")
    pen.text((width - 70, height - 30), f"{points[-1][0]:.1e}", fill="black")
    picture.save(path)


# -------------------------------------------------------------------------------- own pictures

# What a picture's name ends with: torchvision's ImageFolder knows the first nine.
PICTURE_ENDINGS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
    ".gif", ".jfif", ".avif", ".jp2", ".pbm", ".tga",
)

# What systems put into people's folders, in small letters; and all that begins with a dot.
SYSTEM_NAMES = ("__macosx", "__pycache__", "@eadir", "thumbs.db", "ehthumbs.db", "desktop.ini")

# What the three parts of a folder of pictures may be called.
PART_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}


def pixels_of(image):
    """Makes a tensor of a PIL image of mode "L" (grey) or "RGB": uint8 (C, H, W).

    Needs: torch.
    """
    channels = len(image.getbands())
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(image.height, image.width, channels)  # PIL has the channels last
    return pixels.permute(2, 0, 1)


def lay_on_background(image):
    """Puts something behind a PIL image that is transparent: mode "RGB".

    A drawing program saves black strokes, and between them nothing at all. What one sees depends on
    what lies below, and the usual default, black, gives black strokes on black. So the background
    is chosen after the drawing, by the mean brightness of what is there:

        dark strokes      mean below 128      on white
        bright strokes    mean 128 or more    on black

    It is the other way round for a picture that brings its own background, such as a screenshot of
    a window with transparent corners: more than half of it is opaque, and that half is not of one
    brightness. There the corners continue what is beside them.

    Needs: Image; pixels_of.
    """
    image = image.convert("RGBA")
    opacity = pixels_of(image.getchannel("A"))[0].float() / 255  # (H, W)
    if opacity.min() < 1:
        grey = pixels_of(image.convert("L"))[0].float()  # (H, W), whatever the opacity is
        mean = (grey * opacity).sum() / opacity.sum().clamp(min=1)
        variance = ((grey - mean) ** 2 * opacity).sum() / opacity.sum().clamp(min=1)
        background = 0 if mean >= 128 else 255
        if opacity.mean() > 0.5 and variance > 32**2:
            background = 255 - background
        below = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(below, image)
    return image.convert("RGB")


def open_picture(path, channels=3, size=None):
    """Opens a picture with PIL and makes it plain: upright, opaque, grey or RGB, 8 bits a channel.

    What a file holds is not yet what one sees. To take its numbers as they are goes wrong for

        a phone's photo     the pixels lie on their side, and a tag says how to turn them
        transparency        there is no colour behind the drawing: see lay_on_background
        a palette           a pixel is the number of a colour: 3 is not darker than 7
        16 bits             white is 65,535; PIL's own convert makes white of all above 255
        CMYK                the numbers are amounts of ink: 0 is white
        1 bit               white is 1

    channels  1 or 3
    size      an int: a JPEG whose sides are at least twice as long may come smaller, but no side
              below `size`. Its decoder then leaves out the fine detail, which is several times as
              fast for a photo. None: every pixel
    returns   a PIL image of mode "L" or "RGB"
    raises    DataError that names the file and the reason

    Needs: os, stat, warnings, Image, ImageOps; lay_on_background, DataError.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path}: is a folder, not a picture")
    if not stat.S_ISREG(status.st_mode):  # to open a named pipe is to wait, perhaps for ever
        raise DataError(f"{path}: is no regular file")
    if status.st_size == 0:
        raise DataError(f"{path}: is empty (0 bytes)")
    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")  # of tags that PIL does not understand
            if size is not None:
                image.draft(mode, (size, size))
            image.load()
            try:
                image = ImageOps.exif_transpose(image)
            except Exception:
                pass  # the tag is broken, the pixels are not
            if image.mode == "F":
                raise ValueError("pixels of floating point have no known white; save 8 or 16 bits")
            if image.mode.startswith("I"):
                image = image.convert("I")
                if image.getextrema()[1] > 65535:
                    raise ValueError("pixels of more than 16 bits; save 8 or 16 bits")
                # 65,535 / 257 is 255, so this table maps all of 16 bits to the nearest of 8.
                image = image.point([(value + 128) // 257 for value in range(65536)], "L")
            elif image.has_transparency_data:
                image = lay_on_background(image)
            elif image.mode != "L":
                image = image.convert("RGB")
            return image.convert(mode)
    except Image.UnidentifiedImageError:
        raise DataError(f"{path}: is not a picture of a kind that PIL reads") from None
    except Exception as error:  # a decoder that meets broken bytes raises whatever it likes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: cannot be read ({reason})") from None


def read_picture(path, shape):
    """Reads one picture in the size that a network wants.

    All pictures of a batch have one size, and photos do not. There are three ways to get there.
    To stretch the picture makes a circle an ellipse. To cut off what is too long may cut off what
    the picture is about: a 7 without its bar is a 1. So the whole picture is made to fit, and the
    rest is filled with the colour of its outermost pixels, their median:

        a photo of 600 x 800, wanted as 28 x 28

        . . x x x x . .       21 x 28 pixels are the photo,
        . . x x x x . .       the rest continues its paper, its sky, its black
        . . x x x x . .

    A picture that has the size already keeps each pixel.

    shape    (C, H, W); C is 1 (grey) or 3 (red, green, blue)
    returns  uint8 (C, H, W)
    raises   DataError that names the file and the reason

    Needs: torch, Image; open_picture, pixels_of.
    """
    C, H, W = shape
    image = open_picture(path, C, 2 * max(H, W))
    scale = min(H / image.height, W / image.width)
    h = max(1, round(image.height * scale))
    w = max(1, round(image.width * scale))
    if (h, w) != (image.height, image.width):
        # PIL takes the mean over all pixels that become one; without that, thin lines would break.
        image = image.resize((w, h), Image.Resampling.BILINEAR)
    pixels = pixels_of(image)  # (C, h, w)
    frame = torch.cat([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], dim=1)
    whole = frame.median(1).values.view(C, 1, 1).repeat(1, H, W)  # (C, H, W)
    top = (H - h) // 2
    left = (W - w) // 2
    whole[:, top : top + h, left : left + w] = pixels
    return whole


def looks_grey(path):
    """Says whether a picture is grey: whether red, green and blue are equal in each of its pixels.

    Up to 8 of 255 they may differ, for a lossy file's colours are not exact.

    Needs: open_picture, pixels_of.
    """
    pixels = pixels_of(open_picture(path, 3, 64)).int()  # (3, H, W)
    return (pixels.amax(0) - pixels.amin(0)).max().item() <= 8


def by_number(path):
    """What to sort paths by, so that 9.png comes before 10.png: "a10.png" -> "a", 10, ".png".

    Needs: re.
    """
    pieces = re.split(r"(\d+)", path.name)  # every second one is of digits
    pieces[1::2] = [int(digits) for digits in pieces[1::2]]
    return pieces, str(path)


def list_pictures(folder):
    """Lists the pictures in a folder and in all folders below it.

    By name, and numbers in names as numbers: 9.png comes before 10.png. What is a picture, the end
    of its name tells. What the system has put there (.DS_Store, Thumbs.db, __MACOSX) is passed by.
    A link is followed, unless it leads back to a folder that we come from or have been in.

    returns  list of paths of pictures, list of paths of other files
    raises   DataError if a folder cannot be read

    Needs: os, Path; by_number, PICTURE_ENDINGS, SYSTEM_NAMES, DataError.
    """
    pictures = []
    others = []
    entered = set()  # real paths, without links
    for way in (os.path.abspath(folder), os.path.realpath(folder)):
        entered.update(os.path.realpath(parent) for parent in Path(way).parents)
    waiting = [Path(folder)]
    try:
        while waiting:
            here = waiting.pop()
            if os.path.realpath(here) in entered:
                continue
            entered.add(os.path.realpath(here))
            for name in os.listdir(here):
                if name.startswith(".") or name.lower() in SYSTEM_NAMES:
                    continue
                if os.path.isdir(here / name):
                    waiting.append(here / name)
                elif name.lower().endswith(PICTURE_ENDINGS):
                    pictures.append(here / name)
                else:
                    others.append(here / name)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    return sorted(pictures, key=by_number), others


def find_classes(folder):
    """Finds the classes of a folder of pictures: each of its sub-folders is one.

    They are sorted as numbers if all of them are numbers, so that class "10" of eleven has label 10
    and not 2; else as text, like torchvision's find_classes.

    returns  dict of class name -> path, in the order of the labels 0 .. K-1
    raises   DataError if the folder cannot be read, or a name has no characters that one can print

    Needs: os, Path; SYSTEM_NAMES, DataError.
    """
    here = Path(os.path.realpath(folder))
    names = []
    try:
        for name in sorted(os.listdir(here)):
            path = here / name
            if name.startswith(".") or name.lower() in SYSTEM_NAMES or not os.path.isdir(path):
                continue
            if Path(os.path.realpath(path)) in (here, *here.parents):
                continue  # a link back to where we come from
            name.encode()
            names.append(name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
    except UnicodeEncodeError:
        raise DataError(f"{folder}: {os.fsencode(name)} is not UTF-8; rename it") from None
    try:
        names.sort(key=float)
    except ValueError:
        pass  # not all of them are numbers
    return {name: Path(folder) / name for name in names}


def find_parts(root, log=print):
    """Finds what is to train on, to validate with and to test with in a folder of pictures.

        root/train/cat/1.jpg     part "train", class "cat"; val and test may be beside train
        root/cat/1.jpg           no parts: all of it is "train"

    returns  dict with "train", and "val" and "test" if they are there -> path
    raises   DataError if there are no classes, or others to validate or test with but none to train

    Needs: Path; find_classes, PART_NAMES, DataError.
    """
    root = Path(root)
    folders = find_classes(root)
    if not folders:
        raise DataError(
            f"{root}: no sub-folder in it; a class is a sub-folder of pictures: {root}/cat/1.jpg"
        )
    parts = {}
    for part, names in PART_NAMES.items():
        for name in names:
            # A class may be called "train", too. It holds pictures, a part holds classes.
            if part not in parts and name in folders and find_classes(folders[name]):
                parts[part] = folders[name]
    if not parts:
        return {"train": root}
    if "train" not in parts:
        found = ", ".join(str(path) for path in parts.values())
        raise DataError(f"{root}: {found} without {root}/train; put what to train on there")
    left_out = [name for name, path in folders.items() if path not in parts.values()]
    if left_out:
        log(f"{root}: {', '.join(left_out)} beside {parts['train'].name}: left out")
    return parts


def list_samples(folder, classes, log=print):
    """Lists the pictures of one part of the data, each with its label, by name and not by class.

    By class, the first hundred pictures would all be cats. By name, those that somebody numbered
    through before they went into their folders are in their first order again.

    classes  list of K names: those to train on
    returns  list of (path, label)
    raises   DataError for a class that is not one of them: it would have no label

    Needs: by_number, find_classes, list_pictures, DataError.
    """
    samples = []
    others = []
    for name, path in find_classes(folder).items():
        if name not in classes:
            raise DataError(f"{path}: a class that is not among those to train on")
        pictures, no_pictures = list_pictures(path)
        others.extend(no_pictures)
        for picture in pictures:
            samples.append((picture, classes.index(name)))
    if others:
        log(f"left out: {len(others):,} files with names of no pictures: {others[0]} ...")
    samples.sort(key=lambda sample: by_number(sample[0]))
    return samples


def keep_tenth(samples, seed):
    """Keeps a tenth of each class for the test: at least one picture, if the class has two.

    Which ones depends on their names: name and seed are mixed to a number, and those with the
    smallest numbers are kept. Whoever adds a few pictures to a thousand finds almost the same ones
    in the test, which a shuffled list would not give.

    samples  list of (path, label)
    returns  the list to train on, the list to test with, both in the order of `samples`

    Needs: zlib; mix.
    """
    by_label = {}
    for path, label in samples:
        number = mix(seed, zlib.crc32(path.name.encode("utf-8", "replace")))
        by_label.setdefault(label, []).append((number, path))
    kept = set()
    for ranked in by_label.values():
        if len(ranked) > 1:
            count = max(1, round(len(ranked) / 10))
            kept.update(path for _, path in sorted(ranked)[:count])
    to_train = [sample for sample in samples if sample[0] not in kept]
    to_test = [sample for sample in samples if sample[0] in kept]
    return to_train, to_test


def check_classes(folder, classes, samples, log=print):
    """DataError unless there are two classes or more, and a picture of each. Needs: DataError.

    classes  list of K names
    samples  list of (path, label) to train on
    """
    if len(classes) < 2:
        raise DataError(f"{folder}: one class only, {classes[0]}; there is nothing to tell apart")
    for label in sorted(set(range(len(classes))) - {label for _, label in samples}):
        raise DataError(
            f"{folder}/{classes[label]}: no picture in it; remove the folder, or put some there"
        )
    first = {}
    for name in classes:
        twin = first.setdefault(name.casefold(), name)
        if twin != name:
            log(f"{folder}: {twin} and {name} differ by upper and lower case only: two classes")


def most_are_grey(samples):
    """Says whether most pictures are grey, by a look at 200 of them, evenly spread. See looks_grey.

    Needs: looks_grey, DataError.
    """
    step = max(1, len(samples) // 200)
    grey = 0
    seen = 0
    for path, _ in samples[::step]:
        try:
            grey += looks_grey(path)
            seen += 1
        except DataError:
            pass  # whoever reads them all will say so
    return 2 * grey > seen


def memory_left():
    """How many bytes of memory this machine, or this container, can give. None: it does not tell.

    Needs: os, re, Path.
    """
    sizes = []
    try:
        if hasattr(os, "sysconf"):  # Windows has none
            sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        # Linux also tells what it can give without taking it from others, and a container's limit,
        # which is a number or "max".
        for kilobytes in re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text()):
            sizes.append(1024 * int(kilobytes))
        for limit in re.findall(r"\d+", Path("/sys/fs/cgroup/memory.max").read_text()):
            sizes.append(int(limit))
    except (OSError, ValueError):
        pass
    return min(sizes, default=None)


def read_pictures(samples, shape, log=print):
    """Reads pictures into one tensor. Those that cannot be read are named and left out.

    samples  list of (path, label)
    shape    (C, H, W) of each
    returns  images uint8 (N, C, H, W), labels int64 (N,), and which of the samples they are: int64
             (N,), indices into `samples`
    raises   DataError if more than a tenth of them cannot be read

    Needs: time, torch; read_picture, DataError.
    """
    images = torch.empty(len(samples), *shape, dtype=torch.uint8)
    read = []
    last_line = time.monotonic()
    for index, (path, _) in enumerate(samples):
        try:
            images[len(read)] = read_picture(path, shape)
            read.append(index)
        except DataError as error:
            failed = index + 1 - len(read)
            if 10 * failed > len(samples):
                raise DataError(
                    f"more than a tenth of {len(samples)} pictures cannot be read, such as {error}"
                ) from None
            log(f"left out: {error}")
        if time.monotonic() - last_line > 5:
            log(f"{index + 1:,} of {len(samples):,} pictures are read")
            last_line = time.monotonic()
    labels = torch.tensor([samples[index][1] for index in read], dtype=torch.int64)
    return images[: len(read)], labels, torch.tensor(read, dtype=torch.int64)


def load_folder(root, image_size=28, channels=None, seed=0, train=True, log=print):
    """Loads a folder of your own pictures, in the layout of torchvision's ImageFolder.

    A sub-folder is a class, and its name is the name of the class:

        pets/cat/1.jpg    pets/cat/2.jpg    ...    pets/dog/1.jpg    ...

    There may be folders train/, val/ and test/ above the classes. Without test/ a tenth of each
    class is kept for the test. What is in val/ is the end of the training part, and
    about["held_out"] says how many pictures that are: the validation set, in place of one chosen by
    chance. The labels are those of the classes to train on, everywhere: if val/ has no folder "b"
    of a, b and c, then its c still has label 2.

    All pictures are read now, once, into memory: 1,000 of 3 x 64 x 64 bytes take 12 MB.

    image_size  the pictures become image_size x image_size pixels: see read_picture
    channels    1 (grey) or 3; None: as most of the pictures are
    seed        chooses the pictures for the test, see keep_tenth
    train       False: none of the training part is read; the first value returned is None, and
                `about` has only name, items, classes and shape
    log         takes a line for the user
    returns     (images uint8 (N, C, H, W), labels int64 (N,)) to train on, the same to test with,
                about: see describe, and "held_out"
    raises      DataError, in one line, for what is to be put right in the folder

    Needs: math, Path; check_classes, describe, find_classes, find_parts, keep_tenth, list_samples,
    memory_left, most_are_grey, read_pictures, DataError.
    """
    root = Path(root)
    parts = find_parts(root, log)
    classes = list(find_classes(parts["train"]))
    samples = {"val": []}
    for part, folder in parts.items():
        samples[part] = list_samples(folder, classes, log)
    check_classes(parts["train"], classes, samples["train"], log)
    note = ""
    if "test" not in parts:
        samples["train"], samples["test"] = keep_tenth(samples["train"], seed)
        note = f"; without {root}/test a tenth of each class, by seed {seed}, is kept for the test"
    if not samples["test"]:
        raise DataError(f"{root}: no picture to test with; put some into {root}/test/{classes[0]}")
    if channels is None:
        channels = 1 if most_are_grey(samples["train"]) else 3

    shape = [channels, image_size, image_size]
    wanted = samples["test"]
    if train:
        wanted = samples["train"] + samples["val"] + samples["test"]
    size = len(wanted) * math.prod(shape)
    counts = ", ".join(f"{len(samples[part]):,} in {part}" for part in ("train", "val", "test"))
    log(
        f"{root}: {len(classes)} classes; pictures: {counts}{note}; "
        f"{channels} x {image_size} x {image_size} bytes each, {size / 1e6:,.1f} MB of memory"
    )
    left = memory_left()
    if left is not None and 2 * size > left:  # twice, while the validation set is taken out
        raise DataError(
            f"{root}: {2 * size / 1e9:,.1f} GB of memory would be in use, and {left / 1e9:,.1f} GB "
            "are left; take a smaller --image-size, or fewer pictures"
        )

    images, labels, read = read_pictures(wanted, shape, log)
    name = root.resolve().name or "pictures"
    if not train:
        about = {"name": name, "items": "pictures", "classes": classes, "shape": shape}
        return None, (images, labels), about
    first_val = (read < len(samples["train"])).sum().item()
    first_test = (read < len(wanted) - len(samples["test"])).sum().item()
    if first_test == len(read) or len(labels[:first_val].unique()) < len(classes):
        raise DataError(f"{root}: no picture of a class, or of the test, could be read: see above")
    train_part = images[:first_test], labels[:first_test]
    test_part = images[first_test:], labels[first_test:]
    about = describe(*train_part, classes, name, "pictures")
    about["held_out"] = first_test - first_val
    return train_part, test_part, about


# ---------------------------------------------------------------- a picture of one digit as MNIST's


def smooth_paper(grey):
    """Estimates how bright the paper is at each pixel, as if nothing were written on it.

    Paper is not white. On the side of the window it is brighter, and a photo is darker in its
    corners. No single threshold tells ink from such paper. Here it is brighter to the left:

        pixels     .90 .88 .30 .83 .80 .20 .75 .72        ink at .30 and .20
        paper      .90 .88 .85 .83 .80 .78 .75 .72        a straight line through the others
        difference   0   0 .55   0   0 .58   0   0        now a threshold is easy

    In two dimensions the line becomes a surface, brightness = a + bx + cy + dx² + exy + fy², whose
    six numbers are found by least squares. The ink must not pull at it. So each pixel gets a weight
    that is the smaller, the farther it was from the surface before, and the fit is repeated. It
    begins with the outermost pixels alone: they are paper, mostly, also where a bold digit fills
    the picture.

    grey     float (H, W) in 0..1
    returns  float (H, W)

    Needs: torch, F.
    """
    H, W = grey.shape
    scale = min(1, 64 / max(H, W))  # six numbers need no more than 64 x 64 pixels
    h = max(1, round(H * scale))
    w = max(1, round(W * scale))
    small = F.interpolate(grey[None, None], size=(h, w), mode="area")[0, 0]

    def terms(h, w):
        y = ((2 * torch.arange(h) + 1) / h - 1)[:, None].expand(h, w)  # -1 to 1
        x = ((2 * torch.arange(w) + 1) / w - 1).expand(h, w)
        return torch.stack([torch.ones(h, w), x, y, x * x, x * y, y * y], dim=-1)  # (h, w, 6)

    frame = torch.ones(h, w, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    surface = torch.zeros(6)
    surface[0] = small[frame].median()
    for chosen in [frame] * 4 + [torch.ones_like(frame)] * 6:
        A = terms(h, w)[chosen]  # (n, 6)
        b = small[chosen]  # (n,)
        distance = (b - A @ surface).abs()
        usual = 2 * distance.median().clamp(min=2 / 255)
        weight = 1 / (1 + (distance / usual) ** 2) ** 2  # (n,)
        left = A.T @ (weight[:, None] * A) + 1e-4 * torch.eye(6)
        surface = torch.linalg.solve(left, A.T @ (weight * b))
    return terms(H, W) @ surface


def step_paper(grey):
    """Estimates the paper's brightness where smooth_paper cannot: at the edge of a shadow.

    Ink is narrow, and shadows and tables are wide. The brightest pixel in a window that is wider
    than a stroke is paper, wherever the window lies; then the darkest of these brightest undoes
    that they have grown at the shadow's edge. This is called a closing. A row, a window of three:

        pixels       .9 .9 .2 .9 .9 .4 .4 .1 .4 .4        .2 and .1 are ink, .4 is in the shadow
        brightest    .9 .9 .9 .9 .9 .9 .4 .4 .4 .4
        darkest      .9 .9 .9 .9 .9 .4 .4 .4 .4 .4        what paper there would look like

    grey     float (H, W), ink darker than paper
    returns  float (H, W)

    Needs: F.
    """
    H, W = grey.shape
    scale = min(1, 64 / max(H, W))
    small = F.interpolate(grey[None, None], scale_factor=scale, mode="area")
    half = max(1, max(small.shape) // 8)
    size = 2 * half + 1  # of the window: a quarter of the picture
    x = F.pad(small, [half] * 4, mode="replicate")  # the paper goes on beyond the frame
    x = F.max_pool2d(x, (size, 1), 1, (half, 0))
    x = F.max_pool2d(x, (1, size), 1, (0, half))
    x = -F.max_pool2d(-x, (size, 1), 1, (half, 0))
    x = -F.max_pool2d(-x, (1, size), 1, (0, half))
    x = x[:, :, half:-half, half:-half]
    return F.interpolate(x, size=(H, W), mode="bilinear")[0, 0]


def ink_in_shadow(grey):
    """How much darker than step_paper each pixel is, as a fraction of it: float (H, W) in 0..1.

    A fraction, for in the shadow everything has half the light: paper .8 and ink .2 become .4 and
    .1, whose difference is half as large, but 1 - .1 / .4 is 0.75 as before.

    White ink on black is turned into black on white first. Which of the two it is, the cubes of the
    differences from the local mean tell: there is less ink than paper, so ink is further from the
    mean, and a cube keeps the sign. At a shadow's edge both sides are equally far, and cancel.

    Needs: F; step_paper.
    """
    H, W = grey.shape
    small = F.interpolate(grey[None, None], scale_factor=min(1, 64 / max(H, W)), mode="area")
    half = max(1, max(small.shape) // 6)
    mean = F.avg_pool2d(small, 2 * half + 1, 1, half, count_include_pad=False)
    if ((small - mean) ** 3).sum() > 0:
        grey = 1 - grey
    return 1 - ((grey + 0.02) / (step_paper(grey) + 0.02)).clamp(max=1)


def otsu_threshold(values):
    """Finds the threshold that divides numbers into two heaps, each as narrow as can be.

    [0, 1, 0, 1, 8, 9] falls into [0, 1, 0, 1] and [8, 9]: within these heaps the numbers differ by
    little. Equivalent and faster to compute: the means of the two heaps, weighted by their sizes,
    are as far apart as can be. All 256 thresholds are tried at once, by cumulative sums.

    values   float, any shape, at least 0
    returns  the threshold, and how clear the division is: the part of all variance that is between
             the heaps, from 0 to 1

    N. Otsu 1979, doi 10.1109/TSMC.1979.4310076. Needs: torch.
    """
    top = max(values.max().item(), 1e-6)
    counts = torch.histc(values, 256, 0, top).double() / values.numel()  # (256,)
    centres = (torch.arange(256) + 0.5) / 256 * top
    below = counts.cumsum(0)  # the size of the lower heap, as a fraction
    sums = (counts * centres).cumsum(0)
    mean = sums[-1]
    between = (mean * below - sums) ** 2 / (below * (1 - below)).clamp(min=1e-9)
    best = between[:-1].argmax()
    variance = (counts * (centres - mean) ** 2).sum().clamp(min=1e-12)
    return (best.item() + 1) / 256 * top, (between[best] / variance).item()


def find_ink(grey):
    """Tells ink from paper: 0 is paper, 1 is ink, and between them are the edges of strokes.

    Dark on bright and bright on dark are the same here: ink is what differs from the paper.

    grey     float (H, W) in 0..1
    returns  float (H, W) in 0..1; or None if there is nothing but paper

    Needs: torch; smooth_paper, ink_in_shadow, otsu_threshold.
    """
    difference = grey - smooth_paper(grey)
    darker = (-difference).clamp(min=0)
    brighter = difference.clamp(min=0)
    strength = darker
    if (brighter**2).sum() > (darker**2).sum():
        strength = brighter
    threshold, clearness = otsu_threshold(strength)
    frame = torch.cat([strength[0], strength[-1], strength[:, 0], strength[:, -1]])
    if (frame > threshold).float().mean() > 0.04:
        # So much ink on the outermost pixels may be a shadow. The clearer of two answers is taken.
        second = ink_in_shadow(grey)
        second_threshold, second_clearness = otsu_threshold(second)
        if second_clearness > clearness:
            strength = second
            threshold = second_threshold
    is_ink = strength > threshold
    ink = strength[is_ink].mean()  # NaN if there is none
    paper = strength[~is_ink]
    grain = paper.std(correction=0)
    # The grain of the paper, divided into two heaps, is 5 to 6 times its own width apart.
    is_seen = ink > 0.1 or (ink > 0.03 and ink - paper.mean() > 8 * grain)
    if not is_seen:
        return None
    # Half the threshold is still paper: its grain is gone, and edges keep their grey.
    return ((strength - threshold / 2) / (ink - threshold / 2)).clamp(0, 1)


def keep_digit(ink):
    """Leaves out what is ink, but no part of the digit: specks, and the dark rim of a scan.

    Ink that hangs together is one piece. To find the pieces, each pixel of ink gets a number of its
    own, and then, again and again, the largest number among its neighbours and itself:

        . 2 3 .      . 6 6 .      . 6 6 .
        5 6 . .      6 6 . .      6 6 . .        two pieces, 6 and 12
        . . . 12     . . . 12     . . . 12

    A piece that covers more than half of a side of the picture is a rim, unless nothing else is
    there. Of the others those count that have at least a twentieth of the largest one's ink.

    ink      float (H, W) in 0..1
    returns  float (H, W)

    Needs: torch, F.
    """
    H, W = ink.shape
    scale = min(1, 56 / max(H, W))
    size = max(1, round(H * scale)), max(1, round(W * scale))
    is_ink = F.adaptive_max_pool2d((ink > 0.5).float()[None, None], size)  # (1, 1, h, w)
    pieces = is_ink * torch.arange(1, is_ink.numel() + 1).view_as(is_ink)
    while True:
        spread = F.max_pool2d(pieces, 3, 1, 1) * is_ink
        if torch.equal(spread, pieces):
            break
        pieces = spread
    pieces = pieces[0, 0].long()  # (h, w), 0 = no ink
    weights = F.adaptive_avg_pool2d(ink[None, None], size).flatten()
    weight = pieces.flatten().bincount(weights)  # of each piece, by its number
    weight[0] = 0
    inner = weight.clone()
    for side in (pieces[0], pieces[-1], pieces[:, 0], pieces[:, -1]):
        inner[side.bincount(minlength=len(weight)) > len(side) / 2] = 0
    if inner.max() >= pieces.numel() / 1000:
        weight = inner
    kept = (weight >= weight.max() / 20)[pieces] & (pieces > 0)
    return ink * F.interpolate(kept.float()[None, None], size=(H, W))[0, 0]


def thicken(ink):
    """Makes thin strokes as thick as those of MNIST: a tenth of the digit's longer side.

    A ballpoint's line is a fiftieth of a large digit. Shrunk to 20 pixels it would be 0.4 pixels
    wide, a grey that no digit of MNIST has. The width of a stroke is about twice its area divided
    by its edge: a line of 100 x 4 pixels has 400 pixels, and about 200 of them lie at its edge.

    ink      float (H, W) in 0..1, some of it above 0.5
    returns  float (H, W)

    Needs: torch, F.
    """
    is_ink = (ink > 0.5).float()
    inside = -F.max_pool2d(-is_ink[None], 3, 1, 1)[0]  # a pixel with paper beside it becomes 0
    edge = (is_ink - inside).sum().clamp(min=1)
    width = 2 * is_ink.sum() / edge
    rows, columns = is_ink.nonzero(as_tuple=True)
    side = max(rows.max() - rows.min(), columns.max() - columns.min()) + 1
    missing = round(((side / 10 - width) / 2).item())  # on each side of the stroke
    if missing > 0:
        ink = F.max_pool2d(ink[None], 2 * missing + 1, 1, missing)[0]
    return ink


def fit_digit(ink):
    """Puts a digit where MNIST has its digits: 20 pixels long, its weight in the middle of 28 x 28.

    1. The box around the ink is shrunk, or enlarged, until its longer side has 20 pixels. The
       shorter one follows: a 1 stays narrow.
    2. The centre of mass, which is the mean position of all ink, comes to row 14 and column 14, as
       near as whole pixels allow. A 7 has most of its ink above, so its box lies a bit lower.

    ink      float (H, W) in 0..1, some of it above 0.5
    returns  float (28, 28) in 0..1

    Y. LeCun et al. 1998, doi 10.1109/5.726791, section III A. Needs: torch, F.
    """
    rows, columns = (ink > 0.5).nonzero(as_tuple=True)
    box = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    scale = 20 / max(box.shape)
    h = max(1, round(box.shape[0] * scale))
    w = max(1, round(box.shape[1] * scale))
    box = F.interpolate(box[None, None], size=(h, w), mode="bilinear", antialias=True)[0, 0]
    box = (box / box.max()).clamp(0, 1)  # the darkest ink of a digit is white, 1
    row = (box.sum(1) * torch.arange(h)).sum() / box.sum()
    column = (box.sum(0) * torch.arange(w)).sum() / box.sum()
    top = min(max(round(14 - row.item()), 0), 28 - h)
    left = min(max(round(14 - column.item()), 0), 28 - w)
    whole = torch.zeros(28, 28)
    whole[top : top + h, left : left + w] = box
    return whole


def is_like_mnist(image):
    """Says whether an image is one of MNIST's already: all 70,000 of them are.

    Its ink, which is all that is not 0, is 19 or 20 pixels long, and its centre of mass is at most
    half a pixel away from row 14 and column 14.

    image  float (H, W) in 0..1

    Needs: torch.
    """
    if image.shape != (28, 28) or image.max() == 0:
        return False
    rows, columns = image.nonzero(as_tuple=True)
    side = max(rows.max() - rows.min(), columns.max() - columns.min()).item() + 1
    index = torch.arange(28)
    row = (image.sum(1) * index).sum() / image.sum()
    column = (image.sum(0) * index).sum() / image.sum()
    return side in (19, 20) and abs(row - 14) < 0.53 and abs(column - 14) < 0.53


def digit_steps(path):
    """The steps from a picture of a digit to an image like MNIST's: see read_digit.

    returns  list of (what it is, float (H, W) in 0..1); the last one is the result, (28, 28)
    raises   DataError, see read_digit

    Needs: Image; open_picture, pixels_of, is_like_mnist, find_ink, keep_digit, thicken, fit_digit,
    DataError.
    """
    image = open_picture(path, 1, 256)
    image.thumbnail((256, 256), Image.Resampling.BILINEAR)  # more would not be seen in 20 pixels
    grey = pixels_of(image)[0].float() / 255
    steps = [("the picture in grey", grey)]
    for candidate in (grey, 1 - grey):
        if is_like_mnist(candidate):
            return [*steps, ("it has MNIST's form already", candidate)]
    ink = find_ink(grey)
    if ink is None:
        raise DataError(f"{path}: nothing is written on it, or too faintly to be seen")
    steps.append(("the paper taken away", ink))
    ink = keep_digit(ink)
    steps.append(("without specks and rims", ink))
    ink = thicken(ink)
    steps.append(("no thinner than MNIST's strokes", ink))
    return [*steps, ("20 pixels long, its centre of mass in the middle of 28 x 28", fit_digit(ink))]


def read_digit(path):
    """Reads any picture of one digit, and makes of it what MNIST would have made of it.

    A network that has learnt MNIST's digits has seen white ink on black, of one size, in the
    middle. A photo of a digit is none of that, and the network would answer nonsense. So what was
    done to MNIST's digits is done to this one. `python data.py PICTURE` shows each step:

        open_picture    upright, grey, something behind what is transparent
        find_ink        paper becomes 0, whatever its brightness, and ink 1
        keep_digit      specks and a scan's dark rim go
        thicken         a thin pen's strokes become as thick as MNIST's
        fit_digit       20 pixels long, and the centre of mass in the middle of 28 x 28

    A picture that has MNIST's form already, white on black or black on white, keeps every pixel.

    returns  uint8 (1, 28, 28), 0 = paper
    raises   DataError: the picture cannot be read, or it is blank

    Needs: torch; digit_steps.
    """
    _, image = digit_steps(path)[-1]
    return (image * 255).round().to(torch.uint8)[None]


def show_digit(path):
    """Prints each step of read_digit in characters, a pixel as two of them.

    Needs: F; digit_steps.
    """
    for title, image in digit_steps(path):
        H, W = image.shape
        print(f"{title}: {H} x {W} pixels")
        scale = min(1, 28 / max(H, W))
        size = max(1, round(H * scale)), max(1, round(W * scale))
        for row in F.interpolate(image[None, None], size=size, mode="area")[0, 0].tolist():
            print("".join(2 * " .:-=+*#%@"[min(9, int(10 * pixel))] for pixel in row).rstrip())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        try:
            show_digit(sys.argv[1])
        except DataError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        sys.exit()
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
