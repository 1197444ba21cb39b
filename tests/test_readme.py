"""README's smallest loop runs as it stands, and so does each rung of the ladder on top of it."""

import re

import pytest

from helpers import ROOT, run_program

README = (ROOT / "README.md").read_text()
SECTION = re.search(r"^## The loop, simplest first$(.*?)^## ", README, re.M | re.S)[1]
LOOP = re.search(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)[1]
RUNGS = re.findall(r"^\*\*(\d)\..*?^```diff\n(.*?)^```$", SECTION, re.M | re.S)


def climb(text, diff):
    """The text with each hunk of a diff applied."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def right_of(text, folder):
    """Runs the text as a program beside the sample. Returns what each epoch says: percent of the test digits."""
    if not (folder / "sample").exists():
        (folder / "sample").symlink_to(ROOT / "sample")
    status, out, err = run_program(cwd=folder, script=None, before=text)
    assert (status, err) == (0, ""), err
    return [float(percent) for percent in re.findall(r"([\d.]+)% of the test digits", out)]


def test_the_smallest_loop_learns(tmp_path):
    assert len([line for line in LOOP.splitlines() if line.strip()]) <= 25
    right = right_of(LOOP, tmp_path)
    print(right)
    assert len(right) == 3 and right[-1] > 85


def test_each_rung_of_the_ladder_holds(tmp_path):
    """All seven are put on, and the result trains, stops and goes on: after 2 of 3 epochs it ends as it does at once."""
    text = LOOP
    for number, (said, diff) in enumerate(RUNGS, start=1):
        assert int(said) == number
        text = climb(text, diff)
        compile(text, said, "exec")
    assert number == 7
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    seeded = "import torch\ntorch.manual_seed(0)\n" + text
    right = right_of(seeded, whole)
    print(right)
    assert len(right) == 3 and right[-1] > 90
    assert right_of(seeded.replace("range(first, 3)", "range(first, 2)"), stopped) == right[:2]
    assert right_of(seeded, stopped) == right[2:]
