"""What a training program needs besides its loop.

python utils.py                    draws the learning rates
python utils.py RUN [RUN ...]      draws the curves of runs, and says what they look like
python utils.py CHECKPOINT         what is in it
python utils.py CHECKPOINT OTHER   where the two differ

1. what the program says     UserError, one_line, show
2. device and seeds          pick_device, autocast, to_device, set_seed, rng_state
3. how weights move          build_optimizer, lr_at, set_lr, distillation
4. checkpoints               snapshot and restore; save_checkpoint and load_checkpoint
5. several processes         init_distributed, sums and messages over ranks
6. extras                    the run's folder and tables, signals, the C library's memory
7. export                    a network as one file, which answers without this code
8. looking inside            time, gradients, what is not finite; curves; what differs

This file knows no network and no data set. "Needs" in a docstring lists what to copy along with the
object: names of this file and modules that it imports. A rank is one of several processes that
train together; `world size` counts them.
"""

import argparse
import csv
import ctypes
import gc
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import zipfile
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# ---------------------------------------------------- 1. what the program says


class UserError(ValueError):
    """What the user of the program has to put right: a flag, a file, a checkpoint. Its message is
    one line.

    Only this class is turned into a line without a traceback (see one_line). Whoever forks the
    program will make mistakes of their own, and `error: too many values to unpack` without a
    traceback would hide where.
    """


class NotFinite(UserError):
    """Loss or gradient is NaN or infinite: the run cannot go on from here. Needs: UserError."""


class LostWorker(UserError):
    """A process that loads data has died, or gives nothing any more. Needs: UserError."""


def why_worker_is_lost(error):
    """The first line of what torch says where a loader's worker was killed (mostly for want of
    memory), or where one has been waited for in vain (with a /dev/shm that is too small it waits
    for ever); None for any other error. It is a RuntimeError like many others. Needs: nothing.
    """
    reason = next(iter(str(error).splitlines()), "")
    if "DataLoader worker" in reason or "DataLoader timed out" in reason:
        return reason
    return None


@contextmanager
def one_line(*kinds, program="train.py"):
    """Ends the program with status 2 and one line on standard error for an error of these kinds.

    Every other error passes, with its traceback. Needs: contextmanager, printable, sys.
    """
    try:
        yield
    except kinds as error:
        line = printable(" ".join(str(error).split()))
        if len(line) > 600:  # a list of all layers that do not fit
            line = f"{line[:400]} ... {line[-150:]}"
        print(f"{program}: error: {line}", file=sys.stderr)
        sys.exit(2)


def printable(text):
    """The text with all that a terminal would obey, and not show, escaped: "\\x1b[31m" in place of
    what turns it red.

    Names of classes and keys come out of files, which may be a stranger's. Needs: nothing.
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def show(line, over=False):
    """Prints `line`. With `over`, on a terminal, the next line that `show` prints takes its place.

    A failed print is no failed training: `| head -1` has read enough, a terminal was closed, a disk
    is full behind `>`. Then False is returned, and the program goes on. Needs: on_terminal,
    printable, shutil, sys.
    """
    line = printable(line)
    end = "\n"
    if on_terminal():
        width = shutil.get_terminal_size().columns - 1
        if over:
            line = line[:width]  # a longer one would wrap, and stay
            end = ""
        line = "\r" + line.ljust(width)
    try:
        print(line, end=end)
        if hasattr(sys.stdout, "flush"):
            sys.stdout.flush()
    except (OSError, ValueError):
        return False


def on_terminal():
    """Whether somebody sits before a terminal. In a notebook, or without any standard output, the
    answer is no. Needs: sys.
    """
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # None, an object with write alone; a closed file
        return False


def show_at_last(line, log):
    """Shows a line that somebody has to read: on standard error, where `show` has failed.

    Ctrl-C ends `tee`, too. Needs: sys, suppress.
    """
    if log(line) is False:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)


# ---------------------------------------------------- 2. device and seeds


def pick_device(name="auto"):
    """The torch.device called `name`; "auto" is the first of cuda, mps, xpu and cpu that this
    machine has.

    A GPU comes with its number: "cuda" is cuda:0, so that all who ask for the device mean the same
    one. UserError if the machine does not have it. Needs: UserError, torch.
    """
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    there = [kind for kind, backend in backends.items() if backend.is_available()]
    there.append("cpu")
    try:
        device = torch.device(there[0] if name == "auto" else name)
        usable = device.type in there
        if usable and device.type != "cpu":
            usable = (device.index or 0) < torch.get_device_module(device).device_count()
    except RuntimeError:  # cpu:x, or a kind of device that torch has never heard of
        usable = False
    if not usable:
        raise UserError(f"--device {name}: not on this machine, which has {', '.join(there)}")
    if device.type in ("cuda", "xpu"):
        return torch.device(device.type, device.index or 0)
    return device


def pick_amp(name, device):
    """How to compute: "off", "fp16" or "bf16". It is `name`, or if that is None the default for
    this device.

    Matrix products in 16 bits are several times as fast as in 32, and half as large in memory.
    There are two formats:

        float32   8 bits of exponent, 23 of fraction   up to 3e38, 7 digits
        float16   5 bits of exponent, 10 of fraction   up to 65,504, below 3e-8 it is 0; 3 digits
        bfloat16  8 bits of exponent,  7 of fraction   up to 3e38 as float32; 2 digits

    In float16 large activations overflow, and the smallest gradients vanish. So its loss is
    multiplied by a large scale before the backward pass, and the gradients are divided by it
    afterwards. bfloat16 has the range of float32 and needs none of
    that. It is the default on NVIDIA's GPUs and on CPUs that have instructions for it; elsewhere
    the default is "off", float32. Most CPUs emulate it, which is slower than float32. Needs:
    multiplies_in_bf16, torch.
    """
    if name:
        return name
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    if device.type == "cpu" and multiplies_in_bf16():
        return "bf16"
    return "off"


def multiplies_in_bf16():
    """Whether this CPU has instructions for products of bf16 matrices: AMX tiles on x86, or ARM's
    on Linux. Elsewhere the answer is no, perhaps wrongly.

    It is looked up, not timed: a time would depend on who else uses the machine, and a run would
    not be the same twice. Needs: Path, torch.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_amx and has_amx():
        return True
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return False
    # "Features" is the word of ARM's kernel; x86 calls them flags.
    return any(line.startswith("Features") and "bf16" in line.split() for line in lines)


def pick_workers(workers, device):
    """How many processes load data: `workers`, or if that is None what helps on this device.

    On a CPU none: they would take the cores from the network. A GPU leaves the cores idle, and
    waits for whoever augments its images; there as many help as there are cores for this rank, up
    to 8. Needs: os.
    """
    if workers is not None:
        return workers
    if device.type == "cpu":
        return 0
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # what this process may use, not what the machine has
        cores = len(os.sched_getaffinity(0))
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def set_float32_precision(device, deterministic=False):
    """Lets a GPU round the factors of float32 products to 10 bits of fraction (TF32).

    Its tensor cores then multiply them several times as fast, and the sums stay float32. A network
    does not notice: stochastic gradients are far noisier. By default torch allows it for
    convolutions and not for matrix products; here it is the same for both. With `deterministic` it
    is off: whoever wants the same bits everywhere wants those of another GPU, too. Needs: torch.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if deterministic else "high")
        torch.backends.cudnn.allow_tf32 = not deterministic


def autocast(device, amp):
    """A context in which matrix products and convolutions run in 16 bits; with "off" it does
    nothing.

    Weights stay float32, so that a step of 1e-4 times a weight is not rounded away. On a GPU sums,
    layer norms and softmax are computed in float32, too, for there many small numbers add up; on a
    CPU they keep the dtype of their input. Needs: torch.
    """
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.amp.autocast(device.type, dtype=dtype, enabled=amp != "off")


def map_tensors(function, batch):
    """Nested tuples, lists and dicts with `function` of each tensor in its place. Everything else
    is returned unchanged.

    Needs: torch.
    """
    if isinstance(batch, dict):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    if isinstance(batch, list):
        return [map_tensors(function, part) for part in batch]
    if isinstance(batch, tuple):
        return tuple(map_tensors(function, part) for part in batch)
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return batch


def to_device(batch, device):
    """A tensor, or nested tuples, lists and dicts of tensors, on `device`.

    From pinned (page-locked) memory the copy runs beside the GPU's work (non_blocking); the next
    operation on the GPU waits for it. Other memory may be overwritten before a copy to an Apple GPU
    has read it, so there the program waits. Needs: map_tensors.
    """

    def move(tensor):
        return tensor.to(device, non_blocking=tensor.is_pinned())

    return map_tensors(move, batch)


def set_seed(seed, deterministic=False):
    """Seeds Python's generator and torch's on all devices.

    On a CPU the same seed and number of threads give the same run to the bit. A GPU needs
    `deterministic`, too. Its kernels are then reproducible and may be slower; an operation that has
    no such kernel raises a RuntimeError when it is called. Otherwise cuDNN may choose kernels by
    their speed. Call it before anything runs on a GPU. Needs: os, random, torch.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    # cuDNN times its convolution kernels once and keeps the fastest, which need not be the same in
    # the next run.
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS refuses to be deterministic without a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def rng_state(device):
    """States of Python's generator, of torch's and of the device's, as plain types and tensors.

    Needs: random, torch.
    """
    own = None
    if device.type != "cpu":
        own = torch.get_device_module(device).get_rng_state(device)
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": device.type,
        "own": own,
    }


def set_rng_state(state, device, log=print):
    """Puts what rng_state returned back into this process. The state of another kind of device is
    left out, with a line.

    Needs: random, torch.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["device"] != device.type:
        log(
            f"random state of {state['device']} in the checkpoint, {device.type} here: "
            "that of the device is skipped"
        )
    elif state["own"] is not None:
        torch.get_device_module(device).set_rng_state(state["own"], device)


# ---------------------------------------------------- 3. how weights move


def build_optimizer(model, args):
    """AdamW (Loshchilov and Hutter 2019) with two groups of parameters: one decays, the other does
    not.

    Weight decay pulls weights to 0, which keeps a network from relying on a few large ones. A bias
    or the gain of a norm has one dimension and no reason to be small, so these are left alone. Each
    group may have an `lr` of its own; the schedule scales all of them alike (see set_lr). args: lr,
    weight_decay. Needs: torch.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # beta2 = 0.95 averages squared gradients over some 20 steps. The default, 0.999, averages over
    # 1000, which is long for a run of a few thousand. Fused does the arithmetic of a parameter in
    # one pass: 4 times as fast on a CPU.
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def lr_at(step, total=math.inf, warmup=0.0, schedule="cosine", drops=0):
    """The factor, in (0, 1], by which the peak learning rate is multiplied in optimizer step `step`
    of `total`.

    Large steps at the start would throw freshly initialized weights far away, so the rate rises
    first (warm-up). Near the end small steps settle into the minimum, so it falls. With 30 steps, a
    tenth of them warm-up, and "cosine":

        1.00     ##
        0.75     #########
        0.50    ###############
        0.25   ####################
        0.05   #########################
             0 |        |         |         | 29

    total     steps of the whole run; infinite: no end is known, so there is no warm-up, and only
              "plateau" falls
    warmup    fraction of all steps in which it rises, in a straight line from 1/100, 0 to 1; it is
              rounded to whole steps, so that one step has the peak
    schedule  after the warm-up:
              cosine     falls along half a cosine to 1/100 (Loshchilov and Hutter 2017)
              step       falls to a tenth after a third of what is left, to a hundredth after two
              one-cycle  rises along half a cosine from 1/25, falls to 1/250,000: as torch's
                         OneCycleLR does by default, after Smith and Topin 2018
              plateau    falls to a tenth for each of `drops` (see drop_on_plateau), two at most
              constant   stays

    It depends on its arguments alone. There is no scheduler with a counter of its own, which a
    resume, a skipped step or one epoch more could put wrong. Past the end it stays at its last
    value.
    Needs: warmup_steps, math.
    """
    step = min(step, total - 1)
    lowest, last = 1 / 100, 1 / 100
    if schedule == "one-cycle":
        lowest, last = 1 / 25, 1 / 250_000
    rising = warmup_steps(total, warmup)
    if step < rising:
        part = step / rising
        if schedule == "one-cycle":
            part = (1 - math.cos(math.pi * part)) / 2
        return lowest + (1 - lowest) * part
    part = (step - rising) / max(1, total - 1 - rising)  # 0 at the peak, 1 in the last step
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return 0.1 ** min(2, int(3 * part))
    if schedule == "plateau":
        return 0.1 ** min(2, drops)
    return last + (1 - last) * (1 + math.cos(math.pi * part)) / 2


def warmup_steps(total, warmup):
    """How many of `total` steps the learning rate rises, for a fraction `warmup` of them.

    The peak needs a step of its own, also where all steps are warm-up. Needs: math.
    """
    if total == math.inf:
        return 0
    return min(round(warmup * total), total - 1)


def set_lr(optimizer, factor):
    """Sets the learning rate of each group to `factor` times its own peak, the rate that it was
    built with.

    So a group of 1e-4 beside one of 1e-2 keeps its ratio to it. Needs: nothing.
    """
    for group in optimizer.param_groups:
        # The first time it is noted; from then on it lies in the optimizer's state_dict.
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = factor * group["peak_lr"]


def drop_on_plateau(drops, stale, improved, patience=2):
    """Returns (drops, stale) after an epoch, for the schedule "plateau".

    drops  how often the rate has dropped: once more if more than `patience` epochs in a row have
           brought no improvement
    stale  epochs since the last improvement or drop
    Needs: nothing.
    """
    stale = 0 if improved else stale + 1
    if stale > patience:
        return drops + 1, 0
    return drops, stale


def distillation(logits, teacher_logits, temperature=4.0):
    """How far the answers of a network are from those of its teacher, summed over the samples
    (Hinton et al. 2015).

    A label says "this is a 4". A teacher says "a 4, perhaps a 9, certainly no 0": it also tells
    which wrong answers are nearly right. With a temperature T the logits are divided by T, which
    makes the small probabilities visible:

        logits [6, 3, 0]   softmax [0.95, 0.05, 0.002]   with T = 4 [0.59, 0.28, 0.13]

        T^2 KL(softmax(teacher_logits / T) || softmax(logits / T))

    The gradient of the divergence shrinks as 1 / T^2. The factor T^2 takes that back, so that the
    weight of this term beside the cross-entropy hardly depends on T. Both logits are float (B, K).
    Needs: F.
    """
    student = (logits / temperature).log_softmax(1)
    teacher = (teacher_logits / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


# ---------------------------------------------------- 4. checkpoints


def snapshot(model, optimizer, scaler=None, state=None, device=torch.device("cpu")):
    """A copy of all that a run is between two steps, as one dict on the CPU that `restore` puts
    back.

    Each part is there because a resumed run goes wrong without it:

        model      the weights
        optimizer  Adam's averages; without them the first steps after a resume are far too large
        scaler     the scale of fp16; without it steps overflow until it has been found again
        rng        the states of the generators, by rank; without them dropout drops other units
        state      your own dict: epoch, step, best result, averaged weights, ...

    state   plain types and tensors, alike on all ranks, but for state["this_rank"], which each rank
            has for itself
    scaler  torch.amp.GradScaler or None
    All ranks call it together. The keys of the model are those of the bare network (see plain_key).
    Needs: copied, gather_over_ranks, plain_weights, rng_state, torch.
    """
    state = dict(state or {})
    own = {"rng": rng_state(device), "this_rank": state.pop("this_rank", None)}
    ranks = gather_over_ranks(copied(own))
    return {
        **copied(state),
        "state_keys": list(state),
        "model": copied(plain_weights(model)),
        "optimizer": copied(optimizer.state_dict()),
        "optimizer_class": type(optimizer).__name__,
        "scaler": scaler.state_dict() if scaler else {},
        "rng": [each["rng"] for each in ranks],
        "this_rank": [each["this_rank"] for each in ranks],
    }


def restore(
    checkpoint, model, optimizer, scaler=None, state=None, device=torch.device("cpu"), log=print,
    source="the checkpoint",
):
    """Puts what `snapshot` returned back into model, optimizer, scaler, `state` and the generators,
    in place.

    The optimizer comes back as it was, hyperparameters included. With another number of ranks than
    before, the random states and state["this_rank"] belong to nobody: the generators stay as they
    are, this_rank becomes None, and a line says so. UserError if the checkpoint is of another
    network or another class of optimizer, or is not whole. Needs: UserError, check_optimizer_state,
    copied, load_weights, rank_and_world_size, set_rng_state, torch.
    """
    parts = {"model", "optimizer", "optimizer_class", "scaler", "rng", "this_rank", "state_keys"}
    missing = parts - checkpoint.keys()
    if missing:
        raise UserError(
            f"{source}: no {', '.join(sorted(missing))} in it; --init takes its weights alone"
        )
    written, here = checkpoint["optimizer_class"], type(optimizer).__name__
    if written != here:
        raise UserError(
            f"{source}: its optimizer is {written}, here it is {here}; "
            "--init takes its weights alone"
        )
    load_weights(model, checkpoint["model"], source)
    rank, world_size = rank_and_world_size()
    own = None
    try:
        optimizer.load_state_dict(copied(checkpoint["optimizer"]))
        check_optimizer_state(optimizer)
        # One of the two is empty if fp16 comes or goes.
        if scaler and scaler.is_enabled() and checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
        if len(checkpoint["rng"]) == world_size:
            own = copied(checkpoint["this_rank"][rank])
            set_rng_state(checkpoint["rng"][rank], device, log)
        else:
            log(
                f"{len(checkpoint['rng'])} processes in the checkpoint, {world_size} here: "
                "random states start from the seed"
            )
        restored = {key: copied(checkpoint[key]) for key in checkpoint["state_keys"]}
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        # What is read here is data, and whatever is wrong with them is the file's fault.
        raise UserError(f"{source}: its state does not fit: {type(e).__name__}: {e}") from None
    if state is not None:
        state.update(restored)
        state["this_rank"] = own


def check_optimizer_state(optimizer):
    """ValueError unless the averages that an optimizer holds are complete, have the shapes of their
    parameters, and are finite. A fused kernel takes that for granted, and reads whatever memory
    follows.

    Needs: torch.
    """
    names = {name for values in optimizer.state.values() for name in values}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            if values and values.keys() != names:
                raise ValueError(f"no {', '.join(names - values.keys())} for one of the parameters")
            for name, value in values.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.shape not in (parameter.shape, ()) or value.is_sparse:
                    shapes = f"{tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
                    raise ValueError(f"{name} of the optimizer has the shape {shapes}")
                if not value.isfinite().all():
                    raise ValueError(f"{name} of the optimizer is not finite")


def copied(value):
    """Nested dicts, lists and tuples with all tensors copied to the CPU. Other values are taken as
    they are.

    A state_dict holds the live tensors: without a copy a snapshot would change with the next step.
    Needs: torch.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict or hasattr(value, "_metadata"):  # the latter: what state_dict() returns
        return {key: copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(part) for part in value)
    return value


def plain_key(key):
    """The name of a weight in the bare network: without what DDP ("module.") and torch.compile
    ("_orig_mod.") add.
    """
    key = key.replace("_orig_mod.", "")
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key


def plain_weights(model):
    """The state_dict of `model` with the keys of the bare network, however it is wrapped. Needs:
    nothing.
    """
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}


def load_weights(model, weights, source="the checkpoint"):
    """Loads the state_dict `weights` into `model`, whichever of the two is wrapped by DDP or
    torch.compile.

    UserError with `source`, keys and shapes if they are of another network. Needs: UserError,
    plain_key.
    """
    weights = {plain_key(key): value for key, value in weights.items()}
    # The keys as the model has them, by their plain names.
    keys = {plain_key(key): key for key in model.state_dict()}
    try:
        model.load_state_dict({keys.get(key, key): value for key, value in weights.items()})
    except RuntimeError as error:
        raise UserError(
            f"{source}: see --model, --width, --norm: {' '.join(str(error).split())}"
        ) from None


def load_matching(model, weights, log=print, force=False):
    """Loads what has a namesake of the same shape in `model`, and logs in one line what it took and
    what it left.

    Returns (keys taken, keys left with the reason). UserError if that is less than half of the
    model's parameters, unless `force`: a wrong --width fits in a few biases, and the run would
    begin as good as from scratch. Needs: UserError, plain_key.
    """
    weights = {plain_key(key): value for key, value in weights.items()}
    own = {plain_key(key): value for key, value in model.state_dict().items()}
    keys = {plain_key(key): key for key in model.state_dict()}
    taken = [key for key in weights if key in own and own[key].shape == weights[key].shape]
    left = []
    for key, value in weights.items():
        if key not in taken:
            here = tuple(own[key].shape) if key in own else "none"
            left.append(f"{key} (shape {tuple(value.shape)}, here {here})")
    left += [f"{key} (only here, as initialized)" for key in own if key not in weights]
    fits = sum(own[key].numel() for key in taken)
    total = sum(value.numel() for value in own.values())
    if 2 * fits < total and not force:
        raise UserError(
            f"only {fits:,} of {total:,} parameters have weights that fit (see --model, --width); "
            f"--force goes on with the others as initialized: {', '.join(left)}"
        )
    model.load_state_dict({keys[key]: weights[key] for key in taken}, strict=False)
    log(f"took {', '.join(taken)}; left {', '.join(left) or 'nothing'}")
    return taken, left


PLAIN_TYPES = (dict, list, tuple, set, str, bytes, int, float, bool, type(None))


def check_plain(value, name="checkpoint"):
    """TypeError, with the key and the type, for what torch.load(weights_only=True) would refuse to
    read.

    A NumPy number, a Path or a defaultdict can be written and then not be read, which somebody
    finds out after a night of training. Types are compared exactly: numpy.float64 is a subclass of
    float. Needs: PLAIN_TYPES, torch.
    """
    if isinstance(value, torch.Tensor):
        return
    if type(value) not in PLAIN_TYPES:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(
            f"{name} is a {kind}, which a checkpoint cannot hold: "
            "use int(), float(), str() or dict()"
        )
    if type(value) is dict:
        for key, part in value.items():
            check_plain(key, f"a key of {name}")
            check_plain(part, f"{name}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, part in enumerate(value):
            check_plain(part, f"{name}[{index}]")


def write_atomically(path, write):
    """Calls write(file) on a new file beside `path`, flushes that to the disk, and gives it the
    name `path`.

    Whoever reads `path` sees the old content or the new one, never a half, even after a crash or
    with a full disk:

        open .last.pt.<random>.tmp   write   fsync   rename to last.pt   fsync of the folder
                                             |       |                   '- the new name, too
                                             |       '- atomic within one file system
                                             '- else a power cut can leave an empty file

    Others may be able to write in the folder, and a link under the scratch file's name would lead
    the content elsewhere. So the name is random, and mode "x" opens only what was not there: a link
    is not followed. A run that is killed in the middle leaves its scratch file; the next write of
    the same name removes it, so that at most one is left.

    UserError with the path if the disk is full or the folder cannot be written to; nothing is left
    then. Needs: UserError, flush_folder, remove_scratch, os, Path, suppress.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        remove_scratch(path)
        with open(scratch, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        flush_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):
            scratch.unlink()  # still there if something above has failed


def remove_scratch(path):
    """Removes what killed runs have left of the file `path`. Needs: suppress."""
    with suppress(OSError):  # a folder that we may not read, or a file of somebody else
        for left in path.parent.iterdir():
            ours = left.name.startswith(f".{path.name}.") and left.name.endswith(".tmp")
            if ours and not left.is_dir():
                left.unlink()


def flush_folder(folder):
    """Writes the names in a folder to the disk, where the system can do that. Needs: os, suppress.

    fsync of a file flushes its content; its name is content of the folder. It takes 2 ms.
    """
    with suppress(OSError):  # Windows, or a folder that we may not read
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_checkpoint(path, checkpoint):
    """Writes a dict of plain types and tensors to `path`, with the versions of torch and
    torchvision.

    Needs: check_plain, copied, versions, write_atomically, io, torch.
    """
    # Copied to the CPU, so that a machine without this GPU can read it.
    checkpoint = copied({**checkpoint, "versions": versions()})
    check_plain(checkpoint)
    # By way of memory: on a full disk torch.save would raise a RuntimeError about its archive.
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write_atomically(path, lambda file: file.write(content.getbuffer()))


def load_checkpoint(path, bare=False):
    """The dict that save_checkpoint wrote, with all tensors on the CPU. UserError, with the reason,
    for anything else.

    weights_only: a pickle can run any program when it is opened; this way only tensors and plain
    types come in. The checksums are compared first, which torch.load does not do: a flipped bit
    would be a wrong weight. A file that would unpack to more than its own size is refused, for a
    checkpoint is stored, not compressed: a few kilobytes could become all of the memory.

    bare  a state_dict alone will do, and is returned as {"model": state_dict}
    Needs: UserError, check_weights, os, re, stat, zipfile, torch.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # to open a named pipe is to wait
            raise ValueError("no regular file")
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
            if size > status.st_size:
                raise ValueError(f"compressed, to unpack it would take {size:,} bytes")
            broken = archive.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if all(isinstance(value, torch.Tensor) for value in checkpoint.values()):
            if not bare:
                raise ValueError("a bare state_dict, which --init takes")
            checkpoint = {"model": dict(checkpoint)}
        check_weights(checkpoint["model"])
        if not isinstance(checkpoint.get("args", {}), dict):
            raise ValueError("its args are no dict")
    except OSError as error:  # it is absent, a folder, or not permitted, and says so itself
        raise UserError(str(error)) from None
    # A damaged file raises one of a dozen types, depending on where the damage is.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        refused = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        if refused:
            reason = (
                f"it holds a {refused[1]}, which torch.load does not read; if you trust the file, "
                "torch.serialization.add_safe_globals allows it"
            )
        raise UserError(f"{path}: not a checkpoint of this program, or damaged: {reason}") from None
    return checkpoint


def check_weights(weights):
    """ValueError that names the key unless all of a state_dict are finite tensors, or dicts, which
    are weights of few bits with a scale above 0. Needs: nothing.
    """
    for key, value in weights.items():
        if isinstance(value, dict):
            if not (value["scale"] > 0).all():
                raise ValueError(f"the scale of {key} is not above 0")
            value = value["scale"]
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{key} is not finite")


def versions():
    """Versions of torch and torchvision as plain str; None for a package whose metadata are
    missing.

    torch.__version__ is of a class that weights_only=True refuses; importing torchvision would take
    a second. Needs: metadata, torch.
    """
    try:
        torchvision = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        torchvision = None
    return {"torch": str(torch.__version__), "torchvision": torchvision}


# ---------------------------------------------------- 5. several processes


def init_distributed(device, log=print):
    """Joins the process group that torchrun describes in the environment. Returns (rank, world
    size, device).

    Each process has a copy of the network and its part of every batch. During the backward pass DDP
    averages their gradients (an all-reduce), so that all take the same step. Each has a GPU of its
    own, by its number on the machine (LOCAL_RANK). Whoever calls this calls leave_distributed at
    the end. UserError if there are more processes than GPUs. Needs: UserError, importlib, os, dist,
    torch.
    """
    if "RANK" not in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the default device from here on
        return 0, 1, device
    if device.type in ("mps", "xpu"):
        log(f"several processes on {device.type}: gloo takes no tensors from there, so on the CPU")
        device = torch.device("cpu")
    backend, options = "gloo", {}
    if device.type == "cuda":
        own, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if own >= count:
            raise UserError(f"--nproc-per-node: more than the {count} GPUs of this machine")
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
        # Two backends: NCCL for tensors on the GPU, and gloo for the small agreements between CPUs,
        # which stall no GPU.
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": device}
    # Before there is a group: leave_distributed says why.
    importlib.import_module("torch.distributed.nn")
    try:
        dist.init_process_group(backend, **options)
    except (dist.DistError, ValueError) as error:
        # A port that is taken, a host that does not answer; or RANK is set, and not the rest.
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = f"{error} (torchrun sets RANK and what belongs to it)"
        raise UserError(f"the processes cannot meet at {where}: {reason}") from None
    return dist.get_rank(), dist.get_world_size(), device


def leave_distributed():
    """Ends the process group and waits for its threads. It is the last call of a process, also
    after an error.

    A thread of gloo lets go of the tensors of an all-reduce a moment after everybody has the
    result. If the interpreter ends in that moment, C++ aborts a process whose work was done (status
    -6). dist.destroy_process_group() waits for these threads, but only if nobody else holds the
    group. Three may hold it:

    - torch.distributed.nn stores the group that there is when it is imported, in default arguments.
      The first optimizer imports it; so init_distributed does that before there is a group.
    - DDP, if it is part of a circle of references, or held by an error on its way out: see
      free_what_errors_hold.

    Needs: free_what_errors_hold, dist.
    """
    free_what_errors_hold()
    if dist.is_initialized():
        dist.destroy_process_group()


def free_what_errors_hold():
    """Clears the local variables of all functions that an error on its way out has come through.

    An error, sys.exit among them, keeps them for a debugger. Here they are loaders, whose workers
    would be killed at the end of the program in place of being told to end. Needs: gc, sys,
    traceback.
    """
    error = sys.exc_info()[1]
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__  # the one that was being handled when this one was raised
    gc.collect()  # and circles of references


def rank_and_world_size():
    """Which process this is, and how many there are: (0, 1) where there is only one.

    Needs: dist.
    """
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(tensor):
    """Sum of `tensor` over all processes, in place, and returned; with one process as it is.

    Sums, never averages: ranks hold different numbers of samples, and the mean of their means would
    weigh them alike. Needs: dist.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def largest_over_ranks(numbers):
    """Starts an all-reduce of the largest in all ranks' lists of ints, 0 for an empty list. Returns
    a function that waits for it. So ranks agree on a signal that one of them has caught, and go on
    with their work meanwhile. With one process that function looks when it is called.

    Needs: dist, torch.
    """
    if not dist.is_initialized():
        return lambda: max(numbers, default=0)
    largest = torch.tensor(max(numbers, default=0))
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)

    def answer():
        work.wait()
        return largest.item()

    return answer


def gather_over_ranks(value):
    """List of each rank's `value` (anything that pickles), by rank, on all ranks. Needs: dist."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def broadcast_from_rank_0(value):
    """Rank 0's `value` (anything that pickles) on all ranks. Needs: dist."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def once_per_machine(function):
    """Runs `function` in one process of each machine. Returns on all ranks the first result that is
    not None, or None.

    Needs: gather_over_ranks, os.
    """
    result = None
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        result = function()
    results = [each for each in gather_over_ranks(result) if each is not None]
    return results[0] if results else None


# ---------------------------------------------------- 6. extras: the run's folder, signals, memory


def number(kind, low, high):
    """A type for argparse: an int or a float (`kind`) from `low` to `high`. NaN is outside: all its
    comparisons are false.

    Needs: argparse.
    """

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


def file_path(text):
    """A type for argparse: a path, in which ~ is the home folder. An empty one is an error:
    `--resume "$CHECKPOINT"` with a variable that is not set would be a new training.

    Needs: argparse, os.
    """
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return os.path.expanduser(text)


@contextmanager
def claimed(folder):
    """Keeps a folder for this run, as long as it lasts. UserError if another one has it: two runs
    that write the same files would both end well, and leave a mixture.

    It is a lock on the folder itself, which the system takes back when a process ends, however that
    happens. Where there are no such locks nothing is claimed. Needs: UserError, contextmanager, os,
    suppress.
    """
    handle = None
    with suppress(ImportError, OSError):  # Windows; a file system without locks
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(f"{folder}: another run is writing into it") from None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def new_folder(out, name):
    """Makes the folder of a run: `out`, or if that is None runs/<name>-<n> with the next free n.

    UserError if it holds a run already or cannot be made. Needs: UserError, itertools, Path.
    """
    folder = Path(out or "runs")
    try:
        if out and any((folder / file).exists() for file in ("run.json", "last.pt", "best.pt")):
            raise UserError(f"--out {folder}: holds a run already; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if out:
            return folder
        for n in itertools.count(1):
            numbered = folder / f"{name}-{n}"
            if not numbered.exists():
                try:
                    # Not exist_ok: of two programs that start together one gets n, the other n + 1.
                    numbered.mkdir()
                except FileExistsError:
                    continue
                return numbered
    except OSError as error:
        raise UserError(f"cannot make a folder for the run: {error}") from None


def write_csv(path, rows):
    """Writes a list of dicts as a table. Its head has all keys of all rows; rows that lack one
    leave it empty.

    Needs: write_atomically, csv, io.
    """
    head = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, head)
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_json(path, value):
    """Writes dicts, lists, strings and numbers as indented JSON. Needs: write_atomically, json."""
    text = json.dumps(value, indent=2)
    write_atomically(path, lambda file: file.write(text.encode()))


def confusion_table(confusion, classes):
    """Text of an int64 (K, K) matrix: row = true class, column = answer. A dot is 0; each row ends
    with the fraction of it that is right (recall).

    Needs: nothing.
    """
    longest = max(len(name) for name in classes)
    width = 1 + max(6, longest, len(str(confusion.max().item())))
    lines = ["".join(f"{name:>{width}}" for name in ["", *classes, "right"])]
    for index, (name, row) in enumerate(zip(classes, confusion.tolist())):
        right = "-"
        if sum(row):
            right = f"{100 * row[index] / sum(row):.1f}%"
        counts = [count or "." for count in row]
        lines.append("".join(f"{cell:>{width}}" for cell in [name, *counts, right]))
    return "\n".join(lines)


@contextmanager
def caught_signals(caught, grace=5.0):
    """Requests to stop only append their number to the list `caught`, and the program goes on:

        SIGINT    Ctrl-C
        SIGTERM   a scheduler ends the job, or the machine is shut down
        SIGHUP    the terminal was closed; not if that was ignored at the start, as nohup does
        SIGUSR1   how many schedulers announce that a job will soon be ended

    A scheduler may signal every process of a job, and torchrun passes on what it gets: the same
    request comes twice. So a second signal within `grace` seconds of the first is not counted. A
    later one ends the program at once. Python lets only the main thread ask for signals; in another
    one nothing is caught. Needs: contextmanager, signal, threading, time.
    """
    numbers = []
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)  # Windows has the first two
        if number and not (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
            numbers.append(number)
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    times = []

    def note(number, frame):
        times.append(time.monotonic())
        if len(times) == 1:
            caught.append(number)
        elif times[-1] - times[0] > grace:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_freed_memory():
    """Makes the C library (glibc) keep the memory that tensors free, for the next ones: a CPU step
    is 1.2 to 1.6 times as fast.

    Otherwise freed megabytes go back to the system, and the activations of each step come as new
    pages that the kernel has to fill with zeros: 9,000 page faults a step. The price is a process
    that stays as big as it ever was. Needs: ctypes, sys.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
    # Larger blocks are mappings of their own, which are given back when they are freed.
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # all that old versions take
    libc.mallopt(trim_threshold, 2**31 - 1)  # so much may lie free at the end of the heap


# ---------------------------------------------------- 7. export: a network for other programs
#
# A checkpoint holds weights. Whoever opens it needs the code of the network, and has to know how a
# picture was prepared, and what class 3 is called. An exported file holds the computation itself:
#
#     pictures uint8 (B, C, H, W) -> float -> / 255 -> normalize -> network -> logits (B, K)
#
# and the names of the classes. It is recorded from a network in evaluation mode, for what is
# recorded is done for ever: from one in training mode dropout would go on to drop units. The
# functions as_... return (the bytes of a file, a function that answers as this file will), so that
# an answer is compared before there is a file.


class WithPreparation(torch.nn.Module):
    """A network together with what is done to pictures before it: pictures in, logits out.

    A network has learnt from normalized pictures. Another program would have to normalize them in
    the same way; if it forgets to, there is no error, only worse answers:

        a white pixel     in training    (255 / 255 - 0.1307) / 0.3081 = 2.82
                          forgotten      255, or 1

    So the preparation becomes a part of the network. It takes bytes, as they come out of a file: of
    a float nobody could tell whether 1 is white, or nearly black.

    network   any module
    prepare   a function: pictures float (B, C, H, W) in 0..1 -> what the network takes
    images uint8 (B, C, H, W) -> logits (B, K). Needs: torch.
    """

    def __init__(self, network, prepare):
        super().__init__()
        self.network = network
        self.prepare = prepare

    def forward(self, images):
        return self.network(self.prepare(images.float() / 255))


def record_graph(model, shape):
    """The torch.export.ExportedProgram of a model that takes images uint8 (B, C, H, W), for any B.

    torch.export calls the model once with a tensor that has a shape and no values, and writes down
    each operation on it:

        images  uint8 (B, 1, 28, 28)             sub, div          by mean and standard deviation
        to      float (B, 1, 28, 28)             conv2d, ...       with the weights
        div     by 255                           linear            (B, 10): the answer

    Python itself is not recorded. An `if` that asks for a shape is answered once; one that asks for
    a value is an error, for there is none. Sizes are numbers: a graph recorded with two pictures
    would take two pictures for ever. So we name the first dimension as one that varies. Even so the
    example must not be a single picture, because a size of 1 is special (it broadcasts): torch
    would settle it as the constant 1, and complain that it was to vary.

    shape  (C, H, W). The model is in evaluation mode, and the graph cannot leave it. It computes
    on the CPU. Needs: torch.
    """
    example = torch.zeros(2, *shape, dtype=torch.uint8)
    batch = torch.export.Dim("batch")
    return torch.export.export(model, (example,), dynamic_shapes=({0: batch},), strict=False)


def as_export(model, shape, classes):
    """A .pt2 file, which torch.export.load reads; the class names are beside the graph, as JSON.

    Another version of torch need not be able to read it. What lasts are the weights of the
    checkpoint, so keep that. Needs: record_graph, io, json, torch.
    """
    names = {"classes.json": json.dumps(classes)}
    content = io.BytesIO()
    torch.export.save(record_graph(model, shape), content, extra_files=names)
    content.seek(0)
    return content.getvalue(), torch.export.load(content).module()


def as_onnx(model, shape, classes):
    """An .onnx file: the same graph in a format that many programs run, without PyTorch.

    The class names are in its metadata, as JSON. Here its answers are computed by the slow and
    plain evaluator that comes with onnx; a user has onnxruntime or a program of another language.
    UserError if the packages are not there, as they are needed for nothing else. Needs: UserError,
    record_graph, json, torch.
    """
    try:
        import onnx.reference
        import onnxscript  # noqa: F401  torch.onnx.export needs it
    except ImportError as error:
        raise UserError(
            "--format onnx: needs the packages onnx and onnxscript "
            f"(pip install onnx onnxscript): {error}"
        ) from None
    program = torch.onnx.export(
        record_graph(model, shape),
        input_names=["images"],
        output_names=["logits"],
        dynamo=True,
        verbose=False,
    )
    program.model.metadata_props["classes"] = json.dumps(classes)
    evaluator = onnx.reference.ReferenceEvaluator(program.model_proto)

    def answer(images):
        (logits,) = evaluator.run(None, {"images": images.numpy()})
        return torch.from_numpy(logits)

    return program.model_proto.SerializeToString(), answer


class CheckedPictures(torch.nn.Module):
    """What as_torchscript wraps a recorded network in: the check that recording has lost.

    Floats of 0..1 would pass the recorded operations without an error, and be nearly black. This
    class is compiled from its source (torch.jit.script), `if` and `raise` included. Needs: torch.
    """

    def __init__(self, recorded, shape, classes):
        super().__init__()
        self.recorded = recorded
        self.shape = shape
        self.classes = classes

    def forward(self, images):
        if images.dtype != torch.uint8 or list(images.shape[1:]) != self.shape:
            raise ValueError("pictures uint8 (B, C, H, W) expected, of the size of the training's")
        return self.recorded(images)


def as_torchscript(model, shape, classes):
    """A TorchScript file, which torch.jit.load and C++ read; its attribute `classes` has the names.

    torch.jit.trace records, too, but from a real example, and asks no questions: an `if` on a value
    takes the example's way for ever, and a size that Python has calculated with is a constant.
    Nothing says so but a warning, and it warns of harmless checks as well. So only a comparison
    with other pictures and other batch sizes shows whether the record is right. PyTorch retires
    TorchScript. Needs: CheckedPictures, io, warnings, torch.
    """
    example = torch.zeros(2, *shape, dtype=torch.uint8)
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = torch.jit.trace(model, example)
        checked = CheckedPictures(recorded, list(shape), list(classes))
        torch.jit.save(torch.jit.script(checked), content)
        content.seek(0)
        return content.getvalue(), torch.jit.load(content)


# By the name that --format takes: the end of the file's name, and the function that makes it.
EXPORTS = {
    "export": (".pt2", as_export),
    "onnx": (".onnx", as_onnx),
    "torchscript": (".torchscript.pt", as_torchscript),
}


@torch.no_grad()
def largest_difference(answer, reference, images):
    """How far two functions of pictures are apart, over batches of 1, 2 and 5 of these images.

    Returns (the largest |answer - reference|, the largest |reference|). Needs: torch.
    """
    differences = []
    logits = []
    for batch in (images[:1], images[:2], *images.split(5)):
        expected = reference(batch)
        differences.append((answer(batch) - expected).abs().max())
        logits.append(expected.abs().max())
    return torch.stack(differences).max().item(), torch.stack(logits).max().item()


def check_same_answers(answer, reference, images):
    """The largest difference of a logit, if it is one of rounding: some 1e-6 of the largest logit.

    UserError from 1e-4 of it on, and for NaN. Needs: UserError, largest_difference.
    """
    difference, largest = largest_difference(answer, reference, images)
    bound = 1e-4 * max(1.0, largest)
    if not difference <= bound:  # so that NaN is an error, too
        raise UserError(
            f"what was exported differs from the checkpoint's network by {difference:.1e}, and "
            f"rounding explains {bound:.1e} at most; nothing is written"
        )
    return difference


# ---------------------------------------------------- 8. looking inside: what to do when it is slow
#                                                         or does not learn
#
# All of this watches from outside, by hooks: a network calls its forward hooks before and after
# forward, an optimizer its step hooks before and after step. So the loop has no line for it, and
# what is not asked for costs nothing.


@contextmanager
def removed_at_end(handles):
    """Takes hooks away again, whatever happens while they are there. Needs: contextmanager."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def profiled_steps(path, total, device, log, first=3, count=5):
    """Records what a few steps of a training do, operation by operation; yields a function that is
    to be called after each step.

    The first steps are left out, for they are not like the others: memory is allocated for the
    first time, kernels are chosen, code is compiled. Then `count` steps are recorded, and the ten
    operations that take the longest are logged:

        operation                                calls   seconds    share
        aten::convolution_backward                  10     0.038    29.4%

    The time is that of the operation itself, without the operations that it calls. All of it, on a
    time line, is in the file `path`: chrome://tracing or ui.perfetto.dev shows it.

    total   steps of the run: if they are few, recording begins with an earlier one
    device  on a GPU its own time is what counts
    Needs: contextmanager, torch.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    first = max(0, min(first, total - count))
    steps = 0

    def stop():
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        kind = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        events = profiler.key_averages()
        whole = sum(getattr(event, kind) for event in events)  # microseconds
        log(f"{'operation':40} {'calls':>7} {'seconds':>9} {'share':>8}")
        for event in sorted(events, key=lambda event: -getattr(event, kind))[:10]:
            own = getattr(event, kind)
            log(f"{event.key[:40]:40} {event.count:7} {own / 1e6:9.3f} {own / max(1, whole):8.1%}")
        log(f"profile of steps {first + 1} to {steps}, for chrome://tracing: {path}")

    def after_step():
        nonlocal steps
        steps += 1
        if steps == first:
            profiler.start()
        elif steps == first + count:
            stop()

    if first == 0:
        profiler.start()
    try:
        yield after_step
    finally:
        if first <= steps < first + count:
            stop()  # the run has ended before the recording was complete


@contextmanager
def time_phases(model, optimizer, device):
    """Measures how the time of a training is divided. Yields a dict of seconds that grows with each
    step.

        data        until the network is called: loading, augmentation, copies to the GPU; and what
                    the program does between two steps, such as saving
        forward     inside of the network
        backward    the loss and its backward pass, all-reduce, clipping
        optimizer   inside of optimizer.step

    A step is a circle of these four, so it is enough to look at the clock where one of them ends.
    A GPU works behind the program, and a clock would tell only how long it took to ask for work. So
    each look waits for the GPU, and training is slower while this is on.

    Needs: contextmanager, removed_at_end, time, torch.
    """
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    before = {"time": time.perf_counter(), "phase": "optimizer"}

    def ends(phase, counts=True):
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        now = time.perf_counter()
        if counts:
            seconds[phase] += now - before["time"]
        before.update(time=now, phase=phase)

    def network_is_called(module, inputs):
        # Within a window of accumulation a backward pass comes before it, and else a step.
        waited_for = "data" if before["phase"] == "optimizer" else "backward"
        ends(waited_for, counts=module.training)

    def network_has_answered(module, inputs, outputs):
        if module.training:
            ends("forward")
        else:
            ends("optimizer", counts=False)  # the time of an evaluation is left out

    handles = [
        model.register_forward_pre_hook(network_is_called),
        model.register_forward_hook(network_has_answered),
        optimizer.register_step_pre_hook(lambda *args: ends("backward")),
        optimizer.register_step_post_hook(lambda *args: ends("optimizer")),
    ]
    with removed_at_end(handles):
        yield seconds


def look_at_first(seconds):
    """In words: the shares of what time_phases has measured, and which of them is worth a look.

    Data are to be loaded while the network computes, and an optimizer touches each weight once: as
    soon as one of the two takes a fifth of the time, it is the first thing to look at. Else it is
    the network. Needs: nothing.
    """
    whole = max(sum(seconds.values()), 1e-9)
    shares = {phase: value / whole for phase, value in seconds.items()}
    remedies = {
        "data": "more --workers, a cheaper transform, data in memory",
        "optimizer": "larger batches or --accum, a fused optimizer, less saving",
        "forward": "--amp, --compile, --channels-last, larger batches, a smaller --width",
        "backward": "--amp, --compile, --channels-last, larger batches, no --grad-checkpoint",
    }
    first = max(("forward", "backward"), key=shares.get)
    for phase in ("optimizer", "data"):
        if shares[phase] > 0.2:
            first = phase
    words = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items())
    return f"time: {words}; look first at {first}: {remedies[first]}"


@contextmanager
def watched_gradients(model, optimizer, path, every, state, log):
    """Every `every` steps writes for each parameter how large it, its gradient and its last update
    are, to the table `path`, and names those in which something is wrong.

    A useful number is the size of an update as a part of the weights that it moves. About 1e-3 is
    usual: a thousand steps then can change a layer altogether.

        layer          weight  gradient   update   ratio
        conv1.weight     3.31     0.412  0.00498  1.5e-3   as it should be
        fc1.weight       5.20     0.000  0.00052  1.0e-4   no gradient: weight decay alone moves it
        fc2.weight       1.80     93.10  0.36000  2.0e-1   it will not settle: a smaller --lr

    All are Euclidean norms. The gradient is what the optimizer gets: of fp16 without the scale,
    and clipped. A parameter that begins at 0 has no ratio until it has moved.

    state  a dict whose "step" counts the steps of the run. Rows of the table from a later step are
           removed at the beginning: a run that goes on from there writes them once more
    Needs: cause_of, contextmanager, csv, removed_at_end, Path, torch.
    """
    head = ["step", "layer", "weight", "gradient", "update", "ratio"]
    rows = []
    if Path(path).exists():
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= state["step"]]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, head)
        table.writeheader()
        table.writerows(rows)
    named = set()
    before = {}

    def step_begins(*args):
        before.clear()
        if (state["step"] + 1) % every == 0:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    before[name] = parameter.detach().clone()

    def step_ends(*args):
        if not before:
            return
        rows = []
        for name, old in before.items():
            parameter = model.get_parameter(name).detach()
            gradient = model.get_parameter(name).grad
            norms = [old.norm(), (parameter - old).norm()]
            norms.append(gradient.norm() if gradient is not None else norms[0] * 0)
            weight, update, gradient = torch.stack(norms).tolist()
            ratio = update / weight if weight else ""
            rows.append(dict(zip(head, [state["step"] + 1, name, weight, gradient, update, ratio])))
            cause = cause_of(gradient, update, ratio)
            if cause and name not in named:
                named.add(name)
                log(f"step {state['step'] + 1}: {name}: {cause}")
        with open(path, "a", newline="") as file:
            csv.DictWriter(file, head).writerows(rows)

    handles = [
        optimizer.register_step_pre_hook(step_begins),
        optimizer.register_step_post_hook(step_ends),
    ]
    with removed_at_end(handles):
        yield


def cause_of(gradient, update, ratio):
    """What is probably wrong with a parameter of these norms (see watched_gradients), or None.

    Needs: math.
    """
    if not math.isfinite(gradient + update):
        return "its gradient is not finite: look at the data, lower --lr, or take --amp off"
    if gradient == 0:
        return "its gradient is 0: cut off by detach or no_grad, or behind a ReLU that is always 0"
    if update == 0:
        return "it does not move: a learning rate of 0, or an optimizer that has never heard of it"
    if ratio != "" and ratio > 0.1:
        return f"an update moves it by {ratio:.0%} of itself: lower --lr"
    if ratio != "" and ratio < 1e-6:
        return f"an update moves it by {ratio:.0e} of itself: raise --lr"
    return None


@contextmanager
def first_not_finite(model, log):
    """While it lasts, the first layer whose output is not finite is named, once, and from what:

        its inputs are not finite either     they came into the network: the data
        its weights are not                  the step before has spoilt them: its gradient
        neither                              the layer itself has overflowed

    Layers are looked at in the order in which forward runs them, so the first one named is where it
    began: all that follow it only pass it on. Yields the list of what was found. Each layer waits
    for the device; it is for a step that is run once more. Needs: contextmanager, partial,
    removed_at_end, tensors_of, torch.
    """
    found = []

    def look(name, module, inputs, outputs):
        if found or all(tensor.isfinite().all() for tensor in tensors_of(outputs)):
            return
        reason = "its inputs and weights are finite, so it has overflowed"
        if not all(parameter.isfinite().all() for parameter in module.parameters()):
            reason = "its weights are not finite since the step before"
        if not all(tensor.isfinite().all() for tensor in tensors_of(inputs)):
            reason = "what comes in is not finite already"
        found.append(name)
        log(f"the first layer with an output that is not finite is {name}: {reason}")

    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):  # a container only passes on what its layers do
            hook = partial(look, f"{name or 'the network'} ({type(module).__name__})")
            handles.append(module.register_forward_hook(hook))
    with removed_at_end(handles):
        yield found


def tensors_of(value):
    """The tensors of floating point in nested tuples, lists and dicts. Needs: map_tensors."""
    found = []
    map_tensors(found.append, value)
    return [tensor for tensor in found if tensor.is_floating_point()]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_curves(curves, width=64, height=14, log_x=False):
    """Draws curves in characters, each with a letter of its own, on common axes. Returns lines.

        1.00 | a
             |  aa
        0.50 |b   aaaa
             | bbbbb  aaa
        0.00 +------------
              1          20

    curves  {name: list of (x, y)}; what is not finite is left out
    log_x   x on a logarithmic axis, for learning rates
    Needs: LETTERS, math.
    """
    points = {}
    for name, curve in curves.items():
        points[name] = [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]
    all_points = [point for curve in points.values() for point in curve]
    if not all_points:
        return ["nothing to draw"]
    place = math.log if log_x else float
    xs = [place(x) for x, _ in all_points]
    ys = [y for _, y in all_points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    cells = [[" "] * width for _ in range(height)]
    for letter, curve in zip(LETTERS, points.values()):
        for x, y in curve:
            column = round((place(x) - low_x) / ((high_x - low_x) or 1) * (width - 1))
            row = round((high_y - y) / ((high_y - low_y) or 1) * (height - 1))
            cells[row][column] = letter
    lines = [f"{letter} = {name}" for letter, name in zip(LETTERS, points)]
    for row, line in enumerate(cells):
        label = ""
        if row in (0, height // 2, height - 1):
            label = f"{high_y - (high_y - low_y) * row / (height - 1):.4g}"
        lines.append(f"{label:>8} |{''.join(line).rstrip()}")
    first = f"{min(x for x, _ in all_points):.4g}"
    last = f"{max(x for x, _ in all_points):.4g}"
    lines.append(" " * 9 + "+" + "-" * width)
    lines.append(" " * 10 + first + last.rjust(width - len(first)))
    return lines


def show_runs(folders, log=print):
    """Draws loss and accuracy of runs over their epochs, and says what the curves look like.

    folders  of runs, with a metrics.csv and a run.json each
    UserError if one has none. Needs: describe_curve, draw_curves; UserError, csv, json, Path.
    """
    runs = {}
    for folder in folders:
        try:
            with open(Path(folder) / "metrics.csv", newline="") as file:
                runs[str(folder)] = list(csv.DictReader(file))
            about = json.loads((Path(folder) / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: not the folder of a run ({error})") from None
        log(describe_curve(str(folder), runs[str(folder)], about["dataset"]["val"]))
    names = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    for name in [name for name in names if name.startswith("val_")]:
        curves = {}
        for folder, rows in runs.items():
            for part in ("train_", "val_"):
                key = name.replace("val_", part)
                curve = [(int(row["epoch"]), float(row[key])) for row in rows if row.get(key)]
                curves[f"{key} of {folder}"] = curve
        log("\n".join(["", *draw_curves(curves)]))


def describe_curve(name, rows, val_size):
    """In words what somebody sees in the metrics of a run: is it still learning, does it overfit,
    and how much of the up and down of its accuracy is chance.

    Of n samples of which a part p is right, an accuracy is uncertain by sqrt(p (1 - p) / n): with
    5,000 samples and 99 %, by 0.14 %. Needs: math.
    """
    words = [f"{name}: {len(rows)} epochs"]
    loss = [float(row["val_loss"]) for row in rows if row.get("val_loss")]
    accuracy = [float(row["val_accuracy"]) for row in rows if row.get("val_accuracy")]
    if loss:
        best = loss.index(min(loss))
        words.append(f"smallest validation loss {loss[best]:.4f} in epoch {rows[best]['epoch']}")
        falls = float(rows[-1]["train_loss"]) < float(rows[best]["train_loss"])
        worse = not accuracy or accuracy[-1] <= accuracy[best]
        if falls and worse and loss[-1] > 1.2 * loss[best]:
            words.append("since then it rises while the training loss falls: overfitting")
        elif best == len(loss) - 1 and len(loss) > 1:
            words.append("and it still falls: more --epochs")
    if len(accuracy) > 1 and val_size:
        last = accuracy[-min(4, len(accuracy)) :]
        jump = max(abs(b - a) for a, b in zip(last, last[1:]))
        p = min(max(last[-1], 1 / val_size), 1 - 1 / val_size)
        chance = math.sqrt(p * (1 - p) / val_size)
        jumps = f"accuracy jumps by up to {jump:.2%} between the last epochs"
        words.append(f"{jumps}, {chance:.2%} is the chance of {val_size:,} samples")
    return "; ".join(words)


def show_checkpoint(path, log=print):
    """Says what a checkpoint holds, a line for each key. Needs: load_checkpoint, torch."""
    checkpoint = load_checkpoint(path)
    for key, value in checkpoint.items():
        if key in ("model", "optimizer"):
            continue
        text = " ".join(str(value).split())
        if key == "metrics":
            text = f"{len(value)} rows"
        log(f"{key}: {text[:100]}{' ...' if len(text) > 100 else ''}")
    weights = checkpoint["model"]
    log(f"model: {len(weights)} entries")
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            log(f"  {name} {tuple(value.shape)} {str(value.dtype)[6:]}")
        else:  # integers of few bits, see pack_weights of model.py
            log(f"  {name} {tuple(value['shape'])} packed")


def compare_checkpoints(first, second, log=print):
    """Says where two checkpoints differ, leaf by leaf, the largest difference first: so "my resume
    differs" has an answer. Returns how many leaves differ.

        args.seed: 0 and 1
        model.conv1.weight: differs by up to 2.3e-02 in 288 of 288 numbers

    Arguments come first, for they may be why the weights differ; these come before all that follows
    from them. Times and speeds are never the same, and are left out. Needs: flat, load_checkpoint,
    torch.
    """
    left, right = (flat(load_checkpoint(path)) for path in (first, second))
    lines = []
    for key in dict.fromkeys([*left, *right]):
        a, b = left.get(key, "nothing"), right.get(key, "nothing")
        if key.rpartition(".")[2] in ("seconds", "waiting", "images_per_second"):
            continue
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if tensors and a.shape == b.shape:
            different = ~((a == b) | (a != a) & (b != b))  # NaN equals NaN here
            if different.any():
                most = (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()
                count = f"{different.sum()} of {a.numel()} numbers"
                lines.append((1, -most, f"{key}: differs by up to {most:.1e} in {count}"))
        elif tensors or type(a) is not type(b) or a != b:
            a, b = (tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in (a, b))
            lines.append((0 if key.startswith("args.") else 2, 0, f"{key}: {a} and {b}"))
    for _, _, line in sorted(lines, key=lambda each: each[:2]):
        log(line)
    if not lines:
        log("equal in every argument, weight and state, to the bit")
    return len(lines)


def flat(value, name=""):
    """{"args.seed": 0, ...}: the leaves of nested dicts and lists by their path. Needs: nothing."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {name: value}
    leaves = {}
    for key, part in parts:
        leaves.update(flat(part, f"{name}.{key}" if name else str(key)))
    return leaves


def show_schedules():
    """Draws the learning rates of three schedules. Needs: lr_at."""
    for schedule in ("cosine", "step", "one-cycle"):
        curve = [lr_at(step, 60, 0.15, schedule) for step in range(60)]
        print(
            f"{schedule}: 60 steps, 9 of warm-up, from {curve[0]:.3f} via 1 "
            f"to {curve[-1]:.6f} of the peak"
        )
        for level in (0.9, 0.7, 0.5, 0.3, 0.1):
            print("".join("#" if factor > level else " " for factor in curve))


def main(paths):
    """What is shown for the words of the command line. Needs: see what it calls."""
    files = [path for path in paths if Path(path).is_file()]
    if not paths:
        show_schedules()
    elif not files:
        show_runs(paths)
    elif len(paths) == 1:
        show_checkpoint(paths[0])
    elif len(paths) == len(files) == 2:
        compare_checkpoints(*paths)
    else:
        raise UserError("one or two checkpoints, or folders of runs")


if __name__ == "__main__":
    try:
        with one_line(UserError, program="utils.py"):
            main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `python utils.py RUN | head` has read enough
        os._exit(0)  # a usual exit would try to write the rest, and complain
