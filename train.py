"""Trains a neural network on MNIST.

python train.py --epochs 10                                    train; everything else has a default
python train.py --resume runs/mnist-cnn-1/last.pt              go on, from any step, as if nothing had happened
python train.py --evaluate runs/mnist-cnn-1/best.pt            loss, accuracy and confusion matrix of the test set
python train.py --dry-run                                      a few batches of everything, from end to end
torchrun --standalone --nproc-per-node 2 train.py --epochs 10  several processes, the same flags

A run leaves a folder under runs/: best.pt and last.pt (weights and state), metrics.csv (one row per epoch),
run.json (arguments, versions, data, final figures). To train another network, change build_model.
Letters: B samples in a batch, K classes. "Needs" in a docstring: what to copy along with the function.
"""

import argparse
import copy
import math
import signal
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
from torch.utils.data import IterableDataset

import data
import model as networks
import utils

DEFAULTS = {"cnn": {"width": 32, "dropout": 0.25}, "attention": {"width": 64, "dropout": 0.0}}  # by model


def parse_args(argv=None, stored=None):
    """The command line over `stored`, a checkpoint's arguments. A wrong value: one line, status 2. Needs: DEFAULTS."""
    parser = argparse.ArgumentParser(
        usage="python train.py [flags]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: parser.exit(2, f"train.py: error: {message} (see --help)\n")
    count, whole, share = utils.number(int, 1, 10**9), utils.number(int, 0, 10**9), utils.number(float, 0, 1)
    switch = {"default": False, "action": argparse.BooleanOptionalAction}

    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="auto", choices=("auto", "mnist", "fashion-mnist", "sample"),
        help="auto (default) is mnist if it is in --data-dir or can be downloaded, else the bundled sample")
    add("--data-dir", default="data", metavar="DIR", help="where data sets lie or are downloaded to (default data)")
    add("--val-size", default=5000, type=whole, metavar="N", help="held out, at most a twelfth; 0: none (default 5000)")
    add("--workers", default=0, type=utils.number(int, 0, 256), help="processes that load data; 0: none (default 0)")
    add("--augment", **switch | {"default": True}, help="shift, turn and scale the training images (default on)")
    add("--balanced", **switch, help="draw all classes equally often, repeating (default off)")
    add("--stream", **switch, help="read training images batch by batch, for files larger than memory (default off)")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="cnn", choices=tuple(DEFAULTS), help="convolutions (default) or attention over patches")
    add("--width", type=count, metavar="C", help="of the first layer, or of a token (default 32, attention 64)")
    add("--dropout", type=utils.number(float, 0, 0.99), help="of hidden units; 0: off (default 0.25, attention 0)")
    add("--norm", default="none", choices=("none", "batch", "group"), help="cnn: after convolutions (default none)")
    add("--tokens", default="packed", choices=("packed", "padded", "all"),
        help="attention: patches with ink, in one row (default) or padded to the longest of the batch; or all patches")
    add("--attention-kernel", default="fused", choices=("manual", "fused"), help="by hand, or by SDPA (default)")
    add("--quant-bits", default=0, type=int, choices=(0, *range(2, 9)), help="weights of N bits; 0: float (default 0)")
    add("--grad-checkpoint", **switch, help="attention: compute blocks twice instead of keeping them (default off)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", default=10, type=count, metavar="N", help="passes over the training set (default 10)")
    add("--batch-size", default=128, type=count, metavar="B", help="samples per forward pass and process (default 128)")
    add("--accum", default=1, type=count, metavar="N", help="batches whose gradients add up to one step (default 1)")
    add("--lr", default=4e-3, type=utils.number(float, 1e-9, 1000), help="peak learning rate (default 4e-3)")
    add("--weight-decay", default=0.05, type=utils.number(float, 0, 1000), help="of weights; 0: off (default 0.05)")
    add("--schedule", default="cosine", choices=("cosine", "step", "one-cycle", "plateau", "constant"),
        help="learning rate after the warm-up (default cosine)")
    add("--warmup", default=0.1, type=share, help="share of all steps in which the rate rises; 0: off (default 0.1)")
    add("--label-smoothing", default=0.05, type=share, help="share of a target for all classes; 0: off (default 0.05)")
    add("--clip", default=1.0, type=utils.number(float, 0, 10**9), help="largest gradient norm; 0: off (default 1)")

    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", metavar="DEV", help="cpu, cuda, mps, xpu (default auto: cpu if there is no other)")
    add("--amp", choices=("off", "fp16", "bf16"), help="mixed precision (default bf16 on a GPU that has it, else off)")
    add("--sync-bn", **switch, help="batch norm over the batches of all GPUs (default off)")
    add("--compile", **switch, help="torch.compile: a slow start, for a faster GPU (default off)")
    add("--channels-last", **switch | {"default": True}, help="NHWC in memory, faster than NCHW (default on)")
    add("--deterministic", **switch, help="reproducible on a GPU too, but slower (default off)")

    add = (group := parser.add_argument_group("run")).add_argument
    add("--out", metavar="DIR", help="the run's folder (default runs/<data>-<model>-<n>, the next free n)")
    add("--seed", default=0, type=utils.number(int, 0, 2**32 - 1), help="of all random numbers (default 0)")
    add("--dry-run", action="store_true", help="one epoch of two training batches, then a small test (default off)")
    add("--pictures", **switch, help="--evaluate attention: save where it looked, attention.png (default off)")
    add("--save-every", default=0, type=whole, metavar="N", help="write last.pt every N steps, too; 0: off (default 0)")
    add("--teacher", metavar="CKPT", help="learn from the answers of this model, too (default none)")
    add("--format", default="int8", choices=("int8",), help="int8 (default): integers of --quant-bits, else 8")
    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", metavar="CKPT", help="go on from this checkpoint; its arguments are the defaults (default none)")
    add("--init", metavar="CKPT", help="begin with the weights of this checkpoint that fit (default none)")
    add("--export", metavar="CKPT", help="do not train; write its weights in --format, beside it (default none)")
    add("--evaluate", metavar="CKPT", help="do not train; evaluate this checkpoint on the test set (default none)")
    parser.set_defaults(**(stored or {}))
    args = parser.parse_args(argv)
    vars(args).update({key: value for key, value in DEFAULTS[args.model].items() if getattr(args, key) is None})
    if args.norm == "batch" and args.batch_size == 1 and args.model == "cnn":
        parser.error("--norm batch: a batch of 1 is its own mean; take --norm group or a larger --batch-size")
    if args.balanced and args.stream:
        parser.error("--balanced: cannot draw from a --stream, which reads in order")
    return args


def build_model(args, classes):
    """The network, on the CPU: a fork changes this function. `classes` is the list of K names."""
    if args.model == "attention":
        model = networks.AttentionClassifier(
            args.width, args.dropout, len(classes), args.attention_kernel, args.grad_checkpoint
        )
    else:
        model = networks.SimpleCNN(args.width, args.dropout, len(classes), args.norm)
    return networks.quantize(model, args.quant_bits) if args.quant_bits else model


def collate_of(args, mean, std):
    """The collate function that feeds the network."""
    if args.model == "cnn":
        return partial(data.collate_images, mean=mean, std=std)
    if args.tokens == "packed":
        return partial(data.collate_packed, mean=mean, std=std)
    return partial(data.collate_tokens, mean=mean, std=std, blank=args.tokens == "all")


# ---------------------------------------------------------------------------------------------------- the loop

LOSS, CORRECT, SAMPLES, NORM, TAKEN, FINITE = range(6)  # what is summed over an epoch, in one tensor on the device


def train_one_epoch(model, loader, optimizer, scaler, state, args, device, show=print, after_step=None, teacher=None):
    """Trains for one epoch and returns its metrics as a dict. Needs: LOSS.

    loader   pairs of what the model takes and labels int64 (B,); its sampler, or its stream, has set_epoch
    state    where the run is, see utils.new_state; up to date whenever after_step is called, and can be saved there
    args     accum, lr, warmup, schedule, label_smoothing, clip, amp
    teacher  a model in eval mode, without gradients, whose answers are targets, too
    FloatingPointError, with epoch and step, if the loss or the gradient is not finite.
    """
    model.train()
    order = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    order.set_epoch(state["epoch"])  # without it every epoch has the order of the first
    if hasattr(loader.dataset, "set_epoch"):  # and the draws of the first
        loader.dataset.set_epoch(state["epoch"])
    batches = iter(loader)
    if state["batch"]:  # a resumed epoch: pass over what was trained on before it stopped
        rng = utils.rng_state(device)
        for _ in islice(batches, state["batch"]):
            continue
        utils.set_rng_state(rng, device)  # passing over must not advance the generators, whatever a transform draws
    sums = torch.zeros(6) if state["sums"] is None else state["sums"]
    sums = state["sums"] = sums.to(device, torch.float32 if device.type == "mps" else torch.float64)
    started = printed = time.perf_counter()
    waited, seen, first = 0.0, 0, math.ceil(state["batch"] / args.accum)
    windows = first + math.ceil((len(loader) - state["batch"]) / args.accum)

    for index in range(first, windows):
        # The whole window is drawn first: the number of its samples must be known before the first backward pass.
        before = time.perf_counter()
        window = list(islice(batches, args.accum))  # at the end of an epoch a short one: dropped batches are lost data
        waited += time.perf_counter() - before
        if index == windows - 1 and getattr(order, "padding", 0):
            window[-1][1][-order.padding :] = -100  # cross_entropy leaves out the sample that fills up this rank's epoch
        count = sum((labels >= 0).sum().item() for _, labels in window)
        counts = utils.gather_over_ranks(count) if index == windows - 1 else [count]  # before the last all are equal
        seen += count

        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for position, batch in enumerate(window):
            inputs, labels = utils.to_device(batch, device)  # such as (B, 1, 28, 28), (B,)
            # Processes exchange gradients in the backward pass of the window's last batch; before it they only add up.
            exchange = position == len(window) - 1 or not dist.is_initialized()
            with nullcontext() if exchange else model.no_sync():
                with utils.autocast(device, args.amp):
                    logits = model(inputs)  # (B, K)
                    wanted = teacher(inputs) if teacher else None  # (B, K)
                logits = logits.float()  # a softmax in 16 bits is off in the third digit
                loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=args.label_smoothing)
                if teacher:
                    loss = loss + utils.distillation(logits * (real := (labels >= 0)[:, None]), wanted.float() * real)
                # Sum over the samples / count of the window = the mean over the window, exactly. The usual
                # mean-of-batch / accum gives a sample more weight in a short batch, and too little in a short window.
                # DDP takes the mean over ranks: with the ranks' mean count that is the mean over all their samples.
                scaler.scale(loss * len(counts) / sum(counts)).backward()
            loss_sum += loss.detach()
            sums[CORRECT] += (logits.detach().argmax(1) == labels).sum()

        total = state["total_steps"]
        lr = utils.lr_at(state["step"], total, args.lr, args.warmup * total, args.schedule, state["drops"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.unscale_(optimizer)  # first: the bound is on the gradient, not on 65,536 times the gradient
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)  # inf: measure, do not clip
        scale = scaler.get_scale()  # in fp16 this waits for the device; else it is a constant
        scaler.step(optimizer)  # takes no step if a gradient has overflowed in fp16
        scaler.update()
        taken = scaler.get_scale() >= scale  # the scaler lowers its scale when it has skipped, and only then
        state["step"] += taken  # so a skipped step does not advance the schedule
        state["skipped"] += not taken
        state["batch"] += len(window)

        # NaN and infinity stay in a sum, so FINITE stops counting at the first, and looking at it can wait for the next
        # line that is printed: .item(), print(loss) and `if loss > x` halt a loop that runs ahead of the GPU.
        sums[LOSS] += loss_sum
        sums[SAMPLES] += count
        sums[NORM] += norm if taken else 0.0
        sums[TAKEN] += taken
        sums[FINITE] += torch.isfinite(sums[LOSS] + sums[NORM])
        now = time.perf_counter()
        if now - printed > (0.2 if sys.stdout.isatty() else 5.0):
            printed = now
            loss, accuracy, _ = utils.finite_means(sums, state["epoch"])
            passed = now - started
            left = round(passed / (index + 1 - first) * (total - state["epoch"] * windows - index - 1))
            show(f"step {index + 1}/{windows} loss {loss:.3f} acc {100 * accuracy:.1f} % lr {lr:.1e} "
                 f"{seen / passed:.0f} images/s data {100 * waited / passed:.0f} % {left // 60}:{left % 60:02} left")
        if after_step:
            after_step()

    utils.finite_means(sums, state["epoch"])  # before ranks are summed: this one's FINITE is the number of the step
    seconds = time.perf_counter() - started  # since the resume, if there was one in this epoch
    loss, accuracy, norm = utils.finite_means(utils.sum_over_ranks(sums.clone()), state["epoch"])
    return {
        "epoch": state["epoch"] + 1, "step": state["step"], "skipped": state["skipped"],
        "lr": optimizer.param_groups[0]["lr"], "train_loss": loss, "train_accuracy": accuracy, "grad_norm": norm,
        "seconds": seconds, "waiting": waited / seconds,
        "images_per_second": sum(utils.gather_over_ranks(seen)) / seconds,
    }


@torch.no_grad()  # keeps no graph. eval() is another thing, it turns dropout off: evaluation needs both
def evaluate(model, loader, device, amp="off"):
    """Mean loss and accuracy over the samples of all ranks, as a dict. FloatingPointError if the loss is not finite.

    Also "samples", their number, and "confusion", int64 (K, K): how often label i (row) was taken for class j (column).
    Ranks bring different samples, none twice. The model is left in the mode in which it came.
    """
    training, K = model.training, len(loader.dataset.classes)
    model.eval()
    loss = torch.zeros((), device=device)
    confusion = torch.zeros(K * K, dtype=torch.int64, device=device)
    for batch in loader:
        inputs, labels = utils.to_device(batch, device)
        with utils.autocast(device, amp):
            logits = model(inputs)  # (B, K)
        logits = logits.float()
        loss += F.cross_entropy(logits, labels, reduction="sum")  # no label smoothing: that is a means of training
        confusion += torch.bincount(labels * K + logits.argmax(1), minlength=K * K)
    model.train(training)
    confusion = utils.sum_over_ranks(confusion).view(K, K).cpu()
    samples = confusion.sum().item()
    loss, accuracy = utils.sum_over_ranks(loss).item() / samples, confusion.diag().sum().item() / samples
    if not math.isfinite(loss):
        raise FloatingPointError(f"evaluation: loss {loss}, from weights or pixels that are not finite")
    return {"loss": loss, "accuracy": accuracy, "samples": samples, "confusion": confusion}


# ---------------------------------------------------------------------------------------------------- the program


def main(argv=None):
    """The program, in the order of time: arguments, data, model, arithmetic, epochs, test."""
    args, checkpoint = parse_args(argv), None
    with utils.one_line(ValueError, OSError):
        if path := args.resume or args.evaluate or args.init or args.export:
            checkpoint = utils.load_checkpoint(path)
            checkpoint["model"] = networks.unpack_weights(checkpoint["model"])
            if not args.init:
                args = parse_args(argv, checkpoint.get("args"))
        once = ("device", "out", "dry_run", "resume", "init", "evaluate", "export")  # of one start alone: not stored
        stored = {key: value for key, value in vars(args).items() if key not in once}
        device = utils.pick_device(args.device)
        rank, world_size, device = utils.init_distributed(device)
        say = utils.show if rank == 0 else lambda *_, **__: None
        args.amp = utils.pick_amp(args.amp, device)
        utils.keep_freed_memory()
        utils.set_seed(args.seed + rank, args.deterministic)  # ranks drop different units; DDP gives them equal weights

        if args.export:
            args.quant_bits = args.quant_bits or 8
            model = build_model(args, checkpoint.get("classes", range(10)))
            utils.load_weights(model, checkpoint["model"], path)
            path = Path(args.export).with_suffix(f".int{args.quant_bits}.pt")
            packed = {"model": networks.pack_weights(model), "args": stored | {"quant_bits": 0}}
            utils.save_checkpoint(path, packed | {"classes": checkpoint.get("classes")})
            size, full = path.stat().st_size, 4 * networks.count_parameters(model)
            return say(f"{path}: {size:,} bytes, {size / full:.3f} of its weights in float32")

        (images, labels), test, about = data.load_dataset(
            args.dataset, args.data_dir, True, utils.once_per_machine, say
        )
        name, classes = about["name"], about["classes"]
        few = 2 * args.batch_size * world_size if args.dry_run else None  # [:None] is everything
        test_set = data.Digits(test[0][:few], test[1][:few], classes)
        N = len(images[:few])
        if args.stream:  # held out evenly from the whole file: a list of what is left would grow with it
            val_part = torch.linspace(0, N - 1, min(args.val_size, N // 12), dtype=torch.float64).long()
            raw = (data.SAMPLE / "MNIST" if name == "sample" else Path(args.data_dir) / name) / "raw"
            files = [raw / file for file in data.IDX_FILES[:2]]
            train_set = data.DigitStream(files, N, args.batch_size, val_part, args.augment, args.seed, world_size, rank)
            val_set = torch.cat([data.read_idx(files[0], 3)[part] for part in val_part.split(8)]).unsqueeze(1)  # few pages
        else:
            train_part, val_part = data.split_validation(N, args.val_size, args.seed)
            train_set = data.Digits(images[train_part], labels[train_part], classes, args.augment, args.seed)
        val_set = data.Digits(val_set if args.stream else images[val_part], labels[val_part], classes)
        sizes = {"train": N - len(val_set), "val": len(val_set), "test": len(test_set)}
        facts = {"name": name, **sizes, "seed": args.seed, "stream": args.stream}
        if args.schedule == "plateau" and not len(val_set) and not args.evaluate:
            raise ValueError("--schedule plateau: needs a validation set, see --val-size and --dry-run")
        model = build_model(args, classes)
        if args.init:
            utils.load_matching(model, checkpoint["model"], say)
        elif checkpoint:
            utils.load_weights(model, checkpoint["model"], path)
        teacher = None
        if args.teacher and not args.evaluate:
            known = utils.load_checkpoint(args.teacher)
            teacher = build_model(parse_args([], known.get("args")), classes).requires_grad_(False).eval()
            utils.load_weights(teacher, networks.unpack_weights(known["model"]), args.teacher)
            if type(teacher) is not type(model):
                raise ValueError(f"--teacher {args.teacher}: a {type(teacher).__name__} takes other inputs")

    pin = device.type == "cuda"
    weighed = train_set.labels if args.balanced else None
    sampler = None if args.stream else data.EpochSampler(len(train_set), args.seed, world_size, rank, weighed)
    collate = collate_of(args, about["mean"], about["std"])
    train_loader = data.make_loader(train_set, args.batch_size, sampler, args.workers, pin, args.seed + rank, collate)
    # Evaluation deals each sample to one rank. A DistributedSampler would repeat some to make the ranks equal.
    deal = lambda part: data.make_loader(part, 500, range(rank, len(part), world_size), 0, pin, collate=collate)
    val_loader, test_loader = deal(val_set), deal(test_set)

    # The convolution kernels of CPUs and of tensor cores compute in channels-last: a CPU's step is 1.4 times faster.
    # Images of 1 channel have the same layout either way; those of 3 would be converted as well.
    for network in filter(None, (model, teacher)):
        network.to(device, memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)
    if args.sync_bn and device.type != "cuda":
        say("--sync-bn: there are no GPUs here, batch norm stays as it is")
    elif args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()  # in place: torch.compile(model) would put _orig_mod. before every key of the checkpoint

    # Stands beside every accuracy, so that nobody takes one data set for the other.
    title = lambda part: f"({name}, {facts[part]:,} {about['items']})"
    report = lambda result, of: say(f"test accuracy {100 * result['accuracy']:.2f} % {title('test')}, "
                                    f"loss {result['loss']:.4f}: {of}")
    if args.evaluate:
        with utils.one_line(OSError, FloatingPointError):
            result = evaluate(model, test_loader, device, args.amp)
            say(utils.confusion_table(result["confusion"], classes))
            report(result, args.evaluate + f", weights of {args.quant_bits} bits" * bool(args.quant_bits))
            if args.pictures and args.model == "attention" and rank == 0:
                images, labels = test_set.__getitems__(range(min(32, len(test_set))))
                batch = utils.to_device(data.collate_tokens((images, labels), about["mean"], about["std"], args.tokens == "all")[0], device)
                utils.attention_picture(Path(args.evaluate).with_name("attention.png"), model, batch, images)
        return

    optimizer = utils.build_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # bf16 has float32's range and needs none
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    epochs, steps = 1 if args.dry_run else args.epochs, math.ceil(len(train_loader) / args.accum)
    state = utils.new_state(epochs * steps)
    with utils.one_line(ValueError, OSError):
        if args.resume:
            utils.restore(checkpoint, args, facts, state, optimizer, scaler, device, rank, world_size, say)
            if state["epoch"] >= epochs and state["test"]:
                return say(f"{args.resume}: nothing to do, {state['epoch']} epochs are done; see --epochs")
            folder = Path(args.resume).parent
            best = state["best"] and utils.load_checkpoint(folder / "best.pt")  # damaged? better known now than then
        if not args.resume or Path(args.out or folder).resolve() != folder.resolve():
            folder = utils.new_folder(args.out, f"{name.lower()}-{args.model}") if rank == 0 else None
            folder = utils.gather_over_ranks(folder)[0]
            if args.resume and best and rank == 0:
                utils.save_checkpoint(folder / "best.pt", best)

    parameters, per_step = networks.count_parameters(model), args.batch_size * args.accum * world_size
    say(f"{type(model).__name__}: {parameters:,} parameters; {device}, mixed precision {args.amp}; results in {folder}")
    say(f"{name}: {facts['train']:,} for training, {facts['val']:,} for validation, {facts['test']:,} for the test")
    say(f"{args.batch_size} a batch x {args.accum} accumulated x {world_size} processes = {per_step} a step; "
        f"{facts['train']:,} / {per_step} = {steps} steps an epoch, x {epochs} epochs = {epochs * steps:,}, "
        f"{args.warmup * epochs * steps:.0f} of them warm-up to lr {args.lr:g}, then {args.schedule}")

    def save(file):
        """Writes a checkpoint and, after an epoch, metrics.csv and run.json, to repeat it all. All ranks call it."""
        checkpoint = utils.snapshot(wrapped, optimizer, scaler, state, device)
        if rank == 0:
            about = {"args": stored, "amp": args.amp, "classes": classes, "data": facts, "world_size": world_size}
            utils.save_checkpoint(folder / file, checkpoint | about)
        if rank == 0 and file == "last.pt" and not state["batch"]:  # an epoch, or the whole, is done
            test = state["test"] or {"accuracy": None, "loss": None}
            utils.write_csv(folder / "metrics.csv", state["metrics"])
            utils.write_json(folder / "run.json", {
                "args": vars(args), "versions": utils.versions(), "device": str(device), "world_size": world_size,
                "dataset": facts, "parameters": parameters, "epochs_done": state["epoch"],
                "train_seconds": sum(row["seconds"] for row in state["metrics"]),
                "val_accuracy": state["best"]["val_accuracy"], **{f"test_{key}": value for key, value in test.items()},
            })

    signals = []  # the numbers of those that have come

    answers = [utils.largest_over_ranks(signals)]

    def after_step():
        # One rank's signal stops all ranks after the same step, or they would wait for each other for ever. They hear
        # of it one step later: to wait for the slowest rank twice in each step would cost a tenth of the time.
        number = answers.pop()()
        answers.append(utils.largest_over_ranks(signals))
        if number or (args.save_every and (state["step"] + state["skipped"]) % args.save_every == 0):
            utils.finite_means(state["sums"], state["epoch"])
            save("last.pt")
        if number:
            say(f"stopped by {signal.Signals(number).name} after step {state['step']:,}; to go on: "
                f"python train.py --resume {folder}/last.pt")
            sys.exit(128 + number)

    with utils.one_line(OSError, FloatingPointError), utils.caught_signals(signals):
        while state["epoch"] < epochs:
            epoch = f"epoch {state['epoch'] + 1}/{epochs}"
            progress = lambda line: say(f"{epoch} {line} {title('train')}", over=True)
            row = train_one_epoch(
                wrapped, train_loader, optimizer, scaler, state, args, device, progress, after_step, teacher
            )
            for buffer in model.buffers() if dist.is_initialized() else ():
                dist.broadcast(buffer, 0)  # the running means of batch norm: each rank has seen other batches
            save("last.pt")
            say(f"{epoch}  training loss {row['train_loss']:.4f}  accuracy {100 * row['train_accuracy']:.2f} % "
                f"{title('train')}  {row['seconds']:.1f} s, {100 * row['waiting']:.1f} % of it waiting for data")
            row |= {"val_loss": None, "val_accuracy": None}
            if len(val_set):
                result = evaluate(model, val_loader, device, args.amp)
                row |= {"val_loss": result["loss"], "val_accuracy": result["accuracy"]}
                say(f"{epoch}  validation loss {result['loss']:.4f}  accuracy {100 * result['accuracy']:.2f} % "
                    f"{title('val')}")
            # Without a validation set the last epoch is taken: to choose by the test set would be to train on it.
            quality = lambda row: (row["val_accuracy"], -row["val_loss"])
            better = not state["best"] or not len(val_set) or quality(row) > quality(state["best"])
            state["drops"], state["stale"] = utils.drop_on_plateau(state["drops"], state["stale"], better)
            state |= {"epoch": state["epoch"] + 1, "batch": 0, "sums": None, "test": None}
            state["metrics"].append(row)
            if better:
                state["best"] = row
                save("best.pt")
            save("last.pt")

        # The test set is read here, once, by the weights that the validation set has chosen.
        chosen = copy.deepcopy(model)  # the run itself may go on some day, from where it is
        best = utils.gather_over_ranks(utils.load_checkpoint(folder / "best.pt") if rank == 0 else None)[0]
        chosen.load_state_dict(best["model"])
        result = evaluate(chosen, test_loader, device, args.amp)
        state["test"] = {"accuracy": result["accuracy"], "loss": result["loss"]}
        save("last.pt")
    report(result, f"{folder}/best.pt, of epoch {best['best']['epoch']}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the training or in --evaluate: there is nothing to save
        sys.exit(130)
    finally:
        utils.leave_distributed()
