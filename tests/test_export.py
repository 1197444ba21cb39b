"""Exported files answer as the network that was trained, without this code, and what is not right is not written."""

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import data
import train
import utils
from helpers import NORM, ROOT

MNIST = {"name": "MNIST", "items": "digits", "classes": [str(i) for i in range(10)], "shape": [1, 28, 28], **NORM}
COLOUR = {
    "name": "signs", "items": "signs", "classes": ["stop", "go", "停"], "shape": [3, 20, 24],
    "mean": [0.2, 0.5, 0.7], "std": [0.1, 0.2, 0.3],
}
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript and onnxruntime are not installed")
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_checkpoint(*flags, about=MNIST, path="best.pt"):
    """Writes a checkpoint of a network with random weights and statistics. Returns (its arguments, the network in use)."""
    args = train.parse_args(["--dropout", "0.5", *flags])
    torch.manual_seed(1)
    network = train.build_model(args, about)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    utils.save_checkpoint(path, {"model": network.state_dict(), "args": train.stored_arguments(args), "data": about})
    return args, network.eval()


def some_pictures(about, count=7):
    """uint8 (count, C, H, W), of noise, with a black part that differs from one to the other; the third is black."""
    images = torch.randint(256, (count, *about["shape"]), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    for index, image in enumerate(images):
        image[:, :, 3 * index :] = 0
    images[2] = 0
    return images


def answers_of(args, network, about, images):
    """What evaluation would make of these pictures: by way of the data set and the collate function of training."""
    digits = data.Digits(images, torch.zeros(len(images), dtype=torch.int64), about["classes"])
    inputs, _ = train.NETWORKS[args.model]["collate"](args, about)(digits.__getitems__(range(len(images))))
    with torch.no_grad():
        return network(inputs)


def load(path):
    """(a function of pictures, the class names), of a file and what it takes to read that kind."""
    if path.endswith(".pt2"):
        names = {"classes.json": ""}
        return torch.export.load(path, extra_files=names).module(), json.loads(names["classes.json"])
    if path.endswith(".torchscript.pt"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            network = torch.jit.load(path)
        return network, network.classes
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    def answer(images):
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return answer, json.loads(session.get_modelmeta().custom_metadata_map["classes"])


FILES = {"export": "best.pt2", "torchscript": "best.torchscript.pt", "onnx": "best.onnx"}


@pytest.mark.parametrize("flags, about", [
    ([], MNIST), (["--width", "8", "--norm", "batch"], COLOUR), (["--width", "8", "--norm", "group", "--quant-bits", "2"], MNIST),
    (["--model", "attention"], MNIST), (["--model", "attention", "--tokens", "padded", "--attention-kernel", "manual"], COLOUR),
    (["--model", "attention", "--tokens", "all", "--grad-checkpoint", "--quant-bits", "4"], MNIST),
], ids=lambda value: " ".join(value) or "defaults" if isinstance(value, list) else value["name"])
@pytest.mark.parametrize("kind", ["export", "torchscript", pytest.param("onnx", marks=needs_onnx)])
def test_a_file_answers_as_the_network_for_any_batch(kind, flags, about, capfd):
    args, network = a_checkpoint(*flags, about=about)
    train.main(["--export", "best.pt", "--format", kind])
    answer, classes = load(FILES[kind])
    images = some_pictures(about)
    assert classes == about["classes"]
    for size in (1, 2, 3, 7):
        for start in (0, 7 - size):
            batch = images[start : start + size]
            expected = answers_of(args, network, about, batch)
            with torch.no_grad():
                found = answer(batch)
            assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    # A float could be 0 to 1 or 0 to 255; other sizes might be broadcast. So both are refused, not answered.
    channels, height, width = about["shape"]
    others = torch.rand(2, *about["shape"]), torch.zeros(2, 4 - channels, height, width, dtype=torch.uint8), images[:, :, 4:]
    for wrong in others:
        with pytest.raises(Exception, match="(?i)expected|guard"):
            answer(wrong)
    out = capfd.readouterr().out
    assert FILES[kind] in out and "differ by at most" in out
    assert ("PyTorch retires TorchScript; torch.export replaces it" in out) == (kind == "torchscript")
    assert sorted(path.name for path in Path().iterdir()) == sorted(["best.pt", FILES[kind]])


def test_patches_with_a_mask_are_the_tokens_of_training():
    images, labels = data.Digits(*data.load_mnist(data.SAMPLE)).__getitems__(range(20))
    images[4] = 0
    (tokens, positions, mask), same = data.collate_masked((images, labels), **NORM)
    packed, packed_positions, packed_mask = data.collate_packed((images, labels), **NORM)[0][:3]
    assert tokens.shape == (20, 49, 16) and torch.equal(tokens[mask], packed) and torch.equal(positions[mask], packed_positions)
    assert torch.equal(mask.sum(1), packed_mask.sum(1)) and mask[4].sum() == 0 and same is labels
    assert data.collate_masked((images, None), **NORM, blank=True)[0][2].all()


def test_pictures_to_check_meet_what_may_happen():
    images = train.pictures_to_check(MNIST)
    made, digits = images[:-10], images[-10:]
    filled = (made != 0).flatten(1).float().mean(1)
    assert images.dtype == torch.uint8 and len(made) == 11 and filled[0] > 0.99 and filled[-1] == 0
    assert (filled.diff() < 0).all()  # every number of tokens in between
    sample, labels, _ = data.load_mnist(data.SAMPLE, train=False)
    found = [labels[(sample == digit).flatten(1).all(1)].unique().tolist() for digit in digits]
    assert found == [[label] for label in range(10)]
    assert train.pictures_to_check(COLOUR).shape == (6, 3, 20, 24)
    assert len(train.pictures_to_check({**COLOUR, "classes": list("abcdefg")})) == 8


def test_the_check_sees_every_batch_and_every_picture():
    images, sizes = torch.arange(12.0)[:, None], []

    def answer(batch):
        sizes.append(len(batch))
        return batch + 0.5 * (batch == 11)  # only the last one is wrong

    assert utils.largest_difference(answer, torch.nn.Identity(), images) == (0.5, 11) and {1, 2, 5} <= set(sizes)
    with pytest.raises(utils.UserError, match="differs .* by 5.0e-01"):
        utils.check_same_answers(answer, torch.nn.Identity(), images)
    with pytest.raises(utils.UserError, match="nan"):
        utils.check_same_answers(lambda batch: batch / batch, torch.nn.Identity(), images)
    assert utils.check_same_answers(lambda batch: batch + 1e-6, torch.nn.Identity(), images / 100) == pytest.approx(1e-6, rel=0.2)


def error_of(capfd, *words):
    """The one line that main() ends with, status 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(list(words))
    err = capfd.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("kind", ["export", "torchscript"])
def test_what_answers_otherwise_is_not_written(kind, capfd, monkeypatch):
    a_checkpoint("--width", "4")
    real = utils.WithPreparation.forward
    monkeypatch.setitem(train.NETWORKS["cnn"], "export", lambda args, about: lambda batch: batch)  # not normalized
    assert "differs from the checkpoint's network by" in error_of(capfd, "--export", "best.pt", "--format", kind)
    monkeypatch.delitem(train.NETWORKS["cnn"], "export")

    def in_training_mode(self, images):
        return real(self.train(), images)

    monkeypatch.setattr(utils.WithPreparation, "forward", in_training_mode)  # dropout
    assert "differs" in error_of(capfd, "--export", "best.pt", "--format", kind)
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


def test_a_graph_for_one_batch_size_is_not_written(monkeypatch):
    a_checkpoint("--width", "4")
    monkeypatch.setattr(torch.export, "Dim", lambda name: None)  # None: the size of the example for ever
    with pytest.raises(AssertionError, match="Guard failed"):
        train.main(["--export", "best.pt", "--format", "export"])
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


def test_weights_that_are_not_finite_are_not_written(capfd):
    a_checkpoint("--width", "4")
    checkpoint = utils.load_checkpoint("best.pt")
    checkpoint["model"]["fc2.bias"][0] = torch.nan
    utils.save_checkpoint("best.pt", checkpoint)
    assert "fc2.bias is not finite" in error_of(capfd, "--export", "best.pt", "--format", "export")
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


@pytest.mark.parametrize("kind", ["export", "int8"])
def test_a_full_disk_leaves_no_file(kind, capfd, monkeypatch):
    a_checkpoint("--width", "4")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(utils.os, "fsync", full)
    assert "No space left" in error_of(capfd, "--export", "best.pt", "--format", kind)
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


def test_a_checkpoint_is_not_written_over(capfd):
    a_checkpoint("--width", "4", path="best.pt2")
    before = Path("best.pt2").read_bytes()
    assert "best.pt2" in error_of(capfd, "--export", "best.pt2", "--format", "export")
    assert Path("best.pt2").read_bytes() == before


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_onnx_without_its_packages_is_one_line(missing, capfd, monkeypatch):
    a_checkpoint("--width", "4")
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    assert "needs the packages onnx and onnxscript" in error_of(capfd, "--export", "best.pt", "--format", "onnx")
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


@pytest.mark.parametrize("flags, given", [([], []), ([], ["--quant-bits", "3"]), (["--quant-bits", "3"], [])])
def test_int8_says_how_far_its_logits_are_from_those_as_trained(flags, given, capfd):
    """Quantized after training, they move; in training, it is the same network, but for rounding of floats."""
    args, network = a_checkpoint("--width", "8", *flags)
    train.main(["--export", "best.pt", "--format", "int8", *given])
    said = float(re.search(r"as trained by at most (\S+)$", capfd.readouterr().out.strip())[1])
    stored = utils.load_checkpoint(next(Path().glob("best.int*.pt")))
    weights = train.networks.unpack_weights(stored["model"])
    rounded = train.load_network(train.parse_args([], stored["args"]), MNIST, weights, "")
    images = train.pictures_to_check(MNIST)
    moved = (answers_of(args, network, MNIST, images) - answers_of(args, rounded, MNIST, images)).abs().max().item()
    assert said == pytest.approx(moved, rel=0.05, abs=1e-5)
    assert moved < 1e-5 if flags else moved > 1e-3


def test_a_checkpoint_does_not_choose_the_format(capfd):
    a_checkpoint("--width", "4")
    checkpoint = utils.load_checkpoint("best.pt")
    checkpoint["args"]["format"] = "torchscript"
    utils.save_checkpoint("best.pt", checkpoint)
    train.main(["--export", "best.pt"])
    assert Path("best.int8.pt").exists() and not Path("best.torchscript.pt").exists()


# ---------------------------------------------------------------------------------------------------- the README

SECTION = re.search(r"^## The model leaves$(.*?)^## ", README, re.M | re.S)[1]
SNIPPETS = {re.search(r'"(best\.[\w.]+)"', text)[1]: text for text in re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)}

# Each in a namespace of its own, in one interpreter: to start another one takes seconds.
RUN_ALL = """
import importlib.util, json, sys, warnings
assert not any(importlib.util.find_spec(name) for name in ("train", "utils", "data", "model")), "this code is in reach"
warnings.simplefilter("ignore")
for text in json.load(sys.stdin):
    exec(text, {"__name__": "snippet"})
"""


def test_readme_reads_each_format_in_six_lines_without_this_code(folder):
    assert set(SNIPPETS) == {*FILES.values(), "best.int8.pt"}
    names = {**MNIST, "classes": [f"the digit {i}" for i in range(10)]}
    args, network = a_checkpoint(about=names)
    empty = folder / "empty"
    empty.mkdir()
    texts = []
    for kind in ("export", "torchscript", "int8", "onnx"):
        path = FILES.get(kind, "best.int8.pt")
        lines = SNIPPETS[path].splitlines()
        assert len(lines) <= 6 and max(map(len, lines)) <= 120
        assert not re.search(r"\b(train|utils|data|model)\b\s*[.(]", SNIPPETS[path])
        if kind != "onnx" or HAS_ONNX:
            train.main(["--export", "best.pt", "--format", kind])
            Path(path).rename(empty / path)
            texts.append(SNIPPETS[path])
    done = subprocess.run([sys.executable, "-c", RUN_ALL], cwd=empty, input=json.dumps(texts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stroke = F.pad(torch.full((1, 1, 20, 2), 255, dtype=torch.uint8), (13, 13, 4, 4))
    expected = names["classes"][answers_of(args, network, names, stroke).argmax()]
    assert done.stdout.splitlines() == [expected] * len(texts)
