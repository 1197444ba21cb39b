"""The classic traps of PyTorch, as pairs: the wrong way with what it does, then the right way.

The first line of a test is the symptom that a person sees. Below "Wrong" it is made to happen, and
asserted as a number, a shape or an error. Below "Right" stands what to do instead: this project's
own code, where it has any. TRAPS.md lists all pairs in tables, in the order of this file.
"""

import ast
import errno
import io
import math
import pathlib
import pickle
import re
import runpy
import subprocess
import sys
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would import it, in the time of whichever test has it
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import random_split
from torch.utils.data.distributed import DistributedSampler

import data
import model as networks
import train
import utils
from helpers import ROOT, run_program

CPU = torch.device("cpu")
FILES = [data.SAMPLE / "MNIST/raw" / name for name in data.IDX_FILES]


def off():
    """A gradient scaler that does nothing, as in training without fp16."""
    return torch.amp.GradScaler("cpu", enabled=False)


def arguments(**changes):
    """The flags of the command line that the loop reads, all of them switched off."""
    plain = {"accum": 1, "warmup": 0.0, "schedule": "constant", "label_smoothing": 0.0}
    return SimpleNamespace(**{**plain, "clip": 0.0, "amp": "off", **changes})


class TwoClasses(nn.Module):
    """Logits (0, w * x): while w is 0, a sample x of class 0 has the gradient x / 2."""

    def __init__(self, features=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), x @ self.w], dim=1)


def class_0(*rows):
    """Samples of class 0 as a data set: class_0([2.0], [4.0]) has two of one feature."""
    return TensorDataset(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))


def train_epoch(model, dataset, batch_size=1, lr=1.0, state=None, **flags):
    """An epoch of train.train_one_epoch with plain SGD, in order. Returns its row of metrics."""
    loader, sgd = DataLoader(dataset, batch_size), torch.optim.SGD(model.parameters(), lr=lr)
    state = {} if state is None else state
    return train.train_one_epoch(model, loader, sgd, off(), state, arguments(**flags), CPU, log=str)


def full_disk(file):
    """What utils.write_atomically may meet in the middle of a file."""
    file.write(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


# ------------------------------------------------------------------------------------ 1. tensors


def test_two_devices():
    """RuntimeError: a tensor is not on the expected device."""
    # Wrong: the network is moved and its input is not. (A "meta" tensor stands in for the GPU's.)
    device = torch.device("meta")
    model, x = nn.Linear(2, 1).to(device), torch.ones(4, 2)
    x.to(device)  # this returns a copy there, and x stays where it is
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        model(x)
    # A single number may lie on the CPU. That is no mistake, and does not show that devices mix.
    assert (torch.ones(2, device=device) + torch.tensor(1.0)).device == device

    # Right: whatever the batch consists of, all of it is moved, and the result is used.
    x, mask = utils.to_device((x, {"mask": x > 0}), device)
    assert model(x).device == mask["mask"].device == device


def test_input_of_another_dtype():
    """RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float."""
    # Wrong: NumPy computes in float64, integers are int64, and a layer's weights are float32.
    layer = nn.Linear(2, 1)
    for x in (torch.from_numpy(np.ones((1, 2))), torch.tensor([[1, 1]])):
        with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
            layer(x)

    # Right: what comes out of the data set is float32 already, whatever it has in store.
    images, labels, classes = data.load_mnist(data.SAMPLE)
    image, label = data.Digits(images, labels, classes)[0]
    assert images.dtype == torch.uint8 and image.dtype == torch.float32 == layer.weight.dtype


def test_column_against_row():
    """The loss falls and stops early, and every prediction is the mean of all targets."""
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    y = torch.tensor([1.0, 3.0, 5.0])  # = 2x + 3
    answers = {}
    for way in ("wrong", "right"):
        layer = nn.Linear(1, 1)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(200):
            prediction = layer(x)  # (3, 1)
            if way == "right":  # Right: (3,), as the targets
                prediction = prediction.squeeze(1)
            # Wrong: (3, 1) - (3,) = (3, 3), each against all targets. (F.mse_loss would warn.)
            error = prediction - y
            sgd.zero_grad()
            error.square().mean().backward()
            sgd.step()
        answers[way] = layer(x).flatten().tolist()
    assert answers["wrong"] == pytest.approx([3, 3, 3], abs=1e-2)
    assert answers["right"] == pytest.approx([1, 3, 5], abs=1e-2)


def test_permute_then_view():
    """RuntimeError: view size is not compatible; or, with reshape first, pictures full of noise."""
    pixels = torch.arange(16.0).view(1, 4, 4, 1)  # (B, H, W, C), as PIL and NumPy have them
    images = pixels.expand(1, 4, 4, 2)  # the same picture in both channels
    # Wrong: view only renames what lies in memory, and after permute that lies in another order.
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        images.permute(0, 3, 1, 2).view(1, 32)
    # Wrong, and silent: to reshape instead of to permute deals the pixels to the wrong channels.
    mixed = images.reshape(1, 2, 4, 4)
    assert mixed[0, 0, 0].tolist() == [0, 0, 1, 1]

    # Right: permute puts dimensions in order, then flatten (or reshape) joins neighbours.
    images = images.permute(0, 3, 1, 2)  # (B, C, H, W)
    assert images[0, 0, 0].tolist() == [0, 1, 2, 3]
    patches = data.cut_patches(images)  # (B, P, C, 4, 4): one patch of 4 x 4 pixels
    assert patches.flatten(2).shape == (1, 1, 32) and torch.equal(patches[0, 0], images[0])


def test_squeeze_of_a_batch_of_one():
    """IndexError: Dimension out of range, in the last batch of an epoch only."""
    pool, mask = networks.MaskedPooling(5), torch.ones(1, 3, dtype=torch.bool)
    x = torch.randn(1, 3, 5)  # a last batch of one sample: (B, L, d)
    # Wrong: squeeze() takes away every dimension of size 1, also that of the batch.
    mean = x.mean(1, keepdim=True).squeeze()
    assert mean.shape == (5,)
    with pytest.raises(IndexError, match="Dimension out of range"):
        mean.argmax(1)

    # Right: squeeze(1) takes away that one, as MaskedPooling does.
    assert x.mean(1, keepdim=True).squeeze(1).shape == pool(x, mask).shape == (1, 5)


def test_max_without_keepdim():
    """Rows are divided by the maxima of other rows, and only square matrices do not complain."""
    x = torch.tensor([[60.0, 30.0], [0.6, 0.3]])
    # Wrong: (2, 2) / (2,) lines the maxima up with the columns.
    largest = x.max(1).values  # [60, 0.6]; x.max(1) itself is a pair, values and indices
    assert (x / largest)[0].tolist() == pytest.approx([1, 50])
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2, 3) / torch.ones(2, 3).max(1).values

    # Right: keepdim=True leaves (2, 1), which lines up with the rows.
    assert (x / x.amax(1, keepdim=True))[0].tolist() == [1, 0.5]
    scale = networks.quantization_scale(x, bits=8, axis=0)  # so is each channel's scale made
    assert scale.shape == (2, 1) and (x / scale)[1].tolist() == pytest.approx([127, 63.5])


def test_reshape_that_copies():
    """What is written into a reshaped tensor is in the original sometimes, and sometimes lost."""
    # Wrong: reshape gives a view where it can, and where memory lies otherwise, a copy.
    x = torch.zeros(2, 3)
    x.reshape(6)[1] = 1
    x.t().reshape(6)[5] = 1  # the same call; what is written is lost
    assert x.flatten().tolist() == [0, 1, 0, 0, 0, 0]

    # Right: view never copies, and says so where it would have to. Or write into x itself.
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.t().view(6)[5] = 1
    x[1, 2] = 1
    packed, mask = torch.tensor([[7.0], [8.0]]), torch.tensor([[True, False], [True, False]])
    assert x[1, 2] == 1 and networks.unpack(packed, mask).flatten().tolist() == [7, 0, 8, 0]


# ----------------------------------------------------------------------------------- 2. autograd


def test_forgotten_zero_grad():
    """Gradients become longer with every step, and the loss swings wildly."""
    # Wrong: backward adds to what is in .grad.
    model, loss = TwoClasses(), nn.CrossEntropyLoss()
    gradients = []
    for _ in range(3):
        loss(model(torch.tensor([[2.0]])), torch.tensor([0])).backward()
        gradients.append(model.w.grad.item())
    assert gradients == [1, 2, 3]

    # Right: the loop empties .grad before each window. (lr 0: the same gradient three times.)
    row = train_epoch(TwoClasses(), class_0([2.0], [2.0], [2.0]), lr=0.0)
    assert row["grad_norm"] == 1.0  # the mean of the three


def test_modified_in_place():
    """RuntimeError: one of the variables needed ... has been modified by an inplace operation."""
    # Wrong: the derivative of exp is its result, which += has overwritten.
    x = torch.zeros(2, requires_grad=True)
    y = x.exp()
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    # 3 * x has the derivative 3, whatever becomes of its result: so often enough it works.
    y = 3 * x
    y += 1
    y.sum().backward()
    assert x.grad.tolist() == [3, 3]

    # Right: y = y + 1 makes a new tensor, as the residual connections of Block do.
    block, x = networks.Block(d_model=4, n_heads=1), torch.ones(1, 2, 4, requires_grad=True)
    block(x.exp()).sum().backward()
    assert x.grad.shape == x.shape


def test_backward_a_second_time():
    """RuntimeError: Trying to backward through the graph a second time."""
    # Wrong: a running total, for the log, takes the graphs of all batches before along.
    model, total = TwoClasses(), 0
    batch = torch.tensor([[2.0]]), torch.tensor([0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        for x, y in (batch, batch):
            total = total + F.cross_entropy(model(x), y)
            total.backward()

    # Right: what is summed up for the log is detached. (No retain_graph: it would run, and count
    # the first batch twice.)
    model, window = TwoClasses(), [(*batch, 1), (*batch, 1)]
    sums = train.backward_window(model, window, 2, off(), arguments(), CPU)
    assert model.w.grad.item() == 1 and not sums["loss"].requires_grad


def test_no_grad_around_the_loss():
    """RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn."""
    # Wrong: under no_grad nothing is recorded, so there is nothing to go back through. The same
    # error comes from a loss made of argmax, .item() or .detach().
    model, x, y = TwoClasses(), torch.tensor([[2.0]]), torch.tensor([0])
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        (model(x).argmax(1) != y).float().mean().backward()

    # Right: the loss is recorded; metrics such as the accuracy are counted beside it.
    loss, _, metrics = train.loss_and_metrics(model(x), y)
    loss.backward()
    assert model.w.grad.item() == 1 and metrics["accuracy"] == 1


def test_own_update_of_a_leaf():
    """RuntimeError: a leaf Variable that requires grad is being used in an in-place operation."""
    w = nn.Parameter(torch.tensor([1.0]))
    (3 * w).sum().backward()
    # Wrong: the update itself would be recorded.
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        w -= 0.1 * w.grad
    # Wrong, and silent: w = w - ... is another tensor, a result, which never gets a gradient.
    assert not (w - 0.1 * w.grad).is_leaf

    # Right: an optimizer, which works under no_grad.
    model = nn.ParameterList([w])
    train.optimizer_step(model, torch.optim.SGD(model.parameters(), lr=0.1), off(), lr_factor=1.0)
    assert w.item() == pytest.approx(0.7) and w.is_leaf


def test_numpy_detour():
    """RuntimeError: Can't call numpy() on Tensor that requires grad; or a term has no effect."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\)"):
        np.square(w.numpy())
    # Wrong: the advice in the message stops the error, and cuts the graph. Here a penalty w^2 is
    # added to a loss 3w, and its gradient, 2w, is missing.
    penalty = torch.from_numpy(np.square(w.detach().numpy()))
    (3 * w + penalty).sum().backward()
    assert w.grad.tolist() == [3, 3]

    # Right: torch has all of it, and its loss terms keep their gradient, as distillation does.
    w.grad = None
    (3 * w + w.square()).sum().backward()
    assert w.grad.tolist() == [5, 7]
    utils.distillation(w[None], torch.zeros(1, 2)).backward()
    assert w.grad.tolist() != [5, 7]


def test_losses_in_a_list():
    """Memory grows with every batch."""
    made, alive = [], weakref.WeakSet()  # what graphs save for a backward pass, and what is left

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            made.append(tensor.shape)
            alive.add(self)

    model, loader = nn.Linear(1, 2), DataLoader(class_0([1.0], [2.0], [3.0]))
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        # Wrong: each loss of a validation, or their running sum, holds its whole graph.
        losses = [F.cross_entropy(model(x), y) for x, y in loader]
        assert len(alive) == len(made) and len(alive) % 3 == 0 and len(alive) > 0
        # Right: numbers hold nothing, and evaluate does not even begin a graph.
        losses, before = [loss.item() for loss in losses], len(made)
        train.evaluate(model, loader, CPU)
    assert len(alive) == 0 and len(made) == before


def test_backward_of_a_vector():
    """RuntimeError: grad can be implicitly created only for scalar outputs."""
    # Wrong: a loss for each sample, as reduction="none" gives it.
    model, x, y = TwoClasses(), torch.tensor([[2.0], [4.0]]), torch.tensor([0, 0])
    losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        losses.backward()

    # Right: their sum, and a division by the number of samples.
    loss, count, _ = train.loss_and_metrics(model(x), y)
    (loss / count).backward()
    assert losses.shape == (2,) and loss.shape == () and model.w.grad.item() == 1.5


def test_gradient_of_a_result():
    """w.grad is None after backward, or ValueError: can't optimize a non-leaf Tensor."""
    # Wrong: .double(), .to(device) or * 0.1 after requires_grad=True makes a result of another
    # tensor, a leaf, and only leaves collect gradients.
    w = torch.ones(2, requires_grad=True).double()
    w.sum().backward()
    with pytest.warns(UserWarning, match="not a leaf Tensor"):
        assert w.grad is None
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        torch.optim.SGD([w], lr=1.0)

    # Right: first the tensor, then requires_grad. A module's parameters stay leaves when it moves.
    args = train.parse_args(["--channels-last"])
    model = train.prepare(nn.Conv2d(1, 1, 1).double(), args, CPU, print)
    model(torch.ones(1, 1, 1, 1, dtype=torch.float64)).sum().backward()
    assert model.weight.is_leaf and model.weight.grad.item() == 1


def test_zero_grad_between_backward_and_step():
    """The loss does not move at all, and there is no error."""
    # Wrong: the gradient is gone before anybody has used it.
    model = TwoClasses()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    F.cross_entropy(model(torch.tensor([[2.0]])), torch.tensor([0])).backward()
    sgd.zero_grad()
    sgd.step()
    assert model.w.item() == 0 and model.w.grad is None

    # Right: zero_grad, backward, step.
    train_epoch(model, class_0([2.0]))
    assert model.w.item() == -1


def test_frozen_batch_norm():
    """A frozen network does not stay as it was loaded."""
    # Wrong: requires_grad stops the optimizer. Batch norm moves its buffers in each forward pass.
    frozen, images = networks.SimpleCNN(2, norm="batch"), torch.rand(4, 1, 28, 28)
    frozen.requires_grad_(False)
    before = frozen.norm1.running_mean.clone()
    frozen(images)
    assert not torch.equal(frozen.norm1.running_mean, before)

    # Right: eval() as well, as train.load_teacher does; and again after each train() of the whole.
    before = frozen.norm1.running_mean.clone()
    whole = nn.Sequential(frozen, nn.Linear(10, 2)).train()
    frozen.eval()
    whole(images)
    assert torch.equal(frozen.norm1.running_mean, before)
    # Or a norm that has no buffers.
    assert list(networks.SimpleCNN(2, norm="group").buffers()) == []


def test_gradient_of_rounding():
    """A network with rounded weights does not learn: all gradients are 0, and there is no error."""
    # Wrong: round is a staircase, flat everywhere.
    w = torch.tensor([0.9, -0.31, 0.1], requires_grad=True)
    (w / 0.3).round().sum().backward()
    assert w.grad.tolist() == [0, 0, 0]

    # Right: the straight-through estimator: forward the staircase, backward as if it were not.
    w.grad = None
    rounded, _ = networks.RoundSTE.apply(w, torch.tensor(0.3), -3, 3)
    rounded.sum().backward()
    assert rounded.tolist() == pytest.approx([0.9, -0.3, 0]) and w.grad.tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------ 3. modules


def test_targets_of_the_wrong_kind():
    """RuntimeError: expected target dtype to be Long; or multi-target not supported."""
    # Wrong: class numbers as floats, as a column, or as a row of integers that has a single 1.
    logits = torch.zeros(2, 3)
    for targets, error in (
        (torch.tensor([0.0, 1.0]), "Long"),  # older: expected scalar type Long but found Float
        (torch.tensor([[0], [1]]), "multi-target not supported"),
        (torch.tensor([[1, 0, 0], [0, 1, 0]]), "Expected floating point type for target"),
    ):
        with pytest.raises(RuntimeError, match=error):
            F.cross_entropy(logits, targets)
    # Wrong, and silent: one logit a sample. The softmax of a single number is 1, the loss is 0.
    assert F.cross_entropy(torch.randn(2, 1), torch.tensor([0, 0])) == 0

    # Right: logits (B, K), targets int64 (B,), which is what load_mnist and Digits return.
    digits = data.Digits(*data.load_mnist(data.SAMPLE))
    _, targets = digits.__getitems__([0, 1])
    assert targets.dtype == torch.int64 and targets.shape == (2,)
    train.loss_and_metrics(torch.zeros(2, 10), targets)


def test_softmax_before_cross_entropy():
    """With 10 classes the loss does not fall below 1.46, however long one trains."""
    # Wrong: cross_entropy has a softmax of its own. Of probabilities, even of [0, 1, 0, ...], it
    # makes nearly equal ones: -log(e / (e + 9)) = 1.46.
    targets = torch.tensor([1])
    certain = 50.0 * F.one_hot(targets, 10)  # logits of a network that is right, and sure
    assert F.cross_entropy(certain.softmax(1), targets).item() == pytest.approx(1.4612, abs=1e-4)

    # Right: logits go into the loss. SimpleCNN ends in a linear layer.
    assert train.loss_and_metrics(certain, targets)[0].item() == 0
    assert not torch.allclose(networks.SimpleCNN(2)(torch.rand(3, 1, 28, 28)).sum(1), torch.ones(3))


class Spy(nn.Module):
    """Answers with its input, behind a dropout, and notes how it was called."""

    def __init__(self):
        super().__init__()
        self.dropout, self.calls = nn.Dropout(0.5), []

    def forward(self, x):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.dropout(x * torch.ones(2, requires_grad=True))


def test_no_grad_without_eval():
    """The same picture gets another answer each time it is evaluated."""
    # Wrong: no_grad keeps no graph, but dropout drops on, and batch norm moves its buffers.
    torch.manual_seed(0)
    model, x = Spy(), torch.ones(100, 2)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))

    # Right: evaluate has both, and leaves the model in the mode it came in.
    loader = DataLoader(TensorDataset(x, torch.zeros(100, dtype=torch.int64)), 100)
    result = train.evaluate(model, loader, CPU)
    assert model.calls[-1] == (False, False) and model.training
    assert result == train.evaluate(model, loader, CPU)


def test_eval_without_no_grad():
    """Validation takes as much memory as training."""
    # Wrong: eval() turns off dropout. The graph for a backward pass is recorded all the same.
    model, x = Spy().eval(), torch.ones(4, 2)
    assert model(x).grad_fn is not None

    # Right: evaluate has both.
    train.evaluate(model, DataLoader(TensorDataset(x, torch.zeros(4, dtype=torch.int64)), 4), CPU)
    assert model.calls == [(False, True), (False, False)] and not model.training


def test_layers_in_a_list():
    """ValueError: optimizer got an empty parameter list; or half of the network never learns."""

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]  # a list that nn.Module does not see

    # Wrong: nothing to train, nothing to save, nothing that .to(device) would move.
    assert list(Wrong().parameters()) == [] and Wrong().state_dict() == {}
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        torch.optim.SGD(Wrong().parameters(), lr=1.0)

    # Right: nn.ModuleList, which AttentionClassifier has for its blocks.
    one, two = (networks.AttentionClassifier(8, blocks=blocks) for blocks in (1, 2))
    a_block = networks.count_parameters(two.blocks[1])
    assert networks.count_parameters(two) == networks.count_parameters(one) + a_block


def test_one_layer_several_times():
    """A deep network has as few parameters as a shallow one."""
    # Wrong: [layer] * 3 is the same layer three times; so is a layer made outside of a loop.
    wrong = nn.Sequential(*[nn.Linear(4, 4)] * 3)
    assert len(wrong) == 3 and networks.count_parameters(wrong) == 4 * 4 + 4
    assert len(wrong.state_dict()) == 6  # three weights and three biases: a file does not show it

    # Right: a new layer for each place. (To share one on purpose is fine.)
    right = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    assert networks.count_parameters(right) == 3 * (4 * 4 + 4)
    first, second = networks.AttentionClassifier(8, blocks=2).blocks
    assert not torch.equal(first.up.weight, second.up.weight)


def test_state_in_forward():
    """A network loses something when it is saved, and changes while it is evaluated."""

    class Wrong(nn.Module):
        largest = torch.zeros(())

        def forward(self, x):
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            return x / self.largest

    # Wrong: a plain attribute is not saved, and forward writes to it in evaluation as well.
    model = Wrong().eval()
    assert model(torch.tensor([2.0])) == 1 and model(torch.tensor([4.0])) == 1
    assert model(torch.tensor([2.0])) == 0.5 and model.state_dict() == {}

    # Right: a buffer, written in training only. QuantActivation keeps a range of activations so.
    model = networks.QuantActivation(8)
    model(torch.tensor([2.0]))
    model.eval()(torch.tensor([4.0]))
    assert model.state_dict() == {"range": torch.tensor(2.0)}


def test_negative_temperature():
    """The attention suddenly prefers the worst match."""
    # Wrong: a divisor that is learnt as it is. One step too far, and it is below 0.
    scores, temperature = torch.tensor([2.0, 1.0]), torch.tensor(0.1, requires_grad=True)
    sgd = torch.optim.SGD([temperature], lr=0.1)
    temperature.backward(torch.tensor(2.0))  # as if the loss asked for a lower one
    sgd.step()
    assert temperature.item() == pytest.approx(-0.1)
    assert (scores / temperature).softmax(0)[0] < 1e-4  # and near 0 it would have been NaN

    # Right: what is learnt has no bounds, and is mapped to what is above 0.
    softmax = networks.TemperatureSoftmax(0.1)
    nn.init.constant_(softmax.raw, -1000.0)
    assert softmax.temperature() > 0 and softmax(scores)[0] > 0.99


# --------------------------------------------------------------------------------------- 4. data


def test_labels_out_of_range():
    """CUDA error: device-side assert triggered; on a CPU IndexError: Target 10 is out of bounds."""
    # Wrong: classes 1 to 10 for ten logits, which are numbered 0 to 9.
    logits = torch.zeros(2, 10)
    with pytest.raises(IndexError, match="Target 10 is out of bounds"):
        F.cross_entropy(logits, torch.tensor([1, 10]))
    # Wrong, and silent: -100 means "leave this one out".
    with_it = F.cross_entropy(logits, torch.tensor([1, -100]), reduction="sum")
    assert with_it == F.cross_entropy(logits[:1], torch.tensor([1]), reduction="sum")

    # Right: looked at once, where the file's name and the number of classes are known.
    images, classes = torch.zeros(2, 1, 28, 28, dtype=torch.uint8), list("0123456789")
    for wrong in (10, -100):
        with pytest.raises(data.DataError, match="but 10 classes, 0 to 9"):
            data.Digits(images, torch.tensor([1, wrong]), classes)


def test_ragged_samples():
    """RuntimeError: stack expects each tensor to be equal size."""
    # Wrong: the default collate stacks, and rows of 3 and of 1 do not stack.
    samples = [(torch.tensor([1, 2, 3]), 7), (torch.tensor([4]), 8)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(samples, batch_size=2)))

    # Right: pad to the longest, and say with a mask what is real.
    loader = DataLoader(samples, batch_size=2, collate_fn=data.collate_padded)
    padded, mask, labels = next(iter(loader))
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0]] and labels.tolist() == [7, 8]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_script_without_main_guard(tmp_path):
    """RuntimeError: An attempt has been made to start a new process before ... (Windows, macOS)."""
    # Wrong: there (and on Linux from Python 3.14 on) a worker imports the script, and so comes to
    # this line itself.
    # (A DataLoader starts its workers like this process, which need not wait for torch.)
    worker = "multiprocessing.get_context('spawn').Process(target=print, args=['loaded'])"
    start, found = f"worker = {worker}; worker.start(); worker.join()", {}
    guard = "if __name__ == '__main__': "
    for name, line in (("wrong", start), ("right", guard + start)):
        (tmp_path / f"{name}.py").write_text(f"import multiprocessing\n{line}\n")
        command = [sys.executable, tmp_path / f"{name}.py"]
        found[name] = subprocess.run(command, capture_output=True, text=True)
    assert "An attempt has been made to start a new process" in found["wrong"].stderr
    assert found["wrong"].stdout == "" and found["right"].stdout == "loaded\n"

    # Right: train.py under the name that a worker gives it: all is defined, and nothing begins.
    assert callable(runpy.run_path(str(ROOT / "train.py"), run_name="__mp_main__")["main"])


def test_last_batch_of_one():
    """ValueError: Expected more than 1 value per channel when training, at the end of an epoch."""
    # Wrong: 9 samples in batches of 4 end with one, and the mean of one number is the number.
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        for x in torch.randn(9, 3).split(4):
            norm(x)
    # Wrong, and silent: a picture has many values, so a batch of one runs, on other statistics.
    torch.manual_seed(0)
    images = torch.rand(4, 1, 28, 28) * torch.tensor([0.1, 1, 2, 3]).view(4, 1, 1, 1)
    batch = networks.SimpleCNN(2, dropout=0.0, norm="batch")
    assert not torch.allclose(batch(images)[:1], batch(images[:1]), atol=1e-2)

    # Right: group norm has no part in the batch. (Or drop_last=True, at the price of samples.)
    group = networks.SimpleCNN(2, dropout=0.0, norm="group")
    assert torch.allclose(group(images)[:1], group(images[:1]), atol=1e-5)


def test_augmented_validation():
    """The same weights have another validation loss in each epoch."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    # Wrong: random_split deals one data set out, and its augmentation goes with it.
    both = data.Digits(images[:40], labels[:40], classes, augment=True)
    _, validation = random_split(both, [30, 10])
    first = validation[0][0]
    both.set_epoch(1)
    assert not torch.equal(first, validation[0][0])

    # Right: the indices are dealt out, and each part is a data set of its own.
    training, held_out = data.split_validation(40, val_size=10, seed=0)
    train_set = data.Digits(images[training], labels[training], classes, augment=True)
    validation = data.Digits(images[held_out], labels[held_out], classes)
    first = validation[0][0]
    validation.set_epoch(1)
    assert torch.equal(first, validation[0][0]) and len(train_set) + len(validation) == 40


def test_no_shuffle():
    """The network answers with the last class, whatever it is shown."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    order = labels[:300].argsort(stable=True)  # many files are sorted by class
    digits, share = data.Digits(images[order], labels[order], classes), {}
    for way, sampler in (("wrong", None), ("right", data.EpochSampler(300))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = data.make_loader(digits, 10, sampler)
        train.train_one_epoch(model, loader, sgd, off(), {}, arguments(), CPU, log=str)
        answers = model(digits.__getitems__(range(300))[0]).argmax(1)
        share[way] = (answers == 9).float().mean().item(), (answers == digits.labels).float().mean()

    # Wrong: without a sampler (and shuffle=False) 300 digits went by from 0 to 9.
    assert share["wrong"][0] > 0.9 and share["wrong"][1] < 0.2
    # Right: EpochSampler has another order in each epoch.
    assert share["right"][0] < 0.3 and share["right"][1] > 0.7


class Draws(Dataset):
    """Two samples: a number from NumPy's global generator, and one from a generator kept here."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.random.random(), self.rng.random()


def test_numpy_in_workers():
    """Each augmentation comes once a worker (gone since 1.9 for NumPy's global generator)."""
    # Wrong: a worker is a copy, and so is a generator that the data set keeps.
    of_worker_0, of_worker_1 = DataLoader(Draws(), batch_size=1, num_workers=2)
    assert of_worker_0[1] == of_worker_1[1]
    # Before 1.9 this was so for np.random.random() too. Today torch seeds it in each worker.
    assert of_worker_0[0] != of_worker_1[0]

    # Right: make_loader's workers call seed_worker, which finds the kept generator.
    of_worker_0, of_worker_1 = data.make_loader(Draws(), batch_size=1, workers=2)
    assert of_worker_0[1] != of_worker_1[1]


class Numbers(IterableDataset):
    """0, 1, 2, 3"""

    def __iter__(self):
        return iter(range(4))


def test_stream_read_by_each_worker():
    """Two workers make an epoch twice as long, and every sample comes twice."""
    # Wrong: each worker has a copy of the stream, and reads all of it.
    read = list(DataLoader(Numbers(), batch_size=None, num_workers=2))
    assert sorted(read) == [0, 0, 1, 1, 2, 2, 3, 3]

    # Right: get_worker_info() tells a worker which part is its own.
    stream = data.DigitStream(FILES[:2], total=10, batch_size=3)
    labels = torch.cat([labels for _, labels in data.make_loader(stream, 3, workers=2)])
    everything = data.load_mnist(data.SAMPLE)[1][:10]
    assert sorted(labels.tolist()) == sorted(everything.tolist())


def test_statistics_of_the_validation_set():
    """White pictures and black ones get the same answer."""
    # Training pictures are black (class 0) or white (class 1); these for validation are all white.
    images = torch.tensor([0, 255, 0, 255], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    about = data.describe(images, torch.tensor([0, 1, 0, 1]), ["black", "white"], "two", "images")
    white = torch.ones(3, 1, 2, 2)
    # Wrong: by their own mean they are neither black nor white.
    own = data.describe((white * 255).byte(), torch.ones(3), ["black", "white"], "two", "images")
    assert data.normalize(white, own["mean"], own["std"]).unique().tolist() == [0]

    # Right: mean and std of the training set for every picture, and in the checkpoint beside it.
    assert data.normalize(white, about["mean"], about["std"]).unique().tolist() == [1]
    assert data.normalize(white - 1, about["mean"], about["std"]).unique().tolist() == [-1]


class Cached(Dataset):
    """Four samples that take long to read. `reads` counts for each how often that was done."""

    def __init__(self, cache, reads):
        self.cache, self.reads = cache, reads

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.cache[index] < 0:  # not yet read
            self.reads[index] += 1
            self.cache[index] = 10 * index
        return self.cache[index]


def test_cache_in_each_worker():
    """A cache does not help: the second epoch reads everything again."""
    found = {}
    # Wrong: workers fill copies of their own, which are gone at the end of the epoch.
    # Right: memory that they share. Digits has its images before there are workers, and in shared
    # memory what changes later, the number of the epoch.
    for way, cache in (("wrong", [-1] * 4), ("right", torch.full((4,), -1).share_memory_())):
        reads = torch.zeros(4, dtype=torch.int64).share_memory_()
        loader = DataLoader(Cached(cache, reads), num_workers=2)
        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
        assert epochs == [[0, 10, 20, 30]] * 2
        found[way] = reads.tolist(), list(cache)
    assert found["wrong"] == ([2, 2, 2, 2], [-1, -1, -1, -1])
    assert found["right"] == ([1, 1, 1, 1], [0, 10, 20, 30])
    images, labels, classes = data.load_mnist(data.SAMPLE)
    assert data.Digits(images, labels, classes).epoch.is_shared()


# --------------------------------------------------------------------------------------- 5. loop


def squared_error(outputs, targets, label_smoothing=0.0):
    """What a fork for regression puts in the place of train.loss_and_metrics."""
    return F.mse_loss(outputs.squeeze(1), targets, reduction="sum"), len(targets), {}


def test_learning_rate_too_high(monkeypatch):
    """The loss becomes nan, and the program trains on without an error."""
    # Pixels of 0 to 255 and a rate of 0.1: each step overshoots by more than it corrects.
    x, y = torch.tensor([[255.0], [128.0]]), torch.tensor([1.0, 0.5])
    layer = nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(20):
        loss, count, _ = squared_error(layer(x), y)
        sgd.zero_grad()
        (loss / count).backward()
        sgd.step()
    # Wrong: nobody has looked.
    assert math.isnan(loss.item()) and layer.weight.isnan().all()

    # Right: train_one_epoch looks, and names the step. Pixels of 0 to 1 prevent it.
    monkeypatch.setattr(train, "loss_and_metrics", squared_error)
    with pytest.raises(utils.UserError, match=r"epoch 1, step \d+: loss or gradient is not finite"):
        train_epoch(nn.Linear(1, 1), TensorDataset(x.repeat(20, 1), y.repeat(20)), 2, lr=0.1)
    train_epoch(nn.Linear(1, 1), TensorDataset(x.repeat(20, 1) / 255, y.repeat(20)), 2, lr=0.1)


def test_scheduler_before_optimizer():
    """UserWarning: Detected call of lr_scheduler.step() before optimizer.step()."""
    # Wrong: the first rate of the schedule is skipped, and all others come a step early.
    sgd, rates = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), []
    scheduler = StepLR(sgd, step_size=1, gamma=0.1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        for _ in range(3):
            scheduler.step()
            rates.append(sgd.param_groups[0]["lr"])
            sgd.step()
    assert rates == pytest.approx([0.1, 0.01, 0.001])

    # Right: the rate is a function of the step that is about to be taken, so there is no order.
    rates = [utils.lr_at(step, total=3, schedule="step") for step in range(3)]
    assert rates == pytest.approx([1.0, 0.1, 0.01])


def test_schedule_stepped_once_a_batch():
    """After the first epoch nothing moves any more."""
    # Wrong: "a tenth every 2 epochs" in the loop over batches is a tenth every 2 batches.
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = StepLR(sgd, step_size=2, gamma=0.1)
    for _ in range(10):  # the first epoch
        sgd.step()
        scheduler.step()
    assert sgd.param_groups[0]["lr"] == pytest.approx(1e-5)

    # Right: lr_at is asked for step `step` of `total`: 6 epochs of 10 steps, a third on each rate.
    state = train.new_state(total_steps=60)
    row = train_epoch(TwoClasses(), class_0(*[[1.0]] * 10), state=state, schedule="step")
    assert row["lr"] == 1.0 and state["step"] == 10
    assert [utils.lr_at(s, 60, schedule="step") for s in (20, 40)] == pytest.approx([0.1, 0.01])


def test_mean_of_batch_means():
    """The accuracy depends on the batch size, and is not correct / total."""
    # Ten samples of which the last two are wrong, in batches of 4, 4 and 2.
    rows = class_0(*[[-1.0]] * 8, [1.0], [1.0])
    model, loader = TwoClasses(), DataLoader(rows, batch_size=4)
    nn.init.ones_(model.w)
    # Wrong: the batch of two counts as much as a batch of four.
    means = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    assert means == [1, 1, 0] and sum(means) / len(means) == pytest.approx(0.667, abs=1e-3)

    # Right: sums over samples, and one division at the end.
    assert train.evaluate(model, loader, CPU)["accuracy"] == 0.8


def test_accumulation_without_division():
    """Accumulation over 4 batches needs a learning rate 4 times as small."""
    # Wrong: four backward passes add four means up.
    batches = [(torch.tensor([[2.0]]), torch.tensor([0]))] * 4
    model = TwoClasses()
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
    assert model.w.grad.item() == 4

    # Right: the sum over the window divided by its samples, as for one batch of four.
    model = TwoClasses()
    train.backward_window(model, [(x, y, 1) for x, y in batches], 4, off(), arguments(), CPU)
    assert model.w.grad.item() == 1


def test_accumulation_with_a_short_end():
    """The last batches of an epoch count too little, or count for the next epoch."""
    # Five batches, four to a window: every gradient is 1.
    model, steps = TwoClasses(), []
    for number in range(1, 6):
        (F.cross_entropy(model(torch.tensor([[2.0]])), torch.tensor([0])) / 4).backward()
        # Wrong: the usual condition never comes true for the fifth.
        if number % 4 == 0:
            steps.append(model.w.grad.item())
            model.zero_grad()
    assert steps == [1] and model.w.grad.item() == 0.25  # a quarter, and left for later

    # Right: a last window of one batch, divided by what is in it. (lr 0: w stays 0.)
    state = train.new_state()
    row = train_epoch(TwoClasses(), class_0(*[[2.0]] * 5), lr=0.0, state=state, accum=4)
    assert state["step"] == 2 and row["grad_norm"] == 1  # both steps have a gradient of length 1


class CountItems(TorchDispatchMode):
    """Counts how often the program asks a tensor for its number."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_item_in_each_step():
    """The GPU is idle between the steps (a CPU can only count where a program waits for it)."""
    # Wrong: .item(), float(), print(loss) and `if loss > x` need the number now. A GPU works
    # behind the program, which waits there until all is computed, and then the GPU has no work.
    found = {}
    for steps in (5, 50):
        rows = class_0(*[[1.0]] * steps)
        with CountItems() as wrong:
            sum(F.cross_entropy(TwoClasses()(x[None]), y[None]).item() for x, y in rows)
        # Right: sums stay on the device, and are looked at for a line of progress and at the end.
        with CountItems() as right:
            train_epoch(TwoClasses(), rows)
        found[steps] = wrong.count, right.count
    assert found[5][0] == 5 and found[50][0] == 50
    assert found[5][1] == found[50][1] < 50


def test_clip_before_unscale():
    """With fp16 and clipping the loss hardly moves, without clipping it falls."""
    # The gradient of this sample is (3, 4), its length 5. Clipped to 1 it is (0.6, 0.8).
    model, x, y = TwoClasses(2), torch.tensor([[6.0, 8.0]]), torch.tensor([0])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    # Wrong: the gradient is 65,536 times too long, so that much is left of the step afterwards.
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 5 * 65536
    scaler.step(sgd)
    assert model.w.tolist() == pytest.approx([-0.6 / 65536, -0.8 / 65536])

    # Right: unscale_, then clip, then step.
    model, scaler = TwoClasses(2), torch.amp.GradScaler("cpu", init_scale=65536.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    norm, taken = train.optimizer_step(model, sgd, scaler, lr_factor=1.0, clip=1.0)
    assert norm == 5 and taken and model.w.tolist() == pytest.approx([-0.6, -0.8])


def test_one_cycle_past_its_end():
    """ValueError: Tried to step 6 times. The specified number of total steps is 5."""
    # Wrong: one epoch more than planned, or total_steps counted before the batches were.
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = OneCycleLR(sgd, max_lr=1.0, total_steps=5)
    with pytest.raises(ValueError, match="Tried to step 6 times"):
        for _ in range(6):
            sgd.step()
            scheduler.step()

    # Right: past its end lr_at stays where it was.
    rates = [utils.lr_at(step, 5, 0.3, "one-cycle") for step in range(7)]
    assert rates[4] == rates[5] == rates[6] == min(rates) and max(rates) == 1


def test_plateau_before_validation():
    """The learning rate falls after the first epoch already."""
    losses, rates = [1.0, 0.5, 0.5, 0.5], {"wrong": [], "right": []}  # of the validation
    # Wrong: before the validation there is only the loss of the epoch before, and first of none.
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = ReduceLROnPlateau(sgd, factor=0.1, patience=0)
    for last in (math.inf, *losses[:-1]):
        rates["wrong"].append(sgd.param_groups[0]["lr"])
        scheduler.step(last)
    assert rates["wrong"] == pytest.approx([1.0, 0.1, 0.1, 0.1])

    # Right: train, validate, and then say whether it has become better.
    drops, stale, best = 0, 0, math.inf
    for loss in losses:
        rates["right"].append(utils.lr_at(0, schedule="plateau", drops=drops))
        drops, stale = utils.drop_on_plateau(drops, stale, loss < best, patience=0)
        best = min(best, loss)
    assert rates["right"] == pytest.approx([1.0, 1.0, 1.0, 0.1])


# ---------------------------------------------------------------------- 6. keeping and shipping


def test_checkpoint_that_does_not_load(tmp_path):
    """UnpicklingError: Weights only load failed (since 2.6)."""
    checkpoint = {"model": TwoClasses().state_dict(), "best": np.float64(0.5)}
    # Wrong: NumPy's numbers, paths, Namespaces and torch.__version__ can be written. They are
    # objects of classes, for which a file could run any program, so torch.load refuses them.
    torch.save(checkpoint, tmp_path / "wrong.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "wrong.pt")

    # Right: plain types and tensors, and an error that names the entry when it is written.
    with pytest.raises(TypeError, match=r"checkpoint\['best'\] is a numpy.float64"):
        utils.save_checkpoint(tmp_path / "right.pt", checkpoint)
    utils.save_checkpoint(tmp_path / "right.pt", {**checkpoint, "best": 0.5})
    assert utils.load_checkpoint(tmp_path / "right.pt")["best"] == 0.5


def test_prefix_of_a_wrapper():
    """RuntimeError: Missing key(s) in state_dict: "w"; Unexpected key(s): "module.w"."""
    # Wrong: DataParallel, DDP and torch.compile wrap a network, and their keys have a prefix.
    wrapped = nn.DataParallel(TwoClasses())
    with pytest.raises(RuntimeError, match="Missing key.*\n.*Unexpected key.*module.w"):
        TwoClasses().load_state_dict(wrapped.state_dict())

    # Right: the keys of the bare network are saved, and prefixes of old files are taken off.
    assert list(utils.plain_weights(wrapped)) == ["w"]
    nn.init.ones_(wrapped.module.w)
    model = TwoClasses()
    utils.load_weights(model, wrapped.state_dict())
    assert model.w.item() == 1


def test_renamed_layer():
    """RuntimeError: Missing key(s) in state_dict; or, with strict=False, the accuracy of chance."""
    old = nn.Sequential()
    old.add_module("fc", nn.Linear(4, 2))
    new = nn.Sequential()
    new.add_module("head", nn.Linear(4, 2))
    # Wrong: the remedy of many answers, strict=False, loads what fits. Here that is nothing.
    with pytest.raises(RuntimeError, match="Missing key"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(old.state_dict(), strict=False)
    assert not torch.equal(new.head.weight, old.fc.weight)

    # Right: load_matching says what it took and left, and refuses less than half. Or rename keys.
    with pytest.raises(utils.UserError, match="only 0 of 10 parameters have weights that fit"):
        utils.load_matching(new, old.state_dict())
    renamed = {key.replace("fc.", "head."): value for key, value in old.state_dict().items()}
    utils.load_weights(new, renamed)
    assert torch.equal(new.head.weight, old.fc.weight)


def test_loading_without_map_location(tmp_path, monkeypatch):
    """RuntimeError: Attempting to deserialize object on a CUDA device, on a machine without one."""
    weights = {"model": {"w": torch.ones(1)}}
    # A file as a machine with a GPU writes it, and a machine without one.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.save(weights, tmp_path / "gpu.pt")
    # Wrong: each tensor goes back to where it was.
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
        torch.load(tmp_path / "gpu.pt")

    # Right: read to the CPU, and written from there.
    assert utils.load_checkpoint(tmp_path / "gpu.pt")["model"]["w"].device == CPU


def test_best_weights_that_change():
    """The weights of the best epoch, kept in a variable, turn out to be those of the last."""
    model = TwoClasses()
    # Wrong: a state_dict holds the live tensors, and so does a .copy() of the dict.
    best = model.state_dict().copy()
    # Right: a copy of each tensor (or copy.deepcopy).
    kept = utils.snapshot(model, torch.optim.SGD(model.parameters(), lr=1.0))
    train_epoch(model, class_0([2.0]))
    assert best["w"].item() == -1 and kept["model"]["w"].item() == 0
    utils.load_weights(model, kept["model"])
    assert model.w.item() == 0


def test_resume_without_the_optimizer():
    """A resumed run does not end where the run without a stop ends."""
    rows, ends = class_0([3.0], [-1.0]), {}
    for way in ("straight", "wrong", "right"):
        model, state = TwoClasses(), {}
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        for epoch in range(2):
            if epoch and way != "straight":  # stopped, and started again
                saved = utils.snapshot(model, adam, state=state)
                model, state = TwoClasses(), {}
                adam = torch.optim.AdamW(model.parameters(), lr=0.1)
                if way == "wrong":  # Wrong: weights alone; Adam has forgotten its averages.
                    model.load_state_dict(saved["model"])
                else:  # Right: all that a run is.
                    utils.restore(saved, model, adam, state=state)
            train.train_one_epoch(model, DataLoader(rows), adam, off(), state, arguments(), CPU)
        ends[way] = model.w.item()
    assert ends["right"] == ends["straight"] and abs(ends["wrong"] - ends["straight"]) > 0.01


def test_pickled_model(tmp_path):
    """AttributeError: Can't get attribute 'Net', from a file that loaded before a clean-up."""
    code = types.ModuleType("my_networks")  # as if there were a file my_networks.py
    exec("import torch.nn as nn\nclass Net(nn.Linear):\n    pass", code.__dict__)
    sys.modules["my_networks"] = code
    net = code.Net(2, 1)
    # Wrong: the file has the name of the class, not its code.
    torch.save(net, tmp_path / "net.pt")
    code.Network = code.__dict__.pop("Net")  # renamed
    with pytest.raises(AttributeError, match="Can't get attribute 'Net'"):
        torch.load(tmp_path / "net.pt", weights_only=False)
    del sys.modules["my_networks"]

    # Right: the weights alone, and code that builds the network they belong to.
    utils.save_checkpoint(tmp_path / "weights.pt", {"model": net.state_dict()})
    model = code.Network(2, 1)
    utils.load_weights(model, utils.load_checkpoint(tmp_path / "weights.pt")["model"])
    assert torch.equal(model.weight, net.weight)


def test_checkpointed_block():
    """UserWarning: None of the inputs have requires_grad=True. Gradients will be None."""
    # Wrong: the old (reentrant) kind of checkpoint looks at the inputs of a block, and the input
    # of a first block is data. Its weights do not count, and do not learn.
    block = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        wrong = checkpoint(block, torch.ones(1, 2), use_reentrant=True)
    assert wrong.grad_fn is None

    # Right: use_reentrant=False, as in AttentionClassifier, here with its first layers frozen.
    checkpoint(block, torch.ones(1, 2), use_reentrant=False).sum().backward()
    assert block.weight.grad.tolist() == [[1, 1]]
    model = networks.AttentionClassifier(8, grad_checkpoint=True)
    model.embed.requires_grad_(False)
    model.position_embedding.requires_grad_(False)
    mask = torch.ones(1, 2, dtype=torch.bool)
    model((torch.ones(1, 2, 16), torch.tensor([[0, 1]]), mask)).sum().backward()
    assert model.blocks[0].up.weight.grad.abs().sum() > 0


torchscript = pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript ends with 3.13")


@torchscript
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_trace_in_training_mode():
    """An exported network gives another answer each time, and eval() does not help."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(1, 8)
    # Wrong: a trace is a list of the operations that ran, and dropout was one of them.
    with pytest.warns(torch.jit.TracerWarning, match="does not match"):
        wrong = torch.jit.trace(model, x)
    assert not torch.equal(wrong.eval()(x), wrong.eval()(x))

    # Right: eval() first, then trace.
    right = torch.jit.trace(model.eval(), x)
    assert torch.equal(right(x), model(x))


@torchscript
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_trace_that_loses_a_branch():
    """An exported network is right for the example it was exported with, and wrong for others."""

    class Wrong(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else torch.zeros_like(x)

    # Wrong: an `if` is decided once, while the example runs.
    with pytest.warns(torch.jit.TracerWarning, match="Converting a tensor to a Python boolean"):
        wrong = torch.jit.trace(Wrong(), torch.ones(2))
    assert wrong(-torch.ones(2)).tolist() == [-1, -1]

    # Right: torch.where computes both and chooses, as QuantActivation does while it has no range.
    model, x = networks.QuantActivation(2).eval(), torch.tensor([0.4])
    right = torch.jit.trace(model, x)
    assert right(x) == x
    right.range.fill_(1.0)  # with a range and 2 bits its answers are -1, 0 and 1
    assert right(x) == 0


# --------------------------------------------------------------------------- 7. several processes


def test_no_set_epoch():
    """With several processes each epoch comes in the same order."""
    rows = class_0(*[[float(i)] for i in range(8)])
    sampler = DistributedSampler(rows, num_replicas=2, rank=0)
    loader = DataLoader(rows, sampler=sampler)
    # Wrong: its order is a function of seed and epoch, and nobody has told it the epoch.
    first, second = ([x.item() for x, _ in loader] for _ in range(2))
    assert first == second

    # Right: begin_epoch tells every sampler that wants to know, torch's as well as ours.
    for sampler in (sampler, data.EpochSampler(8, world_size=2, rank=0)):
        loader, epochs = DataLoader(rows, sampler=sampler), []
        for epoch in range(2):
            batches = train.begin_epoch(loader, {"epoch": epoch, "batch": 0})
            epochs.append([x.item() for x, _ in batches])
        assert epochs[0] != epochs[1] and len(epochs[0]) == len(epochs[1]) == 4


def test_batch_norm_of_a_shard():
    """Two processes with batch norm learn something else than one with the same batch."""
    # A batch of four pictures in two processes, which have two each.
    x = torch.tensor([0.0, 0.0, 2.0, 2.0]).view(4, 1, 1, 1).expand(4, 1, 4, 4)
    # Wrong: each normalizes its own part, and all that differs between the parts is gone.
    norm = nn.BatchNorm2d(1)
    whole, parts = norm(x), torch.cat([norm(part) for part in x.chunk(2)])
    assert whole[:, 0, 0, 0].tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-4)
    assert parts[:, 0, 0, 0].tolist() == [0, 0, 0, 0]

    # Right: group norm has no part in the batch. (On GPUs SyncBatchNorm, --sync-bn, asks all.)
    group = networks.SimpleCNN(2, dropout=0.0, norm="group", shape=(1, 4, 4))
    parts = torch.cat([group(part) for part in x.chunk(2)])
    assert torch.allclose(group(x), parts, atol=1e-6) and not torch.allclose(parts[0], parts[2])


def test_averages_of_averages(tmp_path):
    """The accuracy depends on the number of processes, and is not correct / total."""
    # Two processes with 3 samples and 1. Of each, all and none are right: 3 / 4 = 0.75.
    program = """
        import torch, train, utils
        from torch.utils.data import DataLoader, TensorDataset
        rank, world_size, device = utils.init_distributed(torch.device("cpu"))
        y = torch.zeros(3, dtype=torch.int64) if rank == 0 else torch.ones(1, dtype=torch.int64)
        x = torch.tensor([[1.0, 0.0]]).expand(len(y), 2)  # logits, for class 0
        # Wrong: the mean of each process, and then the mean of the means.
        mean = (x.argmax(1) == y).float().mean()
        wrong = utils.sum_over_ranks(mean) / world_size
        # Right: sums and numbers of samples over all processes, and one division.
        right = train.evaluate(torch.nn.Identity(), DataLoader(TensorDataset(x, y)), device)
        print(wrong.item(), right["accuracy"], right["samples"])
        utils.leave_distributed()
    """
    status, out, err = run_program(cwd=tmp_path, ranks=2, script=None, before=program)
    assert status == 0 and out == "0.5 0.75 4\n" * 2, err


def test_every_rank_writes(tmp_path):
    """The training ended well, and its checkpoint cannot be read."""
    path, content = tmp_path / "last.pt", io.BytesIO()
    torch.save({"model": {"w": torch.ones(100)}}, content)
    # Wrong: to open a file for writing empties it, also while another process is writing to it.
    with open(path, "wb", buffering=0) as of_rank_0:
        of_rank_0.write(content.getbuffer()[:500])
        with open(path, "wb", buffering=0):  # rank 1, which is stopped after this
            of_rank_0.write(content.getbuffer()[500:])
    with pytest.raises(utils.UserError, match="not a checkpoint of this program, or damaged"):
        utils.load_checkpoint(path)

    # Right: rank 0 alone, and to another file, which gets the name when it is whole.
    for rank in range(2):
        if rank == 0:
            utils.save_checkpoint(path, {"model": {"w": torch.ones(100)}})
    with pytest.raises(utils.UserError, match="No space left"):
        utils.write_atomically(path, full_disk)
    assert utils.load_checkpoint(path)["model"]["w"].sum() == 100


def test_same_augmentation_on_every_rank():
    """All processes augment their pictures in the same way."""
    # Wrong: torch.manual_seed(0) in each process. Their pictures differ, what is drawn does not.
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(0)) for rank in range(2)]
    assert torch.equal(*draws)

    # Right: draws are a function of seed, epoch and index, and no two processes have an index in
    # common. Dropout, which draws from the global generator, is seeded by seed and rank.
    shares = [list(data.EpochSampler(8, seed=0, world_size=2, rank=rank)) for rank in range(2)]
    draws = torch.cat([data.uniform_draws(0, 0, share, count=4) for share in shares])
    assert len(draws.unique()) == 8 * 4 and data.mix(0, 0) != data.mix(0, 1)


# ---------------------------------------------------------------------------------- the tables


def pairs():
    """{name: (title of its section, its source, its docstring)} of the pairs, in order."""
    text = pathlib.Path(__file__).read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        titles = [line for line in lines[: node.lineno] if line.startswith("# ----")]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            title = titles[-1].strip("# -")
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if title != "the tables":
                found[node.name] = title, source, ast.get_docstring(node)
    return found


def rows():
    """{name: (title of its table, symptom, cause, what does it right)} of TRAPS.md, in order."""
    found, title = {}, None
    for line in (ROOT / "TRAPS.md").read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| ") and "`test_" in line:
            symptom, cause, test, right = line.strip("| ").split(" | ")
            assert test.strip("`") not in found
            found[test.strip("`")] = title, symptom, cause, right
    return found


def test_each_pair_has_its_row_and_each_row_its_pair():
    in_words = {name: (title.lower(), symptom) for name, (title, symptom, _, _) in rows().items()}
    expected = {name: (title, said.rstrip(".")) for name, (title, _, said) in pairs().items()}
    assert in_words == expected and list(in_words) == list(expected)
    assert "(TRAPS.md)" in (ROOT / "README.md").read_text()


def test_what_a_row_names_is_there_and_used_in_its_test():
    found = pairs()
    for name, (_, _, cause, right) in rows().items():
        assert cause and right, name
        for module, path in re.findall(r"`(train|model|data|utils)\.([\w.]+)`", right):
            thing = {"train": train, "model": networks, "data": data, "utils": utils}[module]
            for part in path.split("."):
                thing = getattr(thing, part)
            source = found[name][1].replace("train_epoch(", "train.train_one_epoch(")
            assert f"{module.replace('model', 'networks')}.{path}" in source, (name, path)


def test_pairs_are_short_and_have_two_sides():
    for name, (_, source, said) in pairs().items():
        assert len(source.splitlines()) <= 20, name
        assert said and "\n" not in said and said.endswith("."), name
        assert "# Wrong" in source and "# Right" in source, name
