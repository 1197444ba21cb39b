"""From a textbook loop to this one: what each single change gives, alone and where all the others are there already.

python tests/bench_changes.py [--rounds 3] [--images 6400]

The textbook fetches and augments one PIL image after the other, in batches of 64, with ReLU before the pooling, Adam as
it is by default, and .item() at each step. Every variant trains in a process of its own, for one of the changes (how the
C library keeps memory) is one of the whole process. Printed are median and range over the rounds of

    alone    the time of the textbook's epoch over that of the textbook with this change only
    last     the time of an epoch with all changes but this one over that of an epoch with all

A change may be worth little alone, because something else takes most of the time, and much once that is gone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import utils

CHANGES = {
    "batched fetch": "a batch is fetched and augmented by a few operations, not image by image",
    "batches of 128": "in place of 64",
    "channels-last": "the channels of a pixel side by side in memory",
    "pool, then ReLU": "the same values, and ReLU has a quarter of the work",
    "fused optimizer": "one loop over all values of a parameter, not one for each operation",
    "memory kept": "freed memory is not given back to the system",
    "no .item()": "loss and accuracy are added up as tensors",
    "bf16": "torch.autocast; only where the CPU multiplies in bf16 it can help",
}


class CNN(nn.Module):
    """The network of this project, with the pooling where the textbook or we have it."""

    def __init__(self, pool_first=False):
        super().__init__()
        self.pool_first = pool_first
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for conv in (self.conv1, self.conv2):
            if self.pool_first:
                x = F.relu(F.max_pool2d(conv(x), 2))
            else:
                x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


def make_loader(changes, n):
    """Batches of n images of the sample, shuffled and augmented, (images float (B, 1, 28, 28), labels)."""
    size = 128 if "batches of 128" in changes else 64
    if "batched fetch" not in changes:
        return textbook_loader(n, size)
    # Imported here: train.py sets how threads wait, and the processes of the other variants would inherit it.
    from helpers import NORM, repeated_sample

    collate = partial(data.collate_images, **NORM)
    return data.make_loader(repeated_sample(n, augment=True), size, data.EpochSampler(n), collate=collate)


def textbook_loader(n, batch_size=64, augment=True):
    """n images of the sample, one PIL image after the other, shuffled."""
    affine = [transforms.RandomAffine(10, translate=(2 / 28, 2 / 28), scale=(0.9, 1.1))] if augment else []
    transform = transforms.Compose([*affine, transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = ConcatDataset([datasets.MNIST(data.SAMPLE, transform=transform)] * -(-n // 4000))
    return DataLoader(Subset(dataset, range(n)), batch_size=batch_size, shuffle=True)


def train_epoch(model, loader, optimizer, changes=()):
    """The textbook's loop. Returns seconds."""
    started = time.perf_counter()
    running_loss = correct = 0
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in changes):
            outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels)
        loss.backward()
        optimizer.step()
        right = (outputs.argmax(1) == labels).sum()
        if "no .item()" in changes:
            running_loss += loss.detach()
            correct += right
        else:
            running_loss += loss.item()
            correct += right.item()
    assert float(running_loss) > 0 and int(correct) > 0  # here the tensors are read
    return time.perf_counter() - started


def seconds_here(changes, n):
    """Seconds of an epoch of n images in this process, after a short one that warms up."""
    torch.manual_seed(0)
    if "memory kept" in changes:
        utils.keep_freed_memory()
    model = CNN("pool, then ReLU" in changes)
    if "channels-last" in changes:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused="fused optimizer" in changes)
    train_epoch(model, make_loader(changes, 1280), optimizer, changes)
    return train_epoch(model, make_loader(changes, n), optimizer, changes)


def seconds(changes, n):
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--images", str(n), "--changes", json.dumps(sorted(changes))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def show(name, values, text=""):
    spread = f"{min(values):.2f} to {max(values):.2f}"
    print(f"{name:24} {statistics.median(values):5.2f}  {spread:14} {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=6400, help="images in an epoch")
    parser.add_argument("--changes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    n = options.images
    if options.changes is not None:
        return print(seconds_here(options.changes, n))

    # On a CPU that has no instructions for it bf16 is slower: it is measured alone, and not among all.
    everything = set(CHANGES)
    if utils.pick_amp(None, torch.device("cpu")) != "bf16":
        everything.discard("bf16")
    alone, last, together, speeds = {name: [] for name in CHANGES}, {name: [] for name in CHANGES}, [], []
    for _ in range(options.rounds):
        textbook, best = seconds(set(), n), seconds(everything, n)
        together.append(textbook / best)
        speeds.append((n / textbook, n / best))
        for name in CHANGES:
            alone[name].append(textbook / seconds({name}, n))
            other = best / seconds(everything | {name}, n) if name not in everything else seconds(everything - {name}, n) / best
            last[name].append(other)

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {n:,} images, {options.rounds} rounds")
    for name, text in CHANGES.items():
        show(f"{name}, alone", alone[name], text)
        show(f"{name}, last", last[name])
    show("all together", together, f"without {', '.join(set(CHANGES) - everything) or 'none'}")
    for label, values in zip(("textbook", "all together"), zip(*speeds)):
        print(f"{label}: {statistics.median(values):,.0f} images/s")


if __name__ == "__main__":
    main()
