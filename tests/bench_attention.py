"""What attention costs, as ratios within one run: python tests/bench_attention.py [--rounds 5] [--images 6400]

1. an epoch of the attention model over one of the CNN, both with their default flags: the patches with ink in one row
   (the default), padded to the longest of the batch, or all 49 patches; attention written out, and fused
2. --grad-checkpoint: time of an epoch, and bytes kept for the backward pass, over those without it

All are measured in turns, round by round, on the bundled sample; median and range over the rounds are printed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import utils
from helpers import repeated_sample, training


def prepare(digits, flags):
    """Returns (a function that trains for one epoch, bytes kept for the backward pass of one batch)."""
    network, _, loader, epoch = training(digits, flags)
    kept = {}  # by address: what several functions keep is counted once

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    inputs, labels = next(iter(loader))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(network.train()(inputs), labels)
    del loss
    return epoch, sum(size for address, size in kept.items() if address not in parameters)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=6400, help="images in an epoch")
    options = parser.parse_args()
    n = options.images
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {n:,} images an epoch, {options.rounds} rounds")
    torch.manual_seed(0)
    utils.keep_freed_memory()
    digits = repeated_sample(n, augment=True)

    attention = "--model attention"
    variants = {"CNN": "", **{
        f"{tokens}, {kernel}": f"{attention} --tokens {tokens} --attention-kernel {kernel}"
        for tokens in ("packed", "padded", "all") for kernel in ("manual", "fused")
    }, "packed, manual, --grad-checkpoint": f"{attention} --attention-kernel manual --grad-checkpoint"}
    epochs = {name: prepare(digits, flags) for name, flags in variants.items()}
    times = {name: [] for name in variants}
    for round in range(options.rounds + 1):  # the first time is never the usual time
        for name, (epoch, _) in epochs.items():
            started = time.perf_counter()
            epoch()
            if round:
                times[name].append(time.perf_counter() - started)
    print(f"{'':34} time of an epoch / CNN's                    MB kept for the backward pass of a batch")
    for name, seconds in times.items():
        ratios = [own / cnn for own, cnn in zip(seconds, times["CNN"])]
        print(f"{name:34} median {statistics.median(ratios):5.2f}   range {min(ratios):5.2f} to {max(ratios):5.2f}   {epochs[name][1] / 1e6:8.1f}")


if __name__ == "__main__":
    main()
