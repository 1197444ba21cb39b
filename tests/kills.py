"""Kills a training without warning at random moments: python tests/kills.py [--kills 200] [--seed 0]

The same command (--resume auto) is started again after each kill, until the run has ended. After every kill each checkpoint
that is there has to be readable, and at the end weights, optimizer and figures have to be those, to the bit, of a run that
was left alone. Then a new run begins, until there have been as many kills as asked for.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

COMMAND = [
    "--epochs", "5", "--batch-size", "8", "--width", "8", "--amp", "off", "--save-every", "2", "--norm", "batch", "--workers", "0",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    forkserver.set_forkserver_preload(["torch", "torch._dynamo", "torchvision.datasets", "pytest"])
    forkserver.ensure_running()
    import functools

    import data
    import helpers
    import train
    import utils

    data.load_dataset = functools.partial(helpers.load_small, 120, 20)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        began = time.monotonic()
        assert helpers.run_program(*COMMAND, "--out", "straight", cwd=folder)[0] == 0
        usual = time.monotonic() - began
        straight = utils.load_checkpoint("straight/last.pt")
        kills = runs = read = wrong = 0
        while kills < options.kills:
            runs += 1
            out = f"run{runs}"
            status = None
            while status != 0:
                process = helpers.start(*COMMAND, "--out", out, "--resume", "auto", cwd=folder)
                process.join(draw.uniform(0.1, 0.9) * usual if kills < options.kills else None)
                if process.exitcode is None:
                    process.kill()
                    kills += 1
                status, _, err = helpers.finish(process)
                if status not in (0, -9):
                    wrong += 1
                    print(f"status {status}: {err[-300:]}")
                    break
                for path in Path(out).glob("*.pt"):
                    utils.load_checkpoint(path)
                    read += 1
            last = utils.load_checkpoint(f"{out}/last.pt")
            parts = [utils.flat({key: each[key] for key in ("model", "optimizer", "step", "epoch")}) for each in (straight, last)]
            torch = train.torch
            for key in parts[0]:
                a, b = parts[0][key], parts[1].get(key)
                same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                if not same:
                    wrong += 1
                    print(f"{out}: {key} differs")
                    break
        print(f"{kills} kills in {runs} runs: {read} checkpoints were read, {wrong} things were wrong")
    multiprocessing.active_children()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
