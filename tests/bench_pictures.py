"""How well and how fast pictures are read: python tests/bench_pictures.py CHECKPOINT [--data-dir DIR] [--photos 500]

1. 10,000 training digits and 2,000 test digits of MNIST as PNG files in class folders, and the same in the same order as
   IDX files, are trained on for two epochs with the same seed. Weights and figures of the two runs have to be equal.
2. Test digits as photos: dark ink on bright, uneven paper, turned by up to 10 degrees, away from the centre of 600 x 800
   pixels, JPEG of quality 60. Printed is how many of them --predict answers rightly with CHECKPOINT (best.pt of
   `train.py --epochs 10` on MNIST), and how many of the same digits as they are.
3. The time of --predict for 1,000 PNG files of 28 x 28 pixels, from the start of the program to its end.
"""

import argparse
import csv
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image, ImageFilter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import data
import train
import utils


def write_folder(folder, images, labels):
    """The names are numbers, by which the pictures of all classes are sorted: so their order is that of the IDX file."""
    for index, (image, label) in enumerate(zip(images, labels.tolist())):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / str(label) / f"{index:05}.png")


def write_idx(raw, part, images, labels):
    raw.mkdir(parents=True, exist_ok=True)
    content = struct.pack(">4I", 2051, len(images), 28, 28) + images.numpy().tobytes()
    (raw / f"{part}-images-idx3-ubyte").write_bytes(content)
    (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, len(labels)) + bytes(labels.tolist()))


def compare_folder_with_idx(folder, train_part, test_part):
    """Trains on both, and says whether weights and figures are the same."""
    for part, name, digits in (("train", "train", train_part), ("test", "t10k", test_part)):
        write_folder(folder / "digits" / part, *digits)
        write_idx(folder / "idx/MNIST/raw", name, *digits)
    common = ["--epochs", "2", "--amp", "off"]
    train.main([*common, "--dataset", str(folder / "digits"), "--out", str(folder / "a")])
    train.main([*common, "--dataset", "mnist", "--data-dir", str(folder / "idx"), "--out", str(folder / "b")])
    figures, weights = [], []
    for run in ("a", "b"):
        with open(folder / run / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        figures.append([{key: row[key] for key in ("train_loss", "val_loss", "val_accuracy")} for row in rows])
        figures[-1].append(json.loads((folder / run / "run.json").read_text())["test_accuracy"])
        weights.append(utils.load_checkpoint(folder / run / "last.pt")["model"])
    same = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    print(f"10,000 pictures of a folder and from IDX: test accuracies {figures[0][-1]} and {figures[1][-1]}, figures "
          f"{'equal' if figures[0] == figures[1] else 'DIFFERENT'}, weights {'equal' if same else 'DIFFERENT'}")


def photo(image, draw):
    """A digit (28, 28) as somebody would photograph it: a grey picture of 600 x 800 pixels."""
    size = draw.randint(200, 400)
    pen = Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BICUBIC)
    pen = pen.rotate(draw.uniform(-10, 10), Image.Resampling.BICUBIC)
    ink = Image.new("L", (600, 800))
    ink.paste(pen, (draw.randint(10, 590 - size), draw.randint(10, 790 - size)))
    ink = torch.frombuffer(bytearray(ink.tobytes()), dtype=torch.uint8).view(800, 600).float() / 255
    y, x = torch.linspace(-1, 1, 800)[:, None], torch.linspace(-1, 1, 600)
    # The light comes from one side, the corners are darker, and the paper has a grain.
    paper = 0.75 + draw.uniform(-0.12, 0.12) * x + draw.uniform(-0.12, 0.12) * y - 0.06 * (x * x + y * y)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    paper = paper + 0.02 * torch.randn(800, 600, generator=generator)
    darkness = draw.uniform(0.6, 0.9)
    grey = (255 * paper * (1 - darkness * ink)).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(grey.numpy()).filter(ImageFilter.GaussianBlur(1))


def predict(checkpoint, folder):
    """({name of a file: class}, seconds) of the program, from its start to its end."""
    command = [sys.executable, str(ROOT / "train.py"), "--predict", checkpoint, str(folder), "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    answers = map(json.loads, done.stdout.splitlines())
    return {Path(answer["file"]).name: answer["class"] for answer in answers}, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--photos", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the photos")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="whose digits are photographed")
    options = parser.parse_args()
    digits = data.load_mnist(options.data_dir)
    test_digits = data.load_mnist(options.data_dir, train=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_folder_with_idx(folder, [each[:10000] for each in digits[:2]], [each[:2000] for each in test_digits[:2]])

        images, labels, _ = test_digits if options.split == "test" else digits
        draw = random.Random(options.seed)
        chosen = draw.sample(range(len(images)), options.photos)
        for kind in ("photos", "plain"):
            (folder / kind).mkdir()
        for index in chosen:
            photo(images[index, 0], draw).save(folder / f"photos/{index}.jpg", quality=60)
            Image.fromarray(images[index, 0].numpy()).save(folder / f"plain/{index}.png")
        for kind in ("photos", "plain"):
            answers, seconds = predict(options.checkpoint, folder / kind)
            right = sum(answers.get(file.name) == str(labels[int(file.stem)].item()) for file in (folder / kind).iterdir())
            print(f"{kind}: {right} of {options.photos} right, {100 * right / options.photos:.1f} %, {seconds:.1f} s")

        (folder / "many").mkdir()
        for index in range(1000):
            Image.fromarray(test_digits[0][index, 0].numpy()).save(folder / f"many/{index}.png")
        seconds = sorted(predict(options.checkpoint, folder / "many")[1] for _ in range(3))
        print(f"1,000 pictures: {seconds[0]:.1f} to {seconds[-1]:.1f} s from start to end, 3 times")


if __name__ == "__main__":
    main()
