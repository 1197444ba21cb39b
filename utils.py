"""What a training program needs beside its loop.

This file knows nothing of the data or the networks. `python utils.py` draws the schedules. "Needs" in a docstring: what
to copy along with the function.
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
import shutil
import signal
import sys
import traceback
import zipfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------- the command line


def number(kind, low, high):
    """An argparse type: an int or a float (`kind`) from `low` to `high`. NaN is outside: it compares with nothing."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


@contextmanager
def one_line(*kinds):
    """Errors of these kinds are the user's to fix: one line, status 2. Others are bugs and keep their traceback."""
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
    """torch.device for `name`; auto is the first of cuda, mps, xpu, cpu that is there. ValueError if `name` is not."""
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    there = [kind for kind, backend in backends.items() if backend.is_available()] + ["cpu"]
    try:
        device = torch.device(there[0] if name == "auto" else name)
        usable = device.type == "cpu" or (device.index or 0) < torch.get_device_module(device).device_count()
    except (RuntimeError, AttributeError):  # cpu:x, or a kind that torch has never heard of
        usable = False
    if not usable or device.type not in there:
        raise ValueError(f"--device {name}: not on this machine, which has {', '.join(there)}")
    return device


def pick_amp(name, device):
    """`name`, or the default for this device where it is None: bf16 on a GPU that computes in it natively, else off.

    bf16 has float32's range in 16 bits, so it needs no loss scaling. Most CPUs emulate it, slowly, for trying it out.
    """
    native_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return name or ("bf16" if native_bf16 else "off")


def autocast(device, amp):
    """Context in which products and convolutions run in 16 bits, sums, norms and losses in float32; none for off."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.amp.autocast(device.type, dtype=dtype, enabled=amp != "off")


def to_device(batch, device):
    """A tensor, or nested tuples and lists of tensors, on `device`; from pinned memory without waiting for the copy."""
    if isinstance(batch, (tuple, list)):
        return tuple(to_device(part, device) for part in batch)
    return batch.to(device, non_blocking=True)


def keep_freed_memory():
    """Makes the C library (glibc) keep the memory that tensors free, for the next ones: a CPU step is a fifth faster.

    Else freed megabytes go back to the system, and each step's activations come as new pages that the kernel has to
    zero: 9,000 page faults a step. The price is a process that stays as big as it ever was.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        # M_MMAP_THRESHOLD: larger blocks are mappings of their own, unmapped when freed. Old versions take only 32 MiB.
        libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: so much may lie free at the end of the heap


def set_seed(seed, deterministic=False):
    """Seeds Python's and torch's generators on all devices.

    On a CPU the same seed and thread count give the same run to the bit. A GPU needs `deterministic`, too: kernels that
    are reproducible and may be slower, or a RuntimeError where there is none.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic  # times the convolution kernels once and keeps the fastest
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without


def rng_state(device):
    """States of Python's generator, torch's and the device's, as plain types and tensors for a checkpoint."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "device": device.type, "own": own}


def set_rng_state(state, device, say=print):
    """Puts rng_state() back into this process. That of an absent kind of device is skipped with one line to `say`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["device"] != device.type:
        say(f"random state of {state['device']} in the checkpoint, {device.type} here: that of the device is skipped")
    elif state["own"] is not None:
        torch.get_device_module(device).set_rng_state(state["own"])


@contextmanager
def caught_signals(caught):
    """Ctrl-C and SIGTERM only append their number to the list `caught`; another one ends the program at once."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def note(number, frame):
        caught.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    before = [signal.signal(number, note) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------- several processes


def init_distributed(device):
    """Joins the process group that torchrun describes in the environment. Returns (rank, world size, device).

    Whoever calls it calls leave_distributed at the end.
    """
    if "RANK" not in os.environ:
        return 0, 1, device
    importlib.import_module("torch.distributed.nn")  # before there is a group: leave_distributed says why
    # Two backends: NCCL for tensors on the GPU, and gloo for the small agreements between CPUs, which stall no GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def leave_distributed():
    """Ends the process group and waits for its threads: the last that a process does, also with an error on its way out.

    A thread of gloo lets go of the tensors of an all-reduce a moment after everybody has the result. If the interpreter
    ends in that moment, the thread dies in the middle of it, and C++ aborts a process whose work was done: status -6.
    dist.destroy_process_group() waits for the threads, but only if nobody else holds the group. Three do:
    - torch.distributed.nn: `group=group.WORLD` is a default argument of its functions, so it keeps the group for good
      if there is one when it is imported, and the first optimizer or DDP imports it. So init_distributed does, earlier.
    - DDP, which garbage collection frees, for its references go in a circle.
    - an error, by the local variables of all functions that it has come through.
    """
    if not dist.is_initialized():
        return
    error = sys.exc_info()[1]
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__  # the one that was being handled when this one was raised
    gc.collect()
    dist.destroy_process_group()


def sum_over_ranks(tensor):
    """Sum of `tensor` over all processes, in place, and returned; with one process as it is.

    Sums, never averages: ranks hold different numbers of samples, and the mean of their means would weigh them alike.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def largest_over_ranks(numbers):
    """Starts to look for the largest in all ranks' lists of ints. Returns a function that waits for the answer."""
    if not dist.is_initialized():
        return lambda: max(numbers, default=0)
    largest = torch.tensor(max(numbers, default=0))
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    return lambda: work.wait() and largest.item()


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


# ---------------------------------------------------------------------------------------------------- optimisation


def build_optimizer(model, args):
    """AdamW (Loshchilov and Hutter 2019), decaying weights only: a bias or a norm's gain has no reason to be small."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    # beta2 0.95 averages over some 20 steps. The default, 0.999, averages over 1000: long for a run of a few thousand.
    # Fused is one kernel for all parameters, four times faster on a CPU.
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def distillation(logits, wanted, temperature=4.0):
    """T^2 KL(softmax(wanted / T) || softmax(logits / T)), summed over the samples of two (B, K) (Hinton et al. 2015).

    A high T shows which wrong answers the teacher finds less wrong than others. The gradient falls with T^2, so with
    that factor the weight beside the cross-entropy does not depend on T.
    """
    logits, wanted = ((each / temperature).log_softmax(1) for each in (logits, wanted))
    return temperature**2 * F.kl_div(logits, wanted, reduction="sum", log_target=True)


def lr_at(step, total, peak, warmup=0, schedule="cosine", drops=0):
    """Learning rate of optimizer step `step`, counted from 0, of `total`: in (0, peak], also past the end.

    For the first `warmup` steps it rises in a line from peak / 100. Then
    cosine    falls along half a cosine to peak / 100 at the last step (Loshchilov and Hutter 2017, without restarts)
    step      falls to a tenth after a third, and to a hundredth after two thirds of what is left
    one-cycle also rises along half a cosine, from peak / 25, and falls to peak / 250,000 (Smith and Topin 2018)
    plateau   falls to a tenth for each of `drops` (see drop_on_plateau), two at most
    constant  stays

    A pure function: there is no scheduler whose counter a resume, a skipped step or an epoch more could put wrong.
    """
    low, last = (peak / 25, peak / 250_000) if schedule == "one-cycle" else (peak / 100, peak / 100)
    if step < warmup:
        part = step / warmup
        return low + (peak - low) * ((1 - math.cos(math.pi * part)) / 2 if schedule == "one-cycle" else part)
    part = min(1.0, (step - warmup) / max(1, total - 1 - warmup))  # 0 at the peak, 1 at the last step
    if schedule in ("step", "plateau"):
        return peak * 0.1 ** min(2, int(3 * part) if schedule == "step" else drops)
    if schedule == "constant":
        return peak
    return last + (peak - last) * (1 + math.cos(math.pi * part)) / 2  # not 0: the last step still does something


def drop_on_plateau(drops, stale, improved, patience=2):
    """After an epoch: how often the learning rate has dropped, and for how many epochs nothing has improved since."""
    stale = 0 if improved else stale + 1
    return (drops + 1, 0) if stale > patience else (drops, stale)


# ---------------------------------------------------------------------------------------------------- a run on disk


def new_folder(out, name):
    """Makes the folder of a run: `out`, or if None runs/<name>-<n>, the next free n. ValueError if it holds a run."""
    if out:
        folder = Path(out)
        if any((folder / file).exists() for file in ("run.json", "last.pt", "best.pt")):
            raise ValueError(f"--out {folder}: holds a run already; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    Path("runs").mkdir(exist_ok=True)
    for n in itertools.count(1):
        try:
            folder = Path("runs") / f"{name}-{n}"
            folder.mkdir()  # not exist_ok: of two programs that start together one gets n, the other n + 1
            return folder
        except FileExistsError:
            pass


def write_atomically(path, write):
    """Calls write(file) on a new file beside `path`, flushes it to the disk and gives it the name `path`.

    Whoever reads `path` sees the old content or the new, never a half, even after a crash or with a full disk. A rename
    is atomic within one file system only; without fsync a power cut can leave an empty file under the new name.
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
    """Of torch and torchvision, as plain str: torch.__version__ is of a class that weights_only=True refuses."""
    return {"torch": str(torch.__version__), "torchvision": metadata.version("torchvision")}  # an import takes a second


def new_state(total_steps):
    """State of a run that has not begun. With model, optimizer, scaler, generators it is all that counts but time."""
    return {
        "epoch": 0,  # epochs that are done
        "batch": 0,  # batches of the epoch now that are done, on each rank
        "sums": None,  # over those batches: loss, correct, samples, gradient norm, steps taken, finite steps
        "step": 0,  # steps that the optimizer has taken
        "skipped": 0,  # steps that it has not, for an overflow in fp16
        "total_steps": total_steps,
        "drops": 0, "stale": 0,  # of the plateau schedule, see utils.drop_on_plateau
        "metrics": [],  # one row per epoch
        "best": None,  # the row of best.pt
        "test": None,  # accuracy and loss, once all epochs are done
    }


def finite_means(sums, epoch):
    """Of new_state's sums, loss and accuracy per sample, gradient norm per step; FloatingPointError if not finite."""
    loss, correct, samples, norm, taken, finite = sums.tolist()  # here the host waits for the device
    if not math.isfinite(loss + norm):
        raise FloatingPointError(
            f"epoch {epoch + 1}, step {finite + 1:.0f}: loss or gradient is not finite (sums {loss:g}, {norm:g}); "
            "look at the data of this step, or lower --lr"
        )
    return loss / max(1.0, samples), correct / max(1.0, samples), norm / max(1.0, taken)


def plain_weights(model):
    """The state_dict of `model` with the keys of the bare model, however DDP or torch.compile have wrapped it."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}


def snapshot(model, optimizer, scaler, state, device):
    """All that changes in a run, as a dict that restore puts back. All ranks call it, for each has its own generators.

    Needs: plain_weights, gather_over_ranks, rng_state.
    """
    sums = None if state["sums"] is None else state["sums"].cpu()  # of the epoch now, of this rank
    return {
        "model": plain_weights(model), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), **state,
        "sums": gather_over_ranks(sums), "rng": gather_over_ranks(rng_state(device)),
    }


def save_checkpoint(path, checkpoint):
    """Writes a dict of plain types and tensors to `path`, with the versions. Needs: write_atomically, versions."""
    content = io.BytesIO()  # by way of memory: on a full disk torch.save would raise a RuntimeError about its archive
    torch.save({**checkpoint, "versions": versions()}, content)
    write_atomically(path, lambda file: file.write(content.getbuffer()))


def load_checkpoint(path):
    """The dict that save_checkpoint wrote, all tensors on the CPU. ValueError or OSError for anything else.

    weights_only: a pickle can run any program when it is opened; this way only tensors and plain types come in.
    The checksums are compared first, which torch.load itself does not do: a flipped bit would be a wrong weight.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        parts = [checkpoint["model"], checkpoint.get("args", {})] + list(checkpoint["model"].values())
        if not all(isinstance(part, (dict, torch.Tensor)) for part in parts):
            raise ValueError("its model or args are no dict of tensors")
    except OSError:  # absent, a folder, not permitted: says so itself
        raise
    except Exception as error:  # a damaged file raises one of a dozen types, depending on where the damage is
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a checkpoint of this program, or damaged: {reason}") from None
    return checkpoint


def load_weights(model, weights, source="weights"):
    """Loads the state_dict `weights` into `model`; ValueError with source, keys and shapes if it is another model's."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{source}: see --model, --width, --norm: {' '.join(str(error).split())}") from None


def restore(checkpoint, args, facts, state, optimizer, scaler, device, rank=0, world_size=1, say=print):
    """Puts all that `checkpoint` holds beside the weights where it belongs, in place. Needs: set_rng_state.

    args, facts  arguments and description of the data, now; a changed argument is said in one line
    state        dict of where the run is; total_steps is kept as it is
    ValueError if the checkpoint holds something else, or is of other data: its place in the epoch would mean nothing,
    and with another split it would be validated on what it was trained on.
    """
    missing = {*state, "optimizer", "scaler", "rng", "args", "amp", "data", "world_size"} - checkpoint.keys()
    if missing:
        raise ValueError(f"{args.resume}: no {', '.join(sorted(missing))} in it; --init takes its weights alone")
    if checkpoint["data"] != facts:
        raise ValueError(f"{args.resume}: of {checkpoint['data']}, here is {facts}; see --dataset, --val-size, --seed")
    old = {**checkpoint["args"], "amp": checkpoint["amp"]}  # as it was, not as it was asked for
    for key in sorted(vars(args).keys() & old.keys()):
        if getattr(args, key) != old[key]:
            say(f"--{key.replace('_', '-')}: {old[key]} in {args.resume}, {getattr(args, key)} from now on")

    state |= {key: checkpoint[key] for key in state if key != "total_steps"}
    before, now = old["batch_size"] * checkpoint["world_size"], args.batch_size * world_size
    # If batches or windows have another size now: go on after as many samples (a stream: others), in the schedule, too.
    state["batch"] = math.ceil(state["batch"] * before / now)
    state["step"] = round(state["step"] * before * old["accum"] / (now * args.accum))
    sums, rng = checkpoint["sums"], checkpoint["rng"]  # lists, by rank
    if world_size == len(rng):
        state["sums"] = sums[rank]
        set_rng_state(rng[rank], device, say)
    else:  # rank 0 takes over what was summed
        say(f"{len(rng)} processes in {args.resume}, {world_size} here: random states start from the seed")
        state["sums"] = sum(sums) if rank == 0 and sums[0] is not None else None
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint["optimizer"])
    for group, weight_decay in zip(optimizer.param_groups, decay):
        group["weight_decay"] = weight_decay  # the argument's, which load_state_dict has overwritten
    if scaler.is_enabled() and checkpoint["scaler"]:  # one of the two is empty if the run goes to or from fp16
        scaler.load_state_dict(checkpoint["scaler"])


def load_matching(model, weights, say=print):
    """Loads what has a namesake of the same shape in `model`, and says in one line what it took and what it left.

    Returns (keys taken, keys left with the reason); ValueError if nothing fits.
    """
    own = model.state_dict()
    taken = [key for key in weights if key in own and own[key].shape == weights[key].shape]
    left = [
        f"{key} (shape {tuple(weights[key].shape)}, here {tuple(own[key].shape) if key in own else 'none'})"
        for key in weights
        if key not in taken
    ] + [f"{key} (only here, as initialized)" for key in own if key not in weights]
    if not taken:
        raise ValueError(f"none of the weights fit: {', '.join(left)}")
    model.load_state_dict({key: weights[key] for key in taken}, strict=False)
    say(f"took {', '.join(taken)}; left {', '.join(left) or 'nothing'}")
    return taken, left


def confusion_table(confusion, classes):
    """Text of an int64 (K, K) matrix: row = true class, column = answer; behind each row the share that is right."""
    wide = max(7, len(str(confusion.max().item())) + 1, *(len(name) + 1 for name in classes))
    lines = ["".join(f"{name:>{wide}}" for name in ["", *classes, "right"])]
    for name, row, right in zip(classes, confusion.tolist(), confusion.diag().tolist()):
        share = f"{100 * right / sum(row):.1f}%" if sum(row) else "-"
        lines.append("".join(f"{cell:>{wide}}" for cell in [name, *(count or "." for count in row), share]))
    return "\n".join(lines)


@torch.no_grad()
def attention_picture(path, model, batch, images):
    """PNG of images (B, 1, 28, 28) in 0..1, in red the weights with which patches entered the answer.

    model an AttentionClassifier, batch = (tokens (B, L, 16), positions (B, L), mask (B, L)) of the same images.
    """
    from torchvision.utils import save_image  # here, for it takes a second

    seen = []
    hook = model.pool.softmax.register_forward_hook(lambda layer, inputs, weights: seen.append(weights))  # (B, L)
    model.eval()(batch)
    hook.remove()
    _, positions, mask = batch
    heat = torch.zeros(len(images), 49, device=mask.device).scatter_add(1, positions, seen[0].float() * mask)  # (B, 49)
    heat = (heat / heat.amax(1, keepdim=True).clamp(min=1e-9)).view(-1, 1, 7, 7).cpu()  # the largest is full red
    heat, images = (F.interpolate(each.float(), size=(112, 112)) for each in (heat, images.cpu()))  # nearest
    dark = images * (1 - 0.6 * heat)
    save_image(torch.cat([(images + heat).clamp(max=1), dark, dark], dim=1), path, nrow=8, padding=8, pad_value=0.5)


if __name__ == "__main__":
    for schedule in ("cosine", "step", "one-cycle"):
        curve = [lr_at(step, 60, 1.0, 9, schedule) for step in range(60)]
        print(f"{schedule}: 60 steps, 9 of warm-up, from {curve[0]:.3f} over 1 to {curve[-1]:.6f}")
        for level in (0.9, 0.7, 0.5, 0.3, 0.1):
            print("".join("#" if lr > level else " " for lr in curve))
