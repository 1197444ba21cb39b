"""Trains a neural network on pictures such as MNIST's digits.

python train.py --epochs 10                                    train; everything has a default
python train.py --resume runs/mnist-cnn-1/last.pt              go on, from any step
python train.py --evaluate runs/mnist-cnn-1/best.pt            test loss, accuracy, confusion matrix
python train.py --predict runs/mnist-cnn-1/best.pt a.png       answers for pictures, or for folders
python train.py --dry-run                                      a few batches of everything
python train.py --find-lr                                      suggests a learning rate
python train.py --overfit 64                                   can it learn at all? If not, why
python train.py --export runs/mnist-cnn-1/best.pt              a file of --format for other programs
torchrun --standalone --nproc-per-node 2 train.py --epochs 10  several processes, the same flags

A run leaves a folder under runs/: best.pt and last.pt (weights and state), metrics.csv (one row per
epoch) and run.json (arguments, versions, data, final figures).

1. what a project of your own changes   the networks, the loss and the metrics
2. the loop                             backward_window, optimizer_step, train_one_epoch, evaluate
3. arguments
4. the verbs: what the program can do   train, evaluate_checkpoint, find_lr, overfit, predict,
                                        export_checkpoint; main

What calls what, in a training:

    main
      train                     data, network, optimizer; then, once an epoch:
        train_one_epoch           for each window of batches:
          draw_window               the batches, and how many samples they have
          backward_window           gradients
          optimizer_step            weights
        validate                  is this the best epoch so far? then it becomes best.pt
      test_best                 once: best.pt on pictures that had no part in any choice

Words, from small to large, with the numbers of a default run on MNIST:

    sample   one image and its class                                55,000 to train on
    batch    B samples that go through the network together         128 of them
    window   the batches whose gradients make one step, --accum     1 batch
    step     the optimizer moves the weights once
    epoch    every training sample once                             55,000 / 128 = 430 steps
    run      all epochs, then the test                              10 epochs = 4,300 steps

Letters: B samples in a batch, K classes, C x H x W values of an image. A rank is one of several
processes that train together, world size their number. "Needs" in a docstring lists what to copy
along with the object: names of this file, modules that it imports, helpers of data.py and utils.py.
"""

import os
import signal

# To be set before torch is imported. The threads that share a convolution wait for each other
# thousands of times a second, and by default they do so by spinning. Beside another busy program a
# spinning thread takes the core from the one it is waiting for. To sleep at once costs time on a
# quiet machine. To spin for some ten microseconds first is good for both (images/s on 2 cores):
#
#                                  spin          sleep         spin 10,000 times, then sleep
#     nothing else runs            7,300-7,900   6,100-6,800   7,100-7,200
#     two busy programs beside it  290           2,500-3,900   2,800
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The imports take seconds. Until main begins, Ctrl-C ends the process without a traceback of
    # torch's insides. (Where a shell has started us with Ctrl-C ignored, it stays so.)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import copy
import json
import math
import shlex
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import data
import model as networks
import utils

# ---------------------------------------------------- 1. what a project of your own changes
#
# Which pictures: data.load_dataset. Which network: one entry of NETWORKS. What is minimized and
# reported: loss_and_metrics; which epoch is the best: quality. How weights move:
# utils.build_optimizer and utils.lr_at. The loop, checkpoints and processes stay as they are.
#
# `args` are the arguments of the command line. `about` is the dict in which a data set says what it
# is: classes, shape of an image, mean, standard deviation (see data.describe). A network is built
# from it; no number of classes or pixels is written down here.


def build_cnn(args, about):
    """The convolutional network, for as many channels, pixels and classes as the data set has.

    Needs: SimpleCNN of networks.
    """
    return networks.SimpleCNN(
        args.width, args.dropout, len(about["classes"]), args.norm, tuple(about["shape"])
    )


def collate_for_cnn(args, about):
    """The function that makes a batch for the CNN: it normalizes images as the training set asks.

    A loader calls it with what the data set returns. It is a partial, for a lambda cannot be
    pickled for workers that are spawned. Needs: collate_images of data, partial.
    """
    return partial(data.collate_images, mean=about["mean"], std=about["std"])


def build_attention(args, about):
    """The small transformer. Its tokens are patches of 4 x 4 pixels, each in its place of a grid.

    28 x 28 grey pixels make 7 x 7 = 49 places, and 1 x 4 x 4 = 16 numbers in each patch.

    Needs: AttentionClassifier of networks.
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
    """The function that cuts a batch of images into tokens: packed in one row, padded to the most
    that an image has, or all. Packed and padded give the same results; packed is faster.

    Needs: collate_packed and collate_tokens of data, partial.
    """
    if args.tokens == "packed":
        return partial(data.collate_packed, mean=about["mean"], std=about["std"])
    return partial(
        data.collate_tokens, mean=about["mean"], std=about["std"], blank=args.tokens == "all"
    )


def collate_for_exported_attention(args, about):
    """The same tokens without a shape that depends on pixels: what --export makes part of a file.

    Needs: collate_masked of data, partial.
    """
    return partial(
        data.collate_masked, mean=about["mean"], std=about["std"], blank=args.tokens == "all"
    )


# By the name that --model takes: how the network is built, what feeds it, the defaults of its
# arguments, and, if there are any, the flags that have a meaning for it alone. The functions take
# (args, about). A third network is a third entry. Where what feeds it looks at values, there is
# another function for --export, which cannot.
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
        "export": collate_for_exported_attention,
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
    """How many samples a batch of targets holds: what the sum of their losses is divided by.

    Needs: nothing.
    """
    return len(targets)


def loss_and_metrics(outputs, targets, label_smoothing=0.0):
    """What is minimized and what is reported, in training and in evaluation.

    The network answers with a number for each class, its logits. Softmax makes probabilities of
    them, and the loss of a sample is -log(probability of the true class), the cross-entropy:

        logits [2.0, 1.0, -1.0]   softmax [0.705, 0.260, 0.035]
        the true class is the first: loss 0.35; the last: loss 3.35

    It is small where the network is right and sure, and grows without bound where it is sure and
    wrong. cross_entropy takes the logits themselves. A softmax of your own before it would be
    applied twice, and the network would learn slowly, without an error.

    Label smoothing asks for 0.955 and 0.005s in place of 1 and 0s (with 0.05 and 10 classes), so
    that no logit has to run to infinity to satisfy it. It is a means of training: evaluation has
    none.

    Returned are sums over the samples, never means. Sums of batches, of windows and of processes
    add up to the sum over all samples, and one division at the end gives the mean, however unequal
    the batches were:

        batches of 4, 4 and 2 samples with 4, 4 and 0 right: 8 / 10 = 0.8   mean of means: 0.667

    outputs  logits float (B, K), as the network returns them
    targets  classes int64 (B,)
    label_smoothing  this fraction of each target is given to all classes alike
    returns  (sum of the losses, count_samples(targets), {name of a metric: its sum}), the sums as
             tensors
    Szegedy et al. 2016 (label smoothing). Needs: count_samples, F.
    """
    logits = outputs.float()  # a softmax in 16 bits is off in the third digit
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits.detach().argmax(1) == targets).sum()
    return loss, count_samples(targets), {"accuracy": correct}


def quality(row):
    """A key for comparing two epochs: the row of metrics with the largest one becomes best.pt.

    Tuples are compared from left to right: more right answers are better, and of two epochs with
    equally many the one with the smaller loss. The loss alone would be a poor judge. Late in a
    run a network gets a few more digits right and is surer of those that it gets wrong: accuracy
    rises from 99.30 to 99.52 %, and the loss rises with it, from 0.043 to 0.052.

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
    """Where a run is before it begins: what somebody would have to know, beside model, optimizer,
    scaler and generators, to go on from here as if nothing had happened.

    A loop that keeps these in local variables cannot be resumed in the middle. So they are all in
    one dict. A fork adds what it needs: every key is saved and restored. Needs: math.
    """
    return {
        "epoch": 0,  # epochs that are trained
        "batch": 0,  # batches of the current epoch that are done, on each rank
        "step": 0,  # steps that the optimizer has taken: the learning rate is a function of it
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

    Each shared tensor holds an open file, and a process may often have no more than a thousand: a
    window of a few hundred batches would run out of them.
    """
    if tensor.is_shared():
        return tensor.clone()
    return tensor


def backward_window(model, window, count, scaler, args, device, teacher=None):
    """Adds up the gradient of the mean loss over a window, a list of batches that together make one
    step.

    Four batches of 64 in a window take the step of one batch of 256 (batch norm apart, which sees
    64), in the memory of 64: each
    backward pass adds its gradient to the one that is there (`.grad` is a sum until zero_grad). For
    that each sample has to count alike. Per-sample gradients 1, 2 and 6, in batches of two and one:

        mean of batch means          ((1 + 2) / 2 + 6 / 1) / 2 = 3.75   the third counts double
        sum / samples of the window  (1 + 2) / 3 + 6 / 3       = 3.0    as one batch of three

    So the loss of each batch is a sum, and is divided by the number of samples of the whole window,
    which has to be known before the first backward pass.

    Several processes have a window each, and the gradients are averaged over them (an all-reduce).
    DDP does that within a backward pass, as soon as a gradient is complete. In a window of four
    batches only the last sum is complete, so the first three passes run under no_sync:

        rank 0   backward   backward   backward   backward + all-reduce
        rank 1   backward   backward   backward   backward + all-reduce

    window   list of (inputs, targets, real): only the first `real` samples count, the rest is
             padding of the sampler
    count    samples of the window; in several processes the mean of their counts, because DDP
             takes the mean over ranks
    args     amp, label_smoothing
    teacher  a network in evaluation mode whose answers are targets, too (see utils.distillation);
             then inputs are a pair (ours, the teacher's)
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
        sync_context = nullcontext()
        if position < len(window) - 1 and hasattr(model, "no_sync"):
            sync_context = model.no_sync()  # the all-reduce comes with the last batch
        with sync_context:
            # The forward pass alone: each operation of the backward pass takes the dtype of its
            # forward one, and the loss is computed in float32.
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
        # detach: a sum of losses would hold on to the graphs of all batches, activations included.
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0) + value.detach()
    return sums


def optimizer_step(model, optimizer, scaler, lr_factor, clip=0.0):
    """One step of the optimizer with the gradients that backward_window has left. Returns (gradient
    norm, taken).

    The order is scale, backward (both above), unscale, clip, step, update. In every other order
    something breaks:

        clip before unscale    the bound 1.0 meets gradients that are 65,536 times too large: all of
                               them are cut to the same length, and with SGD to nothing
        clip after step        the weights have moved already
        no unscale             scaler.step unscales, but clipping has seen scaled gradients
        no update              the next unscale_ is an error, and the scale never adapts

    Clipping shortens a gradient longer than `clip` to that length and keeps its direction, so that
    one odd batch cannot throw the weights away (Pascanu et al. 2013); 0 only measures. `taken` is
    False if a gradient overflowed in fp16: the scaler has then left the weights alone and lowered
    its scale, and a schedule must not advance. Needs: set_lr of utils, math, torch.
    """
    utils.set_lr(optimizer, lr_factor)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    taken = True
    if scaler.is_enabled():
        # One value that is not finite makes the norm so. To look at it waits for the device, which
        # only fp16 has to do: nobody else skips a step.
        taken = bool(norm.isfinite())
    return norm, taken


def training_mode(model):
    """model.train(), but layers of which all own parameters are frozen stay in eval mode.

    A frozen batch norm would not move its two parameters and yet change from batch to batch, for
    its running mean and variance are moved by the forward pass itself, in training mode. Needs:
    nothing.
    """
    model.train()
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            layer.eval()


def begin_epoch(loader, state):
    """An iterator over what is left of the current epoch: all of it, or what a stop has left.

    Whoever decides on order or draws is told the epoch. Without set_epoch every epoch has the order
    of the first, and a network that meets the same batches again and again learns less from them;
    nothing fails, so nobody notices.

    A run that was stopped after batch 100 goes on with batch 101. Our own samplers begin there.
    Another loader has to load 100 batches, and they are dropped. Needs: IterableDataset, islice.
    """
    order = loader.sampler
    if isinstance(loader.dataset, IterableDataset):  # a stream deals out its samples itself
        order = loader.dataset
    dataset = loader.dataset
    while dataset is not None:  # under Subset and the like, too
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(state["epoch"])
        dataset = getattr(dataset, "dataset", None)
    if hasattr(order, "padding"):  # one of ours
        size = getattr(order, "batch_size", None) or loader.batch_size
        order.set_epoch(state["epoch"], start=state["batch"] * size)
        return iter(loader)
    if hasattr(order, "set_epoch"):
        order.set_epoch(state["epoch"])
    return islice(loader, state["batch"], None)


def draw_window(batches, accum, padding):
    """The next `accum` batches as a list of (inputs, targets, real); at the end of an epoch fewer.

    All batches of a window are drawn before the first is used, because backward_window has to know
    how many samples they have together. Ten batches in windows of four are three steps:

        [b b b b]  [b b b b]  [b b]    the last step is as good as the others: a mean over its own

    The tempting `if (i + 1) % accum == 0: step()` never takes the third, and leaves its gradients
    for the first step of the next epoch.

    padding  how many samples at the end of the window's last batch only make the ranks equal
    LostWorker if a process that loads data is lost. Needs: split_batch, own_memory, count_samples;
    LostWorker, map_tensors and why_worker_is_lost of utils; islice.
    """
    window = []
    try:
        for batch in islice(batches, accum):
            if accum > 1:
                batch = utils.map_tensors(own_memory, batch)
            inputs, targets = split_batch(batch)
            window.append((inputs, targets, count_samples(targets)))
    except RuntimeError as error:
        reason = utils.why_worker_is_lost(error)
        if not reason:
            raise  # an error of the data set itself
        remedy = "fewer of them, or 0, need less memory"
        raise utils.LostWorker(f"--workers: {reason}; {remedy}") from None
    if window and padding:
        inputs, targets, real = window.pop()
        window.append((inputs, targets, real - padding))
    return window


def samples_of_ranks(window, last, epoch):
    """How many samples the window has here, and the mean of that over all ranks. UserError if all
    have none. Needs: UserError and gather_over_ranks of utils.

    Ranks have equally many samples until the last window of the epoch, so they only communicate
    then.
    """
    own = sum(real for _, _, real in window)
    counts = [own]
    if last:
        counts = utils.gather_over_ranks(own)
    if not sum(counts):
        raise utils.UserError(
            f"epoch {epoch + 1}: a window without a sample; the loader has fewer than it says"
        )
    return own, sum(counts) / len(counts)


def train_one_epoch(
    model, loader, optimizer, scaler, state, args, device, log=print, after_step=None, teacher=None
):
    """Trains for one epoch, or for what a stop has left of it, and returns a row of metrics as a
    dict.

    An epoch shows every sample of the loader to the network once. It is a loop over windows, and
    each window is the same five things:

        draw_window      the next batches; how many samples they have is known now
        backward_window  forward and backward pass: the gradient of the mean loss over the window
        lr_at            how large a step may be at this point of the run
        optimizer_step   clips the gradient and moves the weights
        record           adds loss and metrics to the sums of the epoch

    Between two windows all that the run is lies in model, optimizer, scaler, generators and
    `state`. That is the place where it can be saved and stopped: after_step is called there.

    The gradient is set to None before each window, not after the step: whoever looks at `.grad`
    after the step finds the one that moved the weights.

    loader      a DataLoader whose batches are as split_batch takes them, and which has a len()
    scaler      torch.amp.GradScaler; for all but fp16 a disabled one, which does nothing
    state       dict of where the run is, your own keys included; missing ones come from new_state.
                At the end it stands at the next epoch
    args        accum, warmup, schedule, label_smoothing, clip, amp
    log         takes a line of progress about every fifth second, on a terminal five times a second
    teacher     see backward_window
    UserError, with epoch and step, if loss or gradient is not finite, if fp16 never finds a scale,
    or if there is nothing to train on.
    Needs: backward_window, begin_epoch, draw_window, end_of_epoch, new_state, optimizer_step,
    progress_line, record, samples_of_ranks, training_mode; UserError, lr_at, on_terminal and
    to_device of utils; math, time, torch.
    """
    # Whoever copies this function begins with an empty dict, and keeps it from epoch to epoch.
    for key, value in new_state().items():
        state.setdefault(key, value)
    training_mode(model)
    batches = begin_epoch(loader, state)
    padding = getattr(loader.sampler, "padding", 0) or getattr(loader.dataset, "padding", 0)
    windows = math.ceil((len(loader) - state["batch"]) / args.accum)
    if not windows and not state["batch"]:
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
        count, mean_count = samples_of_ranks(window, last, state["epoch"])
        seen += count

        # None and not 0: nothing is filled with zeros, and a parameter without a gradient is left
        # alone by the optimizer, also by its weight decay.
        optimizer.zero_grad(set_to_none=True)
        sums = backward_window(model, window, mean_count, scaler, args, device, teacher)
        factor = utils.lr_at(
            state["step"], state["total_steps"], args.warmup, args.schedule, state["drops"]
        )
        norm, taken = optimizer_step(model, optimizer, scaler, factor, args.clip)
        state["batch"] += len(window)
        record(state, sums, count, norm, taken, scaler)

        # The only place in the loop that waits for the device, and only when a line is due.
        now = time.perf_counter()
        if now - printed > (0.2 if utils.on_terminal() else 5.0):
            printed = now
            log(progress_line(state, index + 1, windows, now - started, seen, optimizer))
        if after_step:
            after_step()

    return end_of_epoch(state, time.perf_counter() - started, waited, seen, optimizer)


def record(state, sums, count, norm, taken, scaler):
    """Adds a step to the sums of the epoch and to the counters of the run. Needs: UserError of
    utils, torch.

    A GPU runs asynchronously. Whoever reads a value, by loss.item(), print(loss) or `if loss > x`,
    waits until all that was asked before is done, and then the GPU waits for Python. So loss,
    metrics and norm are added up on the device, by one addition for all of them, and are read when
    a line is printed. NaN and infinity stay in a sum: finite_steps stops counting at the first of
    them, so that it can be named later.
    """
    kind = torch.float32 if norm.device.type == "mps" else torch.float64  # mps has no float64
    step = torch.stack([value.to(kind) for value in [*sums.values(), norm]])
    if not taken:
        step[-1] = 0  # the norm of a step that was not taken, infinite
    if state["this_rank"] is None:
        zeros = torch.zeros_like(step)
        names = [*sums, "grad_norm"]
        state["this_rank"] = {"names": names, "sums": zeros, "finite_steps": zeros[0].clone()}
        state["this_rank"].update({"samples": 0, "steps": 0})
    totals = state["this_rank"]
    totals["sums"] += step
    totals["finite_steps"] += totals["sums"].isfinite().all()
    totals["samples"] += count
    totals["steps"] += int(taken)

    state["step"] += int(taken)  # a skipped step does not advance the schedule
    state["skipped"] += int(not taken)
    state["skipped_in_a_row"] = 0 if taken else state["skipped_in_a_row"] + 1
    if state["skipped_in_a_row"] >= 20 or (not taken and scaler.get_scale() < 1):
        raise utils.UserError(
            f"step {state['step'] + 1}: no finite gradient in {state['skipped_in_a_row']} tries, "
            f"scale {scaler.get_scale():g}; "
            "the gradient itself is not finite: look at the data, lower --lr, or take --amp off"
        )


def means(totals, epoch):
    """Means of what `record` has summed up: {"loss", metrics..., "grad_norm"}. NotFinite, with
    epoch and step, if loss or norm is not finite. Needs: NotFinite of utils, math.
    """
    sums = dict(zip(totals["names"], totals["sums"].tolist()))  # here the host waits for the device
    norm = sums.pop("grad_norm")
    if not math.isfinite(sums["loss"] + norm):
        step = int(totals["finite_steps"]) + 1
        raise utils.NotFinite(
            f"epoch {epoch + 1}, step {step}: loss or gradient is not finite "
            f"(loss sum {sums['loss']}, gradient norms {norm}); lower --lr or look at the data"
        )
    averages = {name: value / max(1, totals["samples"]) for name, value in sums.items()}
    return {**averages, "grad_norm": norm / max(1, totals["steps"])}


def explain_not_finite(
    model, loader, optimizer, scaler, state, args, device, log=print, teacher=None
):
    """Trains from `state` on until something is not finite, and says where it began: in which
    sample of a batch, in which layer, or in which gradient.

    The loop does not look at each loss, for that would halt a GPU (see record). When it finds that
    a sum is NaN, the weights are NaN, too, and all layers of the network. So the run goes back to
    its last checkpoint and does the same steps once more, with the same samples, draws and dropout,
    and now looks at everything.

        a pixel is not finite        the sample is named: the data
        a loss, but no logit         the sample is named: its label
        the output of a layer        the layer is named, see utils.first_not_finite
        a gradient only              the first parameter of which it is: the backward pass

    Arguments as of train_one_epoch; `state` and all else are those of the last checkpoint. Needs:
    backward_window, begin_epoch, draw_window, optimizer_step, samples_not_finite, training_mode;
    first_not_finite and lr_at of utils.
    """
    training_mode(model)
    batches = begin_epoch(loader, state)
    with utils.first_not_finite(model, log) as layers:
        while window := draw_window(batches, args.accum, 0):
            optimizer.zero_grad(set_to_none=True)
            count = sum(real for _, _, real in window)
            sums = backward_window(model, window, count, scaler, args, device, teacher)
            if layers or not sums["loss"].isfinite():
                return samples_not_finite(model, window, args, device, log, bool(teacher))
            factor = utils.lr_at(
                state["step"], state["total_steps"], args.warmup, args.schedule, state["drops"]
            )
            norm, taken = optimizer_step(model, optimizer, scaler, factor, args.clip)
            if taken and not norm.isfinite():
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None and not parameter.grad.isfinite().all():
                        return log(f"all outputs are finite, but not the gradient of {name}")
            state["batch"] += len(window)
            state["step"] += int(taken)


def samples_not_finite(model, window, args, device, log, with_teacher=False):
    """Names the samples of a window whose numbers are not finite, or whose loss alone is not.

        sample 17 of batch 0 of the window: its data are not finite

    All samples of the batch have a NaN as their loss then, if batch norm has mixed them, and the
    weights are NaN in any case. So the data are looked at, sample by sample. Needs:
    loss_and_metrics; tensors_of and to_device of utils; torch.
    """
    for number, (inputs, targets, real) in enumerate(window):
        inputs, targets = utils.to_device((inputs, targets), device)
        if with_teacher:
            inputs, _ = inputs
        for tensor in utils.tensors_of([inputs, targets]):
            bad = torch.atleast_1d(~tensor.isfinite())
            while bad.ndim > 1:
                bad = bad.any(-1)  # in the end (B,), or of packed tokens (T,)
            for row in bad.nonzero().flatten()[:3].tolist():
                kind = "sample" if len(bad) == len(targets) else "token"
                log(f"{kind} {row} of batch {number} of the window: its data are not finite")
        with torch.no_grad():
            outputs = model(inputs)
        for index in range(real):
            one = slice(index, index + 1)
            loss, _, _ = loss_and_metrics(outputs[one], targets[one], args.label_smoothing)
            if outputs[one].isfinite().all() and not loss.isfinite():
                log(
                    f"sample {index} of batch {number} of the window: its outputs are finite, but "
                    f"not its loss; look at its label, {targets[index].tolist()}"
                )


def end_of_epoch(state, seconds, waited, seen, optimizer):
    """Moves `state` to the next epoch and returns the row of metrics of the one that has ended,
    over the samples of all ranks.

    seconds  since the epoch began, or since the resume; `waited` of them for data
    seen     samples of this rank in these seconds
    Needs: means; gather_over_ranks and sum_over_ranks of utils; torch.
    """
    own = state["this_rank"]
    # An error if something is not finite: before the ranks are added up, to name this rank's step.
    means(own, state["epoch"])
    counts = own["sums"].new_tensor([own["samples"], own["steps"]])
    *sums, samples, steps = utils.sum_over_ranks(torch.cat([own["sums"], counts]))
    totals = {**own, "sums": torch.stack(sums), "samples": samples.item(), "steps": steps.item()}
    averages = means(totals, state["epoch"])
    norm = averages.pop("grad_norm")
    state.update(epoch=state["epoch"] + 1, batch=0, this_rank=None)
    return {
        "epoch": state["epoch"],
        "step": state["step"],
        "skipped": state["skipped"],
        "lr": optimizer.param_groups[0]["lr"],
        **{f"train_{name}": value for name, value in averages.items()},
        "grad_norm": norm,
        "seconds": seconds,
        "waiting": waited / max(seconds, 1e-9),
        "images_per_second": sum(utils.gather_over_ranks(seen)) / max(seconds, 1e-9),
    }


def progress_line(state, index, windows, passed, seen, optimizer):
    """One line about an epoch that is under way: means over its samples up to now.

        step 282/430 1:11 left loss 0.834 accuracy 0.816 lr 2.6e-03 7206 images/s

    What is left of the whole run comes early in the line, where 80 columns still show it.

    index  windows that are done, of `windows` that a stop has left of the epoch, in `passed`
           seconds with `seen` samples of this rank
    Needs: means; rank_and_world_size of utils, math.
    """
    averages = means(state["this_rank"], state["epoch"])
    averages.pop("grad_norm")
    numbers = " ".join(f"{name} {value:.3f}" for name, value in averages.items())
    left = ""
    if state["total_steps"] != math.inf:
        seconds = round(passed / index * (state["total_steps"] - state["step"]))
        left = f" {seconds // 60}:{seconds % 60:02} left"
    speed = seen * utils.rank_and_world_size()[1] / passed
    return (
        f"step {index}/{windows}{left} {numbers} lr {optimizer.param_groups[0]['lr']:.1e} "
        f"{speed:.0f} images/s"
    )


@torch.no_grad()
def evaluate(model, loader, device, amp="off", classes=0):
    """Means of loss and metrics over the samples of all ranks, as a dict with "samples", their
    number.

    Two switches are needed, and neither does the work of the other:

        model.eval()   layers behave as in use: no dropout, batch norm takes its running means
        no_grad()      no activations are kept for a backward pass that will not come

    Without the first the figures are those of a crippled network; without the second they are
    right, and memory is wasted. A model that came in training mode leaves in it.

    classes  K: also return "confusion", int64 (K, K): how often class i (row) was taken for class j
             (column). 0: do not
    Ranks bring different samples, none twice; a rank may bring none. UserError if there is no
    sample at all, or if the loss is not finite. Needs: loss_and_metrics, split_batch,
    training_mode; UserError, autocast, gather_over_ranks, sum_over_ranks and to_device of utils;
    math, torch.
    """
    training = model.training
    model.eval()
    sums, samples = {}, 0
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    for batch in loader:
        inputs, targets = utils.to_device(split_batch(batch), device)
        with utils.autocast(device, amp):
            outputs = model(inputs)
        loss, count, metrics = loss_and_metrics(outputs, targets)
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0) + value
        samples += count
        if classes:
            # The matrix as one row: of ten classes, a 4 that is taken for a 9 counts in cell 49.
            # (bincount would wait for the device, to find the largest cell.)
            cells = targets * classes + outputs.argmax(1)  # (B,)
            confusion.index_add_(0, cells, torch.ones_like(cells))
    if training:
        training_mode(model)

    ranks = utils.gather_over_ranks((samples, {name: value.item() for name, value in sums.items()}))
    samples = sum(count for count, _ in ranks)
    if not samples:
        raise utils.UserError("nothing to evaluate: the loader has no sample")
    # A rank without samples has no names.
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

# A checkpoint keeps these arguments of its run, so that --resume and --evaluate need no others:
# what describes the data, the network and the training. All others belong to one start of the
# program. A checkpoint may be a stranger's file, and must not say which verb runs and what is
# written where. A flag of your own that a resume needs is added here.
KEPT = (
    "dataset", "image_size", "channels", "data_dir", "val_size", "workers", "augment", "balanced",
    "stream", "model", "width", "dropout", "norm", "tokens", "attention_kernel", "quant_bits",
    "grad_checkpoint", "epochs", "batch_size", "accum", "lr", "weight_decay", "schedule", "warmup",
    "label_smoothing", "clip", "amp", "sync_bn", "compile", "channels_last", "deterministic",
    "seed", "save_every", "teacher", "freeze",
)


def build_parser():
    """The table of all flags, which is also the manual: --help prints it.

    Each type checks its range, so that --dropout 25 ends here, with a line, and not in an epoch of
    nonsense. Abbreviations are off: --epoch would be taken for --epochs today, and be an error on
    the day on which another flag begins so. Needs: NETWORKS, EXPORTS and number of utils, argparse.
    """
    parser = argparse.ArgumentParser(
        usage="python train.py [flags]",
        description=__doc__.partition("\n1. ")[0],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count = utils.number(int, 1, 10**9)
    whole = utils.number(int, 0, 10**9)
    fraction = utils.number(float, 0, 1)
    switch = {"default": False, "action": argparse.BooleanOptionalAction}

    # Of these, --val-size trades one thing for another: what is held out is not trained on, but
    # decides which epoch is taken. 5,000 samples of which 99 % are right tell two epochs apart that
    # differ by some 0.3 %: twice sqrt(0.99 x 0.01 / 5,000).
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="auto", type=utils.file_path, metavar="NAME",
        help="mnist, fashion-mnist, sample, or a folder with a folder of pictures for each class; "
        "auto (default): mnist if it is in --data-dir or can be downloaded, else the sample")
    add("--image-size", default=28, type=utils.number(int, 4, 4096), metavar="N",
        help="pictures of a folder are resized to N x N pixels (default 28)")
    add("--channels", type=int, choices=(1, 3),
        help="of pictures of a folder: grey or colour (default: what most of them are)")
    add("--data-dir", type=utils.file_path, default="data", metavar="DIR",
        help="where data sets lie or are downloaded to (default data)")
    add("--val-size", default=5000, type=whole, metavar="N",
        help="held out, at most a twelfth; 0: none (default 5000)")
    add("--workers", type=utils.number(int, 0, 256),
        help="processes that load data; 0: none (default 0 on a CPU, up to 8 for a GPU)")
    add("--augment", **switch | {"default": True},
        help="shift, turn and scale the training images (default on)")
    add("--balanced", **switch, help="draw all classes equally often, repeating (default off)")
    add("--stream", **switch,
        help="read training images batch by batch, for files larger than memory (default off)")

    # A network of twice the width has nearly four times the weights, and takes two to four times
    # as long.
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

    # If it learns too slowly or not at all, try three times and a third of --lr first. A batch
    # twice as large takes half as many steps an epoch; it usually bears a rate 1.4 to 2 times as
    # large. Against overfitting there are, strongest first: augmentation, weight decay, dropout,
    # label smoothing.
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

    # These change how many seconds and how much memory it takes. What is learnt is the same but for
    # rounding, and but for --sync-bn. Which of them pays depends on the machine: change one at a
    # time and compare the images/s of the second epoch, for the first has to warm up. If the line
    # of an epoch says that much of it was waiting for data, none of them helps but --workers.
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", metavar="DEV",
        help="cpu, cuda, mps, xpu (default auto: cpu if there is no other)")
    add("--amp", choices=("off", "fp16", "bf16"),
        help="mixed precision (default bf16 where the GPU or the CPU multiplies in it, else off)")
    add("--sync-bn", **switch, help="batch norm over the batches of all GPUs (default off)")
    add("--compile", **switch, help="torch.compile: a slow start, for a faster GPU (default off)")
    add("--channels-last", **switch | {"default": True},
        help="NHWC in memory, faster than NCHW (default on)")
    add("--deterministic", **switch,
        help="reproducible on a GPU too, without TF32, but slower (default off)")

    # Who is stopped by a scheduler need not ask for --save-every: a signal saves. It is for
    # machines that go without one, and costs a write of all weights and averages each time.
    add = parser.add_argument_group("run").add_argument
    add("--out", type=utils.file_path, metavar="DIR",
        help="the run's folder (default runs/<data>-<model>-<n>, the next free n)")
    add("--seed", default=0, type=utils.number(int, 0, 2**32 - 1),
        help="of all random numbers (default 0)")
    add("--dry-run", action="store_true",
        help="one epoch of two training batches, then a small test (default off)")
    add("--save-every", default=0, type=whole, metavar="N",
        help="write last.pt every N steps, too; 0: off (default 0)")
    add("--teacher", type=utils.file_path, metavar="CKPT",
        help="learn from the answers of this network, too (default none)")
    add("--profile", **switch,
        help="what the time goes into, operation by operation, and trace.json (default off)")
    add("--log-grads", default=0, type=whole, metavar="N",
        help="every N steps size and movement of each layer, gradients.csv; 0: off (default 0)")
    add("--tensorboard", **switch,
        help="write each epoch's figures for TensorBoard, too (default off)")
    add("--resume", type=utils.file_path, metavar="CKPT",
        help="go on from this checkpoint; its arguments are the defaults; "
        "auto: from last.pt in --out, if it is there (default none)")

    # What follows are the verbs beside training, each with the flags that belong to it. Training
    # from --init is another run, for which only weights come from the checkpoint.
    # With a new data set or a new network, in this order: --overfit 64 shows that it can learn, a
    # matter of seconds; --find-lr how fast it may; --dry-run that all of the program works with it,
    # up to the test. Then train.
    add = parser.add_argument_group("try something, and do not train").add_argument
    add("--find-lr", **switch,
        help="a hundred steps of a growing learning rate suggest an --lr (default off)")
    add("--overfit", type=count, metavar="N",
        help="can it learn N samples by heart? If not, why (default none; try 64)")

    add = parser.add_argument_group("begin with the weights of another run").add_argument
    add("--init", type=utils.file_path, metavar="CKPT",
        help="begin with the weights of this checkpoint that fit (default none)")
    add("--force", **switch, help="although less than half of them fit (default off)")
    add("--freeze", metavar="NAME",
        help="freeze parameters whose names start with NAME, such as conv (default none)")

    add = parser.add_argument_group("evaluate, and do not train").add_argument
    add("--evaluate", type=utils.file_path, metavar="CKPT",
        help="evaluate this checkpoint, and draw mistakes.png beside it (default none)")
    add("--split", default="test", choices=("val", "test"),
        help="on which part of the data (default test)")
    add("--pictures", **switch,
        help="attention: save where it looked, attention.png (default off)")

    add = parser.add_argument_group("answer, and do not train").add_argument
    add("--predict", type=utils.file_path, metavar=("CKPT", "PICTURE"), nargs="+",
        help="answer for pictures, or folders of them (default none)")
    add("--raw-images", **switch,
        help="digits: pictures are prepared as MNIST's are (default off)")
    add("--json", **switch, help="one JSON object a line (default off)")

    add = parser.add_argument_group("export, and do not train").add_argument
    add("--export", type=utils.file_path, metavar="CKPT",
        help="write this checkpoint in --format, beside it (default none)")
    add("--format", default="int8", choices=("int8", *utils.EXPORTS),
        help="int8 (default): weights as integers of --quant-bits, else 8; or a file "
        "that answers without this code: export (of torch), onnx, torchscript (retired)")
    return parser


def parse_args(argv=None, stored=None, source="the checkpoint"):
    """The arguments. What stands on the command line wins over `stored`, the arguments of a
    checkpoint, and these win over the defaults:

                    default   stored   command line   result
        --epochs    10        20                      20
        --lr        4e-3      1e-3     2e-3           2e-3

    argv    list of words; None: those that the program was started with
    stored  dict of name and value; of these the names in KEPT are taken over. A flag that is newer
            than the checkpoint has its default
    source  the checkpoint, for a message
    returns a namespace; its `given` lists the names of those that stand on the command line
    A wrong value ends the program with one line and status 2. Needs: NETWORKS, build_parser,
    flag_of, resumed_automatically, stored_as_words, argparse.
    """
    parser = build_parser()

    def error_in_one_line(message):  # argparse would print the usage of all flags before it
        parser.exit(2, f"train.py: error: {message} (see --help)\n")

    parser.error = error_in_one_line
    names = vars(parser.parse_args([])).keys()
    # argparse sets a default only where there is no value yet: what is not None here was given.
    blank = argparse.Namespace(**dict.fromkeys(names))
    given = [
        name for name, value in vars(parser.parse_args(argv, blank)).items() if value is not None
    ]
    if stored:
        # They are checked like the flags of a command line: type, range and choice.
        parser.error = lambda message: error_in_one_line(f"{source}: its argument {message}")
        parser.set_defaults(**vars(parser.parse_args(stored_as_words(stored, names))))
        parser.error = error_in_one_line
    args = parser.parse_args(argv)
    args.given = given

    # These defaults depend on another argument, so argparse cannot know them.
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
    for verbs in (
        ("resume", "init", "evaluate", "predict", "export"),
        ("find_lr", "overfit", "resume", "evaluate", "predict", "export"),
    ):
        asked = [flag_of(verb) for verb in verbs if getattr(args, verb)]
        if len(asked) > 1:
            parser.error(f"{asked[1]}: not allowed with {asked[0]}")
    if args.predict and len(args.predict) < 2:
        parser.error("--predict: after the checkpoint there are no pictures")
    if args.balanced and args.stream:
        parser.error("--balanced: cannot draw from a --stream, which reads in order")
    args.resume = resumed_automatically(args)
    return args


def resumed_automatically(args):
    """The checkpoint to go on with: that of --resume; for "auto" the last.pt of --out, if there is
    one.

    So the same command begins a run and goes on with it, which is what torchrun --max-restarts and
    schedulers need, who start a job again as it was. Needs: UserError of utils, Path.
    """
    if args.resume != "auto":
        return args.resume
    if not args.out:
        raise utils.UserError("--resume auto: needs --out, the folder in which it looks")
    last = Path(args.out) / "last.pt"
    return str(last) if last.exists() else None


def stored_arguments(args):
    """The arguments that a checkpoint keeps, as a dict: what describes network, data and training.

    Needs: KEPT.
    """
    kept = {key: value for key, value in vars(args).items() if key in KEPT}
    # Where a flag was left to the machine, that is kept, and not what this machine made of it.
    kept.update(getattr(args, "asked", {}))
    return kept


def stored_as_words(stored, names):
    """The arguments of a checkpoint as words of a command line: {"lr": 0.01, "augment": False}
    becomes ["--lr=0.01", "--no-augment"]. None is no word: it stands for the default.

    names  of the flags that there are. Needs: KEPT, flag_of.
    """
    # Only these names: what else a stranger has written there is never looked at.
    words = []
    for name in KEPT:
        value = stored.get(name)
        if name not in names or value is None:
            continue
        word = flag_of(name, value)
        if not isinstance(value, bool):
            word = f"{word}={value}"[:200]
        words.append(word)
    return words


def flag_of(name, value=True):
    """The flag of an argument as one types it: "save_every" -> "--save-every", and for a switch
    that is off "augment", False -> "--no-augment". Needs: nothing.
    """
    beginning = "--no-" if value is False else "--"
    return beginning + name.replace("_", "-")


def without_effect(args):
    """One line for each flag of the command line that, as far as we know, changes nothing here.

    Somebody who gives --norm batch to the attention model believes to have changed something. It is
    no error, for the same flags may go with another --model; but it is said. Needs: NETWORKS,
    flag_of.
    """
    lines = []
    for name, network in NETWORKS.items():
        for flag in network.get("flags", ()):
            if name != args.model and flag in args.given:
                lines.append(f"{flag_of(flag)}: has no effect with --model {args.model}")
    if args.model == "cnn" and "sync_bn" in args.given and args.norm != "batch":
        lines.append("--sync-bn: has no effect without --norm batch")
    if "pictures" in args.given and args.model == "attention" and not args.evaluate:
        lines.append("--pictures: has no effect without --evaluate")
    if "format" in args.given and not args.export:
        lines.append("--format: has no effect without --export")
    belongs_to = {
        "force": "init", "split": "evaluate", "raw_images": "predict", "json": "predict",
    }
    for flag, verb in belongs_to.items():
        if flag in args.given and verb not in args.given:
            lines.append(f"{flag_of(flag)}: has no effect without {flag_of(verb)}")
    if args.evaluate or args.export or args.predict:
        of_training = ("save_every", "teacher", "epochs", "lr", "resume", "out", "profile")
        for flag in (*of_training, "log_grads", "tensorboard"):
            if flag in args.given:
                lines.append(f"{flag_of(flag)}: has no effect without training")
    return lines


# ---------------------------------------------------- 4. the verbs, in the order of their use


def most_samples(args, world_size):
    """The largest number of samples of a part of the data, or None for all.

    In a dry run these are two windows for each rank, so that it meets one that is not the last.
    Needs: nothing.
    """
    if args.dry_run:
        return 2 * args.accum * args.batch_size * world_size
    return None  # images[:None] are all


def trained_on(checkpoint, path):
    """The `about` of the data set that a checkpoint was trained on. UserError if it has none.

    Weights are of no use without it: nobody would know their classes, nor what to normalize by.
    Needs: UserError of utils.
    """
    if not checkpoint.get("data"):
        raise utils.UserError(
            f"{path}: does not say what it was trained on; --init takes its weights"
        )
    return checkpoint["data"]


def check_stored(checkpoint, path):
    """UserError that names the key if a checkpoint says something about state or data that cannot
    be. It may be a stranger's file, or one that somebody has edited.

    Without this a wrong value is found late, or never: an epoch of -3 trains three more, a step of
    10^18 has the smallest learning rate for ever, a standard deviation of 0 makes every pixel NaN.
    Weights and the optimizer's averages are looked at in utils, arguments by the parser. What a
    fork has added is not known here, and is left to it. Needs: check_about, new_state; UserError of
    utils.
    """

    def check(is_right, key, value):
        if not is_right:
            raise utils.UserError(f"{path}: {key} cannot be {str(value)[:80]!r}")

    for key, usual in {**new_state(), "world_size": 1}.items():
        value = checkpoint.get(key, usual)
        if type(usual) is int:
            check(type(value) is int and 0 <= value < 10**12, key, value)
    check(checkpoint.get("world_size", 1) != 0, "world_size", 0)
    check(type(checkpoint.get("total_steps", 1)) in (int, float), "total_steps", "no number")
    rows, ranks = checkpoint.get("metrics", []), checkpoint.get("this_rank", [])
    check(isinstance(rows, list), "metrics", rows)
    check(isinstance(ranks, list), "this_rank", ranks)
    for sums in ranks:
        parts = {"names", "sums", "finite_steps", "samples", "steps"}
        check(sums is None or isinstance(sums, dict) and parts <= sums.keys(), "this_rank", sums)
    for row in [*rows, *(checkpoint.get(key) for key in ("row", "best", "test"))]:
        if row is None:
            continue
        check(isinstance(row, dict), "a row of metrics", row)
        for name, value in row.items():
            is_number = value is None or type(value) in (int, float)
            check(isinstance(name, str) and is_number, f"{name} in a row of metrics", value)
    about = checkpoint.get("data") or {}
    check(isinstance(about, dict), "data", about)
    if about:
        check_about(about, check)


def check_about(about, check):
    """What a checkpoint says of its data set, see data.describe. check(is_right, key, value) raises
    where it cannot be right.

    Needs: nothing.
    """
    for key in ("name", "items"):
        check(isinstance(about.get(key), str), f"data: {key}", about.get(key))
    classes, shape = about.get("classes"), about.get("shape")
    check(isinstance(classes, list) and classes, "data: classes", classes)
    check(all(isinstance(name, str) for name in classes), "data: classes", classes)
    is_shape = isinstance(shape, (list, tuple)) and len(shape) == 3
    is_shape = is_shape and all(type(size) is int and 0 < size <= 4096 for size in shape)
    check(is_shape, "data: shape", shape)
    for key, least in (("mean", -1e6), ("std", 1e-12)):
        values = about.get(key)
        check(isinstance(values, list) and len(values) == shape[0], f"data: {key}", values)
        for value in values:
            is_number = type(value) in (int, float) and least <= value <= 1e6
            check(is_number, f"data: {key}", values)


def unpack_weights(weights, path):
    """Weights of few bits as floats, see unpack_weights of model.py. UserError if they cannot be.

    Needs: unpack_weights of networks; UserError of utils.
    """
    try:
        return networks.unpack_weights(weights)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise utils.UserError(f"{path}: its packed weights are damaged: {error}") from None


def check_same_kind(path, theirs, ours):
    """UserError unless the checkpoint at `path` was trained on pictures and classes like ours.

    Else class 3 of one would be compared with class 3 of the other, digits with trousers. Needs:
    UserError of utils.
    """
    for key in ("shape", "classes"):
        if theirs[key] != ours[key]:
            raise utils.UserError(
                f"{path}: its {key} {theirs[key]} are not those of {ours['name']}, {ours[key]}"
            )


def load_dataset(args, train, log, shape=None):
    """The data set that the arguments name, see load_dataset of data. One rank of each machine
    downloads it.

    shape  [C, H, W] of pictures, where it is a network's that is trained; None: what the arguments
           say. Needs: load_dataset of data, once_per_machine of utils.
    """
    channels, image_size = args.channels, args.image_size
    if shape:
        channels, image_size = shape[0], shape[1]
    name, once = args.dataset, utils.once_per_machine
    return data.load_dataset(
        name, args.data_dir, train, once, log, image_size, channels, args.seed
    )


def load_training_data(args, log):
    """Returns (training set, validation set, test set, about, split) for the arguments.

    Three parts, for three questions, with MNIST's numbers:

        training     55,000   what should the weights be?
        validation    5,000   which epoch was the best, and which flags are?
        test         10,000   how good is what was chosen, on pictures that nobody has chosen by?

    The first two are one file, divided by the seed. A part that has answered its question is of no
    use for the next one: weights are better on what they were fitted to, and the best of ten epochs
    is better on what it was picked by. So the test set is evaluated once, after all epochs.

    about  what the data set is, see data.describe
    split  which part of it is used for what: {"name", "train", "val", "test", "seed", "stream"}
    Needs: load_dataset, most_samples; rank_and_world_size of utils; data, Path, torch.
    """
    rank, world_size = utils.rank_and_world_size()
    train_part, test_part, about = load_dataset(args, True, log)
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
        if about.get("held_out") and not few:  # somebody has chosen them: a folder called val
            order = torch.arange(N)
            train_indices, held_out = order[: -about["held_out"]], order[-about["held_out"] :]
        train_set = data.Digits(
            images[train_indices], labels[train_indices], classes, args.augment, args.seed
        )
    val_set = data.Digits(images[held_out], labels[held_out], classes)
    test_set = data.Digits(test_part[0][:few], test_part[1][:few], classes)
    sizes = {"train": N - len(val_set), "val": len(val_set), "test": len(test_set)}
    split = {"name": about["name"], **sizes, "seed": args.seed, "stream": args.stream}
    return train_set, val_set, test_set, about, split


def evaluation_loader(dataset, collate, device):
    """A loader that deals each sample of `dataset` to one rank: rank 1 of 3 has samples 1, 4, 7 ...

    A DistributedSampler would repeat some to make the ranks equal, and these would count twice.
    Needs: make_loader of data, rank_and_world_size of utils.
    """
    rank, world_size = utils.rank_and_world_size()
    # Ranks may have one sample more or less: without a backward pass nobody waits for the other.
    indices = range(rank, len(dataset), world_size)
    return data.make_loader(
        dataset, batch_size=500, sampler=indices, pin_memory=device.type == "cuda", collate=collate
    )


def make_loaders(args, train_set, val_set, test_set, about, teacher_collate, device):
    """The loaders of training, validation and test. They differ: the training is shuffled, anew in
    each epoch, and augmented; the other two are neither, so that two evaluations of the same
    weights agree.

        training      shuffled, augmented, in batches of --batch-size; ranks have equally many
        validation    in order, as they are, in batches of 500; each sample on one rank
        test          the same

    Needs: NETWORKS, collate_for_both, evaluation_loader; rank_and_world_size of utils; data,
    partial.
    """
    rank, world_size = utils.rank_and_world_size()
    collate = NETWORKS[args.model]["collate"](args, about)
    train_collate = collate
    if teacher_collate:
        train_collate = partial(collate_for_both, collate=collate, teacher_collate=teacher_collate)
    sampler = None
    if not args.stream:
        labels = train_set.labels if args.balanced else None
        sampler = data.EpochSampler(len(train_set), args.seed, world_size, rank, labels)
    train_loader = data.make_loader(
        train_set,
        args.batch_size,
        sampler,
        args.workers,
        pin_memory=device.type == "cuda",
        seed=data.mix(args.seed, rank),
        collate=train_collate,
    )
    val_loader = evaluation_loader(val_set, collate, device)
    return train_loader, val_loader, evaluation_loader(test_set, collate, device)


def load_teacher(args, about, device):
    """Returns (the network of --teacher in evaluation mode on `device`, its collate), or (None,
    None).

    It may be any network of this program that was trained on the same kind of data. It answers, and
    does not learn: its parameters ask for no gradients. Needs: NETWORKS, build_model,
    check_same_kind, check_stored, parse_args, prepare, silent, trained_on, unpack_weights;
    load_checkpoint and load_weights of
    utils; networks.
    """
    if not args.teacher:
        return None, None
    checkpoint = utils.load_checkpoint(args.teacher)
    theirs = trained_on(checkpoint, args.teacher)
    check_same_kind(args.teacher, theirs, about)
    check_stored(checkpoint, args.teacher)
    teacher_args = parse_args([], checkpoint.get("args"), args.teacher)
    # Built with the arguments that it was trained with: its width and kind may differ from ours.
    teacher = build_model(teacher_args, about)
    utils.load_weights(teacher, unpack_weights(checkpoint["model"], args.teacher), args.teacher)
    teacher = prepare(teacher.requires_grad_(False).eval(), args, device, silent)
    # Normalized by what the teacher was trained with, which may be another mean.
    return teacher, NETWORKS[teacher_args.model]["collate"](teacher_args, theirs)


def collate_for_both(batch, collate, teacher_collate):
    """A batch for a network and its teacher: ((inputs, the teacher's inputs), targets).

    Both see the same augmented images, each in its own form: tokens for one, pixels for the other.
    Needs: nothing.
    """
    inputs, targets = collate(batch)
    teacher_inputs, _ = teacher_collate(batch)
    return (inputs, teacher_inputs), targets


def freeze(model, beginning, log):
    """Freezes parameters whose names start so; "conv" are the CNN's two convolutions.

    With --init, frozen layers keep what they have learnt from a large data set; trained on a few
    pictures they would overfit to these. Only the last layers learn then. The optimizer takes
    none of the frozen ones, and training_mode keeps the buffers of their layers. UserError if there
    is no such name, or no other. Needs: UserError of utils.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = [name for name in names if name.startswith(beginning)]
    if not frozen or len(frozen) == len(names):
        which = "all" if frozen else "none"
        raise utils.UserError(f"--freeze {beginning}: {which} of {', '.join(names)}")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    log(f"frozen: {', '.join(frozen)}")


def prepare(model, args, device, log):
    """Puts the network on its device, in the memory layout and form in which it computes fastest.

    Channels-last stores the C values of a pixel side by side, as the convolutions of CPUs and of
    tensor cores read them:

        NCHW            all of channel 0, then all of channel 1, ...      R R R R G G G G B B B B
        channels-last   all channels of pixel 0, then of pixel 1, ...     R G B R G B R G B R G B

    Only the strides differ, shapes stay. On a CPU a step is 1.3 times as fast. UserError if there
    is no compiler for --compile. Needs: UserError of utils, os, shutil, torch.
    """
    layout = torch.contiguous_format
    if args.channels_last and device.type != "mps":  # there some operations return wrong values
        layout = torch.channels_last
    model.to(device, memory_format=layout)
    if args.sync_bn and device.type != "cuda":
        log("--sync-bn: there are no GPUs here, batch norm stays as it is")
    elif args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Compiled at the first call, which takes a minute: it pays off in long runs on a GPU.
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
    if args.compile and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise utils.UserError("--compile: needs a C++ compiler such as g++, and there is none")
    if args.compile:
        model.compile()  # in place: torch.compile(model) would put _orig_mod. before every key
    return model


def for_all_ranks(model):
    """The network as the loop calls it: as it is, or wrapped by DDP where there are several ranks.

    Each rank has a whole copy of the network and a part of every batch. Two ranks with batches of
    64 take the step that one would take with 128:

        rank 0   64 samples   gradient g0  --.                 .--  step with (g0 + g1) / 2
                                              >- all-reduce --<
        rank 1   64 samples   gradient g1  --'                 '--  step with (g0 + g1) / 2

    DDP gives all ranks the weights of rank 0 here. Equal weights that are moved by equal gradients
    stay equal, so they are never sent again. The average is taken while the backward pass is still
    at work on earlier layers. gradient_as_bucket_view spares a copy of all gradients.

    Needs: DistributedDataParallel, dist.
    """
    if dist.is_initialized():
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def check_size(args, about):
    """UserError if the network that the arguments ask for is larger than the memory: its weights,
    their gradients and Adam's two averages, 16 bytes a parameter.

    For that it is built on the device "meta", whose tensors have shapes and no memory. So a --width
    of a million is found out here, and not when the machine has nothing left. Needs: build_model,
    networks; memory_left of data, UserError of utils, torch.
    """
    try:
        with torch.device("meta"):
            count = networks.count_parameters(build_model(args, about))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise  # an error of a network of your own
        count = 10**18  # a shape whose product is no 64-bit number
    left = data.memory_left()
    if left is not None and 16 * count > left:
        raise utils.UserError(
            f"--width {args.width}: {count:,} parameters, to train them takes {16 * count:,} bytes "
            f"of memory, and {left:,} are left"
        )


def begin_model(args, about, checkpoint, device, log):
    """The network with which a training begins, on its device: new, or with weights of --init.

    Frozen layers are chosen after their weights have come, and before the optimizer is built, which
    takes what asks for gradients. Needs: build_model, check_size, freeze, prepare; load_matching of
    utils.
    """
    check_size(args, about)
    model = build_model(args, about)
    if args.init:
        utils.load_matching(model, checkpoint["model"], log, args.force)
    if args.freeze is not None:  # an empty name freezes all of them, which is an error
        freeze(model, args.freeze, log)
    return prepare(model, args, device, log)


def begin_training(args, checkpoint, device, log):
    """All that is trained and all that it is trained with, at its beginning.

    The data come first, for the network is built from what they say of themselves. The optimizer
    comes last, when the network is on its device, for it holds on to its parameters.

    returns  (network, optimizer, scaler, (training loader, validation loader, test loader),
             teacher or None, about, split), see load_training_data
    Needs: begin_model, load_teacher, load_training_data, make_loaders; UserError and
    build_optimizer of utils; torch.
    """
    train_set, val_set, test_set, about, split = load_training_data(args, log)
    if args.schedule == "plateau" and not len(val_set):
        raise utils.UserError("--schedule plateau: needs a validation set, see --val-size")
    model = begin_model(args, about, checkpoint, device, log)
    teacher, teacher_collate = load_teacher(args, about, device)
    loaders = make_loaders(args, train_set, val_set, test_set, about, teacher_collate, device)
    optimizer = utils.build_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    return model, optimizer, scaler, loaders, teacher, about, split


def describe_run(args, about, split):
    """What a checkpoint says beside the state: the arguments, the data, the world size, as a dict.

    From it --resume knows whether it has the same data, and --evaluate and --export which network
    to build. Needs: stored_arguments; rank_and_world_size of utils.
    """
    return {
        "args": stored_arguments(args),
        "amp": args.amp,
        "classes": about["classes"],
        "data": about,
        "split": split,
        "world_size": utils.rank_and_world_size()[1],
    }


def title(about, split, part):
    """Stands beside every accuracy, so that nobody takes one data set for another. Needs:
    nothing.
    """
    return f"({about['name']}, {split[part]:,} {about['items']})"


def start_command(world_size):
    """How this program is started, in one process or in several. Needs: nothing."""
    if world_size > 1:
        return f"torchrun --standalone --nproc-per-node {world_size} train.py"
    return "python train.py"


def resume_command(folder, world_size):
    """The command that goes on with the run in `folder`, quoted, so that it can be pasted.

    Needs: start_command, shlex.
    """
    return f"{start_command(world_size)} --resume {shlex.quote(str(folder / 'last.pt'))}"


def check_resumable(checkpoint, path, about, split):
    """UserError unless the checkpoint is one of a run on the same data, divided in the same way.

    With other data the place in the epoch would mean nothing, and with another split the network
    would be validated on what it was trained on. Needs: UserError of utils.
    """
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


def resume_run(checkpoint, args, state, model, optimizer, scaler, device, log):
    """Goes on where `checkpoint` stopped, with the current arguments, which may differ.

    There is little to restore. The order of an epoch is a function of seed and epoch, augmentation
    one of seed, epoch and sample, the learning rate one of the step: a few numbers bring all of it
    back. utils.restore does the rest. What is left for this function are arguments that have
    changed: each is said in a line, and reaches the optimizer.

        --lr: 0.004 in runs/mnist-cnn-1/last.pt, 0.002 from now on

    Needs: flag_of, rescale_place, stored_arguments; lr_at, rank_and_world_size and restore of
    utils; torch.
    """
    rank, world_size = utils.rank_and_world_size()
    # Both are taken now, because restore overwrites them with the checkpoint's.
    total = state["total_steps"]
    asked = [dict(group, params=None) for group in optimizer.param_groups]
    utils.restore(checkpoint, model, optimizer, scaler, state, device, log, args.resume)
    for group, now in zip(optimizer.param_groups, asked):
        # The current arguments win: restored, the checkpoint's would do so, and in silence.
        group.update({**now, "params": group["params"], "lr": group["lr"], "peak_lr": now["lr"]})

    # The precisions that are compared are those used, not those asked for.
    old = {**checkpoint["args"], "amp": checkpoint["amp"]}
    new = {**stored_arguments(args), "amp": args.amp}
    for name in sorted(new.keys() & old.keys()):
        if new[name] != old[name]:
            line = f"{flag_of(name)}: {old[name]} in {args.resume}, {new[name]} from now on"
            if name == "epochs" and args.schedule in ("cosine", "one-cycle", "step"):
                before, after = (
                    args.lr * utils.lr_at(state["step"], steps, args.warmup, args.schedule)
                    for steps in (state["total_steps"], total)
                )
                line += f"; the learning rate jumps from {before:.1e} to {after:.1e}"
            log(line)

    state["total_steps"] = total
    rescale_place(
        state,
        old["batch_size"] * checkpoint["world_size"],
        args.batch_size * world_size,
        old["accum"],
        args.accum,
    )
    ranks = checkpoint["this_rank"]
    if state["this_rank"] is None and ranks[0] is not None:
        # There were more or fewer processes. Rank 0 takes over what was summed, the others nothing.
        state["this_rank"] = dict(ranks[0])
        for name in ("sums", "finite_steps", "samples", "steps"):
            summed = sum(each[name] for each in ranks)
            state["this_rank"][name] = summed if rank == 0 else 0 * summed


def rescale_place(state, batch_before, batch_now, accum_before, accum_now):
    """Puts `state` to the same place of epoch and schedule, counted in batches and steps of now.

    Batches of all ranks together were of 256 samples and are of 64: after 10 of them the run goes
    on with the 41st. Needs: math.
    """
    # Rounded up: a few samples may be left out of this epoch, but none is trained on twice.
    samples = state["batch"] * batch_before
    state["batch"] = math.ceil(samples / batch_now)
    samples = state["step"] * batch_before * accum_before
    state["step"] = round(samples / (batch_now * accum_now))


def load_best(path, model, state):
    """The checkpoint of the best epoch. UserError if it is not the one that `state` speaks of.

    While a run goes on somebody may put another file there. Of another network it does not fit, and
    that is better known before the epochs than after them. Of another run it fits, and would be
    tested in place of ours; but it speaks of another best epoch. Needs: UserError, load_checkpoint
    and load_weights of utils, copy.
    """
    checkpoint = utils.load_checkpoint(path)
    utils.load_weights(copy.deepcopy(model), checkpoint["model"], path)
    if checkpoint.get("best") != state["best"]:
        raise utils.UserError(f"{path}: not of this run, whose best epoch has other figures")
    return checkpoint


def choose_folder(args, about, state, model, log):
    """The folder of the run, on all ranks: the one that is resumed, or a new one.

    Rank 0 makes it and tells the others its name: two ranks that look for the next free number at
    the same time could pick different folders.

    The best weights of a run that goes on are read here, though they are needed at the end: if they
    are damaged, that is better known now. A run that goes on elsewhere takes them along.
    Needs: load_best; broadcast_from_rank_0, new_folder, rank_and_world_size and save_checkpoint of
    utils, Path.
    """
    best = None
    if args.resume:
        # Where the checkpoint lies, and not what its arguments say: it may have been moved.
        folder = Path(args.resume).parent
        if state["best"] and not (folder / "best.pt").exists():
            log(f"{folder}: no best.pt in it; the best epoch is chosen among those to come")
            state["best"] = None
        if state["best"]:
            best = load_best(folder / "best.pt", model, state)
        if Path(args.out or folder).resolve() == folder.resolve():
            return folder
    folder = None
    if utils.rank_and_world_size()[0] == 0:
        folder = utils.new_folder(args.out, f"{about['name'].lower()}-{args.model}")
        if best:
            utils.save_checkpoint(folder / "best.pt", best)
    return utils.broadcast_from_rank_0(folder)


def announce(args, model, about, split, device, steps, epochs, folder, log):
    """Says before the first step what will be done, as arithmetic that a reader can check.

        128 a batch x 2 accumulated x 1 processes = 256 a step; 55,000 / 256 = 215 steps an epoch

    Most mistakes in the flags show here, before an hour is spent: a batch that is larger than
    meant, too few steps, another data set. Needs: rank_and_world_size and
    warmup_steps of utils, networks, torch.
    """
    world_size = utils.rank_and_world_size()[1]
    products = "" if torch.get_float32_matmul_precision() == "highest" else ", float32 as TF32"
    log(
        f"{type(model).__name__}: {networks.count_parameters(model):,} parameters; {device}, "
        f"mixed precision {args.amp}{products}, {args.workers} workers; results in {folder}"
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
    harder = []
    if args.label_smoothing:
        harder.append("label smoothing")
    if args.dropout:
        harder.append("dropout")
    if args.augment:
        harder.append("augmentation")
    if harder:
        log(f"training figures include {', '.join(harder)}; validation and test do not")


def train(args, checkpoint, device, log):
    """The verb of --epochs, --resume and --init: data, network, epochs, test.

    An epoch is trained, saved, validated and saved again:

        what happens             state["row"]            a resume from here
        train_one_epoch          None                    goes on with the next step
        last.pt is written       the training's figures  goes on with the validation
        validate                 the same                goes on with the validation
        best.pt if it is one,    None: the row stands    goes on with the next epoch
        last.pt, metrics.csv     in state["metrics"]

    So a process that is killed loses at most the epoch in progress, or what came after the last
    --save-every. best.pt is written before last.pt: in the other order a process that is killed
    between the two would leave a last.pt that speaks of a best epoch whose weights are nowhere.

    With several processes each runs all of this on its own part of every batch, and rank 0 alone
    writes files.
    """
    began = time.perf_counter()
    model, optimizer, scaler, loaders, teacher, about, split = begin_training(
        args, checkpoint, device, log
    )
    train_loader, val_loader, test_loader = loaders
    wrapped = for_all_ranks(model)

    epochs = 1 if args.dry_run else args.epochs
    steps = math.ceil(len(train_loader) / args.accum)
    state = new_state(epochs * steps)
    if args.resume:  # after all has been built, for what is restored is written into it
        check_resumable(checkpoint, args.resume, about, split)
        resume_run(checkpoint, args, state, model, optimizer, scaler, device, log)
        if state["epoch"] >= epochs and state["test"]:
            return log(f"{args.resume}: nothing to do, {state['epoch']} epochs are done")
    folder = choose_folder(args, about, state, model, log)
    announce(args, model, about, split, device, steps, epochs, folder, log)
    description = describe_run(args, about, split)

    def save(file):
        """Writes the state of now. All ranks call it, for each has generators of its own."""
        current = utils.snapshot(wrapped, optimizer, scaler, state, device)
        if utils.rank_and_world_size()[0] == 0:
            utils.save_checkpoint(folder / file, {**current, **description})

    # From here to the end Ctrl-C is a request, honoured after the next step.
    signals = []
    answer = answer_signals(signals, state, save, args.save_every, folder, log)
    inside = looking_inside(args, wrapped, optimizer, state, device, folder, log)
    claim = utils.claimed(folder) if utils.rank_and_world_size()[0] == 0 else nullcontext()
    with claim, utils.caught_signals(signals), inside as (looks, log_row):
        if not args.resume or folder != Path(args.resume).parent:
            save("last.pt")  # what cannot be written is known now, and not after an epoch
        while state["epoch"] < epochs or state["row"]:
            if state["row"] is None:
                progress = partial(show_progress, log, state["epoch"] + 1, epochs, about, split)
                loop = wrapped, train_loader, optimizer, scaler, state, args, device
                after_step = partial(call_all, [*looks, answer])
                with failing_well(folder, save, *loop, log, teacher):
                    state["row"] = train_one_epoch(*loop, progress, after_step, teacher)
                same_buffers(model)
                check_ranks_agree(model)
                save("last.pt")
            if validate(state, model, val_loader, device, args.amp):
                save("best.pt")
            save("last.pt")
            write_tables(folder, args, state, split, device, model)
            log_epoch(state, epochs, about, split, log)
            log_row(state["metrics"][-1])

        leave_if_asked(utils.largest_over_ranks(signals)(), state, folder, log)

        # All choices are made: now, and only now, the test set.
        classes = count_classes(test_loader.dataset)
        result = test_best(folder, model, state, test_loader, device, args.amp, classes)
        state["test"] = without_counts(result)
        save("last.pt")
        write_tables(folder, args, state, split, device, model)
    log_end(result, about, split, state, time.perf_counter() - began, folder, log)
    leave_if_asked(utils.largest_over_ranks(signals)(), state, folder, log)


def call_all(functions):
    """Calls one after the other. Needs: nothing."""
    for function in functions:
        function()


@contextmanager
def looking_inside(args, model, optimizer, state, device, folder, log):
    """What --profile, --log-grads and --tensorboard ask for, while a training lasts.

    An ExitStack keeps what has been opened, and closes it in the opposite order, whether the
    training ends, is stopped by a signal, or fails. Without these flags it is empty, and the loop
    calls nothing that it would not call without it.

    Yields (functions to be called after each step, a function that takes the row of each epoch).
    Rank 0 alone looks. Needs: ExitStack, contextmanager, open_board; look_at_first,
    profiled_steps, rank_and_world_size, time_phases and watched_gradients of utils.
    """
    looks, log_row = [], lambda row: None
    with ExitStack() as stack:
        if utils.rank_and_world_size()[0] == 0:
            if args.log_grads:
                table = folder / "gradients.csv"
                watched = utils.watched_gradients(
                    model, optimizer, table, args.log_grads, state, log
                )
                stack.enter_context(watched)
            if args.tensorboard:
                log_row, close = open_board(folder, state["epoch"])
                stack.callback(close)
            if args.profile:
                seconds = stack.enter_context(utils.time_phases(model, optimizer, device))
                stack.callback(lambda: log(utils.look_at_first(seconds)))
                left = state["total_steps"] - state["step"]
                profile = utils.profiled_steps(folder / "trace.json", left, device, log)
                looks.append(stack.enter_context(profile))
        yield looks, log_row


def summary_writer():
    """The class that writes files for TensorBoard. UserError without its package, which this
    program does not require. Needs: UserError of utils.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        reason = f"needs the package tensorboard (pip install tensorboard): {error}"
        raise utils.UserError(f"--tensorboard: {reason}") from None
    return SummaryWriter


def open_board(folder, epochs_done):
    """--tensorboard: returns a function that writes the numbers of an epoch's row for TensorBoard,
    which draws them (`tensorboard --logdir runs`), and one that closes the file.

    What an earlier start of the same run has written for later epochs is taken back. Needs:
    summary_writer.
    """
    board = summary_writer()(str(folder), purge_step=epochs_done + 1)

    def log_row(row):
        for name, value in row.items():
            if isinstance(value, (int, float)):
                board.add_scalar(name, value, row["epoch"])
        board.flush()

    return log_row, board.close


@contextmanager
def failing_well(
    folder, save, model, loader, optimizer, scaler, state, args, device, log, teacher
):
    """What is done where a training cannot go on, before the error does:

        LostWorker   all that has been trained is saved: between two steps nothing is half done; but
                     a worker that dies within a step is only said
        NotFinite    the run goes from last.pt to that step once more, and says where it began; its
                     files stay as they are

    With several ranks the others would wait for this one, so there it is not done. Needs:
    contextmanager, explain_not_finite, resume_command; LostWorker, NotFinite, load_checkpoint,
    rank_and_world_size, restore, show_at_last and why_worker_is_lost of utils.
    """
    alone = utils.rank_and_world_size()[1] == 1
    try:
        yield
    except utils.LostWorker:
        if alone:
            save("last.pt")
            command = resume_command(folder, 1)
            utils.show_at_last(f"saved after step {state['step']:,}; to go on: {command}", log)
        raise
    except RuntimeError as error:
        # torch raises this wherever the program is when a worker dies, also in the middle of a
        # step, where half of the weights have moved: nothing is saved then.
        reason = utils.why_worker_is_lost(error)
        if not reason:
            raise
        remedy = f"to go on from its last.pt, with fewer of them: {resume_command(folder, 1)}"
        raise utils.LostWorker(f"--workers: {reason} {remedy}") from None
    except utils.NotFinite:
        if alone:
            checkpoint = utils.load_checkpoint(folder / "last.pt")
            utils.restore(checkpoint, model, optimizer, scaler, state, device, log)
            log(f"back to step {state['step']:,}, to see where it begins")
            explain_not_finite(model, loader, optimizer, scaler, state, args, device, log, teacher)
        raise


def answer_signals(signals, state, save, save_every, folder, log):
    """The function that is called after each step: it saves when that is due, and stops when a
    signal has come.

    A signal handler may run anywhere, also in the middle of an optimizer's step, where half of the
    weights have moved. So it only notes the signal, and the note is read here, between two steps.

    With several ranks one of them may get the signal alone. All must stop after the same step: a
    rank that goes on would wait for ever for the gradients of one that has stopped. So they ask
    each other, and hear the answer one step later, for to wait for it would cost a tenth of the
    time:

        step 6   rank 1 gets SIGTERM; the question "has anybody been asked to stop?" goes out
        step 7   all ranks have the answer, save and stop

    signals     the list that utils.caught_signals fills
    save_every  also save after every so many steps; 0: only at a signal
    Needs: leave_if_asked, means; largest_over_ranks of utils.
    """
    pending = [utils.largest_over_ranks(signals)]

    def after_step():
        answer_of_ranks = pending.pop()
        number = answer_of_ranks()
        pending.append(utils.largest_over_ranks(signals))
        due = save_every and (state["step"] + state["skipped"]) % save_every == 0
        if number or due:
            means(state["this_rank"], state["epoch"])  # what is not finite is not saved
            save("last.pt")
        leave_if_asked(number, state, folder, log)

    return after_step


def leave_if_asked(number, state, folder, log):
    """Ends the program with the status that a shell expects after signal `number`, 128 + number; if
    it is 0, nothing happens. All that the run is has been saved. Needs: resume_command;
    rank_and_world_size and show_at_last of utils, signal, sys.
    """
    if number:
        name = signal.Signals(number).name
        command = resume_command(folder, utils.rank_and_world_size()[1])
        line = f"stopped by {name} after step {state['step']:,}; to go on: {command}"
        utils.show_at_last(line, log)
        sys.exit(128 + number)


def show_progress(log, epoch, epochs, about, split, line):
    """Shows a line of train_one_epoch with the epoch before it and the data set behind it.

        epoch 1/10 step 282/430 1:11 left loss 0.834 ... 7206 images/s (MNIST, 55,000 digits)

    On a terminal the next one takes its place. Needs: title.
    """
    log(f"epoch {epoch}/{epochs} {line} {title(about, split, 'train')}", over=True)


def same_buffers(model):
    """Gives all ranks the buffers of rank 0, before they are validated or saved.

    Parameters are equal on all ranks, for their gradients are. Buffers, such as the running means
    of batch norm, have none. DDP copies those of rank 0 before a forward pass, so the ranks differ
    by what the last one has changed. Needs: dist.
    """
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def check_ranks_agree(model):
    """UserError that names a parameter if it is not the same on all ranks.

    Ranks begin with equal weights and move them by equal gradients, and never compare them. So a
    part of the network that DDP does not know (one that is called around it, or a parameter that is
    changed by hand on one rank) drifts apart without an error, and the checkpoint holds the part of
    rank 0. Once an epoch it costs next to nothing to look: a sum for each parameter.

    Needs: dist; UserError and gather_over_ranks of utils.
    """
    if not dist.is_initialized():
        return
    sums = {name: value.detach().float().sum().item() for name, value in model.named_parameters()}
    first, *others = utils.gather_over_ranks(sums)
    for rank, other in enumerate(others, 1):
        for name in sums:
            # The same numbers, summed up on another kind of GPU, may differ in the last digits.
            if abs(first[name] - other[name]) > 1e-4 * max(1.0, abs(first[name])):
                raise utils.UserError(
                    f"the ranks disagree: {name} of rank {rank} is not that of rank 0; "
                    "it is changed outside of what DDP averages"
                )


def validate(state, model, val_loader, device, amp):
    """Ends an epoch: completes its row with the validation, and says whether it is the best so far.

    The last epoch need not be the best one: a network that begins to overfit gets worse on other
    pictures. Without a validation set the last epoch is taken, all the
    same. To choose by the test set would be to train on it: of ten epochs the one that happens to
    suit these 10,000 digits is better on them than on all others.

    Needs: evaluate, quality, drop_on_plateau of utils.
    """
    row = state["row"]
    better = True
    if len(val_loader.dataset):
        result = evaluate(model, val_loader, device, amp)
        result.pop("samples")
        row.update({f"val_{name}": value for name, value in result.items()})
        better = not state["best"] or quality(row) > quality(state["best"])
    else:
        for name in [name for name in row if name.startswith("train_")]:
            row[name.replace("train_", "val_", 1)] = None
    # The test result of an earlier end of the run is no longer that of its best weights.
    state["test"] = None
    state["drops"], state["stale"] = utils.drop_on_plateau(state["drops"], state["stale"], better)
    state["metrics"].append(row)
    state["row"] = None
    if better:
        state["best"] = row
    return better


def figures(row, part):
    """Loss and metrics of a row that begin with `part`, such as "val_", without that. Needs:
    nothing.
    """
    return {key.removeprefix(part): row[key] for key in row if key.startswith(part)}


def log_epoch(state, epochs, about, split, log):
    """What an epoch has come to, in one line: first what counts, the validation.

        epoch 8/10  validation loss 0.0516  accuracy 99.54 %  best in epoch 7  training loss ...

    The training's figures are means over the epoch, in which the network has changed; and they are
    those of a network that drops units, on images that are distorted. So they are often the worse
    ones, which is no mistake. Needs: figures, in_words, title.
    """
    row = state["metrics"][-1]
    words = [f"epoch {row['epoch']}/{epochs}"]
    if split["val"]:
        words.append(f"validation {in_words(figures(row, 'val_'))} {title(about, split, 'val')}")
        best = state["best"]
        if best is row:
            words.append("best so far")
        else:
            words.append(f"best in epoch {best['epoch']}")
    words.append(f"training {in_words(figures(row, 'train_'))} {title(about, split, 'train')}")
    words.append(f"lr {row['lr']:.1e}")
    words.append(f"{row['images_per_second']:,.0f} images/s, {row['seconds']:.1f} s")
    words.append(f"{100 * row['waiting']:.1f} % of it waiting for data")
    if row["skipped"]:
        words.append(f"{row['skipped']} steps skipped")
    log("  ".join(words))


def write_tables(folder, args, state, split, device, model):
    """metrics.csv, a row for each epoch, and run.json, one object for the whole run: what it takes
    to repeat it (arguments, seed, versions, data) and to compare it with others.

        epoch,step,skipped,lr,train_loss,train_accuracy,grad_norm,seconds,...,val_loss,val_accuracy
        1,430,0,0.004,0.6984,0.8675,1.0725,7.54,...,0.0698,0.9842

    Both are written anew after each epoch, from what the state holds: so a resumed run has each
    epoch once, also if it goes on from an older checkpoint than its last one. Rank 0 writes.

    Needs: figures, networks, utils.
    """
    rank, world_size = utils.rank_and_world_size()
    if rank > 0:
        return
    results = {}
    for name, value in figures(state["best"], "val_").items():
        results[f"val_{name}"] = value
        results[f"test_{name}"] = state["test"][name] if state["test"] else None
    utils.write_csv(folder / "metrics.csv", state["metrics"])
    utils.write_json(
        folder / "run.json",
        {
            "args": {key: vars(args)[key] for key in vars(args) if key not in ("given", "asked")},
            "versions": utils.versions(),
            "device": str(device),
            "world_size": world_size,
            "dataset": split,
            "parameters": networks.count_parameters(model),
            "epochs_done": len(state["metrics"]),
            "train_seconds": sum(row["seconds"] for row in state["metrics"]),
            **results,
        },
    )


def count_classes(dataset):
    """K, or 0 where labels are numbers: a regression has no classes to be taken for each other.
    Needs: nothing.
    """
    return 0 if dataset.labels.is_floating_point() else len(dataset.classes)


def test_best(folder, model, state, test_loader, device, amp, classes):
    """Evaluates the weights that the validation set has chosen on the test set.

    They are loaded into a copy: the last.pt that is saved afterwards keeps those of the last epoch,
    from which the run can go on. Needs: evaluate, load_best, copy; broadcast_from_rank_0,
    load_weights and rank_and_world_size of utils.
    """
    weights = None
    if utils.rank_and_world_size()[0] == 0:
        weights = load_best(folder / "best.pt", model, state)["model"]
    chosen = copy.deepcopy(model)
    utils.load_weights(chosen, utils.broadcast_from_rank_0(weights))
    return evaluate(chosen, test_loader, device, amp, classes)


def without_counts(result):
    """Loss and metrics of what `evaluate` returns, without numbers of samples. Needs: nothing."""
    return {name: value for name, value in result.items() if name not in ("samples", "confusion")}


def report(result, about, count, of, log, part="test"):
    """What the test set of `count` samples, or another part of the data, says of the weights `of`.

    An accuracy of 99.5 % on 10,000 samples is uncertain by sqrt(0.995 x 0.005 / 10,000) = 0.07 %,
    one standard deviation. As a rule of thumb, networks that differ by less than twice that may be
    equally good.
    Needs: in_words, title, without_counts.
    """
    metrics = without_counts(result)
    loss = metrics.pop("loss")
    where = title(about, {part: count}, part)
    name = "validation" if part == "val" else part
    log(f"{name} {in_words(metrics)} {where}, loss {loss:.4f}: {of}")


def hardest_classes(confusion, classes, count=3):
    """In words: "5 (98.3 % right), 8 (98.9 % right)", of a matrix int64 (K, K), row = true class.
    Needs: nothing.
    """
    right = confusion.diag() / confusion.sum(1).clamp(min=1)  # (K,)
    right[confusion.sum(1) == 0] = 1  # nothing is known of a class without samples
    hardest = right.argsort(stable=True)[:count]
    return ", ".join(f"{classes[index]} ({100 * right[index]:.1f} % right)" for index in hardest)


def log_end(result, about, split, state, seconds, folder, log):
    """The last lines of a training: how good it is on the test set, what it finds hardest, how long
    it took, what to do next.

    Needs: hardest_classes, report, resume_command, start_command; rank_and_world_size of utils,
    shlex.
    """
    of = f"{folder}/best.pt, of epoch {state['best']['epoch']}"
    report(result, about, split["test"], of, log)
    if "confusion" in result:
        log(f"hardest classes: {hardest_classes(result['confusion'], about['classes'])}")
    trained = sum(row["seconds"] for row in state["metrics"])
    log(f"{seconds:.1f} s from start to end; all epochs together took {trained:.1f} s of training")
    world_size = utils.rank_and_world_size()[1]
    best = shlex.quote(str(folder / "best.pt"))
    log(f"confusion matrix: {start_command(1)} --evaluate {best}")
    log(f"continue: {resume_command(folder, world_size)} --epochs {2 * state['epoch']}")


def evaluate_checkpoint(args, checkpoint, device, log):
    """The verb of --evaluate: loss, accuracy, confusion matrix, and what was taken for what.

                   4     9  right
            4    970    11  98.8%      eleven pictures of a 4 were taken for a 9,
            9      2  1004  99.5%      two of a 9 for a 4

    The data set is the one that the arguments name; shape, classes, mean and standard deviation are
    the checkpoint's. To compare settings, use --split val: a test set that has decided something is
    no longer independent. Training images are read only for that. The most certain mistakes are
    drawn in mistakes.png beside the checkpoint. Needs: NETWORKS, build_model, check_same_kind,
    count_classes, evaluate, evaluation_loader, load_training_data, load_dataset, log_confusions,
    most_samples, prepare, report, save_attention, save_mistakes, trained_on; load_weights and
    rank_and_world_size of utils; data, Path.
    """
    rank, world_size = utils.rank_and_world_size()
    about = trained_on(checkpoint, args.evaluate)
    if args.split == "val":
        _, dataset, _, here, _ = load_training_data(args, log)
    else:
        _, test_part, here = load_dataset(args, False, log, about["shape"])
        few = most_samples(args, world_size)
        dataset = data.Digits(test_part[0][:few], test_part[1][:few], about["classes"])
    check_same_kind(args.evaluate, about, here)
    if here["name"] != about["name"]:
        log(f"{args.evaluate}: trained on {about['name']}, evaluated on {here['name']}")
    model = build_model(args, about)
    utils.load_weights(model, checkpoint["model"], args.evaluate)
    model = prepare(model, args, device, log)
    loader = evaluation_loader(dataset, NETWORKS[args.model]["collate"](args, about), device)

    result = evaluate(model, loader, device, args.amp, count_classes(dataset))
    if "confusion" in result:
        log_confusions(result["confusion"], about["classes"], log)
    collate, folder = loader.collate_fn, Path(args.evaluate).parent
    if rank == 0 and "confusion" in result:
        path = folder / "mistakes.png"
        save_mistakes(path, model, dataset, collate, device, args.amp, log)
    if rank == 0 and args.pictures and args.model == "attention":
        save_attention(folder / "attention.png", model, dataset, collate, device)
    bits = f", weights of {args.quant_bits} bits" if args.quant_bits else ""
    report(result, here, len(dataset), args.evaluate + bits, log, args.split)


def log_confusions(confusion, classes, log, count=5):
    """The matrix as a table, and its largest cells off the diagonal in words: "4 taken for 9: 11".

    Two classes that are taken for each other equally often look alike. Where all the mistakes go
    one way, the answer is rather a class that has more samples, or one whose label was put on
    pictures of the other.

    Needs: confusion_table of utils.
    """
    log(utils.confusion_table(confusion, classes))
    wrong = confusion.clone().fill_diagonal_(0)
    words = []
    for cell in wrong.flatten().argsort(descending=True, stable=True)[:count].tolist():
        true, answer = divmod(cell, len(classes))
        if wrong[true, answer]:
            words.append(f"{classes[true]} taken for {classes[answer]}: {wrong[true, answer]}")
    log(f"most often wrong: {', '.join(words) or 'nothing'}")


@torch.no_grad()
def answers(model, dataset, collate, device, amp="off"):
    """The probabilities that a network gives to all samples of a data set, in order.

    A logit by itself says little, for only the differences between the logits of a sample count;
    softmax makes fractions of 1 of them. These tell how sure the network is, which is not how often
    it is right (Guo et al. 2017). Label smoothing holds it back: of MNIST's digits half get less
    than 0.98, though 99.5 % of the answers are right.

    returns  float (N, K) on the CPU; the network is left in evaluation mode
    Needs: split_batch; make_loader of data, autocast and to_device of utils; torch.
    """
    model.eval()
    parts = []
    for batch in data.make_loader(dataset, 500, collate=collate):
        inputs, _ = utils.to_device(split_batch(batch), device)
        with utils.autocast(device, amp):
            logits = model(inputs)
        parts.append(logits.float().softmax(1).cpu())
    return torch.cat(parts)


def save_mistakes(path, model, dataset, collate, device, amp, log, count=32):
    """Draws the pictures that were wrong with the highest certainty, with true and predicted class.

    These are worth looking at: among them are wrong labels, pictures that nobody can read, and what
    the network has not understood. Needs: answers; save_pictures of data.
    """
    probabilities = answers(model, dataset, collate, device, amp)  # (N, K)
    certainty, predicted = probabilities.max(1)
    # Sorted by the probability of the wrong answer: 0.99 is a mistake of another kind than 0.51.
    wrong = (predicted != dataset.labels).nonzero().flatten()
    worst = wrong[certainty[wrong].argsort(descending=True, stable=True)][:count]
    if not len(worst):
        return log("no mistakes to be drawn")
    names = []
    for index in worst.tolist():
        true, answer = dataset.labels[index], predicted[index]
        names.append(f"{dataset.classes[true]}, not {dataset.classes[answer]}")
    images, _ = dataset.__getitems__(worst)
    data.save_pictures(path, images, captions=names)
    log(f"{path}: {len(worst)} of {len(wrong)} mistakes, the most certain ones first")


@torch.no_grad()
def save_attention(path, model, dataset, collate, device, count=32):
    """Draws the first pictures of a data set, and how much each patch counted. Needs: to_device of
    utils; data, networks, torch.
    """
    images, labels = dataset.__getitems__(range(min(count, len(dataset))))
    tokens, _ = collate((images, labels))
    heat = networks.attention_weights(model.eval(), utils.to_device(tokens, device))
    data.save_pictures(path, images, heat.cpu())


def range_test(
    model, loader, optimizer, scaler, args, device, low=1e-5, high=1.0, steps=100, teacher=None
):
    """Takes up to `steps` steps with a learning rate that grows from `low` to `high`, by the same
    factor in each. Returns the list of (rate, loss).

    A rate that is too small changes nothing, and one that is too large throws the weights away.
    Between the two the loss falls. One run over all rates shows where that is, in seconds:

        2.3 | * * * * * *                        *
            |              *                    *     here it has blown up
            |                 *               *
        0.8 |                     *  *  *  *          the fall has ended
              1e-5    1e-4    1e-3    1e-2    1e-1

    The losses are smoothed, for those of single batches jump: 0.9 of what was before and 0.1 of the
    new one, divided by the weights that have come together so far (as in Adam). It ends early where
    the loss rises above half again its smallest value, or is not finite.

    model, optimizer, scaler and generators are afterwards as they were. Other arguments are those
    of train_one_epoch.

    Smith 2017, arXiv 1506.01186. Needs: backward_window, begin_epoch, draw_window, new_state,
    optimizer_step, training_mode; restore and snapshot of utils; math.
    """
    before = utils.snapshot(model, optimizer, scaler, {}, device)
    peak = optimizer.param_groups[0]["lr"]
    state = new_state()
    batches = begin_epoch(loader, state)
    training_mode(model)
    curve = []
    smooth = 0.0
    for step in range(steps):
        window = draw_window(batches, args.accum, 0)
        if not window:  # the data are fewer than the steps: once more
            state["epoch"] += 1
            batches = begin_epoch(loader, state)
            window = draw_window(batches, args.accum, 0)
        count = sum(real for _, _, real in window)
        rate = low * (high / low) ** (step / (steps - 1))
        optimizer.zero_grad(set_to_none=True)
        sums = backward_window(model, window, count, scaler, args, device, teacher)
        optimizer_step(model, optimizer, scaler, rate / peak, args.clip)
        smooth = 0.9 * smooth + 0.1 * sums["loss"].item() / count
        loss = smooth / (1 - 0.9 ** (step + 1))
        if not math.isfinite(loss):
            break
        curve.append((rate, loss))
        if loss > 1.5 * min(loss for _, loss in curve):
            break
    optimizer.zero_grad(set_to_none=True)
    utils.restore(before, model, optimizer, scaler, None, device)
    return curve


def suggested_rate(curve):
    """The peak learning rate that a range test suggests: where the loss has made four fifths of its
    fall. UserError if it did not fall.

    The rate of the smallest loss is too large: it is the last one before the loss rises. Where it
    falls most steeply is too small, often by ten. Four fifths lie between the two, some three to
    six times below the end of the fall; and warm-up and decay spare most steps the peak.

    curve  list of (rate, loss), see range_test. Needs: UserError of utils.
    """
    first = curve[0][1] if curve else 0
    least = min((loss for _, loss in curve), default=0)
    if not curve or first - least < 0.02 * abs(first):
        raise utils.UserError(
            "--find-lr: the loss did not fall at any rate; see --overfit for what may be wrong"
        )
    return next(rate for rate, loss in curve if loss <= first - 0.8 * (first - least))


def find_lr(args, checkpoint, device, log):
    """The verb of --find-lr: a range test, its curve, and the command that trains with the rate
    which it suggests.

    Two runs with the default flags and two widths, for what it is worth: the wider network is given
    the smaller rate, as it should be.

        --width 8     suggested: --lr 4.3e-02
        --width 64    suggested: --lr 5.3e-03

    Needs: begin_training, range_test, start_command, suggested_rate, words_given; UserError,
    draw_curves and rank_and_world_size of utils; save_curve of data; Path.
    """
    if utils.rank_and_world_size()[1] > 1:
        raise utils.UserError("--find-lr: in one process; the rate is the same for several")
    model, optimizer, scaler, (loader, _, _), teacher, _, _ = begin_training(
        args, checkpoint, device, log
    )
    curve = range_test(model, loader, optimizer, scaler, args, device, teacher=teacher)
    log("\n".join(utils.draw_curves({"loss, by learning rate": curve}, log_x=True)))
    path = Path(args.out or ".") / "find-lr.png"
    data.save_curve(path, curve)
    rate = f"{suggested_rate(curve):.1e}"
    log(f"{len(curve)} steps; the curve: {path}")
    log(f"suggested: {start_command(1)} {words_given(args, 'find_lr', 'lr')}--lr {rate}")


def words_given(args, *left_out):
    """The flags that stood on the command line, as one would type them, but for those left out:
    "--dataset sample --no-augment ", with a space at the end.

    Needs: flag_of, shlex.
    """
    words = []
    for name in args.given:
        if name in left_out:
            continue
        value = getattr(args, name)
        words.append(flag_of(name, value))
        if not isinstance(value, bool):
            words.append(shlex.quote(str(value)))
    return "".join(word + " " for word in words)


def overfit(args, checkpoint, device, log):
    """The verb of --overfit: can this network learn N samples by heart? Returns the exit status.

    Before a long training there is a short one that must succeed. A few samples without
    augmentation, dropout and other help against overfitting are learnt by heart by any network
    that works. If it cannot do that, more data, more epochs and another learning rate are of no
    use: then something is broken, and with a few samples it is found in seconds.

        it can learn: 64 samples by heart in 14 steps, loss 0.0063

        it cannot learn: after 300 steps with 64 samples the loss is 2.3026
        what to check, in this order:
        1. inputs: as it should be
        2. targets: as it should be
        3. outputs: as it should be
        4. gradients: none in conv1.weight, conv1.bias: detach, no_grad or a frozen layer ...

    Needs: begin_model, learn_by_heart, load_training_data, what_is_broken, NETWORKS; UserError and
    build_optimizer of utils; data, torch.
    """
    args.augment, args.dropout, args.label_smoothing, args.weight_decay = False, 0.0, 0.0, 0.0
    args.warmup, args.schedule, args.accum = 0.0, "constant", 1
    if args.stream:
        raise utils.UserError("--overfit: not with --stream; a few samples fit into memory")
    train_set, _, _, about, _ = load_training_data(args, log)
    count = min(args.overfit, len(train_set))
    chosen = torch.linspace(0, len(train_set) - 1, count).long()  # evenly: of all classes
    few = data.Digits(train_set.images[chosen], train_set.labels[chosen], train_set.classes)
    collate = NETWORKS[args.model]["collate"](args, about)
    loader = data.make_loader(few, min(args.batch_size, count), collate=collate)
    model = begin_model(args, about, checkpoint, device, log)
    optimizer = utils.build_optimizer(model, args)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    steps, loss = learn_by_heart(model, loader, optimizer, args, device)
    if loss < 0.01:
        log(f"it can learn: {count} samples by heart in {steps} steps, loss {loss:.4f}")
        return 0
    log(f"it cannot learn: after {steps} steps with {count} samples the loss is {loss:.4f}")
    log("what to check, in this order:")
    for number, (what, fault) in enumerate(
        what_is_broken(model, loader, before, args, device).items(), 1
    ):
        log(f"{number}. {what}: {fault or 'as it should be'}")
    return 1


def learn_by_heart(model, loader, optimizer, args, device, most_steps=300, goal=0.01):
    """Trains on the few samples of `loader` until the loss is below `goal`. Returns (steps, loss).

    0.01 is a probability of 99 % for each true class: chance does not get there. A loss that is not
    finite is returned as NaN, and is a failure like any other. Needs: new_state, silent,
    train_one_epoch; NotFinite of utils; math, torch.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = new_state()
    loss = math.inf
    while state["step"] + state["skipped"] < most_steps and not loss < goal:
        try:
            row = train_one_epoch(model, loader, optimizer, scaler, state, args, device, silent)
        except utils.NotFinite:
            return state["step"], math.nan
        loss = row["train_loss"]
    return state["step"], loss


def what_is_broken(model, loader, before, args, device):
    """Looks for the classic reasons why a network does not learn, in the order of a step: what
    comes in, what it is compared with, what comes out, the gradient, the weights.

        inputs      all alike: the network can only learn how frequent each class is
        targets     another one each time, as when images and labels are shuffled apart: the same
        outputs     softmax twice: the largest logit is 1 and the smallest 0, so with ten classes
                    the loss cannot fall below log(1 + 9 / e) = 1.46
        gradients   a layer that gets none stays what chance has made of it
        weights     gradients come, and nothing moves

    The first fault is the one to mend first: it may be the cause of those after it.

    loader  gives the same samples in the same order each time
    before  {name: value} of the parameters before they were trained
    returns {what was looked at: what is wrong with it, or None}
    Needs: backward_window, split_batch; tensors_of and to_device of utils; torch.
    """
    faults = {}
    first, second = ([split_batch(batch) for batch in loader] for _ in range(2))
    inputs, targets = utils.to_device(first[0], device)
    rows = [tensor.flatten(1) for tensor in utils.tensors_of(inputs) if tensor.ndim > 1]
    alike = all(torch.equal(each, each[:1].expand_as(each)) for each in rows)
    faults["inputs"] = "all of them are equal: look at how they are loaded" if alike else None

    changed = 0
    for (_, one), (_, other) in zip(first, second):
        changed += (one != other).sum().item()
    fault = f"{changed} of them have changed from one pass to the next, and the inputs have not"
    faults["targets"] = fault if changed else None

    model.eval()
    with torch.no_grad():
        outputs = model(inputs).float()
    sums = outputs.flatten(1).sum(1)
    is_softmax = outputs.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    fault = "they are probabilities; the loss takes logits, and has a softmax of its own"
    faults["outputs"] = fault if is_softmax else None

    model.train()
    model.zero_grad(set_to_none=True)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    backward_window(model, [(inputs, targets, len(targets))], len(targets), scaler, args, device)
    without = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            without.append(name)
    fault = f"none in {', '.join(without)}: detach, no_grad or a frozen layer cuts it off"
    faults["gradients"] = fault if without else None

    still = [name for name, value in model.named_parameters() if torch.equal(before[name], value)]
    still = [name for name in still if name not in without]
    fault = f"{', '.join(still)} have not moved: a learning rate of 0, or not in the optimizer"
    faults["weights"] = fault if still else None
    if not any(faults.values()):
        faults["learning rate and size"] = "nothing else is wrong: try --find-lr, a larger --width"
    return faults


def pictures_in(paths):
    """The files that `paths` name: files as they are, of folders all files but the system's own.

    Files that are no pictures are among them: to pass one over in silence would be worse than a
    line that says so. UserError for a folder without a file. Needs: list_pictures of data,
    UserError of utils, Path.
    """
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        pictures, others = data.list_pictures(path)
        if not pictures and not others:
            raise utils.UserError(f"{path}: no picture in it")
        files += pictures + others
    return files


def predict(args, checkpoint, device, log):
    """The verb of --predict: for each picture its class, the probability, and the next best.

        a.png: 7 (99.2 %), or 1 (0.5 %)
        notes.txt: is not a picture of a kind that PIL reads

    A checkpoint knows all that this takes: which network, which pictures, how to normalize them,
    and what the classes are called. A network that has learnt MNIST's digits has seen white ink on
    black, 20 pixels high, in the centre; a photo is none of that, and data.read_digit makes it so,
    unless --raw-images says that the pictures are prepared. Returns the exit status: 1 if a picture
    could not be read; the others are answered all the same. Needs: NETWORKS, answers, build_model,
    answer_in_words, pictures_in, prepare, silent, trained_on; load_weights of utils; DataError,
    Digits, read_digit and read_picture of data; json, partial, torch.
    """
    path, *paths = args.predict
    about = trained_on(checkpoint, path)
    model = build_model(args, about)
    utils.load_weights(model, checkpoint["model"], path)
    model = prepare(model, args, device, silent)
    collate = NETWORKS[args.model]["collate"](args, about)
    # One bad picture does not spoil the answers for the others: its reason stands in its line.
    read = partial(data.read_picture, shape=about["shape"])
    if about["name"] in ("MNIST", "sample") and not args.raw_images:
        read = data.read_digit
    images, reasons = {}, {}
    for file in pictures_in(paths):
        try:
            images[file], reasons[file] = read(file), None
        except data.DataError as error:
            reasons[file] = str(error)
    found = {}
    if images:
        labels = torch.zeros(len(images), dtype=torch.int64)  # nobody knows them
        dataset = data.Digits(torch.stack(list(images.values())), labels, about["classes"])
        found = dict(zip(images, answers(model, dataset, collate, device, args.amp)))
    for file, reason in reasons.items():
        if reason is None:
            log(answer_in_words(file, found[file], about["classes"], args.json))
        elif args.json:
            log(json.dumps({"file": str(file), "error": reason}))
        else:
            log(reason)
    return 1 if len(found) < len(reasons) else 0


def answer_in_words(file, probabilities, classes, as_json):
    """One line: "a.png: 7 (99.2 %), or 1 (0.5 %)", or the same as a JSON object. Needs: json."""
    best = probabilities.argsort(descending=True)[:2].tolist()
    ranked = [(classes[index], round(probabilities[index].item(), 4)) for index in best]
    if as_json:
        name, probability = ranked[0]
        answer = {"file": str(file), "class": name, "probability": probability}
        return json.dumps({**answer, "next": dict(ranked[1:])}, ensure_ascii=False)
    words = [f"{name} ({100 * probability:.1f} %)" for name, probability in ranked]
    return f"{file}: {', or '.join(words)}"


def export_checkpoint(args, checkpoint, log):
    """The verb of --export: a file for other programs beside the checkpoint. It reads no data set.

        --format       file                  for
        export         best.pt2              programs that have torch, and not this code
        onnx           best.onnx             runtimes in many languages, without torch
        torchscript    best.torchscript.pt   old programs that read nothing else
        int8           best.int8.pt          this program: weights of a quarter of the size

    What is exported takes pictures as they come, and answers with logits (see section 7 of utils).
    Two things differ from the network that was trained. Weights of few bits are rounded once, and
    stored as the floats that they stand for. And attention gets all patches with a mask, for an
    exported graph cannot have a shape that depends on pixels. So the file has to show that it
    answers as the network in training does, with the collate function of training. Only then it is
    written; a failure before that leaves nothing behind.

    Needs: NETWORKS, export_integers, load_network, pictures_to_check, prepared, trained_on; utils,
    copy, networks, Path.
    """
    about = trained_on(checkpoint, args.export)
    if args.format == "int8":
        return export_integers(args, checkpoint, about, log)
    ending, make = utils.EXPORTS[args.format]
    path = Path(args.export).with_suffix(ending)
    if path == Path(args.export):
        raise utils.UserError(f"--export {path}: the file to be written would have the same name")
    if args.format == "torchscript":
        log("PyTorch retires TorchScript; torch.export replaces it: --format export")
    model = load_network(args, about, checkpoint["model"], args.export)
    as_floats = copy.copy(args)
    as_floats.quant_bits = 0
    rounded = networks.unpack_weights(networks.pack_weights(model))
    exported = load_network(as_floats, about, rounded, args.export)

    network = NETWORKS[args.model]
    collate = network["collate"](args, about)
    collate_exported = network.get("export", network["collate"])(args, about)
    content, answer = make(prepared(exported, collate_exported), about["shape"], about["classes"])
    images = pictures_to_check(about)
    difference = utils.check_same_answers(answer, prepared(model, collate), images)
    utils.write_atomically(path, lambda file: file.write(content))
    log(
        f"{path}: {len(content):,} bytes; takes uint8 (B, {', '.join(map(str, about['shape']))}); "
        f"checked on {len(images)} pictures in batches of 1, 2 and 5: logits differ by at most "
        f"{difference:.1e}"
    )


def export_integers(args, checkpoint, about, log):
    """--format int8: the weights as integers of few bits.

    A weight of 8 bits takes a quarter of the room of a float32, one of 2 bits a sixteenth. The
    default network has 421,642 of them:

        float32   1.69 MB     8 bits   0.42 MB     2 bits   0.11 MB

    What is written is again a checkpoint, which --evaluate and --init read: it has the same
    arguments and the same `about`. It buys a small file, no faster answers: the integers become
    floats when they are read. The price is rounding. How far the logits move is measured, against
    the network as it was trained, and said.

    Needs: NETWORKS, load_network, pictures_to_check, prepared, stored_arguments;
    largest_difference and save_checkpoint of utils; copy, networks, Path.
    """
    before = copy.copy(args)
    if "quant_bits" in args.given:  # not what the training knew: that computed with floats
        before.quant_bits = 0
    args.quant_bits = args.quant_bits or 8
    model = load_network(args, about, checkpoint["model"], args.export)
    as_trained = load_network(before, about, checkpoint["model"], args.export)
    path = Path(args.export).with_suffix(f".int{args.quant_bits}.pt")
    # Weights that are rounded once need no rounding when they are read.
    arguments = {**stored_arguments(args), "quant_bits": 0}
    packed = {
        "model": networks.pack_weights(model),
        "args": arguments,
        "data": about,
        "classes": about["classes"],
    }
    collate = NETWORKS[args.model]["collate"](args, about)
    difference, largest = utils.largest_difference(
        prepared(model, collate), prepared(as_trained, collate), pictures_to_check(about)
    )
    utils.save_checkpoint(path, packed)
    size = path.stat().st_size
    full = 4 * networks.count_parameters(model)
    log(
        f"{path}: {size:,} bytes, {size / full:.3f} of its weights in float32; logits, of up to "
        f"{largest:.1f}, differ from those as trained by at most {difference:.1e}"
    )


def load_network(args, about, weights, path):
    """The network of the arguments with the weights of the checkpoint `path`, in evaluation mode.

    Needs: build_model; load_weights of utils.
    """
    model = build_model(args, about)
    utils.load_weights(model, weights, path)
    return model.eval()


def prepared(model, collate):
    """A network with its collate function before it: pictures uint8 (B, C, H, W) in, logits out.

    Needs: inputs_of; WithPreparation of utils, partial.
    """
    return utils.WithPreparation(model, partial(inputs_of, collate=collate)).eval()


def inputs_of(images, collate):
    """What a collate function makes of pictures float (B, C, H, W) in 0..1 that have no labels.

    Needs: split_batch.
    """
    inputs, _ = split_batch(collate((images, None)))
    return inputs


def pictures_to_check(about):
    """Pictures uint8 (n, C, H, W) on which an exported network is compared with its checkpoint.

    Two networks that compute the same do so on any picture. Made ones, more than there are classes,
    go from noise all over to black: so attention meets every number of tokens, none included. If
    they fit, one of the sample's digits of each class is added. Needs: SAMPLE and load_mnist of
    data, torch.
    """
    count = max(len(about["classes"]), 5)
    height = about["shape"][1]
    generator = torch.Generator().manual_seed(0)
    shape = (count + 1, *about["shape"])
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for index, image in enumerate(images):
        rows = height * (count - index) // count  # all of them in the first, none in the last
        image[:, rows:] = 0
    if about["shape"] == [1, 28, 28]:
        digits, labels, classes = data.load_mnist(data.SAMPLE, train=False)
        first = [labels.tolist().index(label) for label in range(len(classes))]
        images = torch.cat([images, digits[first]])
    return images


def main(argv=None):
    """Reads the arguments, sets up device and ranks, and calls one verb.

    The order matters. A checkpoint that is named is read first, for its arguments are defaults, so
    the command line is read once more after it. Then comes the device, and then the ranks, each of
    which needs a GPU of its own; then the seeds, before anything is drawn:

        arguments -> checkpoint -> arguments -> device -> ranks -> precision, workers, seeds -> verb

    Each process that torchrun has started runs this from the first line to the last;
    init_distributed makes ranks of them. Each rank has a seed of its own, so that dropout drops
    other units in each.
    """
    with utils.one_line(utils.UserError, data.DataError):
        # A locale may lack the letters of a folder's name: they are printed escaped then. Not every
        # output can be told so: a notebook's is no file.
        with suppress(AttributeError, OSError, ValueError):
            sys.stdout.reconfigure(errors="backslashreplace")
        args = parse_args(argv)
        if args.tensorboard:
            summary_writer()  # a missing package is said now, and not when all has been loaded
        checkpoint = None
        path = args.resume or args.evaluate or args.init or args.export
        if args.predict:
            path = args.predict[0]
        if path:
            checkpoint = utils.load_checkpoint(path, bare=bool(args.init))
            check_stored(checkpoint, path)
            checkpoint["model"] = unpack_weights(checkpoint["model"], path)
            # --init takes weights into a run of its own; all others go on with the same arguments.
            if not args.init:
                args = parse_args(argv, checkpoint.get("args"), path)
        # First the device, then the ranks: each needs a GPU of its own.
        device = utils.pick_device(args.device)
        rank, world_size, device = utils.init_distributed(device)
        log = utils.show if rank == 0 else silent
        args.asked = {"amp": args.amp, "workers": args.workers}
        args.amp = utils.pick_amp(args.amp, device)
        args.workers = utils.pick_workers(args.workers, device)
        utils.keep_freed_memory()
        utils.set_seed(data.mix(args.seed, rank), args.deterministic)
        utils.set_float32_precision(device, args.deterministic)
        for line in without_effect(args):
            log(line)
        if args.export:
            export_checkpoint(args, checkpoint, log)
        elif args.evaluate:
            evaluate_checkpoint(args, checkpoint, device, log)
        elif args.predict:
            sys.exit(predict(args, checkpoint, device, log))
        elif args.find_lr:
            find_lr(args, checkpoint, device, log)
        elif args.overfit:
            sys.exit(overfit(args, checkpoint, device, log))
        else:
            train(args, checkpoint, device, log)


def silent(line, over=False):
    """What ranks other than the first log to: else each line would come once from each of them.

    Needs: nothing.
    """


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # before the training or in --evaluate: there is nothing to save
        sys.exit(130)
    finally:
        utils.leave_distributed()
