"""All that a GPU has to answer, in one run of some four minutes: python tests/gpu.py [--data-dir DIR] [--minutes 4]

First tests/test_gpu.py, with the waits, errors and differences that each test prints. Then figures: ten epochs by default,
and for single changes the images per second of the last of three epochs, over those of the default. Without MNIST in
--data-dir the sample is trained on, whose epochs are too short for a speed. What the time does not suffice for is named.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES = [
    ("default", ""),
    ("float32 with TF32", "--amp off"),
    ("float32 without TF32", "--amp off --deterministic"),
    ("fp16", "--amp fp16"),
    ("no workers", "--workers 0"),
    ("batches of 1,024", "--batch-size 1024"),
    ("compiled", "--compile"),
    ("width 128", "--width 128"),
    ("width 128, float32 with TF32", "--width 128 --amp off"),
    ("width 128, NCHW", "--width 128 --no-channels-last"),
    ("width 128, compiled", "--width 128 --compile"),
    ("attention", "--model attention"),
    ("attention, padded", "--model attention --tokens padded"),
    ("attention, written out", "--model attention --attention-kernel manual"),
    ("attention, compiled", "--model attention --compile"),
]


def speed(folder):
    """(images per second of the last epoch, fraction of it that was waiting for data)."""
    with open(f"{folder}/metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    return float(row["images_per_second"]), float(row["waiting"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes

    def run(command, **more):
        """Output of a command, or None if the time is up before its end."""
        left = end - time.monotonic()
        if left < 5:
            return None
        try:
            done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=left, **more)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else f"status {done.returncode}\n{done.stdout[-2000:]}"

    asked = "cpu" if options.device == "cpu" else "1"
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-s", "-q", "tests/test_gpu.py"]
    print(run(pytest, env={**os.environ, "GPU_TESTS": asked}) or "the tests took too long", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "train.py", "--data-dir", options.data_dir, "--device", options.device]
        print(run([*program, "--epochs", "10", "--out", f"{folder}/ten"]) or "ten epochs: no time left", flush=True)
        usual = None
        for number, (name, flags) in enumerate(CHANGES):
            out = f"{folder}/{number}"
            said = run([*program, "--epochs", "3", "--out", out, *flags.split()])
            if said is None:
                print(f"{name:30} no time left")
            elif not Path(out, "metrics.csv").is_file():
                print(f"{name:30} {said}")
            else:
                images, waiting = speed(out)
                usual = usual or images
                print(f"{name:30} {images:10,.0f} images/s  x {images / usual:.2f}  {100 * waiting:.0f} % waiting for data", flush=True)


if __name__ == "__main__":
    main()
