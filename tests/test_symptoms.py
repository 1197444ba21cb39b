"""README's table "When something is wrong": each symptom is made, and the command of its row finds the cause."""

import re

import pytest
import torch

import data
import model as networks
import train
import utils
from helpers import ROOT, SlowDigits, run_program

FLAGS = ["--batch-size", "8", "--width", "4", "--dropout", "0", "--amp", "off"]


def said(capfd, words, *flags, status=0):
    """Runs train.py, whose output has to hold all these words."""
    capfd.readouterr()
    if status:
        with pytest.raises(SystemExit) as end:
            train.main([str(flag) for flag in flags])
        assert end.value.code == status
    else:
        train.main([str(flag) for flag in flags])
    text = "".join(capfd.readouterr())
    print(text)
    for word in words:
        assert word in text
    return text


def test_out_of_memory(tmp_path):
    status, out, err = run_program("128", cwd=tmp_path, script=ROOT / "model.py")
    assert (status, err) == (0, "")
    table = out.split("in MB")[1].splitlines()
    names, sizes = table[0].split()[:5], table[1].removeprefix("AdamW, float32").split()[:5]
    largest = max(zip(map(float, sizes), names))
    print(largest, "of", dict(zip(names, sizes)))
    assert largest[1] == "activations"


def test_the_loss_is_nan(folder, capfd, monkeypatch):
    real = data.load_dataset

    def spoilt(*args):
        train_part, test_part, about = real(*args)
        return train_part, test_part, {**about, "std": [0.0]}  # a division by zero

    monkeypatch.setattr(data, "load_dataset", spoilt)
    said(capfd, ["the first layer with an output that is not finite is conv1", "sample 0 of batch 0", "epoch 1, step 1"],
         "--epochs", 1, *FLAGS, "--out", "run", status=2)


def test_the_loss_stays_where_it_is(folder, capfd, monkeypatch):
    class NoGradient(networks.SimpleCNN):
        def forward(self, images):
            return super().forward(images).detach() + 0 * sum(parameter.sum() for parameter in self.parameters())

    monkeypatch.setattr(networks, "SimpleCNN", NoGradient)
    said(capfd, ["it cannot learn: after", "1. inputs: as it should be", "4. gradients: none in conv1.weight"],
         "--overfit", 16, *FLAGS, status=1)


@pytest.mark.parametrize("rate, words", [("50", "of itself: lower --lr"), ("1e-9", "of itself: raise --lr")])
def test_it_learns_too_slowly_or_jumps_about(rate, words, folder, capfd):
    said(capfd, ["suggested: python train.py "], "--find-lr", "--lr", rate, *FLAGS, "--no-augment")
    said(capfd, [words], "--epochs", 1, "--lr", rate, "--log-grads", 2, "--warmup", 0, *FLAGS, "--out", "run")
    assert (folder / "run/gradients.csv").exists()


def test_the_loss_falls_the_accuracy_does_not(folder, capfd, monkeypatch):
    real = data.load_dataset

    def random_labels(*args):
        (images, labels), test_part, about = real(*args)
        shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
        return (images, shuffled), test_part, about  # what is learnt by heart is of no use elsewhere

    monkeypatch.setattr(data, "load_dataset", random_labels)
    flags = ["--epochs", 20, "--batch-size", 8, "--width", 16, "--dropout", 0, "--no-augment", "--weight-decay", 0, "--amp", "off"]
    train.main([str(flag) for flag in [*flags, "--label-smoothing", 0, "--schedule", "constant", "--out", "run"]])
    capfd.readouterr()
    utils.main(["run"])
    out = capfd.readouterr().out
    print(out)
    assert "since then it rises while the training loss falls: overfitting" in out


def test_the_gpu_is_idle(folder, capfd, monkeypatch):
    monkeypatch.setattr(data, "Digits", SlowDigits)
    said(capfd, ["look first at data: more --workers"], "--epochs", 1, *FLAGS, "--profile", "--out", "run")


def test_the_accuracy_jumps_between_evaluations(folder, capfd):
    train.main(["--epochs", "4", *FLAGS, "--lr", "3e-2", "--out", "run"])  # 5 samples validate
    capfd.readouterr()
    utils.main(["run"])
    out = capfd.readouterr().out
    print(out.splitlines()[0])
    chance = re.search(r"accuracy jumps by up to [\d.]+% between the last epochs, ([\d.]+)% is the chance of 5 samples", out)
    assert 15 < float(chance[1]) < 23  # sqrt(p (1 - p) / 5) for p from 0.2 to 0.5


def test_two_runs_that_should_be_equal_differ(folder, capfd):
    train.main(["--epochs", "1", *FLAGS, "--out", "a"])
    train.main(["--epochs", "1", *FLAGS, "--out", "b", "--weight-decay", "0.06"])
    capfd.readouterr()
    utils.main(["a/last.pt", "b/last.pt"])
    out = capfd.readouterr().out
    print(out)
    assert out.startswith("args.weight_decay: 0.05 and 0.06\nmodel.")


def test_a_checkpoint_does_not_load(folder, capfd):
    train.main(["--epochs", "1", *FLAGS, "--out", "a"])
    with pytest.raises(utils.UserError, match="conv1.weight"):
        utils.load_weights(networks.SimpleCNN(8), utils.load_checkpoint("a/best.pt")["model"])
    capfd.readouterr()
    utils.main(["a/best.pt"])
    assert "  conv1.weight (4, 1, 3, 3) float32\n" in capfd.readouterr().out
    (folder / "half.pt").write_bytes((folder / "a/best.pt").read_bytes()[:3000])
    with pytest.raises(utils.UserError, match="half.pt"):
        utils.main(["half.pt"])


def test_several_processes_disagree(folder):
    drift = """
    import os, torch, utils
    def build_optimizer(model, args, real=utils.build_optimizer):
        def step_by_hand(*args):
            with torch.no_grad():
                model.fc2.bias[3] += 0.01
        optimizer = real(model, args)
        if os.environ["RANK"] == "1":
            optimizer.register_step_post_hook(step_by_hand)
        return optimizer
    utils.build_optimizer = build_optimizer
    """
    status, out, err = run_program("--epochs", "1", *FLAGS, "--out", "run", cwd=folder, ranks=2, before=drift)
    print(err)
    assert status != 0 and "the ranks disagree: fc2.bias of rank 1 is not that of rank 0" in err and "Traceback" not in err


def test_each_row_of_the_table_is_tried():
    section = (ROOT / "README.md").read_text().split("## When something is wrong")[1].split("\n## ")[0]
    rows = [line for line in section.split("\n\n")[2].splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        symptom = row.split("|")[1].strip().lower()
        assert "test_" + re.sub(r"\W+", "_", symptom) in globals(), symptom
