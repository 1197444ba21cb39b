"""What several test files need: data sets of a few digits, the program as a process, and a stand-in for the download host."""

import ast
import functools
import gzip
import hashlib
import http.server
import multiprocessing
import os
import pickle
import runpy
import struct
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import train
import utils

pick_device = utils.pick_device
if "GPU_TESTS" not in os.environ:  # see conftest.py: Apple's and Intel's cannot be hidden by a variable
    utils.pick_device = lambda name="auto": pick_device("cpu" if name == "auto" else name)

# What a CPU has as its default is not the same everywhere: the tests are about the same bits on every machine.
multiplies_in_bf16, utils.multiplies_in_bf16 = utils.multiplies_in_bf16, lambda: False

ROOT = Path(__file__).resolve().parent.parent

NORM = {"mean": [0.1307], "std": [0.3081]}  # of MNIST's training images, in 0..1

PATIENCE = 900  # seconds after which a process that hangs is ended; nothing that works waits for it, on any machine

FORKS = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")

# Sends this process the signal in the middle of optimizer step `at`.
SIGNAL_AT = """
import os, signal, utils
def lr_at(step, *args, real=utils.lr_at):
    if step == {at} and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.{name})
    return real(step, *args)
utils.lr_at = lr_at
"""


def load_small(size, test_size, choice="auto", root="data", train=True, once=None, log=print, *of_folders):
    """What the tests of loop, checkpoints, resume and processes have in place of data.load_dataset: made pictures.

    A picture of class k has a bright square in the k-th of 16 places, and noise around it. A project with data of its own
    puts a few of them here, and the tests hold for these.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(size + test_size) % 10
    images = torch.zeros(size + test_size, 1, 28, 28, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist()):
        y, x = 6 * (label // 4) + 2, 6 * (label % 4) + 2
        image[:, y : y + 6, x : x + 6] = torch.randint(100, 256, (6, 6), generator=generator)
        image[:, 8:16] += torch.randint(60, (8, 28), generator=generator).to(torch.uint8).clamp(max=40)
    about = data.describe(images[:size], labels[:size], list("0123456789"), "small", "pictures")
    return (images[:size], labels[:size]) if train else None, (images[size:], labels[size:]), about


OURS = {"loss_and_metrics": train.loss_and_metrics, "quality": train.quality}


def small_loss(outputs, targets, label_smoothing=0.0):
    """What the tests minimize and report where a project of your own has another loss; see conftest.py."""
    logits = outputs.float()
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    return loss, len(targets), {"accuracy": (logits.detach().argmax(1) == targets).sum()}


def small_quality(row):
    return row["val_accuracy"], -row["val_loss"]


def has_another_loss():
    """Whether this copy of the program is one with another loss, other metrics or another choice of the best epoch."""
    logits, targets, row = torch.tensor([[2.0, 1.0, -1.0], [0.0, 3.0, 0.5]]), torch.tensor([0, 2]), {"val_accuracy": 0.5, "val_loss": 1.0}
    try:
        ours, usual = train.loss_and_metrics(logits, targets, 0.1), small_loss(logits, targets, 0.1)
        return ours != usual or train.quality(row) != small_quality(row)
    except (KeyError, RuntimeError):
        return True


def small_task(monkeypatch, size=60, test_size=20):
    """Gives main() the made data set, in this process and in those of start, run_program and torchrun."""
    monkeypatch.setattr(data, "load_dataset", functools.partial(load_small, size, test_size))


def task():
    """What a test may have changed in this process, to be handed to another."""
    return {"load_dataset": data.load_dataset, "loss_and_metrics": train.loss_and_metrics, "quality": train.quality}


def take(task):
    """Gives this process what `task` of another one returned."""
    data.load_dataset = task["load_dataset"]
    train.loss_and_metrics, train.quality = task["loss_and_metrics"], task["quality"]


def run_script(script):
    """Runs a file as a program. train.py gets the loss that the module train has in this process."""
    if Path(script).name != "train.py":
        runpy.run_path(str(script), run_name="__main__")
        return
    *body, last = ast.parse(Path(script).read_text()).body  # definitions; and what only a program does
    program = sys.modules["__main__"].__dict__
    program.update({"__name__": "__main__", "__file__": str(script)})
    exec(compile(ast.Module(body, []), str(script), "exec"), program)
    for name, ours in OURS.items():
        if getattr(train, name) is not ours:
            program[name] = getattr(train, name)
    exec(compile(ast.Module([last], []), str(script), "exec"), program)


def write_mnist(root, train=60, test=20, name="MNIST"):
    """A data set in MNIST's layout under `root`, of the first digits of the bundled sample. Returns its raw folder."""
    raw = Path(root) / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        images, labels, _ = data.load_mnist(data.SAMPLE, part == "train")
        content = struct.pack(">4I", 2051, count, 28, 28) + images[:count].numpy().tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(content)
        content = struct.pack(">2I", 2049, count) + bytes(labels[:count].tolist())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(content)
    return raw


class SlowDigits(data.Digits):
    """A data set that is read from a slow disk: a training waits for it most of the time."""

    def __getitems__(self, indices):
        time.sleep(0.05)
        return super().__getitems__(indices)


def has_mnist(root):
    """Whether all four IDX files are there, as they are or as .gz."""
    raw = Path(root) / "MNIST/raw"
    return all((raw / file).is_file() or (raw / f"{file}.gz").is_file() for file in data.IDX_FILES)


def repeated_sample(n, augment):
    """Digits of n images: the training part of the bundled sample, as often as it takes."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    repeats = -(-n // len(images))
    return data.Digits(images.repeat(repeats, 1, 1, 1)[:n], labels.repeat(repeats)[:n], classes, augment)


def training(digits, flags=""):
    """The program's training on a CPU, to be timed. Returns (network, optimizer, loader, a function that trains an epoch)."""
    args = train.parse_args(["--amp", "off", *flags.split()])
    about = {"classes": digits.classes, "shape": [1, 28, 28], **NORM}
    network = train.build_model(args, about).to(memory_format=torch.channels_last)
    optimizer, scaler = utils.build_optimizer(network, args), torch.amp.GradScaler("cpu", enabled=False)
    collate = train.NETWORKS[args.model]["collate"](args, about)
    loader = data.make_loader(digits, args.batch_size, data.EpochSampler(len(digits)), collate=collate)
    state = train.new_state()  # without end

    def epoch():
        return train.train_one_epoch(
            network, loader, optimizer, scaler, state, args, torch.device("cpu"), log=lambda line: None
        )

    return network, optimizer, loader, epoch


def gzip_files(raw):
    """Packs the four files in `raw`, in place."""
    for file in data.IDX_FILES:
        (raw / f"{file}.gz").write_bytes(gzip.compress((raw / file).read_bytes()))
        (raw / file).unlink()


def play(script, args, cwd, before, environment, task, output, errors, start_method):
    """What a process of `start` does. Its output goes to the files `output` and `errors`."""
    multiprocessing.set_start_method(start_method, force=True)  # of workers: as if there were no server
    os.chdir(cwd)
    os.environ.update(environment)
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for kind in (FutureWarning, UserWarning):  # torch's warnings about our code are errors here, too
        warnings.simplefilter("error", kind)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores, as in pytest.ini
    if "RANK" in environment:
        torch.set_num_threads(1)  # what torchrun asks for
    sys.argv = [str(script), *args]
    try:
        take(task)
        exec(before, {"__name__": "before"})
        if script:
            run_script(script)
    finally:
        look = {}
        exec(LAST_LOOK, look)
        look["last_look"]()


def start(*args, cwd, script=ROOT / "train.py", before="", environment=(), output=None):
    """Starts a process that runs the Python text `before`, then `script` as a program with `args`.

    It is forked from a server that has imported torch: that takes a tenth of a second in place of four. It ends as
    multiprocessing ends it; what is said of the interpreter's own end needs `torchrun` or `subprocess`.
    """
    (folder := Path(cwd) / ".output").mkdir(exist_ok=True)
    files = [str(output or tempfile.mkstemp(dir=folder)[1]) for _ in range(2)]
    args = [str(arg) for arg in args]
    parts = (script, args, cwd, textwrap.dedent(before), dict(environment), task(), *files)
    parts += (multiprocessing.get_start_method(),)
    process = FORKS.Process(target=play, args=parts)
    process.start()
    process.files = files
    return process


def until(condition, process):
    """Waits until condition() is true, or `process` has ended, which is a failure."""
    while not condition():
        assert process.is_alive(), finish(process)
        time.sleep(0.01)


def finish(process):
    """Waits for a process of `start`. Returns (status, standard output, standard error)."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
    out, err = (Path(file).read_text() if os.path.isfile(file) else "" for file in process.files)
    return process.exitcode, out, err


def run_program(*args, cwd, ranks=0, before="", script=ROOT / "train.py"):
    """Runs train.py, or as many ranks of it, to its end. Returns (status, standard output, standard error)."""
    if not ranks:
        return finish(start(*args, cwd=cwd, before=before, script=script))
    # As under torchrun the store is neither rank's: so there is a port before anybody has to know its number.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = [
        start(*args, cwd=cwd, before=before, script=script, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    statuses, outs, errs = zip(*map(finish, processes))
    assert "gloo outlives its group" not in "".join(errs)
    return next(filter(None, statuses), 0), "".join(outs), "".join(errs)


# Says so if threads of gloo are alive when a rank's interpreter ends: they can make it abort.
LAST_LOOK = """
import atexit, pathlib, sys, time
def gloo_threads():
    return [task for task in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in task.read_text()]
def last_look():
    if gloo_threads():
        time.sleep(1)  # a thread that has been waited for may stand in /proc for a moment
        if gloo_threads():
            print("gloo outlives its group", file=sys.stderr)
atexit.register(last_look)
"""


def torchrun(*args, cwd, ranks, before=""):
    """Runs train.py under a real torchrun, whose ranks are new interpreters. Returns (status, standard output, standard
    error).
    """
    script = Path(cwd) / "before_train.py"
    run = f"import helpers, pickle\nhelpers.take(pickle.loads({pickle.dumps(task())!r}))\n"
    run += f"helpers.run_script({str(ROOT / 'train.py')!r})\n"
    script.write_text(f"exec({LAST_LOOK + textwrap.dedent(before)!r})\n{run}")
    words = ["--standalone", "--nproc-per-node", ranks, script, *args]
    run = f"import torch.distributed.run as torchrun\ntorchrun.main({[str(word) for word in words]!r})"
    warnings_are_errors = "error::FutureWarning,error::UserWarning"
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": warnings_are_errors}
    status, out, err = finish(start(cwd=cwd, script=None, before=run, environment=env))
    assert "gloo outlives its group" not in err
    return status, out, err


@contextmanager
def download_host(answer, folder=None, gate=None):
    """A web server in the role of MNIST's: `answer` is a status (403, 503), "files" of `folder`, or "silence".

    Before it gives a file it waits for the threading.Event `gate`.

    Yields (the Python that points torchvision to it, the list of paths that were asked for).
    """
    asked, done = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rsplit("/")[-1]
            asked.append(name)
            if answer == "silence":
                done.wait(PATIENCE)
            elif answer == "files":
                content = (folder / name).read_bytes()
                gate.wait(PATIENCE)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            else:
                self.send_error(answer)

        def log_message(self, *args):
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    md5 = {f: hashlib.md5((folder / f"{f}.gz").read_bytes()).hexdigest() for f in data.IDX_FILES} if folder else {}
    point = (
        "from torchvision import datasets\n"
        f"datasets.MNIST.mirrors = ['http://127.0.0.1:{server.server_address[1]}/']\n"
        f"datasets.MNIST.resources = [(f + '.gz', {md5!r}.get(f, '')) for f in {data.IDX_FILES!r}]"
    )
    try:
        yield point, asked
    finally:
        done.set()
        server.shutdown()
        server.server_close()
