"""Trains a neural network on pictures such as MNIST's digits.

python train.py --epochs 10                                    train; everything else has a default
python train.py --resume runs/mnist-cnn-1/last.pt              go on, from any step
python train.py --evaluate runs/mnist-cnn-1/best.pt            test loss, accuracy, confusion matrix
python train.py --dry-run                                      a few batches of everything
torchrun --standalone --nproc-per-node 2 train.py --epochs 10  several processes, the same flags

A run leaves a folder under runs/: best.pt and last.pt (weights and state), metrics.csv (one row per
epoch) and run.json (arguments, versions, data, final figures).

1. what a project of your own changes   the networks, the loss and the metrics
2. the loop                             backward_window, optimizer_step, train_one_epoch, evaluate
3. arguments
4. the verbs, in the order of time      train, evaluate_checkpoint, export_checkpoint; main

Letters: B samples in a batch, K classes, C x H x W values of an image. "Needs" in a docstring lists
what to copy along with the object: names of this file, modules that it imports, helpers of data.py
and utils.py.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The imports take seconds. Until main begins, Ctrl-C ends the process without a traceback of
    # torch's insides. (Where a shell has started us with Ctrl-C ignored, it stays so.)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import copy
import math
import shlex
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import data
import model as networks
import utils

# ---------------------------------------------------- 1. what a project of your own changes
#
# Which pictures: data.load_dataset. Which network: one entry of NETWORKS. What is minimized and
# reported: loss_and_metrics. How weights move: utils.build_optimizer and utils.lr_at. All the rest
# stays as it is.


def build_cnn(args, about):
    """The convolutional network for the data set that `about` describes (see data.describe), on the
    CPU. Needs: SimpleCNN of networks.
    """
    return networks.SimpleCNN(
        args.width, args.dropout, len(about["classes"]), args.norm, tuple(about["shape"])
    )


def collate_for_cnn(args, about):
    """The function that makes a batch for the CNN of what the data set returns.

    Needs: collate_images of data, partial.
    """
    return partial(data.collate_images, mean=about["mean"], std=about["std"])


def build_attention(args, about):
    """The small transformer. Its tokens are patches of 4 x 4 pixels, each in its place of a
    grid. Needs: AttentionClassifier of networks.
    """
    channels, height, width = about["shape"]
    return networks.AttentionClassifier(
        args.width,
        args.dropout,
        len(about["classes"]),
        args.attention_kernel,
        args.grad_checkpoint,
        patch=channels * 4 * 4,
        positions=(height // 4) * (width // 4),
    )


def collate_for_attention(args, about):
    """The function that cuts a batch of images into tokens: packed in one row, or padded to the
    longest. Needs: collate_packed and collate_tokens of data, partial.
    """
    if args.tokens == "packed":
        return partial(data.collate_packed, mean=about["mean"], std=about["std"])
    return partial(
        data.collate_tokens, mean=about["mean"], std=about["std"], blank=args.tokens == "all"
    )


# By the name that --model takes: how the network is built, what feeds it, the defaults of its
# arguments, and the flags that have a meaning for it alone.
NETWORKS = {
    "cnn": {
        "build": build_cnn,
        "collate": collate_for_cnn,
        "defaults": {"width": 32, "dropout": 0.25},
        "flags": ("norm", "sync_bn"),
    },
    "attention": {
        "build": build_attention,
        "collate": collate_for_attention,
        "defaults": {"width": 64, "dropout": 0.0},
        "flags": ("tokens", "attention_kernel", "grad_checkpoint", "pictures"),
    },
}


def build_model(args, about):
    """The network that the arguments ask for, with quantized weights if they say so. Needs:
    NETWORKS, networks.
    """
    model = NETWORKS[args.model]["build"](args, about)
    if args.quant_bits:
        model = networks.quantize(model, args.quant_bits)
    return model


def count_samples(targets):
    """How many samples a batch of targets holds: what the sum of their losses is divided by. Needs:
    nothing.
    """
    return len(targets)


def loss_and_metrics(outputs, targets, label_smoothing=0.0):
    """What is minimized and what is reported, in training and in evaluation: this function alone
    decides it.

    It returns sums over the samples, never means. Sums of batches, of windows and of processes add
    up to the sum over all samples, and one division at the end gives the mean, however unequal the
    batches were:

        batches of 4, 4 and 2 samples with 4, 4 and 0 right: 8 / 10 = 0.8   mean of means: 0.667

    outputs  logits float (B, K), as the network returns them
    targets  classes int64 (B,)
    returns  (sum of the losses, count_samples(targets), {name of a metric: its sum}), the sums as
             tensors
    label_smoothing gives this fraction of each target to all classes alike; evaluation has none.
    Needs: count_samples, F.
    """
    logits = outputs.float()  # a softmax in 16 bits is off in the third digit
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits.detach().argmax(1) == targets).sum()
    return loss, count_samples(targets), {"accuracy": correct}


def quality(row):
    """A key for comparing two epochs: the row of metrics with the largest one becomes best.pt.
    Needs: nothing.
    """
    return row["val_accuracy"], -row["val_loss"]


def in_words(metrics):
    """Loss and metrics for a person: "loss 0.0559  accuracy 98.91 %". Needs: nothing."""
    words = []
    for name, value in metrics.items():
        words.append(f"{name} {100 * value:.2f} %" if name == "accuracy" else f"{name} {value:.4f}")
    return "  ".join(words)


# ---------------------------------------------------- 2. the loop


def new_state(total_steps=math.inf):
    """Where a run is that has not begun. With model, optimizer, scaler and generators it is all
    that counts but time.

    A fork adds what it needs: every key is saved and restored. Needs: math.
    """
    return {
        "epoch": 0,  # epochs that are trained
        "batch": 0,  # batches of the current epoch that are done, on each rank
        "step": 0,  # steps that the optimizer has taken
        "skipped": 0,  # steps that it has not taken, because a gradient had overflowed in fp16
        "skipped_in_a_row": 0,
        "total_steps": total_steps,
        "this_rank": None,  # sums over the batches that are done, of this process alone
        "row": None,  # metrics of an epoch that is trained and not yet validated
        "metrics": [],  # one row per epoch
        "best": None,  # the row of best.pt
        "test": None,  # loss and accuracy on the test set, once all epochs are done
        "drops": 0,  # for the schedule "plateau", see utils.drop_on_plateau
        "stale": 0,
    }


def split_batch(batch):
    """(inputs, targets) of a batch: a pair, or a dict whose key "targets" has the targets. Needs:
    nothing.
    """
    if isinstance(batch, dict):
        inputs = {key: value for key, value in batch.items() if key != "targets"}
        return inputs, batch["targets"]
    return batch


def own_memory(tensor):
    """A tensor outside of the memory that a loader's worker shares with us. Needs: nothing.

    Each shared tensor holds an open file, and a process may have some thousand: a window of 300
    batches would run out.
    """
    if tensor.is_shared():
        return tensor.clone()
    return tensor


def backward_window(model, window, count, scaler, args, device, teacher=None):
    """Adds up the gradient of the mean loss over a window, a list of batches that together make one
    step.

    Four batches of 64 in a window take the step of one batch of 256, in the memory of 64. For that
    each sample has to count alike. Per-sample gradients 1, 2 and 6, in batches of two and one:

        mean of batch means          ((1 + 2) / 2 + 6 / 1) / 2 = 3.75   the third counts double
        sum / samples of the window  (1 + 2) / 3 + 6 / 3       = 3.0    as one batch of three

    So the loss of each batch is a sum, and is divided by the number of samples of the whole window,
    which has to be known before the first backward pass.

    window   list of (inputs, targets, real): only the first `real` samples count, the rest is
             padding of the sampler
    count    samples of the window; in several processes the mean of their counts, because DDP
             takes the mean over ranks
    teacher  a network in evaluation mode whose answers are targets, too; then inputs are a pair
             (ours, the teacher's)
    returns  {"loss" or name of a metric: sum over the window's samples}, tensors on the device
    Needs: count_samples, loss_and_metrics; autocast, distillation and to_device of utils;
    nullcontext, torch.
    """
    sums = {}
    for position, (inputs, targets, real) in enumerate(window):
        inputs, targets = utils.to_device((inputs, targets), device)
        teacher_inputs = None
        if teacher:
            inputs, teacher_inputs = inputs
        # Processes add up their gradients in the backward pass of the window's last batch, once for
        # all of them.
        exchange = nullcontext()
        if position < len(window) - 1 and hasattr(model, "no_sync"):
            exchange = model.no_sync()
        with exchange:
            with utils.autocast(device, args.amp):
                outputs = model(inputs)
            if real < count_samples(targets):
                outputs, targets = outputs[:real], targets[:real]
            loss, _, metrics = loss_and_metrics(outputs, targets, args.label_smoothing)
            if teacher:
                with torch.no_grad(), utils.autocast(device, args.amp):
                    teacher_logits = teacher(teacher_inputs)[:real]
                loss = loss + utils.distillation(outputs.float(), teacher_logits.float())
            scaler.scale(loss / count).backward()
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0) + value.detach()
    return sums


def optimizer_step(model, optimizer, scaler, lr_factor, clip=0.0):
    """One step of the optimizer with the gradients that backward_window has left. Returns (gradient
    norm, taken).

    The order is scale, backward (both above), unscale, clip, step, update. In every other order
    something breaks:

        clip before unscale    the bound 1.0 meets gradients that are 65,536 times too large, and
                               each step shrinks to nothing
        step without unscale   scaler.step unscales by itself, but then nobody has clipped
        no update              after an overflow the scale stays, and every further step is skipped

    Clipping shortens a gradient longer than `clip` to that length and keeps its direction, so that
    one odd batch cannot throw the weights away (Pascanu et al. 2013); 0 only measures. `taken` is
    False if a gradient overflowed in fp16: the scaler has then left the weights alone and lowered
    its scale, and a schedule must not advance. Needs: set_lr of utils, math, torch.
    """
    utils.set_lr(optimizer, lr_factor)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    before = scaler.get_scale()  # in fp16 this waits for the device; otherwise it is a constant
    scaler.step(optimizer)
    scaler.update()
    taken = scaler.get_scale() >= before  # it is lowered after a skipped step, and only then
    return norm, taken


def begin_epoch(loader, state):
    """An iterator over what is left of the current epoch. Needs: islice.

    Whoever decides on order or draws is told the epoch: without set_epoch every epoch has the order
    of the first. Our samplers begin at the place of the stop by themselves; of another loader,
    batches are loaded and dropped.
    """
    order = loader.sampler
    if hasattr(loader.dataset, "__iter__"):  # a stream deals out its samples itself
        order = loader.dataset
    dataset = loader.dataset
    while dataset is not None:  # under Subset and the like, too
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(state["epoch"])
        dataset = getattr(dataset, "dataset", None)
    if hasattr(order, "padding"):
        size = getattr(order, "batch_size", None) or loader.batch_size
        order.set_epoch(state["epoch"], start=state["batch"] * size)
        return iter(loader)
    if hasattr(order, "set_epoch"):
        order.set_epoch(state["epoch"])
    return islice(loader, state["batch"], None)


def draw_window(batches, accum, padding):
    """The next `accum` batches as a list of (inputs, targets, real); at the end of an epoch fewer.
    Needs: split_batch, own_memory, count_samples; map_tensors of utils; islice.

    padding  how many samples at the end of the window's last batch only make the ranks equal
    """
    window = []
    for batch in islice(batches, accum):
        if accum > 1:
            batch = utils.map_tensors(own_memory, batch)
        inputs, targets = split_batch(batch)
        window.append((inputs, targets, count_samples(targets)))
    if window and padding:
        inputs, targets, real = window.pop()
        window.append((inputs, targets, real - padding))
    return window


def means(sums, epoch):
    """Means of what train_one_epoch sums up: {"loss", metrics..., "grad_norm"}. UserError if loss
    or norm is not finite.

    Needs: UserError of utils, math.
    """
    loss, norm = sums["loss"].item(), sums["grad_norm"].item()  # here the host waits for the device
    if not math.isfinite(loss + norm):
        step = sums["finite_steps"].item() + 1
        raise utils.UserError(
            f"epoch {epoch + 1}, step {step:.0f}: loss or gradient is not finite "
            f"(sums {loss:g}, {norm:g}); "
            "look at the data of this step, or lower --lr"
        )
    kinds = ("grad_norm", "steps", "samples", "finite_steps")
    result = {
        name: value.item() / max(1.0, sums["samples"].item())
        for name, value in sums.items()
        if name not in kinds
    }
    return {**result, "grad_norm": norm / max(1.0, sums["steps"].item())}


def train_one_epoch(
    model, loader, optimizer, scaler, state, args, device, log=print, after_step=None, teacher=None
):
    """Trains for one epoch, or for what a stop has left of it, and returns a row of metrics as a
    dict.

    loader      batches as split_batch takes them; its dataset and sampler may be of any kind
    scaler      torch.amp.GradScaler; for all but fp16 a disabled one, which does nothing
    state       dict of where the run is, your own keys included; missing ones come from new_state.
                It is up to date whenever after_step() is called and can be saved there. At the end
                it stands at the next epoch
    args        accum, warmup, schedule, label_smoothing, clip, amp
    log         takes a line of progress about every fifth second, on a terminal five times a second
    teacher     see backward_window
    UserError, with epoch and step, if loss or gradient is not finite, if fp16 never finds a scale,
    or if there is nothing to train on.
    Needs: backward_window, begin_epoch, draw_window, means, new_state, optimizer_step,
    progress_line, record; UserError, gather_over_ranks, lr_at, sum_over_ranks and to_device of
    utils; math, sys, time, torch.
    """
    for key, value in new_state().items():
        state.setdefault(key, value)
    model.train()
    epoch, done = state["epoch"], state["batch"]
    batches = begin_epoch(loader, state)
    padding = getattr(loader.sampler, "padding", 0) or getattr(loader.dataset, "padding", 0)
    windows = math.ceil((len(loader) - done) / args.accum)
    if not windows and not done:
        raise utils.UserError("nothing to train on: the loader has no batch")
    if state["this_rank"] is not None:  # what a stop has left of the epoch's sums
        state["this_rank"] = utils.to_device(state["this_rank"], device)
    started = printed = time.perf_counter()
    waited, seen = 0.0, 0

    for index in range(windows):
        before = time.perf_counter()
        last = index == windows - 1
        window = draw_window(batches, args.accum, padding if last else 0)
        waited += time.perf_counter() - before
        own_count = sum(real for _, _, real in window)
        counts = [own_count]
        if last:  # before the last window all ranks have the same number of samples
            counts = utils.gather_over_ranks(own_count)
        if not sum(counts):
            raise utils.UserError(
                f"epoch {epoch + 1}: a window without a sample; the loader has fewer than it says"
            )
        seen += own_count

        optimizer.zero_grad(set_to_none=True)
        sums = backward_window(
            model, window, sum(counts) / len(counts), scaler, args, device, teacher
        )
        factor = utils.lr_at(
            state["step"], state["total_steps"], args.warmup, args.schedule, state["drops"]
        )
        norm, taken = optimizer_step(model, optimizer, scaler, factor, args.clip)
        state["batch"] += len(window)
        record(state, sums, own_count, norm, taken, scaler)

        now = time.perf_counter()
        if now - printed > (0.2 if sys.stdout.isatty() else 5.0):
            printed = now
            log(progress_line(state, index + 1, windows, now - started, seen, optimizer))
        if after_step:
            after_step()

    # Before the sums of the ranks are added up: the step that an error names is this rank's.
    means(state["this_rank"], epoch)
    seconds = time.perf_counter() - started  # since the resume, if there was one in this epoch
    totals = {
        name: utils.sum_over_ranks(value.clone()) for name, value in state["this_rank"].items()
    }
    averages = means(totals, epoch)
    norm = averages.pop("grad_norm")
    row = {f"train_{name}": value for name, value in averages.items()}
    state.update(epoch=epoch + 1, batch=0, this_rank=None)
    return {
        "epoch": epoch + 1,
        "step": state["step"],
        "skipped": state["skipped"],
        "lr": optimizer.param_groups[0]["lr"],
        **row,
        "grad_norm": norm,
        "seconds": seconds,
        "waiting": waited / max(seconds, 1e-9),
        "images_per_second": sum(utils.gather_over_ranks(seen)) / max(seconds, 1e-9),
    }


def record(state, sums, count, norm, taken, scaler):
    """Adds a step to the sums of the epoch and to the counters of the run. Needs: UserError of
    utils, torch.

    NaN and infinity stay in a sum, so finite_steps stops counting at the first of them, and looking
    at it can wait for the next line that is printed. .item(), print(loss) and `if loss > x` halt a
    loop that runs ahead of the GPU.
    """
    device = norm.device
    kind = torch.float32 if device.type == "mps" else torch.float64
    zero = torch.zeros((), dtype=kind, device=device)
    if state["this_rank"] is None:
        names = [*sums, "grad_norm", "steps", "samples", "finite_steps"]
        state["this_rank"] = {name: zero.clone() for name in names}
    totals = state["this_rank"]
    for name, value in sums.items():
        totals[name] += value
    totals["samples"] += count
    if taken:
        totals["grad_norm"] += norm
        totals["steps"] += 1
    totals["finite_steps"] += torch.isfinite(totals["loss"] + totals["grad_norm"])

    state["step"] += int(taken)  # a skipped step does not advance the schedule
    state["skipped"] += int(not taken)
    state["skipped_in_a_row"] = 0 if taken else state["skipped_in_a_row"] + 1
    if state["skipped_in_a_row"] >= 20 or (not taken and scaler.get_scale() < 1):
        raise utils.UserError(
            f"step {state['step'] + 1}: no finite gradient in {state['skipped_in_a_row']} tries, "
            f"scale {scaler.get_scale():g}; "
            "the gradient itself is not finite: look at the data, lower --lr, or take --amp off"
        )


def progress_line(state, index, windows, passed, seen, optimizer):
    """One line about an epoch that is under way. Needs: means, math."""
    averages = means(state["this_rank"], state["epoch"])
    averages.pop("grad_norm")
    numbers = " ".join(f"{name} {value:.3f}" for name, value in averages.items())
    left = ""
    if state["total_steps"] != math.inf:
        seconds = round(passed / index * (state["total_steps"] - state["step"]))
        left = f" {seconds // 60}:{seconds % 60:02} left"
    return (
        f"step {index}/{windows}{left} {numbers} lr {optimizer.param_groups[0]['lr']:.1e} "
        f"{seen / passed:.0f} images/s"
    )


# no_grad keeps no graph. eval() is another thing, it turns dropout off: evaluation needs both.
@torch.no_grad()
def evaluate(model, loader, device, amp="off", classes=0):
    """Means of loss and metrics over the samples of all ranks, as a dict with "samples", their
    number.

    With `classes` K it also returns "confusion", int64 (K, K): how often class i (row) was taken
    for class j (column). Ranks bring different samples, none twice; a rank may bring none. The
    model is left in the mode in which it came. UserError if there is no sample or the loss is not
    finite. Needs: loss_and_metrics, split_batch; UserError, autocast, gather_over_ranks,
    sum_over_ranks and to_device of utils; math, torch.
    """
    training = model.training
    model.eval()
    sums, samples = {}, 0
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    for batch in loader:
        inputs, targets = utils.to_device(split_batch(batch), device)
        with utils.autocast(device, amp):
            outputs = model(inputs)
        # Without label smoothing, which is a means of training.
        loss, count, metrics = loss_and_metrics(outputs, targets)
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0) + value
        samples += count
        if classes:
            cells = targets * classes + outputs.argmax(1)
            confusion += torch.bincount(cells, minlength=classes * classes)
    model.train(training)

    ranks = utils.gather_over_ranks((samples, {name: value.item() for name, value in sums.items()}))
    samples = sum(count for count, _ in ranks)
    if not samples:
        raise utils.UserError("nothing to evaluate: the loader has no sample")
    names = list(dict.fromkeys(name for _, each in ranks for name in each))
    result = {name: sum(each.get(name, 0.0) for _, each in ranks) / samples for name in names}
    if not math.isfinite(result["loss"]):
        raise utils.UserError(
            f"evaluation: loss {result['loss']}, from weights or pixels that are not finite"
        )
    result["samples"] = samples
    if classes:
        result["confusion"] = utils.sum_over_ranks(confusion).view(classes, classes).cpu()
    return result


# ---------------------------------------------------- 3. arguments

# What belongs to one start of the program. It is not stored, and a checkpoint cannot ask for it.
ONCE = ("device", "out", "dry_run", "resume", "init", "force", "evaluate", "export", "pictures")


def build_parser():
    """The table of all flags, which is also the manual. Needs: NETWORKS, number of utils,
    argparse.
    """
    parser = argparse.ArgumentParser(
        usage="python train.py [flags]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count = utils.number(int, 1, 10**9)
    whole = utils.number(int, 0, 10**9)
    fraction = utils.number(float, 0, 1)
    switch = {"default": False, "action": argparse.BooleanOptionalAction}

    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="auto", choices=("auto", "mnist", "fashion-mnist", "sample"),
        help="auto (default): mnist if it is in --data-dir or can be downloaded, else the sample")
    add("--data-dir", default="data", metavar="DIR",
        help="where data sets lie or are downloaded to (default data)")
    add("--val-size", default=5000, type=whole, metavar="N",
        help="held out, at most a twelfth; 0: none (default 5000)")
    add("--workers", default=0, type=utils.number(int, 0, 256),
        help="processes that load data; 0: none (default 0)")
    add("--augment", **switch | {"default": True},
        help="shift, turn and scale the training images (default on)")
    add("--balanced", **switch, help="draw all classes equally often, repeating (default off)")
    add("--stream", **switch,
        help="read training images batch by batch, for files larger than memory (default off)")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="cnn", choices=tuple(NETWORKS),
        help="convolutions (default) or attention over patches")
    add("--width", type=count, metavar="C",
        help="of the first layer, or of a token (default 32, attention 64)")
    add("--dropout", type=utils.number(float, 0, 0.99),
        help="of hidden units; 0: off (default 0.25, attention 0)")
    add("--norm", default="none", choices=("none", "batch", "group"),
        help="cnn: after convolutions (default none)")
    add("--tokens", default="packed", choices=("packed", "padded", "all"),
        help="attention: non-blank patches, in one row (default) or padded; or all patches")
    add("--attention-kernel", default="fused", choices=("manual", "fused"),
        help="by hand, or by SDPA (default)")
    add("--quant-bits", default=0, type=int, choices=(0, *range(2, 9)),
        help="weights of N bits; 0: float (default 0)")
    add("--grad-checkpoint", **switch,
        help="attention: compute blocks twice instead of keeping them (default off)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", default=10, type=count, metavar="N",
        help="passes over the training set (default 10)")
    add("--batch-size", default=128, type=count, metavar="B",
        help="samples per forward pass and process (default 128)")
    add("--accum", default=1, type=count, metavar="N",
        help="batches whose gradients add up to one step (default 1)")
    add("--lr", default=4e-3, type=utils.number(float, 1e-9, 1000),
        help="peak learning rate (default 4e-3)")
    add("--weight-decay", default=0.05, type=utils.number(float, 0, 1000),
        help="of weights; 0: off (default 0.05)")
    add("--schedule", default="cosine",
        choices=("cosine", "step", "one-cycle", "plateau", "constant"),
        help="learning rate after the warm-up (default cosine)")
    add("--warmup", default=0.1, type=fraction,
        help="fraction of all steps in which the rate rises; 0: off (default 0.1)")
    add("--label-smoothing", default=0.05, type=fraction,
        help="fraction of a target for all classes; 0: off (default 0.05)")
    add("--clip", default=1.0, type=utils.number(float, 0, 10**9),
        help="largest gradient norm; 0: off (default 1)")

    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", metavar="DEV",
        help="cpu, cuda, mps, xpu (default auto: cpu if there is no other)")
    add("--amp", choices=("off", "fp16", "bf16"),
        help="mixed precision (default bf16 on a GPU that has it, else off)")
    add("--sync-bn", **switch, help="batch norm over the batches of all GPUs (default off)")
    add("--compile", **switch, help="torch.compile: a slow start, for a faster GPU (default off)")
    add("--channels-last", **switch | {"default": True},
        help="NHWC in memory, faster than NCHW (default on)")
    add("--deterministic", **switch, help="reproducible on a GPU too, but slower (default off)")

    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--out", metavar="DIR",
        help="the run's folder (default runs/<data>-<model>-<n>, the next free n)")
    add("--seed", default=0, type=utils.number(int, 0, 2**32 - 1),
        help="of all random numbers (default 0)")
    add("--dry-run", action="store_true",
        help="one epoch of two training batches, then a small test (default off)")
    add("--pictures", **switch,
        help="--evaluate attention: save where it looked, attention.png (default off)")
    add("--save-every", default=0, type=whole, metavar="N",
        help="write last.pt every N steps, too; 0: off (default 0)")
    add("--teacher", metavar="CKPT",
        help="learn from the answers of this network, too (default none)")
    add("--format", default="int8", choices=("int8",),
        help="int8 (default): integers of --quant-bits, else 8")
    add("--force", **switch, help="--init although less than half of the weights fit (default off)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", metavar="CKPT",
        help="go on from this checkpoint; its arguments are the defaults (default none)")
    add("--init", metavar="CKPT",
        help="begin with the weights of this checkpoint that fit (default none)")
    add("--export", metavar="CKPT",
        help="do not train; write its weights in --format, beside it (default none)")
    add("--evaluate", metavar="CKPT",
        help="do not train; evaluate this checkpoint on the test set (default none)")
    return parser


def parse_args(argv=None, stored=None):
    """The arguments: the command line over `stored`, the arguments of a checkpoint, over the
    defaults.

    args.given lists the names of those that stand on the command line. A wrong value ends the
    program with one line and status 2. Needs: NETWORKS, ONCE, build_parser, argparse.
    """
    parser = build_parser()
    parser.error = lambda message: parser.exit(2, f"train.py: error: {message} (see --help)\n")
    names = vars(parser.parse_args([])).keys()
    # argparse sets a default only where there is no value yet: what is not None here was given.
    blank = argparse.Namespace(**dict.fromkeys(names))
    given = [
        name for name, value in vars(parser.parse_args(argv, blank)).items() if value is not None
    ]
    taken_over = {
        key: value for key, value in (stored or {}).items() if key in names and key not in ONCE
    }
    parser.set_defaults(**taken_over)
    args = parser.parse_args(argv)
    args.given = given

    for name, value in NETWORKS[args.model]["defaults"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.model == "cnn" and args.norm == "batch" and args.batch_size == 1:
        parser.error(
            "--norm batch: a batch of 1 is its own mean; take --norm group or a larger --batch-size"
        )
    if args.model == "attention" and args.width % 4:
        parser.error(
            f"--width {args.width}: attention has 4 heads, so the width is a multiple of 4"
        )
    if args.balanced and args.stream:
        parser.error("--balanced: cannot draw from a --stream, which reads in order")
    return args


def stored_arguments(args):
    """The arguments that a checkpoint keeps, as a dict. Needs: ONCE."""
    return {key: value for key, value in vars(args).items() if key not in ONCE and key != "given"}


def without_effect(args):
    """One line for each flag of the command line that changes nothing where it stands. Needs:
    NETWORKS.
    """
    lines = []
    for name, network in NETWORKS.items():
        for flag in network["flags"]:
            if name != args.model and flag in args.given:
                lines.append(f"--{flag.replace('_', '-')}: has no effect with --model {args.model}")
    if args.model == "cnn" and "sync_bn" in args.given and args.norm != "batch":
        lines.append("--sync-bn: has no effect without --norm batch")
    if "pictures" in args.given and args.model == "attention" and not args.evaluate:
        lines.append("--pictures: has no effect without --evaluate")
    if "force" in args.given and not args.init:
        lines.append("--force: has no effect without --init")
    if args.evaluate or args.export:
        for flag in ("save_every", "teacher", "epochs", "lr", "resume", "out"):
            if flag in args.given:
                lines.append(f"--{flag.replace('_', '-')}: has no effect without training")
    return lines


# ---------------------------------------------------- 4. the verbs, in the order of time


def most_samples(args, world_size):
    """The largest number of samples of a part of the data, or None for all. Needs: nothing."""
    if args.dry_run:
        return 2 * args.batch_size * world_size
    return None  # as the end of a slice it is no end


def trained_on(checkpoint, path):
    """What the data set of a checkpoint was, see data.describe. UserError if it does not say.

    Needs: UserError of utils.
    """
    if not checkpoint.get("data"):
        raise utils.UserError(
            f"{path}: does not say what it was trained on; --init takes its weights"
        )
    return checkpoint["data"]


def check_same_kind(path, theirs, ours):
    """UserError unless the checkpoint at `path` was trained on pictures and classes like ours.

    Needs: UserError of utils.
    """
    for key in ("shape", "classes"):
        if theirs[key] != ours[key]:
            raise utils.UserError(
                f"{path}: its {key} {theirs[key]} are not those of {ours['name']}, {ours[key]}"
            )


def load_training_data(args, rank, world_size, log):
    """Returns (training set, validation set, test set, about, split) for the arguments.

    about  what the data set is, see data.describe; split  which part of it is used for what
    Needs: most_samples; once_per_machine of utils; data, Path, torch.
    """
    train_part, test_part, about = data.load_dataset(
        args.dataset, args.data_dir, True, utils.once_per_machine, log
    )
    few = most_samples(args, world_size)
    images, labels = train_part
    classes, N = about["classes"], len(images[:few])
    if args.stream:
        # Held out evenly from the whole file: a list of what is left would grow with it.
        held_out = torch.linspace(0, N - 1, min(args.val_size, N // 12), dtype=torch.float64).long()
        root = Path(args.data_dir) / about["name"]
        if about["name"] == "sample":
            root = data.SAMPLE / "MNIST"
        files = [root / "raw/train-images-idx3-ubyte", root / "raw/train-labels-idx1-ubyte"]
        train_set = data.DigitStream(
            files, N, args.batch_size, held_out, args.augment, args.seed, world_size, rank
        )
    else:
        train_indices, held_out = data.split_validation(N, args.val_size, args.seed)
        train_set = data.Digits(
            images[train_indices], labels[train_indices], classes, args.augment, args.seed
        )
    val_set = data.Digits(images[held_out], labels[held_out], classes)
    test_set = data.Digits(test_part[0][:few], test_part[1][:few], classes)
    sizes = {"train": N - len(val_set), "val": len(val_set), "test": len(test_set)}
    split = {"name": about["name"], **sizes, "seed": args.seed, "stream": args.stream}
    return train_set, val_set, test_set, about, split


def evaluation_loader(dataset, collate, rank, world_size, device):
    """A loader that deals each sample of `dataset` to one rank. Needs: make_loader of data.

    A DistributedSampler would repeat some to make the ranks equal, and these would count twice.
    """
    indices = range(rank, len(dataset), world_size)
    return data.make_loader(dataset, 500, indices, 0, device.type == "cuda", collate=collate)


def load_teacher(args, about):
    """Returns (the network of --teacher in evaluation mode, its collate), or (None, None).

    It may be any network of this program that was trained on the same kind of data. Needs:
    NETWORKS, build_model, check_same_kind, parse_args, trained_on; load_checkpoint and
    load_weights of utils; networks.
    """
    if not args.teacher:
        return None, None
    checkpoint = utils.load_checkpoint(args.teacher)
    check_same_kind(args.teacher, trained_on(checkpoint, args.teacher), about)
    teacher_args = parse_args([], checkpoint.get("args"))
    teacher = build_model(teacher_args, about)
    utils.load_weights(teacher, networks.unpack_weights(checkpoint["model"]), args.teacher)
    collate = NETWORKS[teacher_args.model]["collate"](teacher_args, about)
    return teacher.requires_grad_(False).eval(), collate


def collate_for_both(batch, collate, teacher_collate):
    """A batch for a network and its teacher: ((inputs, the teacher's inputs), targets). Needs:
    nothing.
    """
    inputs, targets = collate(batch)
    teacher_inputs, _ = teacher_collate(batch)
    return (inputs, teacher_inputs), targets


def prepare(model, args, device, log):
    """Puts the network on its device, in the memory layout and form in which it computes fastest.
    Needs: torch.

    Channels-last stores the C values of a pixel side by side, as the convolutions of CPUs and of
    tensor cores read them:

        NCHW            all of channel 0, then all of channel 1, ...      R R R R G G G G B B B B
        channels-last   all channels of pixel 0, then of pixel 1, ...     R G B R G B R G B R G B

    Only the strides differ, shapes stay. On a CPU a step is 1.4 times as fast.
    """
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model.to(device, memory_format=layout)
    if args.sync_bn and device.type != "cuda":
        log("--sync-bn: there are no GPUs here, batch norm stays as it is")
    elif args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()  # in place: torch.compile(model) would put _orig_mod. before every key
    return model


def title(about, split, part):
    """Stands beside every accuracy, so that nobody takes one data set for another. Needs:
    nothing.
    """
    return f"({about['name']}, {split[part]:,} {about['items']})"


def resume_command(folder, world_size):
    """The command that goes on with the run in `folder`. Needs: shlex."""
    start = f"torchrun --standalone --nproc-per-node {world_size}" if world_size > 1 else "python"
    return f"{start} train.py --resume {shlex.quote(str(folder / 'last.pt'))}"


def resume_run(
    checkpoint, args, about, split, state, model, optimizer, scaler, device, rank, world_size, log
):
    """Goes on where `checkpoint` stopped, with the arguments of now. Needs: UserError, lr_at,
    restore of utils; math.

    UserError if the data are not the same: the place in the epoch would mean nothing, and with
    another split the network would be validated on what it was trained on.
    """
    path = args.resume
    missing = {"args", "amp", "data", "split", "world_size"} - checkpoint.keys()
    if missing:
        raise utils.UserError(
            f"{path}: no {', '.join(sorted(missing))} in it; --init takes its weights alone"
        )
    if checkpoint["split"] != split:
        raise utils.UserError(
            f"{path}: of {checkpoint['split']}, here is {split}; see --dataset, --val-size, --seed"
        )
    if checkpoint["data"]["checksum"] != about["checksum"]:
        raise utils.UserError(
            f"{path}: the pictures or labels of {about['name']} are not those it was trained on"
        )
    total = state["total_steps"]
    asked = [dict(group, params=None) for group in optimizer.param_groups]
    utils.restore(checkpoint, model, optimizer, scaler, state, device, log, path)
    for group, now in zip(optimizer.param_groups, asked):
        # Built with the arguments of now: the checkpoint's hyperparameters would win in silence.
        group.update({**now, "params": group["params"], "lr": group["lr"], "peak_lr": now["lr"]})

    old = {**checkpoint["args"], "amp": checkpoint["amp"]}  # as it was, not as it was asked for
    for name in sorted(vars(args).keys() & old.keys()):
        if getattr(args, name) != old[name]:
            now = getattr(args, name)
            line = f"--{name.replace('_', '-')}: {old[name]} in {path}, {now} from now on"
            if name == "epochs" and args.schedule in ("cosine", "one-cycle", "step"):
                before, after = (
                    args.lr * utils.lr_at(state["step"], steps, args.warmup, args.schedule)
                    for steps in (state["total_steps"], total)
                )
                line += f"; the learning rate jumps from {before:.1e} to {after:.1e}"
            log(line)

    # If batches or windows have another size now, it goes on after as many samples, and in the
    # schedule as far.
    batch_before = old["batch_size"] * checkpoint["world_size"]
    batch_now = args.batch_size * world_size
    state["batch"] = math.ceil(state["batch"] * batch_before / batch_now)
    state["step"] = round(state["step"] * batch_before * old["accum"] / (batch_now * args.accum))
    state["total_steps"] = total
    ranks = checkpoint["this_rank"]
    if state["this_rank"] is None and ranks[0] is not None:
        # There were more or fewer processes. Rank 0 takes over what was summed, the others nothing.
        totals = {name: sum(each[name] for each in ranks) for name in ranks[0]}
        if rank > 0:
            totals = {name: torch.zeros_like(value) for name, value in totals.items()}
        state["this_rank"] = totals


def choose_folder(args, about, best, rank):
    """The folder of the run, on all ranks: the one that is resumed, or a new one.

    A run that goes on elsewhere takes its best weights along.
    Needs: broadcast_from_rank_0, new_folder and save_checkpoint of utils, Path.
    """
    if args.resume:
        folder = Path(args.resume).parent
        if Path(args.out or folder).resolve() == folder.resolve():
            return folder
    folder = None
    if rank == 0:
        folder = utils.new_folder(args.out, f"{about['name'].lower()}-{args.model}")
        if best:
            utils.save_checkpoint(folder / "best.pt", best)
    return utils.broadcast_from_rank_0(folder)


def announce(args, model, about, split, device, world_size, steps, epochs, folder, log):
    """Says before the first step what will be done, as arithmetic that a reader can check. Needs:
    warmup_steps of utils, networks.
    """
    log(
        f"{type(model).__name__}: {networks.count_parameters(model):,} parameters; {device}, "
        f"mixed precision {args.amp}; results in {folder}"
    )
    log(
        f"{about['name']}: {split['train']:,} for training, {split['val']:,} for validation, "
        f"{split['test']:,} for the test"
    )
    per_step = args.batch_size * args.accum * world_size
    warmup = utils.warmup_steps(epochs * steps, args.warmup)
    log(
        f"{args.batch_size} a batch x {args.accum} accumulated x {world_size} processes "
        f"= {per_step} a step; {split['train']:,} / {per_step} = {steps} steps an epoch, "
        f"x {epochs} epochs = {epochs * steps:,}, "
        f"{warmup} of them warm-up to lr {args.lr:g}, then {args.schedule}"
    )


def write_tables(folder, args, state, split, device, world_size, parameters):
    """metrics.csv and run.json: what it takes to repeat the run and to compare it. Needs: utils."""
    test = state["test"] or {"accuracy": None, "loss": None}
    best = state["best"] or {}
    utils.write_csv(folder / "metrics.csv", state["metrics"])
    utils.write_json(
        folder / "run.json",
        {
            "args": {key: value for key, value in vars(args).items() if key != "given"},
            "versions": utils.versions(),
            "device": str(device),
            "world_size": world_size,
            "dataset": split,
            "parameters": parameters,
            "epochs_done": len(state["metrics"]),
            "train_seconds": sum(row["seconds"] for row in state["metrics"]),
            "val_accuracy": best.get("val_accuracy"),
            **{f"test_{key}": value for key, value in test.items()},
        },
    )


def validate(state, model, val_loader, device, amp):
    """Ends an epoch: completes its row with the validation, and says whether it is the best so far.

    Without a validation set the last epoch is taken: to choose by the test set would be to train on
    it. Needs: evaluate, quality, drop_on_plateau of utils.
    """
    row = state["row"]
    better = True
    if len(val_loader.dataset):
        result = evaluate(model, val_loader, device, amp)
        result.pop("samples")
        row.update({f"val_{name}": value for name, value in result.items()})
        better = not state["best"] or quality(row) > quality(state["best"])
    else:
        row.update({"val_loss": None, "val_accuracy": None})
    state["drops"], state["stale"] = utils.drop_on_plateau(state["drops"], state["stale"], better)
    state["metrics"].append(row)
    state["row"] = None
    state["test"] = None
    if better:
        state["best"] = row
    return better


def make_loaders(
    args, train_set, val_set, test_set, about, teacher_collate, rank, world_size, device
):
    """The loaders of training, validation and test. Needs: NETWORKS, collate_for_both,
    evaluation_loader, data, partial.
    """
    collate = NETWORKS[args.model]["collate"](args, about)
    train_collate = collate
    if teacher_collate:
        train_collate = partial(collate_for_both, collate=collate, teacher_collate=teacher_collate)
    sampler = None
    if not args.stream:
        labels = train_set.labels if args.balanced else None
        sampler = data.EpochSampler(len(train_set), args.seed, world_size, rank, labels)
    seed = data.mix(args.seed, rank)
    train_loader = data.make_loader(
        train_set, args.batch_size, sampler, args.workers,
        device.type == "cuda",
        seed,
        train_collate,
    )
    val_loader = evaluation_loader(val_set, collate, rank, world_size, device)
    return train_loader, val_loader, evaluation_loader(test_set, collate, rank, world_size, device)


def answer_signals(signals, state, save, save_every, say_how):
    """The function that is called after each step: it saves when that is due, and stops when a
    signal has come.

    signals  the list that utils.caught_signals fills; say_how(signal's name) tells how to go on
    One rank's signal stops all ranks after the same step, or they would wait for each other for
    ever. They hear of it one step later: to wait for the slowest rank twice in each step would cost
    a tenth of the time.
    Needs: means, largest_over_ranks of utils, signal, sys.
    """
    answers = [utils.largest_over_ranks(signals)]

    def after_step():
        number = answers.pop()()
        answers.append(utils.largest_over_ranks(signals))
        due = save_every and (state["step"] + state["skipped"]) % save_every == 0
        if number or due:
            means(state["this_rank"], state["epoch"])  # what is not finite is not saved
            save("last.pt")
        if number:
            say_how(signal.Signals(number).name)
            sys.exit(128 + number)

    return after_step


def train(args, checkpoint, device, rank, world_size, log):
    """The verb of --epochs, --resume and --init: data, network, epochs, test."""
    train_set, val_set, test_set, about, split = load_training_data(args, rank, world_size, log)
    if args.schedule == "plateau" and not len(val_set):
        raise utils.UserError("--schedule plateau: needs a validation set, see --val-size")
    model = build_model(args, about)
    if args.init:
        utils.load_matching(model, checkpoint["model"], log, args.force)
    model = prepare(model, args, device, log)
    teacher, teacher_collate = load_teacher(args, about)
    if teacher:
        teacher = prepare(teacher, args, device, silent)
    train_loader, val_loader, test_loader = make_loaders(
        args, train_set, val_set, test_set, about, teacher_collate, rank, world_size, device
    )
    optimizer = utils.build_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    wrapped = model
    if dist.is_initialized():
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    epochs = 1 if args.dry_run else args.epochs
    steps = math.ceil(len(train_loader) / args.accum)
    state = new_state(epochs * steps)
    best = None
    if args.resume:
        resume_run(
            checkpoint, args, about, split, state, model, optimizer, scaler, device, rank,
            world_size, log
        )
        if state["epoch"] >= epochs and state["test"]:
            return log(f"{args.resume}: nothing to do, {state['epoch']} epochs are done")
        if state["best"]:  # damaged? better known now than after all epochs
            best = utils.load_checkpoint(Path(args.resume).parent / "best.pt")
    folder = choose_folder(args, about, best, rank)
    announce(args, model, about, split, device, world_size, steps, epochs, folder, log)
    described = {"args": stored_arguments(args), "amp": args.amp, "classes": about["classes"]}
    described.update({"data": about, "split": split, "world_size": world_size})
    parameters = networks.count_parameters(model)

    def save(file):
        """Writes the state of now. All ranks call it, for each has generators of its own."""
        current = utils.snapshot(wrapped, optimizer, scaler, state, device)
        if rank == 0:
            utils.save_checkpoint(folder / file, {**current, **described})
            whole_epoch = not state["batch"] and not state["row"]
            if file == "last.pt" and whole_epoch:
                write_tables(folder, args, state, split, device, world_size, parameters)

    def say_how(name):
        command = resume_command(folder, world_size)
        log(f"stopped by {name} after step {state['step']:,}; to go on: {command}")

    signals = []
    after_step = answer_signals(signals, state, save, args.save_every, say_how)
    with utils.caught_signals(signals):
        while state["epoch"] < epochs or state["row"]:
            if state["row"] is None:
                name = f"epoch {state['epoch'] + 1}/{epochs}"
                progress = partial(show_progress, log, name, title(about, split, "train"))
                state["row"] = train_one_epoch(
                    wrapped, train_loader, optimizer, scaler, state, args, device, progress,
                    after_step, teacher
                )
                same_buffers(model)
                save("last.pt")
            if validate(state, model, val_loader, device, args.amp):
                save("best.pt")
            save("last.pt")
            log_epoch(state["metrics"][-1], epochs, about, split, log)

        result = test_best(folder, model, test_loader, device, args.amp, rank)
        state["test"] = {name: value for name, value in result.items() if name != "samples"}
        save("last.pt")
    report(result, about, split, f"{folder}/best.pt, of epoch {state['best']['epoch']}", log)


def test_best(folder, model, test_loader, device, amp, rank):
    """Evaluates the weights that the validation set has chosen. The test set is read here, once.

    The run itself may go on some day from where it is, so a copy takes them. Needs: evaluate, copy;
    broadcast_from_rank_0, load_checkpoint and load_weights of utils.
    """
    weights = None
    if rank == 0:
        weights = utils.load_checkpoint(folder / "best.pt")["model"]
    chosen = copy.deepcopy(model)
    utils.load_weights(chosen, utils.broadcast_from_rank_0(weights))
    return evaluate(chosen, test_loader, device, amp)


def show_progress(log, name, where, line):
    """Shows a line of train_one_epoch with the epoch before it and the data set behind it. Needs:
    nothing.
    """
    log(f"{name} {line} {where}", over=True)


def same_buffers(model):
    """Gives all ranks the buffers of rank 0: the running means of batch norm, of which each has
    seen other batches.

    Needs: dist.
    """
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def log_epoch(row, epochs, about, split, log):
    """What an epoch has come to. Loss and accuracy of training are those of augmented images, with
    dropout, and the loss includes label smoothing: so the validation looks better at first. Needs:
    in_words, title.
    """
    name = f"epoch {row['epoch']}/{epochs}"
    training = {
        key.removeprefix("train_"): value for key, value in row.items() if key.startswith("train_")
    }
    validation = {
        key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")
    }
    skipped = f", {row['skipped']} steps skipped" if row["skipped"] else ""
    log(
        f"{name}  training {in_words(training)} {title(about, split, 'train')}  "
        f"{row['seconds']:.1f} s, "
        f"{100 * row['waiting']:.1f} % of it waiting for data{skipped}"
    )
    if split["val"]:
        log(f"{name}  validation {in_words(validation)} {title(about, split, 'val')}")


def report(result, about, split, of, log):
    """The last line: what the test set says of the weights `of`. Needs: in_words, title."""
    metrics = {name: result[name] for name in result if name not in ("samples", "confusion")}
    loss = metrics.pop("loss")
    log(f"test {in_words(metrics)} {title(about, split, 'test')}, loss {loss:.4f}: {of}")


def evaluate_checkpoint(args, checkpoint, device, rank, world_size, log):
    """The verb of --evaluate: loss, accuracy and confusion matrix of the test set. It reads no
    training images.

    The data set is the one that the arguments name; shape, classes, mean and standard deviation are
    the checkpoint's. Needs: NETWORKS, build_model, check_same_kind, evaluate, evaluation_loader,
    most_samples, prepare, report, trained_on; confusion_table, load_weights and once_per_machine of
    utils; data, networks, Path.
    """
    about = trained_on(checkpoint, args.evaluate)
    _, test_part, here = data.load_dataset(
        args.dataset, args.data_dir, False, utils.once_per_machine, log
    )
    check_same_kind(args.evaluate, about, here)
    if here["name"] != about["name"]:
        log(f"{args.evaluate}: trained on {about['name']}, evaluated on {here['name']}")
    few = most_samples(args, world_size)
    test_set = data.Digits(test_part[0][:few], test_part[1][:few], about["classes"])
    model = build_model(args, about)
    utils.load_weights(model, checkpoint["model"], args.evaluate)
    model = prepare(model, args, device, log)
    loader = evaluation_loader(
        test_set, NETWORKS[args.model]["collate"](args, about), rank, world_size, device
    )

    result = evaluate(model, loader, device, args.amp, len(about["classes"]))
    if about["classes"]:
        log(utils.confusion_table(result["confusion"], about["classes"]))
    bits = f", weights of {args.quant_bits} bits" if args.quant_bits else ""
    report(result, here, {"test": len(test_set)}, args.evaluate + bits, log)
    if args.pictures and args.model == "attention" and rank == 0:
        images, labels = test_set.__getitems__(range(min(32, len(test_set))))
        tokens, _ = loader.collate_fn((images, labels))
        with torch.no_grad():
            heat = networks.attention_weights(model.eval(), utils.to_device(tokens, device))
        data.save_pictures(Path(args.evaluate).with_name("attention.png"), images, heat.cpu())


def export_checkpoint(args, checkpoint, log):
    """The verb of --export: the weights as integers of few bits in a file beside the checkpoint. It
    reads no images.

    Needs: build_model, stored_arguments, trained_on; load_weights and save_checkpoint of utils;
    networks, Path.
    """
    about = trained_on(checkpoint, args.export)
    args.quant_bits = args.quant_bits or 8
    model = build_model(args, about)
    utils.load_weights(model, checkpoint["model"], args.export)
    path = Path(args.export).with_suffix(f".int{args.quant_bits}.pt")
    # Weights that are rounded once need no rounding when they are read.
    arguments = {**stored_arguments(args), "quant_bits": 0}
    packed = {
        "model": networks.pack_weights(model),
        "args": arguments,
        "data": about,
        "classes": about["classes"],
    }
    utils.save_checkpoint(path, packed)
    size = path.stat().st_size
    full = 4 * networks.count_parameters(model)
    log(f"{path}: {size:,} bytes, {size / full:.3f} of its weights in float32")


def main(argv=None):
    """Reads the arguments, sets up device and ranks, and calls one verb."""
    with utils.one_line(utils.UserError, data.DataError):
        args = parse_args(argv)
        checkpoint = None
        path = args.resume or args.evaluate or args.init or args.export
        if path:
            checkpoint = utils.load_checkpoint(path)
            checkpoint["model"] = networks.unpack_weights(checkpoint["model"])
            if not args.init:
                args = parse_args(argv, checkpoint.get("args"))
        device = utils.pick_device(args.device)
        rank, world_size, device = utils.init_distributed(device)
        log = utils.show if rank == 0 else silent
        args.amp = utils.pick_amp(args.amp, device)
        utils.keep_freed_memory()
        # Ranks drop other units. Their weights begin alike, for DDP gives them those of rank 0.
        utils.set_seed(data.mix(args.seed, rank), args.deterministic)
        for line in without_effect(args):
            log(line)
        if args.export:
            export_checkpoint(args, checkpoint, log)
        elif args.evaluate:
            evaluate_checkpoint(args, checkpoint, device, rank, world_size, log)
        else:
            train(args, checkpoint, device, rank, world_size, log)


def silent(line, over=False):
    """What ranks other than the first log to."""


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # before the training or in --evaluate: there is nothing to save
        sys.exit(130)
    finally:
        utils.leave_distributed()
