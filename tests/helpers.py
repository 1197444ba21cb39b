"""What several test files need: data sets of a few digits, the program as a process, and a stand-in for the download host."""

import gzip
import hashlib
import http.server
import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

import data
import train
import utils

ROOT = Path(__file__).resolve().parent.parent

# Sends this process the signal in the middle of optimizer step `at`.
SIGNAL_AT = """
import os, signal, utils
def lr_at(step, *args, real=utils.lr_at):
    if step == {at} and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.{name})
    return real(step, *args)
utils.lr_at = lr_at
"""


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


def has_mnist(root):
    """Whether all four IDX files are there, as they are or as .gz."""
    raw = Path(root) / "MNIST/raw"
    return all((raw / file).is_file() or (raw / f"{file}.gz").is_file() for file in data.IDX_FILES)


def repeated_sample(n, augment):
    """Digits of n images: the training part of the bundled sample, as often as it takes."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    repeats = -(-n // len(images))
    return data.Digits(images.repeat(repeats, 1, 1)[:n], labels.repeat(repeats)[:n], classes, augment)


def training(digits, flags=""):
    """The program's training on a CPU, to be timed. Returns (network, optimizer, loader, a function that trains an epoch)."""
    args = train.parse_args(["--amp", "off", *flags.split()])
    network = train.build_model(args, digits.classes).to(memory_format=torch.channels_last)
    optimizer, scaler = utils.build_optimizer(network, args), torch.amp.GradScaler("cpu", enabled=False)
    collate = data.COLLATES["images" if args.model == "cnn" else args.tokens]
    loader = data.make_loader(digits, args.batch_size, data.EpochSampler(digits.labels), collate=collate)
    state = utils.new_state(10**6)  # without end

    def epoch():
        row = train.train_one_epoch(network, loader, optimizer, scaler, state, args, torch.device("cpu"), show=lambda line: None)
        state.update(epoch=state["epoch"] + 1, batch=0, sums=None)
        return row

    return network, optimizer, loader, epoch


def gzip_files(raw):
    """Packs the four files in `raw`, in place."""
    for file in data.IDX_FILES:
        (raw / f"{file}.gz").write_bytes(gzip.compress((raw / file).read_bytes()))
        (raw / file).unlink()


def program(*args, cwd, before="", ranks=0, **kwargs):
    """Starts train.py as a process in folder `cwd`, or as many as `ranks` under torchrun. Its output is piped.

    `before` is Python that runs first, in the same process.
    """
    script = ROOT / "train.py"
    if before:
        script = Path(cwd) / "before_train.py"
        script.write_text(f"import sys\nif __name__ == '__main__':\n    exec({before!r})\n    import runpy\n    runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    # torch's warnings about our code are errors here too; the worker processes inherit it.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen([sys.executable, *torchrun, str(script), *map(str, args)], cwd=cwd, env=env, text=True, **pipes)


def run_program(*args, cwd, timeout=120, **kwargs):
    """Runs train.py to its end. Returns (status, standard output, standard error)."""
    process = program(*args, cwd=cwd, **kwargs)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


@contextmanager
def download_host(answer, folder=None):
    """A web server in the role of MNIST's: `answer` is a status (403, 503), "files" of `folder`, or "silence".

    Yields (the Python that points torchvision to it, the list of paths that were asked for).
    """
    asked, done = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rsplit("/")[-1]
            asked.append(name)
            if answer == "silence":
                done.wait(30)
            elif answer == "files":
                content = (folder / name).read_bytes()
                time.sleep(0.2)
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
