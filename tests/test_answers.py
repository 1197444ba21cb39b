"""A person's own pictures through the program: trained on, answered, frozen layers, and what was taken for what."""

import json

import pytest
import torch
from PIL import Image

import data
import train
import utils
from helpers import small_task

FLAGS = ["--epochs", "6", "--batch-size", "8", "--width", "8", "--lr", "1e-2", "--dropout", "0", "--no-augment"]


def write_sides(folder, count=24, size=20):
    """Pictures in colour that are bright on their left or on their right, in a folder for each of the two."""
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        name = ("left", "right")[index % 2]
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 90, (size, size, 3), generator=generator, dtype=torch.uint8)
        half = slice(0, size // 2) if name == "left" else slice(size // 2, size)
        pixels[:, half, 0] += 150
        Image.fromarray(pixels.numpy()).save(folder / name / f"{index}.png")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ["cnn", "attention"])
def test_a_folder_is_trained_on_evaluated_exported_and_answered(model, folder, capfd):
    write_sides(folder / "sides")
    flags = [*FLAGS, "--dataset", "sides", "--image-size", "16", "--model", model, "--out", "run", "--val-size", "0"]
    train.main([*flags, *(["--epochs", "30", "--width", "16"] if model == "attention" else [])])
    out = capfd.readouterr().out
    assert "2 classes" in out and "3 x 16 x 16" in out and "test accuracy 100.00 % (sides, 2 pictures)" in out
    assert utils.load_checkpoint("run/best.pt")["data"]["shape"] == [3, 16, 16]
    train.main(["--evaluate", "run/best.pt"])
    assert "test accuracy 100.00 % (sides, 2 pictures)" in capfd.readouterr().out
    train.main(["--export", "run/best.pt"])
    capfd.readouterr()
    Image.new("RGB", (30, 20)).save(folder / "other.jpg")
    (folder / "text.png").write_text("no picture")
    for checkpoint in ("run/best.pt", "run/best.int8.pt"):
        with pytest.raises(SystemExit) as end:
            train.main(["--predict", checkpoint, "sides", "text.png", "other.jpg", "--json"])
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert end.value.code == 1 and len(lines) == 26
        for line in lines[:24]:
            assert line["class"] in line["file"] and line["probability"] > 0.5 and len(line["next"]) == 1
        assert lines[24]["file"] == "text.png" and "text.png" in lines[24]["error"]
        assert lines[25]["file"] == "other.jpg" and lines[25]["class"] in ("left", "right")
    with pytest.raises(SystemExit) as end:
        train.main(["--predict", "run/best.pt", "sides/left/0.png"])
    out = capfd.readouterr().out
    assert end.value.code == 0 and out.startswith("sides/left/0.png: left (") and out.count("\n") == 1
    print(out)
    (folder / "none").mkdir()
    (folder / "none/.DS_Store").write_text("the system's own")
    with pytest.raises(SystemExit) as end:
        train.main(["--predict", "run/best.pt", "none"])
    assert end.value.code == 2 and capfd.readouterr().err == "train.py: error: none: no picture in it\n"


def test_pictures_for_validation_may_be_chosen(folder, capfd):
    write_sides(folder / "sides/train", 20)
    write_sides(folder / "sides/val", 6)
    write_sides(folder / "sides/test", 4)
    train.main([*FLAGS, "--dataset", "sides", "--image-size", "8", "--channels", "1", "--out", "run"])
    assert "20 for training, 6 for validation, 4 for the test" in capfd.readouterr().out
    assert utils.load_checkpoint("run/best.pt")["data"]["shape"] == [1, 8, 8]


def test_answers_for_digits_are_made_of_any_picture_unless_they_are_raw(folder, capfd):
    train.main(["--dataset", "sample", "--epochs", "2", "--width", "8", "--out", "run"])
    images, labels, _ = data.load_mnist(data.SAMPLE, train=False)
    photo = Image.fromarray(255 - images[3, 0].numpy()).resize((280, 280)).rotate(5, fillcolor=255)  # black on white
    photo.save("photo.png")
    Image.fromarray(images[3, 0].numpy()).save("raw.png")
    found = {}
    for name, flags in (("photo.png", []), ("raw.png", ["--raw-images"]), ("raw.png ", [])):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            train.main(["--predict", "run/best.pt", name.strip(), "--json", *flags])
        assert end.value.code == 0
        found[name] = json.loads(capfd.readouterr().out)
    print(labels[3].item(), found)
    assert found["photo.png"]["class"] == found["raw.png"]["class"] == str(labels[3].item())
    assert found["raw.png"]["probability"] == found["raw.png "]["probability"]  # in MNIST's form already


def test_frozen_layers_do_not_move_by_one_bit_and_another_head_is_said(folder, monkeypatch, capfd):
    small_task(monkeypatch)
    flags = ["--epochs", "2", "--batch-size", "8", "--width", "8", "--norm", "batch"]
    train.main([*flags, "--out", "digits"])
    first = utils.load_checkpoint("digits/best.pt")["model"]
    write_sides(folder / "sides")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    flags += ["--dataset", "sides", "--channels", "1", "--val-size", "0"]
    capfd.readouterr()
    train.main([*flags, "--init", "digits/best.pt", "--out", "run", "--freeze", "conv1"])
    out = capfd.readouterr().out
    assert "frozen: conv1.weight, conv1.bias" in out and "fc2.weight (shape (10, 32), here (2, 32))" in out
    second = utils.load_checkpoint("run/last.pt")["model"]
    assert torch.equal(first["conv1.weight"], second["conv1.weight"]) and not torch.equal(first["conv2.weight"], second["conv2.weight"])
    assert not torch.equal(first["norm1.running_mean"], second["norm1.running_mean"])  # it was not frozen
    for name, epochs in (("norm1", 2), ("", 3)):
        if name:
            train.main([*flags, "--init", "digits/best.pt", "--out", "other", "--freeze", name])
        else:
            train.main(["--resume", "other/last.pt", "--epochs", str(epochs)])  # frozen as before
        third = utils.load_checkpoint("other/last.pt")["model"]
        for key in third:
            assert torch.equal(first[key], third[key]) == key.startswith("norm1"), key
    capfd.readouterr()
    for name in ("convolution", ""):
        with pytest.raises(SystemExit) as end:
            train.main([*flags, "--init", "digits/best.pt", "--out", "none", "--freeze", name])
        assert end.value.code == 2 and "--freeze" in capfd.readouterr().err


def test_evaluation_says_and_draws_what_was_taken_for_what(folder, monkeypatch, capfd):
    small_task(monkeypatch)
    train.main(["--epochs", "1", "--batch-size", "16", "--width", "8", "--out", "run"])
    row = utils.load_checkpoint("run/best.pt")["best"]
    capfd.readouterr()
    train.main(["--evaluate", "run/best.pt", "--split", "val"])
    out = capfd.readouterr().out
    assert f"validation accuracy {100 * row['val_accuracy']:.2f} % (small, 5 pictures), loss {row['val_loss']:.4f}" in out
    train.main(["--evaluate", "run/best.pt"])
    out = capfd.readouterr().out
    print(out)
    words = next(line for line in out.splitlines() if line.startswith("most often wrong: "))
    true, answer, count = words.removeprefix("most often wrong: ").split(", ")[0].replace(" taken for", "").replace(":", "").split()
    table = [line.split() for line in out.splitlines()[1:11]]
    cells = [[0 if cell == "." else int(cell) for cell in line[1:11]] for line in table]
    wrong = {(i, j): cells[i][j] for i in range(10) for j in range(10) if i != j}
    assert int(count) == cells[int(true)][int(answer)] == max(wrong.values())
    with Image.open("run/mistakes.png") as picture:
        assert picture.width == 8 * (4 * 28 + 8) + 8 or sum(wrong.values()) < 8
    assert f"{sum(wrong.values())} of {sum(wrong.values())} mistakes" in out
