"""data.py: a folder of pictures becomes the right pixels, and what is wrong in it becomes one line."""

import os

import pytest
import torch
from PIL import Image

import data
from helpers import NORM, ROOT, run_program

RAMP = torch.arange(0, 240, 4, dtype=torch.uint8).view(6, 10)  # 6 x 10 pixels, dark above, bright below


def image_of(pixels):
    return Image.fromarray(pixels.numpy())


@pytest.mark.parametrize("kind", ["L", "RGB", "P", "LA", "RGBA", "CMYK", "I;16", "I"])
def test_each_kind_of_picture_has_the_pixels_that_one_sees(kind, tmp_path):
    if kind.startswith("I"):
        wide = RAMP.int() * 257  # 16 bits: white is 65,535
        picture = image_of(wide.to(torch.int32)) if kind == "I" else Image.frombytes("I;16", (10, 6), bytes(b for v in wide.flatten().tolist() for b in (v & 255, v >> 8)))
    else:
        picture = image_of(RAMP).convert(kind)
    path = tmp_path / ("a.tif" if kind in ("CMYK", "I") else "a.png")
    picture.save(path)
    read = data.read_picture(path, (1, 6, 10))
    assert read.dtype == torch.uint8 and (read[0].int() - RAMP.int()).abs().max() <= 2
    colour = data.read_picture(path, (3, 6, 10))
    assert (colour.int() - RAMP.int()).abs().max() <= 2


def test_one_bit_and_the_orientation_tag(tmp_path):
    bits = RAMP > 100
    image_of(bits.to(torch.uint8) * 255).convert("1").save(tmp_path / "bits.png")
    assert torch.equal(data.read_picture(tmp_path / "bits.png", (1, 6, 10))[0], bits.to(torch.uint8) * 255)
    picture = image_of(RAMP)
    exif = picture.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    picture.save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(data.read_picture(tmp_path / "turned.png", (1, 10, 6))[0], RAMP.rot90(-1))


@pytest.mark.parametrize("ink, background", [(20, 255), (230, 0)])
def test_a_transparent_drawing_keeps_its_strokes(ink, background, tmp_path):
    drawing = torch.zeros(8, 8, 4, dtype=torch.uint8)
    drawing[2:6, 3] = torch.tensor([ink, ink, ink, 255])
    image_of(drawing).save(tmp_path / "a.png")
    read = data.read_picture(tmp_path / "a.png", (1, 8, 8))[0]
    assert (read[2:6, 3] == ink).all() and (read == background).sum() == 60


def test_nothing_is_stretched_or_cut_off(tmp_path):
    image_of(torch.full((40, 20), 200, dtype=torch.uint8)).save(tmp_path / "a.png")
    read = data.read_picture(tmp_path / "a.png", (1, 28, 28))
    assert read.shape == (1, 28, 28) and (read == 200).all()  # the rest continues the paper


@pytest.mark.parametrize("kind", ["absent", "empty", "text", "cut", "folder", "pipe"])
def test_what_cannot_be_read_is_one_line_with_its_name(kind, tmp_path):
    path = tmp_path / "a.png"
    image_of(torch.randint(256, (50, 50), dtype=torch.uint8)).save(tmp_path / "whole.png")
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no picture")
    elif kind == "cut":
        path.write_bytes((tmp_path / "whole.png").read_bytes()[:700])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(data.DataError, match="a.png: ") as error:
        data.read_picture(path, (1, 28, 28))
    assert "\n" not in str(error.value)


def write_folder(root, images, labels, names):
    for index, (image, label) in enumerate(zip(images, labels.tolist())):
        (root / names[label]).mkdir(parents=True, exist_ok=True)
        image_of(image[0]).save(root / names[label] / f"{index}.png")


def test_pictures_in_folders_equal_those_from_idx(tmp_path):
    """The same pixels, labels, order, mean, standard deviation and checksum: so a training is the same, too."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    write_folder(tmp_path / "train", images[:120], labels[:120], classes)
    write_folder(tmp_path / "test", images[120:150], labels[120:150], classes)
    train_part, test_part, about = data.load_folder(tmp_path, log=lambda line: None)
    for ours, expected in zip((*train_part, *test_part), (images[:120], labels[:120], images[120:150], labels[120:150])):
        assert torch.equal(ours, expected)
    expected = data.describe(images[:120], labels[:120], classes, about["name"], "pictures")
    assert about == {**expected, "held_out": 0}
    assert data.load_folder(tmp_path, train=False, log=lambda line: None)[0] is None


def test_classes_sort_as_numbers_and_a_tenth_of_each_is_kept_for_the_test(tmp_path):
    images = torch.randint(256, (44, 1, 28, 28), dtype=torch.uint8)
    names = [str(number) for number in range(11)]
    write_folder(tmp_path, images, torch.arange(44) % 11, names)
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "0/notes.txt").write_text("no picture")
    (tmp_path / "0/loop").symlink_to(tmp_path)
    lines = []
    (_, labels), (_, test_labels), about = data.load_folder(tmp_path, log=lines.append)
    assert about["classes"] == names and sorted(test_labels.tolist()) == list(range(11)) and len(labels) == 33
    assert any("kept for the test" in line for line in lines) and any("notes.txt" in line for line in lines)
    again = data.load_folder(tmp_path, log=lines.append)
    assert torch.equal(labels, again[0][1])


@pytest.mark.parametrize("kind, words", [
    ("no class", "a class is a sub-folder"), ("one class", "one class only"), ("empty class", "no picture in it"),
    ("broken", "more than a tenth"), ("too large", "GB of memory"), ("test alone", "without"),
])
def test_a_folder_that_is_no_data_set_is_one_line(kind, words, tmp_path, monkeypatch):
    images = torch.randint(256, (12, 1, 8, 8), dtype=torch.uint8)
    if kind == "one class":
        write_folder(tmp_path, images, torch.zeros(12, dtype=torch.int64), ["cat"])
    elif kind == "test alone":
        write_folder(tmp_path / "test", images, torch.arange(12) % 2, ["cat", "dog"])
    elif kind != "no class":
        write_folder(tmp_path, images, torch.arange(12) % 2, ["cat", "dog"])
    if kind == "empty class":
        (tmp_path / "mouse").mkdir()
    if kind == "broken":
        for index in (0, 2):
            (tmp_path / f"cat/{index}.png").write_text("no picture")
    if kind == "too large":
        monkeypatch.setattr(data, "memory_left", lambda: 1000)
    with pytest.raises(data.DataError, match=words) as error:
        data.load_folder(tmp_path, log=lambda line: None)
    assert "\n" not in str(error.value)


def test_a_few_broken_pictures_are_named_and_left_out(tmp_path):
    images = torch.randint(256, (30, 1, 8, 8), dtype=torch.uint8)
    write_folder(tmp_path, images, torch.arange(30) % 2, ["Katze", "狗"])
    (tmp_path / "狗/3.png").write_text("no picture")
    lines = []
    (_, labels), (_, test_labels), about = data.load_folder(tmp_path, log=lines.append)
    assert len(labels) + len(test_labels) == 29 and about["classes"] == ["Katze", "狗"]
    assert sum("3.png" in line for line in lines) == 1


def test_digits_of_mnist_keep_each_pixel_and_photos_come_to_its_form(tmp_path):
    images, _, _ = data.load_mnist(data.SAMPLE, train=False)
    for index in range(20):
        image_of(images[index, 0]).save(tmp_path / "raw.png")
        assert torch.equal(data.read_digit(tmp_path / "raw.png"), images[index])
        image_of(255 - images[index, 0]).save(tmp_path / "white.png")
        assert torch.equal(data.read_digit(tmp_path / "white.png"), images[index])
    # The same digit as ink on uneven paper, ten times as large and off its centre.
    large = torch.nn.functional.interpolate(images[0][None].float() / 255, scale_factor=10, mode="bilinear")[0, 0]
    paper = 0.95 - 0.3 * torch.linspace(0, 1, 600)[:, None] - 0.1 * torch.linspace(0, 1, 500)
    paper[250:530, 40:320] *= 1 - 0.8 * large
    image_of((255 * paper).to(torch.uint8)).save(tmp_path / "photo.jpg", quality=60)
    read = data.read_digit(tmp_path / "photo.jpg").float()[0]
    expected = images[0, 0].float()
    alike = (read * expected).sum() / (read.norm() * expected.norm())
    print(f"cosine of the two pictures: {alike:.3f}")
    assert alike > 0.8
    image_of(torch.full((100, 100), 230, dtype=torch.uint8)).save(tmp_path / "blank.png")
    with pytest.raises(data.DataError, match="blank.png: nothing is written"):
        data.read_digit(tmp_path / "blank.png")


def test_the_module_shows_each_step_for_a_picture(tmp_path):
    images, _, _ = data.load_mnist(data.SAMPLE, train=False)
    image_of(255 - images[0, 0]).resize((140, 140)).save(tmp_path / "a.png")
    status, out, err = run_program("a.png", cwd=tmp_path, script=ROOT / "data.py")
    assert (status, err) == (0, "") and "in the middle of 28 x 28: 28 x 28 pixels" in out and "@@" in out
    status, out, err = run_program("absent.png", cwd=tmp_path, script=ROOT / "data.py")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_block_in_a_corner_comes_to_the_form_of_mnist(tmp_path):
    page = torch.full((100, 100), 255, dtype=torch.uint8)
    page[2:14, 3:11] = 0  # 12 x 8 pixels of ink
    image_of(page).save(tmp_path / "a.png")
    digit = data.read_digit(tmp_path / "a.png")
    rows, columns = (digit[0] > 127).nonzero(as_tuple=True)
    mass = digit[0].float() / digit[0].sum()
    centre = (mass.sum(1) * torch.arange(28)).sum().item(), (mass.sum(0) * torch.arange(28)).sum().item()
    print(f"{rows.max() - rows.min() + 1} x {columns.max() - columns.min() + 1} pixels of ink, centre of mass {centre}")
    assert rows.max() - rows.min() + 1 == 20 and columns.max() - columns.min() + 1 in (13, 14)
    assert all(abs(each - 14) <= 1 for each in centre)
    background = data.normalize(digit[None].float() / 255, NORM["mean"], NORM["std"])[0, 0, 0, 0]
    assert abs(background.item() + 0.4242) < 1e-4


def test_what_systems_put_into_folders_is_no_class_and_no_picture(tmp_path):
    images = torch.randint(256, (20, 1, 8, 8), dtype=torch.uint8)
    write_folder(tmp_path, images, torch.arange(20) % 2, ["0", "1"])
    for name in (".ipynb_checkpoints", "__MACOSX"):
        write_folder(tmp_path / name, images[:2], torch.zeros(2, dtype=torch.int64), ["0"])
        image_of(images[0, 0]).save(tmp_path / name / "0.png")
    for name in (".DS_Store", "0/._0.png", "1/Thumbs.db"):
        (tmp_path / name).write_text("not a picture")
    lines = []
    (_, labels), (_, test_labels), about = data.load_folder(tmp_path, log=lines.append)
    assert about["classes"] == ["0", "1"] and len(labels) + len(test_labels) == 20
    assert not any("left out" in line for line in lines)


def test_labels_are_those_of_the_classes_to_train_on_in_every_part(tmp_path):
    names = ["0", "90", "180", "270"]
    images = (torch.arange(40) % 4 * 60).to(torch.uint8).view(40, 1, 1, 1).repeat(1, 1, 8, 8)  # of class k the grey 60 k
    labels = torch.arange(40) % 4
    write_folder(tmp_path / "train", images, labels, names)
    few = labels[:12] != 2
    for part in ("val", "test"):
        write_folder(tmp_path / part, images[:12][few], labels[:12][few], names)  # without 180
    (pictures, found), (test_pictures, test_found), about = data.load_folder(tmp_path, log=lambda line: None)
    assert about["classes"] == names and about["held_out"] == 9
    for each, label in ((pictures, found), (test_pictures, test_found)):
        assert torch.equal(each[:, 0, 0, 0].long() // 60, label)  # an oracle is right everywhere
    write_folder(tmp_path / "val", images[:1], labels[:1], ["45"])
    with pytest.raises(data.DataError, match="val/45: a class that is not among those to train on"):
        data.load_folder(tmp_path, log=lambda line: None)


def test_a_hundred_classes_and_two_that_differ_by_case(tmp_path):
    names = [f"c{index}" for index in range(98)] + ["cat", "Cat"]
    images = torch.randint(256, (200, 1, 4, 4), dtype=torch.uint8)
    write_folder(tmp_path, images, torch.arange(200) % 100, names)
    lines = []
    (_, labels), (_, test_labels), about = data.load_folder(tmp_path, image_size=4, log=lines.append)
    assert len(about["classes"]) == 100 and len(labels) == len(test_labels) == 100
    assert sum("differ by upper and lower case only: two classes" in line for line in lines) == 1
