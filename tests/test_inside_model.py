"""Looking inside of model.py: FLOPs as torch counts them, bytes by hand, and memory as the allocator has it."""

import copy
import gc
import json
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import model as networks
from model import AttentionClassifier, LiveBytes, SimpleCNN, layer_table, measured_peak, memory_at, memory_report, quantize

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def images(count):
    return networks.random_images(CPU, count)


def packed(count):
    return networks.random_tokens(CPU, count)


def padded(count):
    tokens, positions, mask, places = packed(count)
    return networks.unpack(tokens, mask, places), networks.unpack(positions, mask, places), mask


def attention(**arguments):
    return AttentionClassifier(**{"width": 16, **arguments})


# What is special about it -> (network, its inputs)
NETWORKS = {
    "cnn": (SimpleCNN, images),
    "cnn, batch norm": (lambda: SimpleCNN(4, norm="batch"), images),
    "cnn, group norm": (lambda: SimpleCNN(8, norm="group"), images),
    "cnn, 4 bits": (lambda: quantize(SimpleCNN(4), 4, 8), images),
    "cnn, channels last": (lambda: SimpleCNN(4).to(memory_format=torch.channels_last), images),
    "attention": (attention, packed),
    "attention, checkpointed": (lambda: attention(grad_checkpoint=True), packed),
    "attention, 4 bits": (lambda: quantize(attention(), 4, 8), packed),
    "attention, 4 bits, checkpointed": (lambda: quantize(attention(grad_checkpoint=True), 4, 8), packed),
    "attention, written out": (lambda: attention(kernel="manual"), packed),
    "attention, written out, checkpointed": (lambda: attention(kernel="manual", grad_checkpoint=True), packed),
    "padded": (attention, padded),
    "padded, written out": (lambda: attention(kernel="manual"), padded),
    "of torch": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda count: torch.randn(count, 5, 16)),
}


def by_name(rows):
    return {row["layer"]: row for row in rows}


def total(rows, key):
    return sum(row[key] for row in rows)


# ------------------------------------------------------------------------------------------ the table of layers


@pytest.mark.parametrize("build, inputs", NETWORKS.values(), ids=NETWORKS)
def test_the_columns_add_up_to_what_torch_counts(build, inputs):
    model, batch = build(), inputs(32)
    rows = layer_table(model, batch)
    aten = torch.ops.aten
    as_on_a_gpu = {  # the only operation that torch's own table lacks
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: 4 * q.numel() * k[2],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: 10 * q.numel() * k[2],
    }
    with FlopCounterMode(display=False, custom_mapping=as_on_a_gpu) as counter:
        result = model(batch).sum()
        forward = counter.get_total_flops()
        result.backward()
    assert total(rows, "forward") == forward > 0
    assert total(rows, "backward") == counter.get_total_flops() - forward
    assert total(rows, "parameters") == networks.count_parameters(model)


def test_the_flops_of_each_layer_by_hand():
    rows = by_name(layer_table(SimpleCNN(), images(128)))
    by_hand = {
        "conv1": 128 * 28 * 28 * 32 * 9, "conv2": 128 * 14 * 14 * 64 * 9 * 32, "fc1": 128 * 3136 * 128, "fc2": 128 * 128 * 10,
    }
    for name, products in by_hand.items():
        assert rows[name]["forward"] == 2 * products, name
        assert rows[name]["backward"] == (2 if name == "conv1" else 4) * products, name
    assert 2 * by_hand["conv2"] == 924_844_032  # as the docstring says
    assert rows[""]["forward"] == rows[""]["backward"] == rows["dropout"]["backward"] == 0

    rows = by_name(layer_table(attention(kernel="manual"), packed(64)))  # 2 x 592 tokens, 4 heads of width 4, L = 32
    scores = 64 * 4 * 32 * 32 * 4
    for block in (0, 1):
        own = rows[f"blocks.{block}.attention"]
        assert (own["forward"], own["backward"]) == (4 * scores, 8 * scores)
        up = rows[f"blocks.{block}.up"]
        assert (up["forward"], up["backward"]) == (2 * 1184 * 16 * 64, 4 * 1184 * 16 * 64)
    assert rows["embed"]["forward"] == rows["embed"]["backward"] == 2 * 1184 * 16 * 16
    assert rows["pool"]["forward"] == 2 * 64 * 32 * 16


def test_checkpointing_computes_forward_once_more_and_keeps_the_inputs_of_blocks():
    plain = by_name(layer_table(attention(kernel="manual"), packed(32)))
    saving = by_name(layer_table(attention(kernel="manual", grad_checkpoint=True), packed(32)))
    for name, row in plain.items():
        again = row["forward"] if name.startswith("blocks") else 0
        if name.endswith("down"):
            again = 0  # the last layer's output is not needed, so the second forward ends before it
        assert saving[name]["forward"] == row["forward"]
        assert saving[name]["backward"] == row["backward"] + again, name
        if name.startswith("blocks"):
            assert saving[name]["kept"] == 0, name
    # Two blocks' inputs of 592 tokens, the places, and the mask (each as often as the blocks hold it: once).
    assert saving[""]["kept"] == 2 * 592 * 16 * 4 + 592 * 8 + 32 * 32


def test_bytes_kept_by_hand():
    rows = layer_table(SimpleCNN(), images(128))
    kept = {row["layer"]: row["kept"] for row in rows}
    assert kept["conv1"] == 128 * 28 * 28 * 4 == 401_408  # its input, the images
    assert kept["conv2"] == kept["fc1"] == 0  # the outputs of ReLU, which are counted there
    first = 128 * 32 * (28 * 28 * 4 + 14 * 14 * 8 + 14 * 14 * 4)  # max-pooling: input, places as int64; ReLU: output
    second = 128 * 64 * (14 * 14 * 4 + 7 * 7 * 8 + 7 * 7 * 4)
    assert kept[""] == first + second + 128 * 128 * 4  # and the ReLU after fc1
    assert kept["fc2"] == 128 * 128 * 4  # the output of dropout
    assert total(rows, "kept") == 34_316_288

    rows = by_name(layer_table(attention(), packed(64)))
    assert rows["embed"]["kept"] == 1184 * 16 * 4
    assert rows["blocks.0.up"]["kept"] == 1184 * 16 * 4  # its input, from the norm
    assert rows["blocks.0"]["kept"] == rows["blocks.0.down"]["kept"] == 1184 * 64 * 4  # before GELU, and after it
    assert rows["blocks.0.norm1"]["kept"] == 1184 * (16 + 2) * 4  # input, mean and 1 / standard deviation


class Views(nn.Module):
    """Its two layers keep views of one storage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 2)
        self.second = nn.Linear(3, 2)

    def forward(self, x):
        return self.first(x).sum() + self.second(x.view(-1, 3)).sum() + self.second(x[0, :3]).sum()


def test_each_storage_counts_once():
    rows = by_name(layer_table(Views(), torch.ones(4, 6)))
    assert (rows["first"]["kept"], rows["second"]["kept"]) == (4 * 6 * 4, 0)
    rows = by_name(layer_table(Views(), torch.ones(40, 6)[:4]))
    assert rows["first"]["kept"] == 40 * 6 * 4  # a view of a few rows keeps them all
    in_place = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    apart = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    assert [row["kept"] for row in layer_table(in_place, images(2))] == [0, 2 * 784 * 4, 2 * 2 * 26 * 26 * 4]
    assert layer_table(in_place, images(2)) == layer_table(apart, images(2))
    over_written = nn.Sequential(nn.Linear(6, 2), nn.Sigmoid(), nn.ReLU(inplace=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        over_written(torch.ones(4, 6)).sum().backward()


class Shared(nn.Module):
    """One layer under two names, in two parents; one that is never called; one that is frozen."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 4))
        self.two = nn.Sequential(self.one[0], nn.Linear(4, 3))
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.one[0].weight

    def forward(self, batch):
        x = self.one(self.tied(self.frozen(batch["x"])))
        return self.two(F.relu(x)) @ batch["matrix"]


def test_shared_idle_and_frozen_layers():
    model, batch = Shared(), {"x": torch.ones(5, 4), "matrix": torch.ones(3, 7)}
    rows = layer_table(model, batch)
    assert [row["layer"] for row in rows] == ["", "frozen", "tied", "one", "one.0", "two", "two.1", "idle"]
    assert total(rows, "parameters") == networks.count_parameters(model) == 20 + 15 + 6
    assert rows[-1] == {"layer": "idle", "output": None, "parameters": 6, "forward": 0, "backward": 0, "kept": 0}
    named = by_name(rows)
    assert (named["frozen"]["forward"], named["frozen"]["backward"]) == (2 * 5 * 16, 0)
    assert (named["tied"]["forward"], named["tied"]["backward"]) == (2 * 5 * 16, 2 * 5 * 16)  # nobody needs dL/dx
    assert (named["one.0"]["forward"], named["one.0"]["backward"]) == (2 * 2 * 5 * 16, 2 * 4 * 5 * 16)  # called twice
    assert (named["two.1"]["forward"], named["two.1"]["backward"]) == (2 * 5 * 12, 4 * 5 * 12)
    assert (named[""]["forward"], named[""]["backward"]) == (2 * 5 * 21, 2 * 5 * 21)  # @; the matrix is not learnt
    assert named["two.1"]["output"] == (5, 3) and named[""]["output"] == (5, 7)


class Halves(nn.Module):
    """Checkpoints a part of itself that is no layer and of which the last result is not used; calls a layer by keyword."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def halves(self, x):
        return self.a(x), self.b(x)

    def forward(self, x):
        y, _ = checkpoint(self.halves, self.a(x), use_reentrant=False)
        return self.b(input=y @ x.T @ x) * self.scale


def test_the_backward_pass_is_dealt_to_layers_where_a_part_is_checkpointed():
    rows = by_name(layer_table(Halves(), torch.ones(5, 4)))
    product = 2 * 5 * 16
    assert (rows["a"]["forward"], rows["a"]["backward"]) == (2 * product, (1 + 2 + 1) * product)  # the third: once more
    assert (rows["b"]["forward"], rows["b"]["backward"]) == (2 * product, 2 * product)  # the second forward ends before b
    products = 2 * 2 * 5 * 4 * 5
    assert (rows[""]["forward"], rows[""]["backward"]) == (products, products)
    # a: the batch. The network: the input of the checkpointed part. b: its input. scale is not counted.
    assert [rows[name]["kept"] for name in ("a", "", "b")] == 3 * [5 * 4 * 4]


def test_nothing_of_the_copies_is_left_behind():
    """The graph and its hooks hold each other in a way that Python's collector cannot see."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters())
    alive = WeakSet()

    class Noting(nn.Linear):
        def __deepcopy__(self, memo):
            alive.add(made := nn.Linear(3, 1))
            return made

    model[2].__class__ = Noting
    layer_table(model, torch.ones(2, 3))
    memory_report(model, torch.ones(2, 3), optimizer)
    measured_peak(model, torch.ones(2, 3), optimizer)
    gc.collect()
    assert not alive


@pytest.mark.parametrize("name", ["cnn, batch norm", "attention, 4 bits"])
def test_model_and_optimizer_stay_as_they_are(name):
    build, inputs = NETWORKS[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    layer_table(model, inputs(32))
    memory_report(model, inputs(32), optimizer)
    measured_peak(model, inputs(32), optimizer)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


# ------------------------------------------------------------------------------------------ memory


def test_live_bytes_follow_storages():
    with LiveBytes() as live:
        seen = []
        a = torch.zeros(1000)
        seen.append(live.now())
        b = a.view(10, 100)
        b.add_(1)
        seen.append(live.now())
        c = b + 1
        seen.append(live.now())
        del a
        seen.append(live.now())
        del b
        seen.append(live.now())
    assert seen == [4000, 4000, 8000, 8000, 4000] and live.peak == 8000
    assert LiveBytes({"x": [c, c[:2]]}, None).now() == 4000


def test_parts_of_a_report_by_hand():
    model, batch = SimpleCNN(), images(128)
    w = 421_642 * 4
    steps = 8 * 4  # AdamW counts its steps for each of the 8 tensors, in float32
    optimizers = {"AdamW": 2 * w + steps, "SGD": 0, "momentum": w}
    for name, state in optimizers.items():
        if name == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * (name == "momentum"))
        report = memory_report(model, batch, optimizer)
        assert (report["parameters"], report["gradients"], report["optimizer"]) == (w, w, state), name
        assert report["activations"] == 34_316_288
        assert report["sum"] == sum(value for key, value in report.items() if key != "sum")
    # The second pooling: the gradient of its input is new, and that of its output; the ReLU behind it and all that
    # came later has been freed.
    came, goes = 128 * 64 * 49 * 4, 128 * 64 * 196 * 4
    freed = 128 * 64 * 49 * 4 + 3 * 128 * 128 * 4
    assert report["temporary"] == pytest.approx(came + goes - freed, rel=0.02)

    model.conv1.requires_grad_(False)
    model.fc1.requires_grad_(False)
    report = memory_report(model, batch, torch.optim.AdamW(model.parameters()))
    trained = (18_496 + 1_290) * 4
    assert (report["parameters"], report["gradients"]) == (w, trained)
    assert report["optimizer"] == 2 * trained + 4 * 4


def test_buffers_and_the_batch_count():
    model = nn.Linear(10, 10)
    model.register_buffer("big", torch.zeros(1000))
    report = memory_report(model, torch.ones(5, 10), torch.optim.SGD(model.parameters()))
    assert report["parameters"] == 440 + 4000 and report["activations"] == 5 * 10 * 4
    spare = (torch.ones(5, 10), torch.ones(7))  # the second tensor is not kept, but it is there
    by_tuple = memory_report(nn.Sequential(First(), model), spare, torch.optim.SGD(model.parameters()))
    assert by_tuple["activations"] == 5 * 10 * 4 + 7 * 4


class First(nn.Module):
    def forward(self, batch):
        return batch[0]


def test_the_loss_that_is_given_is_used():
    model, batch = SimpleCNN(4), images(32)
    optimizer = torch.optim.SGD(model.parameters())
    plain = memory_report(model, batch, optimizer)
    asked = []

    def loss(logits):
        asked.append(logits.dtype)
        return F.cross_entropy(logits.float(), torch.zeros(32, dtype=torch.int64))

    report = memory_report(model, batch, optimizer, loss=loss)
    assert report["activations"] == plain["activations"] + 32 * 10 * 4 + 32 * 8 + 4  # log-softmax, targets, their weight
    measured_peak(model, batch, optimizer, BF16, loss)
    layer_table(model, batch, loss)
    assert asked == [torch.float32, BF16, torch.float32]


ROWS = {
    "cnn": (SimpleCNN, images),
    "cnn, 4 bits": (lambda: quantize(SimpleCNN(), 4, 8), images),
    "attention": (AttentionClassifier, packed),
    "attention, checkpointed": (lambda: AttentionClassifier(grad_checkpoint=True), packed),
    "attention, 4 bits": (lambda: quantize(AttentionClassifier(), 4, 8), packed),
    "attention, 4 bits, checkpointed": (lambda: quantize(AttentionClassifier(grad_checkpoint=True), 4, 8), packed),
}


@pytest.mark.parametrize("build, inputs", ROWS.values(), ids=ROWS)
def test_the_sum_is_what_is_measured(build, inputs, tmp_path):
    """Predicted from half and quarter of the batch, and computed for the batch itself, within 10 % of the tensors alive and of
    what the allocator hands out.
    """
    model = build()
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(model.parameters(), lr=1e-3)
        for dtype in (None, BF16):
            small = 32, memory_report(model, inputs(32), optimizer, dtype)
            large = 64, memory_report(model, inputs(64), optimizer, dtype)
            predicted = memory_at(128, small, large)["sum"]
            measured = measured_peak(model, inputs(128), optimizer, dtype)
            assert predicted == pytest.approx(measured, rel=0.1)
            if kind is torch.optim.AdamW:
                report = memory_report(model, inputs(128), optimizer, dtype)
                allocated = allocator_peak(model, inputs(128), optimizer, dtype, tmp_path / "trace.json")
                print(f"{predicted / measured - 1:+.1%} {report['sum'] / measured - 1:+.1%} {report['sum'] / allocated - 1:+.1%}")
                assert report["sum"] == pytest.approx(measured, rel=0.01)
                assert report["sum"] == pytest.approx(allocated, rel=0.1)


def allocator_peak(model, inputs, optimizer, dtype, path):
    """The peak of a step as the CPU's allocator tells the profiler: each of its blocks, also those inside of operations."""
    model, optimizer = networks.ready_to_step(model, optimizer)
    gradients = [parameter.grad for parameter in model.parameters()]
    now = networks.bytes_of(list(model.parameters()), list(model.buffers()), gradients, list(optimizer.state.values()), inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        networks.forward_pass(model, inputs, dtype, torch.sum).backward()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    peak = now
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    assert len(events) > 20
    return peak


def test_prediction_is_a_line():
    small = 10, {"parameters": 7, "activations": 30, "sum": 37}
    large = 30, {"parameters": 7, "activations": 90, "sum": 97}
    assert memory_at(100, small, large) == {"parameters": 7, "activations": 300, "sum": 307}
    assert memory_at(30, small, large) == large[1]


def test_on_a_gpu_the_allocator_is_asked(monkeypatch):
    """There is none here, so its functions are replaced. What counts is the second of two steps, less what was there before."""
    calls = []
    stepping = SimpleNamespace(step=lambda: calls.append("step"))
    backward = SimpleNamespace(backward=lambda: calls.append("backward"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: calls.append("before") or 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: calls.append("peak") or 5000)
    monkeypatch.setattr(networks, "ready_to_step", lambda model, optimizer: calls.append("copy") or (model, stepping))
    monkeypatch.setattr(networks, "forward_pass", lambda *arguments: calls.append("forward") or backward)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert measured_peak(model, torch.ones(10), stepping) == 5000 - 1000 + 40
    assert calls == ["before", "copy", *2 * ["reset", "forward", "backward", "step"], "peak"]


# ------------------------------------------------------------------------------------------ what is printed


def test_the_tables_fit_a_terminal_and_show_what_is_there(capsys):
    networks.print_layers(SimpleCNN(), images(128))
    networks.print_layers(attention(), packed(32))
    networks.print_memory(SimpleCNN(), images, 128)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    words = [line.split() for line in lines]
    assert "conv2 (128, 64, 14, 14) 18,496 924,844,032 1,849,688,064 0".split() in words
    assert "together 421,642 1,085,734,912 2,113,667,072 34,316,288".split() in words
    assert not any(line.startswith(("norm1", "blocks.0.dropout")) for line in lines)  # they do nothing
    for line in lines[-4:]:
        *figures, added, measured, off = line.split()[2:]
        assert float(off[:-1]) == pytest.approx(100 * (float(added) / float(measured) - 1), abs=0.1)
        assert abs(float(off[:-1])) < 10 and sum(map(float, figures)) == pytest.approx(float(added), abs=0.03)
