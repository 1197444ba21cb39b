"""What a training program needs beside its loop: device, seeds, ranks, schedules, checkpoints.

pick_device, pick_amp                                    where and in which number format to compute
set_seed, rng_state, set_rng_state                       the random generators of this process
init_distributed, sum_over_ranks, once_per_machine       several processes, one result
lr_at                                                    the learning rate as a pure function of the step
write_atomically, save_checkpoint, load_checkpoint       a run on disk, whole or not at all
load_matching                                            what fits of a checkpoint into another model

This file knows nothing of the data or the networks. `python utils.py` draws the schedules.
"""

import argparse
import csv
import io
import json
import math
import os
import random
import shutil
import sys
import zipfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------------------------------------- the command line


def number(kind, low, high):
    """An argparse type: an int or a float (`kind`) from `low` to `high`. NaN is outside, for it compares with nothing."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


@contextmanager
def one_line(*kinds):
    """Errors of these kinds are the user's to mend: one line, status 2. All others are bugs and keep their traceback."""
    try:
        yield
    except kinds as error:
        print(f"train.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def show(line, over=False):
    """Prints `line`; with `over`, on a terminal, so that the next line overwrites it."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + (line[:width] if over else line).ljust(width), end="" if over else "\n", flush=True)
    else:
        print(line, flush=True)


# ---------------------------------------------------------------------------------------------------- device and seeds


def pick_device(name="auto"):
    """torch.device for `name`: auto takes the first of cuda, mps, xpu that is there, else cpu. ValueError if it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    if not there.get(name.split(":")[0]):
        raise ValueError(f"--device {name}: not on this machine, which has {', '.join(kind for kind in there if there[kind])}")
    return torch.device(name)


def pick_amp(name, device):
    """`name`, or the default for this device where it is None: bf16 on a GPU that computes in it natively, else off.

    bf16 has float32's range in 16 bits: no overflow, so no loss scaling. A CPU emulates it on most machines, slower than
    float32, so there it is for trying out.
    """
    native_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return name or ("bf16" if native_bf16 else "off")


def set_seed(seed, deterministic=False):
    """Seeds Python's and torch's generators on all devices.

    On a CPU the same seed and thread count then give the same run to the bit. A GPU needs `deterministic` too: it
    takes reproducible kernels, slower ones for some layers, and raises RuntimeError where there is none.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic  # times the convolution kernels once and keeps the fastest
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without


def rng_state():
    """The state of this process's generators: plain types and tensors, as a checkpoint takes them."""
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_rng_state(state, say=print):
    """Puts rng_state() back. States of GPUs that are not here are skipped with one line to `say`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for index, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, index)
    if len(state["cuda"]) != torch.cuda.device_count():
        say(f"random states of {len(state['cuda'])} GPUs in the checkpoint, {torch.cuda.device_count()} GPUs here: the others are skipped")


# ---------------------------------------------------------------------------------------------------- several processes


def init_distributed(device):
    """Joins the process group that torchrun describes in the environment, if it does. Returns (rank, world size, device)."""
    if "RANK" not in os.environ:
        return 0, 1, device
    # Two backends: NCCL for tensors on the GPU, and gloo for the small agreements between CPUs, which stall no GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def sum_over_ranks(tensor):
    """Sum of `tensor` over all processes, in place, and returned; with one process as it is.

    Sums, never averages: ranks hold different numbers of samples, and the mean of their means would weigh them alike.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_over_ranks(value):
    """List of each rank's `value` (anything that pickles), by rank, on all ranks."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def once_per_machine(function):
    """Runs `function` in one process of each machine. Returns on all ranks the first result that is not None, or None.

    Needs: gather_over_ranks.
    """
    result = function() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    return next((result for result in gather_over_ranks(result) if result is not None), None)


# ---------------------------------------------------------------------------------------------------- learning rate


def lr_at(step, total, peak, warmup=0, schedule="cosine"):
    """Learning rate of optimizer step `step`, counted from 0, of `total`: a number in [peak / 100, peak].

    For the first `warmup` steps it rises in a line from peak / 100. Then
    cosine    falls along half a cosine to peak / 100 at the last step (Loshchilov and Hutter 2017, without restarts)
    constant  stays

    A pure function: there is no scheduler whose counter a resume, a skipped step or an epoch too many could put wrong.
    """
    low = peak / 100  # not 0: a step with learning rate 0 would be computed in vain
    if step < warmup:
        return low + (peak - low) * step / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, total - 1 - warmup)  # 0 at the peak, 1 at the last step
    return low + (peak - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


# ---------------------------------------------------------------------------------------------------- a run on disk


def new_folder(out, name):
    """Makes the folder of a run: `out`, or if that is None runs/<name>-<n> with the next free n. ValueError if it holds a run."""
    if out:
        folder = Path(out)
        if any((folder / file).exists() for file in ("run.json", "last.pt", "best.pt")):
            raise ValueError(f"--out {folder}: holds a run already; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for n in range(1, 10**6):
        try:
            folder = Path("runs") / f"{name}-{n}"
            folder.mkdir(parents=True)  # not exist_ok: of two programs that start together one gets n, the other n + 1
            return folder
        except FileExistsError:
            continue


def write_atomically(path, write):
    """Calls write(file) on a new file beside `path`, flushes it to the disk and gives it the name `path`.

    Whoever reads `path` sees the old content or the new, never a half, even after a crash or with a full disk. The
    rename is atomic only within one file system, hence the same folder; without fsync a power cut can leave an empty
    file under the new name. A leftover .tmp is overwritten by the next call.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.tmp")
    with open(scratch, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def write_csv(path, rows):
    """Writes a list of dicts as a table, the keys of the first as its head. Needs: write_atomically."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0])
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_json(path, value):
    """Writes dicts, lists, strings and numbers as indented JSON. Needs: write_atomically."""
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2).encode()))


def versions():
    """Of torch and torchvision, as plain str: torch.__version__ is a class that torch.load(weights_only=True) refuses."""
    return {"torch": str(torch.__version__), "torchvision": metadata.version("torchvision")}  # not imported: that takes a second


def plain_weights(model):
    """The state_dict of `model` with the keys of the bare model, however DDP or torch.compile have wrapped it."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}


def save_checkpoint(path, checkpoint):
    """Writes a dict of plain types and tensors to `path`, with the versions. Needs: write_atomically, versions."""
    write_atomically(path, lambda file: torch.save({**checkpoint, "versions": versions()}, file))


def load_checkpoint(path):
    """The dict that save_checkpoint wrote, all tensors on the CPU. ValueError, in one line, for anything else.

    weights_only: a pickle can run any program when it is opened; this way only tensors and plain types come in.
    The checksums are compared first, which torch.load itself does not do: a flipped bit would be a wrong weight.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict) or "model" not in checkpoint:
            raise ValueError("no dict with a key 'model'")
    except Exception as error:  # a damaged file raises one of a dozen types, depending on where the damage is
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a checkpoint of this program, or damaged: {reason}") from None
    return checkpoint


if __name__ == "__main__":
    total, warmup, rows = 60, 9, 10
    curve = [lr_at(step, total, peak=1.0, warmup=warmup) for step in range(total)]
    print(f"lr_at over {total} steps, {warmup} of warm-up, as a share of the peak; last {curve[-1]:.2f}")
    for row in range(rows, 0, -1):
        print("".join("#" if lr > (row - 0.5) / rows else " " for lr in curve))
    print(f"device {pick_device()}, mixed precision {pick_amp(None, pick_device())}")
