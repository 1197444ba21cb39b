"""model.py: against the textbook's order of layers and by counting; and how it is written."""

import ast
import inspect
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as networks
from model import SimpleCNN, count_parameters
from test_copy import RUNS


def textbook(model):
    """The same layers in the order of textbooks, conv - ReLU - pool, as an nn.Sequential that shares the weights."""
    return nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), model.fc1, nn.ReLU(), model.dropout, model.fc2,
    )


def test_number_of_parameters():
    by_hand = (9 * 1 + 1) * 32 + (9 * 32 + 1) * 64 + (3136 + 1) * 128 + (128 + 1) * 10
    assert count_parameters(SimpleCNN()) == by_hand == 421_642
    model = SimpleCNN()
    model.fc1.requires_grad_(False)
    assert count_parameters(model) == by_hand - (3136 + 1) * 128


@pytest.mark.parametrize("width, classes", [(1, 2), (8, 10), (16, 47)])
def test_width_scales_all_layers(width, classes):
    model = SimpleCNN(width, classes=classes)
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, classes)
    by_hand = 10 * width + (9 * width + 1) * 2 * width + (98 * width + 1) * 4 * width + (4 * width + 1) * classes
    assert count_parameters(model) == by_hand


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 48), (4, 30, 7), (2, 4, 4)])
def test_the_network_is_built_from_the_shape_of_an_image(shape, norm):
    model = SimpleCNN(8, classes=4, norm=norm, shape=shape)
    channels, height, width = shape
    assert model.conv1.in_channels == channels
    assert model.fc1.in_features == 16 * (height // 4) * (width // 4)
    logits = model(torch.randn(5, *shape))
    logits.sum().backward()
    assert logits.shape == (5, 4)
    assert all(p.grad is not None for p in model.parameters())


def test_what_cannot_be_built_is_an_error():
    for shape in ((1, 3, 28), (1, 28, 3)):
        with pytest.raises(ValueError, match=f"images of {shape[1]} x {shape[2]} pixels: .* need 4 x 4"):
            SimpleCNN(shape=shape)
    with pytest.raises(ValueError, match="norm 'layer': none, batch or group"):
        SimpleCNN(norm="layer")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pool_before_relu_is_the_textbooks_function_to_the_bit(layout):
    torch.manual_seed(0)
    model = SimpleCNN().to(memory_format=layout)
    images = torch.rand(64, 1, 28, 28)
    images[:32, :, :, 14:] = 0  # flat areas: ties within a pooling window
    labels = torch.randint(10, (64,))
    results = []
    for network in (model, textbook(model)):
        torch.manual_seed(1)  # the same dropout
        model.zero_grad()
        logits = network(images)
        F.cross_entropy(logits, labels).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_is_there_in_training_only():
    model, images = SimpleCNN(dropout=0.5), torch.rand(4, 1, 28, 28)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_gradient_is_the_derivative():
    model = SimpleCNN(width=2, dropout=0.0).double()
    images = torch.rand(2, 1, 28, 28, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model(x).square().sum(), images, fast_mode=True)


# ---------------------------------------------------------------------------------------------------- how it is written

SOURCE = inspect.getsource(networks)
OBJECTS = {node.name: node for node in ast.parse(SOURCE).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def imported():
    """Names that the module's imports bind."""
    names = set()
    for node in ast.parse(SOURCE).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("name", [name for name in OBJECTS if f"model.{name}" in RUNS])
def test_needs_names_imports_and_helpers_and_no_more(name):
    node = OBJECTS[name]
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & (imported() | OBJECTS.keys())
    found = re.search(r"Needs: (.+?)\.(\s|$)", ast.get_docstring(node) or "", re.S)
    needs = re.split(r",\s+", found[1]) if found else []
    assert used - {name} == set(needs)


def test_the_module_shows_itself_through_head():
    command = f"{shlex.quote(sys.executable)} {shlex.quote(networks.__file__)} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "SimpleCNN, 421,642 parameters\n" and done.stderr == ""


def test_explaining_lines_and_lengths():
    lines = SOURCE.splitlines()
    assert max(map(len, lines)) <= 100
    explaining = {number for number, line in enumerate(lines, 1) if line.strip().startswith("#")}
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
            explaining |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
            assert node.end_lineno - start < 55, node.name
    full = [number for number, line in enumerate(lines, 1) if line.strip()]
    fraction = len([number for number in full if number in explaining]) / len(full)
    print(f"{fraction:.0%} of {len(full)} lines explain")
    assert fraction >= 0.35
