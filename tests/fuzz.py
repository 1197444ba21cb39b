"""Damaged and invented checkpoints and data files: python tests/fuzz.py [--count 300] [--seed 0]

Each case takes a good file, changes something in it by chance (a value of another type, sign or size, a key that is gone, a
tensor of another shape or with NaN; bytes of a data file), and runs the program on it. It has to end with a right result,
status 0, or with one line, status 2: no traceback, no crash, no hang, nothing written elsewhere, no escape sequence in the
line, and no more than some hundred characters. The cases are a function of the seed; a few of them are in the test suite.
"""

import argparse
import collections
import contextlib
import copy
import gzip
import io
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import data
import helpers
import train
import utils

ODD = [
    None, True, False, -1, -3, 0, 1, 7, 10**6, 10**18, -(10**18), 0.5, -0.5, 1e300, math.nan, math.inf, "", "foo", "off",
    "\x1b[31mred", "../elsewhere", "/tmp/elsewhere", "x" * 5000, [], [1], {}, {"a": 1}, (), b"bytes", torch.zeros(0),
    torch.zeros(3), torch.full((2, 2), math.nan), torch.ones(2, dtype=torch.int64), torch.tensor(1.0), [None], {"a": None},
]
VERBS = ["--resume", "--evaluate", "--predict", "--export", "--init"]


def leaves(value, path=()):
    """Paths of all parts of nested dicts, lists and tuples, themselves included."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for index in range(min(len(value), 12)):
            yield from leaves(value[index], (*path, index))


def changed(value, path, draw):
    """A copy of `value` in which the part at `path` is gone or another one, and what was done in words."""
    if not path:
        old = value
        kind = draw.choice(["odd", "odd", "tensor"]) if isinstance(old, torch.Tensor) else "odd"
        if kind == "odd":
            new = draw.choice(ODD)
        else:
            new = draw.choice([
                lambda t: t.flatten()[: max(1, t.numel() // 2)], lambda t: t[None], lambda t: t.double(), lambda t: t.to(torch.int8),
                lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t - 300, lambda t: t * 0, lambda t: t.to("meta"),
                lambda t: t.to_sparse() if t.ndim else t,
            ])(old.clone())
        return new, repr(new)[:60]
    if isinstance(value, dict):
        value = dict(value)
        if len(path) == 1 and draw.random() < 0.2:
            del value[path[0]]
            return value, "gone"
        value[path[0]], words = changed(value[path[0]], path[1:], draw)
        return value, words
    parts = list(value)
    parts[path[0]], words = changed(parts[path[0]], path[1:], draw)
    return type(value)(parts), words


def run_main(words):
    """(status or the name of an exception that came through, output)."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            train.main(words)
        return 0, out.getvalue()
    except SystemExit as end:
        return end.code or 0, out.getvalue()
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:150]}", out.getvalue()


def verdict(status, out, before, allowed):
    """What is wrong with an outcome; None if nothing is."""
    elsewhere = {path for path in Path().rglob("*") if path.is_file() and path not in before and path.parts[0] not in allowed}
    if elsewhere:
        return f"written elsewhere: {elsewhere}"
    if status not in (0, 1, 2):
        return f"came through: {status}"
    if status == 2:
        lines = [line for line in out.splitlines() if line.startswith("train.py: error: ")]
        if len(lines) != 1 or len(lines[0]) > 700 or "\x1b" in lines[0] or "weights_only" in lines[0] and "False" in lines[0]:
            return f"not one line: {out[-400:]!r}"
    return None


def checkpoint_case(number, seed):
    """(what was done, what is wrong or None) for one changed checkpoint, in an empty folder."""
    draw = random.Random(f"{seed} {number}")
    model = draw.choice(["cnn", "cnn", "attention"])
    good = utils.load_checkpoint(f"good-{model}/last.pt")
    paths = [path for path in leaves(good) if path]
    # Parts that are nested deeply are many; each top key gets the same chance.
    top = draw.choice(sorted({path[0] for path in paths}))
    path = draw.choice([path for path in paths if path[0] == top])
    bad, words = changed(copy.copy(good), path, draw)
    for folder in ("run", "out"):
        for file in Path(folder).glob("*") if Path(folder).is_dir() else []:
            file.unlink()
    Path("run").mkdir(exist_ok=True)
    torch.save(bad, "run/last.pt")
    Path("run/best.pt").write_bytes(Path(f"good-{model}/best.pt").read_bytes())
    verb = draw.choice(VERBS)
    flags = {"--resume": ["--epochs", "3"], "--init": ["--epochs", "1", "--width", "4", "--model", model, "--out", "out"]}
    words_of_verb = [verb, "run/last.pt", *flags.get(verb, [])]
    if verb == "--predict":
        words_of_verb.append("a.png")
    before = set(Path().rglob("*"))
    status, out = run_main(words_of_verb)
    wrong = verdict(status, out, before, ("run", "out"))
    return f"{' '.join(words_of_verb)} with {'.'.join(map(str, path))} = {words}: {status}", wrong


def data_case(number, seed):
    """The same for a changed data file: IDX or gzip."""
    draw = random.Random(f"data {seed} {number}")
    raw = helpers.write_mnist("bad", 40, 20)
    file = raw / draw.choice(data.IDX_FILES)
    content = bytearray(file.read_bytes())
    kind = draw.choice(["cut", "longer", "header", "header", "bytes", "empty", "text", "gzip", "bomb", "gone", "folder"])
    if kind == "cut":
        content = content[: draw.randrange(len(content))]
    elif kind == "longer":
        content += bytes(draw.randrange(1, 100))
    elif kind == "header":
        content[draw.randrange(16)] = draw.randrange(256)
    elif kind == "bytes":
        for _ in range(20):
            content[draw.randrange(16, len(content))] = draw.randrange(256)
    elif kind == "empty":
        content = b""
    elif kind == "text":
        content = b"<html>\x1b[31mnot found</html>" * 10
    packed = gzip.compress(bytes(content))
    if kind == "gzip":
        packed = bytearray(packed)
        packed[draw.randrange(len(packed))] ^= 1 + draw.randrange(255)
    if kind == "bomb":
        packed = gzip.compress(bytes(content) + bytes(200_000_000), 1)
    file.unlink()
    if kind in ("gzip", "bomb"):
        Path(f"{file}.gz").write_bytes(packed)
    elif kind == "folder":
        file.mkdir()
    elif kind != "gone":
        file.write_bytes(content)
    before = set(Path().rglob("*"))
    status, out = run_main(["--dataset", "mnist", "--data-dir", "bad", "--dry-run", "--width", "4", "--out", "out", "--batch-size", "8"])
    wrong = verdict(status, out, before, ("out", "bad"))
    for path in [*raw.glob("*"), *Path("out").glob("*")]:
        path.rmdir() if path.is_dir() else path.unlink()
    return f"{file.name} {kind}: {status}", wrong


def prepare():
    """In the current folder: good runs of both models on made pictures, and a picture. Makes the program fast."""
    torch.set_num_threads(1)
    data.load_dataset = helpers.functools.partial(helpers.load_small, 60, 20)
    if not Path("a.png").exists():
        for model in ("cnn", "attention"):
            words = ["--model", model, "--width", "4", "--epochs", "2", "--batch-size", "16", "--amp", "off", "--out", f"good-{model}"]
            assert run_main(words)[0] == 0
        image = data.load_mnist(data.SAMPLE, train=False)[0][0, 0]
        from PIL import Image

        Image.fromarray(image.numpy()).save("a.png")


def run_cases(kind, numbers, seed):
    """Runs cases in the current folder; yields (words, what is wrong)."""
    real = data.load_dataset
    prepare()
    if kind == "data":
        data.load_dataset = real
        data.fetch_mnist = no_network
    for number in numbers:
        yield {"checkpoint": checkpoint_case, "data": data_case}[kind](number, seed)


def no_network(root, name="MNIST", stall=10.0):
    raise data.DataError("no network in this test")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("checkpoint", "data"))
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first is not None:
        for words, wrong in run_cases(options.kind, range(options.first, options.first + options.count), options.seed):
            print(f"{'WRONG' if wrong else 'right'} {words!r} {wrong or ''}", flush=True)
        return
    counts = collections.Counter()
    for kind in [options.kind] if options.kind else ["checkpoint", "data"]:
        with tempfile.TemporaryDirectory() as folder:
            first = 0
            while first < options.count:  # a process of its own for some cases: a crash ends only these
                size = min(50, options.count - first)
                command = [sys.executable, str(Path(__file__).resolve()), "--kind", kind, "--first", str(first), "--count", str(size)]
                done = subprocess.run(
                    [*command, "--seed", str(options.seed)], cwd=folder, capture_output=True, text=True, timeout=600,
                    env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                )
                lines = [line for line in done.stdout.splitlines() if line.startswith(("right ", "WRONG "))]
                for line in lines:
                    counts[kind, line[:5]] += 1
                    if line.startswith("WRONG"):
                        print(kind, line, flush=True)
                first += len(lines)
                if len(lines) < size:
                    counts[kind, "CRASH"] += 1
                    print(kind, "CRASH", done.returncode, "in case", first, done.stderr[-300:], flush=True)
                    first += 1
    for (kind, what), count in sorted(counts.items()):
        print(f"{kind}: {count} {what}")


if __name__ == "__main__":
    main()
