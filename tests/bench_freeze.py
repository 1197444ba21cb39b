"""What --init with --freeze gains on few pictures: python tests/bench_freeze.py CHECKPOINT [--seeds 5]

Ten letters in PIL's own font, turned, shifted and blurred: 20 of each to train on, 100 of each to test with. A network that
has learnt MNIST's digits (CHECKPOINT, such as a best.pt of `train.py --epochs 10`) keeps its convolutions and learns the rest
anew; beside it a network learns all from scratch, with the same flags. Printed are the accuracies on the test pictures, for
each seed and as mean and standard deviation. The pictures are the same for all seeds.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train

LETTERS = "ABDEGHKRSW"
FLAGS = ["--epochs", "20", "--batch-size", "25", "--val-size", "0", "--lr", "2e-3", "--amp", "off"]


def letter(name, draw):
    """A picture of 28 x 28 grey pixels, white on black."""
    picture = Image.new("L", (28, 28))
    size = draw.uniform(12, 24)
    middle = 14 + draw.uniform(-4, 4), 14 + draw.uniform(-4, 4)
    ImageDraw.Draw(picture).text(middle, name, fill=255, font=ImageFont.load_default(size), anchor="mm")
    picture = picture.rotate(draw.uniform(-45, 45), Image.Resampling.BILINEAR)
    return picture.filter(ImageFilter.GaussianBlur(draw.uniform(0.5, 2.0)))


def write_letters(folder, train_count=20, test_count=100):
    draw = random.Random(0)
    for part, count in (("train", train_count), ("test", test_count)):
        for name in LETTERS:
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                letter(name, draw).save(folder / part / name / f"{index}.png")


def accuracy(folder, out, seed, flags):
    train.main(["--dataset", str(folder), "--out", str(out), "--seed", str(seed), *FLAGS, *flags])
    return json.loads((out / "run.json").read_text())["test_accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    kinds = {"from scratch": [], "--freeze conv": ["--init", options.checkpoint, "--freeze", "conv"]}
    found = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_letters(folder / "letters")
        for seed in range(options.seeds):
            for number, (kind, flags) in enumerate(kinds.items()):
                found[kind].append(accuracy(folder / "letters", folder / f"run-{seed}-{number}", seed, flags))
    for kind, values in found.items():
        each = ", ".join(f"{100 * value:.1f}" for value in values)
        print(f"{kind:14} {100 * statistics.mean(values):.1f} +- {100 * statistics.stdev(values):.1f} %  (n {len(values)}: {each})")


if __name__ == "__main__":
    main()
