"""How good the rates are that --find-lr suggests: python tests/bench_find_lr.py [--data-dir DIR] [--model cnn|attention]

For widths 8, 16, 32 and 64: the CNN is trained for one epoch with the suggested rate, the attention model for ten, with the
suggested rate, with half of it and with twice as much. Printed are the accuracies on the test set. The rate is chosen on
training images alone.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(folder, *flags):
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--model", choices=("cnn", "attention"), action="append")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()
    for model in options.model or ("cnn", "attention"):
        epochs, factors = (1, (1,)) if model == "cnn" else (10, (0.5, 1, 2))
        for width in options.widths:
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--model", model, "--width", width, "--data-dir", Path(options.data_dir).resolve()]
                rate = float(re.search(r"suggested: .*--lr (\S+)", run(folder, "--find-lr", *flags))[1])
                words = []
                for factor in factors:
                    out = f"{folder}/{factor}"
                    run(folder, "--epochs", epochs, "--lr", factor * rate, "--out", out, *flags)
                    accuracy = json.loads(Path(out, "run.json").read_text())["test_accuracy"]
                    words.append(f"{factor:g} x: {100 * accuracy:.2f} %")
                print(f"{model}, width {width}, {epochs} epochs, suggested {rate:.1e}; {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
