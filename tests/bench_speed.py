"""How fast the default training is, as ratios within one run: python tests/bench_speed.py [--rounds 5] [--images 12800]

1. an epoch of ours over an epoch of the textbook loop of bench_changes.py, in images per second, training alone: both augment the
   images, ours a batch at a time, theirs one PIL image at a time; and, for comparison, with a textbook that does not
2. a pass of our loader, augmentation off, over a pass of the textbook's, which does not augment either
3. the floating-point operations of our training step per second over those of a large float32 matrix product
4. the three checkpoints that an epoch writes over an epoch of the 55,000 training digits of the complete MNIST
5. images per second of two processes with one thread each, half a batch for each, over one process with two threads

All are measured in turns, round by round, on the bundled sample repeated to the same number of images; the median and
the range over the rounds are printed. A ratio holds on a busy machine where a number of seconds does not.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
import utils
from bench_changes import CNN, textbook_loader
from helpers import repeated_sample, training

CPU = torch.device("cpu")


def timed(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def textbook(n, augment):
    """(model, loader, optimizer) of the textbook, for n images of the sample."""
    model = CNN()
    return model, textbook_loader(n, augment=augment), torch.optim.Adam(model.parameters())


def textbook_alone(n, augment):
    """Seconds of a textbook epoch in a process of its own, where the C library's memory is as everybody has it."""
    code = f"import bench_changes as c, bench_speed as b; parts = b.textbook({n}, {augment}); c.train_epoch(*b.textbook(1280, {augment})); print(c.train_epoch(*parts))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return float(done.stdout)


def program_speed(processes, threads, folder):
    """Images per second of train.py in its second and third epoch of the sample, over all processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    out, batch = f"{folder}/{processes}", str(128 // processes)
    flags = ["--dataset", "sample", "--epochs", "3", "--val-size", "0", "--batch-size", batch, "--out", out]
    command = [sys.executable, *torchrun, str(Path(train.__file__)), *flags]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, check=True)
    with open(f"{out}/metrics.csv", newline="") as file:
        return statistics.mean(float(row["images_per_second"]) for row in list(csv.DictReader(file))[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=12800, help="images in an epoch")
    options = parser.parse_args()
    n = options.images
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {n:,} images an epoch, {options.rounds} rounds")

    torch.manual_seed(0)
    utils.keep_freed_memory()
    their_loader = textbook(n, False)[1]
    plain_loader = training(repeated_sample(n, augment=False))[2]
    ours, optimizer, loader, epoch_of_ours = training(repeated_sample(n, augment=True))
    waiting = []
    our_epoch = lambda: waiting.append(epoch_of_ours()["waiting"])

    x, y = next(iter(loader))
    with FlopCounterMode(display=False) as counter:  # counts a multiplication and an addition as two, in both passes
        F.cross_entropy(ours(x), y).backward()
    flops = counter.get_total_flops() / len(x)
    optimizer.zero_grad()
    a, b = torch.rand(2048, 2048), torch.rand(2048, 2048)

    def products():
        for _ in range(4):
            a @ b

    our_epoch(), products(), list(their_loader)  # the first time is never the usual time
    waiting.clear()
    rows = []
    for _ in range(options.rounds):
        matrix = 4 * 2 * 2048**3 / timed(products)
        epoch = timed(our_epoch)
        matrix = (matrix + 4 * 2 * 2048**3 / timed(products)) / 2  # before and after: the machine's speed drifts
        augmenting, plain = textbook_alone(n, True), textbook_alone(n, False)
        load, their_load = timed(lambda: list(plain_loader)), timed(lambda: list(their_loader))
        with tempfile.TemporaryDirectory(dir=".") as folder:
            checkpoint = {"model": ours.state_dict(), "optimizer": optimizer.state_dict(), "rng": [utils.rng_state(CPU)]}
            saving = 3 * timed(lambda: utils.save_checkpoint(f"{folder}/last.pt", checkpoint)) / (epoch * 55000 / n)
            processes = program_speed(2, 1, folder) / program_speed(1, 2, folder)
        rows.append((
            augmenting / epoch, plain / epoch, their_load / load, flops * n / epoch / matrix, saving, processes,
            n / epoch, n / augmenting, n / plain, matrix / 1e9,
        ))

    names = (
        "epoch, textbook time / ours", "same, textbook without augmenting", "loader pass, textbook time / ours",
        "training FLOP/s / matrix product's", "saving / epoch of MNIST", "2 processes / 1 process, images/s",
        "our images/s", "textbook images/s", "same, without augmenting", "matrix product, GFLOP/s",
    )
    print(f"training step: {flops / 1e6:.2f} MFLOP an image; waiting for data {100 * statistics.median(waiting):.1f} % of our epoch")
    for name, values in zip(names, zip(*rows)):
        print(f"{name:36} median {statistics.median(values):9.3f}   range {min(values):9.3f} to {max(values):9.3f}")


if __name__ == "__main__":
    main()
