"""README's "Your own project": each diff there is applied to a fresh copy, which trains, stops, resumes and evaluates."""

import re
import shutil

import pytest
import torch

from helpers import ROOT, run_program

# How many lines a fork of each kind may have to write. The class of a network of one's own is not counted.
FORKS = {
    "other pictures": 10,
    "another network": 3,
    "another loss": 8,
    "a regression": 8,
    "another optimizer, averaged weights": 15,
}


def hunks():
    """The diffs in the README: {fork: [(file, old text, new text)]}."""
    found = {}
    readme = (ROOT / "README.md").read_text().split("## Your own project")[1]
    for name, diff in re.findall(r"^\*\*([^*]+)\*\*.*?^```diff\n(.*?)^```$", readme, re.M | re.S):
        found[name.lower()] = []
        for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
            file, body = part.split("\n", 1)
            for hunk in re.split(r"^@@.*\n", body, flags=re.M):
                lines = hunk.splitlines(keepends=True)
                old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
                new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
                if lines:
                    found[name.lower()].append((file, old, new))
    return found


def apply(fork, folder):
    """Changes the copy of the program in `folder`. Returns the lines that somebody has to write."""
    written = []
    for file, old, new in hunks()[fork]:
        path = folder / file
        text = path.read_text()
        if new in text:
            pytest.skip("this copy of the program is such a fork already")
        assert text.count(old) == 1, f"{file}: found {text.count(old)} times:\n{old}"
        path.write_text(text.replace(old, new))
        before = old.splitlines()
        written += [line for line in new.splitlines() if line.strip() and line not in before]
    return written


def without_class(lines):
    """What is left of `lines` without the bodies of classes."""
    left, inside = [], False
    for line in lines:
        inside = line.startswith("class ") or (inside and line.startswith(" "))
        if not inside:
            left.append(line)
    return left


def test_readme_has_a_diff_for_each_kind_of_fork():
    assert hunks().keys() == FORKS.keys()


# In a process of its own, for these are other modules by the same names.
STRAIGHT_AND_STOPPED = """
import os, signal, sys
for name in ("data", "model", "utils", "train"):
    sys.modules.pop(name, None)
sys.path.insert(0, ".")
import data, train, utils
if not os.path.exists("data/mine.pt"):
    from functools import partial
    from helpers import load_small
    data.load_dataset = partial(load_small, 80, 24)
FLAGS = {flags} + ["--data-dir", "data", "--epochs", "2", "--batch-size", "16", "--amp", "off"]
{part}
"""
TRAIN = """
train.main(FLAGS + ["--out", "straight"])
def lr_at(step, *args, real=utils.lr_at):
    if step == 5:  # in the middle of the second epoch
        os.kill(os.getpid(), signal.SIGTERM)
    return real(step, *args)
utils.lr_at = lr_at
train.main(FLAGS + ["--out", "stopped"])
"""
GO_ON = """
train.main(["--resume", "stopped/last.pt"])
train.main(["--evaluate", "stopped/best.pt", "--data-dir", "data"])
"""


def write_shapes(path, real_targets):
    """80 + 24 pictures of 3 x 20 x 24 pixels in four classes, by the place of a patch of their own colour."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(104) % 4
    images = torch.randint(0, 60, (104, 3, 20, 24), generator=generator).to(torch.uint8)
    for image, label in zip(images, labels.tolist()):
        image[label % 3, 5 * label : 5 * label + 5] = 250
    if real_targets:
        labels = labels * 0.25
    torch.save({"images": images[:80], "labels": labels[:80], "test_images": images[80:], "test_labels": labels[80:]}, path)


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_trains_stops_resumes_to_the_bit_and_evaluates(fork, tmp_path):
    for file in ("train.py", "model.py", "data.py", "utils.py"):
        shutil.copy(ROOT / file, tmp_path)
    written = without_class(apply(fork, tmp_path))
    print(f"{fork}: {len(written)} lines", *written, sep="\n")
    assert len(written) <= FORKS[fork]
    if fork == "a regression":
        apply("other pictures", tmp_path)
    readme = (ROOT / "README.md").read_text()
    said = re.search(rf"^\*\*{fork}\*\* \((.*?)\)", readme, re.M | re.I)[1]
    assert said.split(" and ")[-1] == f"{len(written)} lines"
    flags = {"another network": ["--model", "mlp"], "another optimizer, averaged weights": ["--width", "4", "--lr", "0.1"]}
    flags = flags.get(fork, ["--width", "4"])
    if fork in ("other pictures", "a regression"):
        (tmp_path / "data").mkdir()
        write_shapes(tmp_path / "data/mine.pt", fork == "a regression")

    part = STRAIGHT_AND_STOPPED.format(flags=flags, part=TRAIN)
    status, out, err = run_program(cwd=tmp_path, script=None, before=part)
    assert status == 143 and "stopped by SIGTERM after step 6" in out, err
    part = STRAIGHT_AND_STOPPED.format(flags=flags, part=GO_ON)
    status, resumed, err = run_program(cwd=tmp_path, script=None, before=part)
    assert (status, err) == (0, "")

    one, other = (torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("straight", "stopped"))
    for key in ("model", "average"):
        for name, weight in one.get(key, {}).items():
            assert torch.equal(weight, other[key][name]), name
    losses = [[row["train_loss"] for row in run["metrics"]] for run in (one, other)]
    assert losses[0] == losses[1] and losses[0][1] < losses[0][0] and one["step"] == 10
    test_line, evaluated = (line for line in resumed.splitlines() if line.startswith("test "))
    assert test_line.split(":")[0] == evaluated.split(":")[0]  # what was measured at the end, from the file
    print(evaluated)

    seen = {"other pictures": "(shapes, 24 pictures)", "another loss": "test accuracy", "a regression": "test mae"}
    assert seen.get(fork, "test accuracy") in evaluated
    if fork == "another network":
        assert "MLP: " in out
    if "averaged" in fork:
        best = torch.load(tmp_path / "straight/best.pt", weights_only=True)
        assert torch.equal(best["model"]["fc1.weight"], best["average"]["fc1.weight"])
        assert not torch.equal(one["model"]["fc1.weight"], one["average"]["fc1.weight"])
        assert one["optimizer_class"] == "SGD"
