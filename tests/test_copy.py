"""The copy rule: each public function and class runs, pasted under the imports and helpers that its docstring says it needs."""

import ast
import functools
import importlib.util
import inspect
import os
import random
import re
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader

import data
import model
import train
import utils
from helpers import NORM, ROOT, run_program, write_mnist

CPU = torch.device("cpu")
digits = data.load_mnist(data.SAMPLE)
few = digits[0][:20], digits[1][:20], digits[2]
batch = torch.rand(4, 1, 28, 28), torch.arange(4)
tokens = data.collate_tokens(batch, **NORM)[0]
collate = functools.partial(data.collate_images, **NORM)
about = {"name": "MNIST", "items": "digits", "classes": few[2], "shape": [1, 28, 28], **NORM}
args = train.parse_args(["--width", "4", "--amp", "off"])
BYTES = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
OFF = torch.amp.GradScaler("cpu", enabled=False)
GATES = torch.tensor([[True, False, True], [True, True, False]])


def a_file(folder):
    utils.save_checkpoint(folder / "a.pt", {"model": model.SimpleCNN(2).state_dict(), "world_size": 1})
    return folder / "a.pt"


def train_it(f, folder):
    args = train.parse_args(["--width", "2", "--amp", "off"])
    net, loader = model.SimpleCNN(2), data.make_loader(data.Digits(*few), 5, data.EpochSampler(20), collate=collate)
    return f(net, loader, utils.build_optimizer(net, args), OFF, {}, args, CPU)["step"] == 4


def restore_it(f, folder):
    net, other, state = model.SimpleCNN(2), model.SimpleCNN(2), {}
    saved = utils.snapshot(net, torch.optim.SGD(net.parameters()), state={"epoch": 3})
    f(saved, other, torch.optim.SGD(other.parameters()), state=state)
    return state["epoch"] == 3 and torch.equal(net.fc2.weight, other.fc2.weight)


TOTALS = {"names": ["loss", "grad_norm"], "sums": torch.tensor([4.0, 2.0]), "samples": 4, "steps": 2, "finite_steps": 2}


RESUMABLE = {"args": {}, "amp": "off", "data": {"checksum": "a"}, "split": {}, "world_size": 1}


def optimizer_steps(f, folder):
    net = torch.nn.Linear(1, 1)
    net(torch.ones(1, 1)).sum().backward()
    return f(net, torch.optim.SGD(net.parameters()), OFF, 1.0)[1] is True


def linear_and_optimizer(*inputs):
    net = torch.nn.Linear(2, 3)
    return net, *inputs, torch.optim.SGD(net.parameters())


def records(f, folder):
    state = train.new_state()
    f(state, {"loss": torch.ones(()), "accuracy": torch.ones(())}, 4, torch.ones(()), True, OFF)
    return state


# For each name: runs the lifted object and says whether it did its work.
RUNS = {
    "model.SimpleCNN": lambda f, folder: f(2)(batch[0]).shape == (4, 10),
    "model.check_mask": lambda f, folder: f(GATES, GATES.shape) is None,
    "model.check_padding_mask": lambda f, folder: f(GATES, GATES.shape) is None,
    "model.can_read": lambda f, folder: f(GATES) is True,
    "model.check_tokens": lambda f, folder: f(torch.zeros(2, 3, 4), False) is None,
    "model.find_places": lambda f, folder: f(GATES).tolist() == [0, 2, 3, 4],
    "model.unpack": lambda f, folder: f(torch.ones(4), GATES, torch.tensor([0, 2, 3, 4])).sum() == 4,
    "model.pack": lambda f, folder: f(torch.arange(6).view(2, 3), torch.tensor([0, 2, 3])).tolist() == [0, 2, 3],
    "model.SimpleSelfAttention": lambda f, folder: f(8, 2)(torch.rand(2, 3, 8), GATES).shape == (2, 3, 8),
    "model.TemperatureSoftmax": lambda f, folder: f()(torch.rand(2, 3), GATES).sum().isclose(torch.tensor(2.0)),
    "model.MaskedPooling": lambda f, folder: f(8)(torch.rand(2, 3, 8), GATES).shape == (2, 8),
    "model.Block": lambda f, folder: f(8, 2)(torch.rand(4, 8), GATES, packed=True).shape == (4, 8),
    "model.AttentionClassifier": lambda f, folder: f(16)(tokens).shape == (4, 10),
    "model.attention_weights": lambda f, folder: f(model.AttentionClassifier(16), tokens).shape == (4, 49),
    "model.init_weights": lambda f, folder: f(torch.nn.Linear(2, 2)) is None,
    "model.RoundSTE": lambda f, folder: f.apply(torch.tensor([0.6]), torch.tensor(0.5), -1, 1)[0].item() == 0.5,
    "model.largest_integer": lambda f, folder: f(8) == 127,
    "model.quantization_scale": lambda f, folder: f(torch.tensor([-7.0, 1.0]), 4) == 1,
    "model.fake_quantize": lambda f, folder: f(torch.tensor([1.0, 0.2]), 2).tolist() == [1, 0],
    "model.QuantActivation": lambda f, folder: f(8)(torch.ones(2)).tolist() == [1, 1],
    "model.QuantWeight": lambda f, folder: type("Layer", (f, torch.nn.Linear), {})(2, 2, bits=4).quantized_weight().shape == (2, 2),
    "model.QuantConv2d": lambda f, folder: f(1, 2, 3)(batch[0]).shape == (4, 2, 26, 26),
    "model.QuantLinear": lambda f, folder: f(28, 2)(batch[0]).shape == (4, 1, 28, 2),
    "model.quantize": lambda f, folder: f(torch.nn.Sequential(torch.nn.Linear(2, 2)), 4, 8)[0].bits == 4,
    "model.leave_fast_path": lambda f, folder: f(torch.nn.Linear(2, 2)) is None,
    "model.pack_weights": lambda f, folder: f(model.quantize(model.SimpleCNN(2), 4))["fc1.bias"].shape == (8,),
    "model.unpack_weights": lambda f, folder: f({"a": 1}) == {"a": 1},
    "model.pack_integers": lambda f, folder: f(torch.ones(4, dtype=torch.int8), 2).tolist() == [0b01010101],
    "model.unpack_integers": lambda f, folder: f(torch.tensor([0b01010101], dtype=torch.int8), 2, 4).tolist() == [1, 1, 1, 1],
    "model.field_width": lambda f, folder: f(3) == 4,
    "model.layer_table": lambda f, folder: [row["kept"] for row in f(torch.nn.Linear(2, 3), torch.ones(5, 2))] == [40],
    "model.LayerTrace": lambda f, folder: f(torch.nn.Linear(2, 3)).inside[0]["parameters"] == 9,
    "model.flop_formulas": lambda f, folder: f()[torch.ops.aten.mm](torch.ones(2, 3), torch.ones(3, 4), out_val=None) == 48,
    "model.tensors_in": lambda f, folder: len(list(f([{"a": batch}, 3]))) == 2,
    "model.unchanged": lambda f, folder: f(GATES) is GATES,
    "model.bytes_of": lambda f, folder: f(GATES, GATES[0]) == 6,
    "model.memory_report": lambda f, folder: f(model.SimpleCNN(2), batch[0], torch.optim.SGD([torch.ones(1)]))["optimizer"] == 0,
    "model.keep_storage": lambda f, folder: f(set(), set(), GATES) is GATES,
    "model.LiveBytes": lambda f, folder: f(GATES, GATES[0]).now() == 6,
    "model.ready_to_step": lambda f, folder: f(*linear_and_optimizer())[0].weight.grad.sum() == 0,
    "model.forward_pass": lambda f, folder: f(model.SimpleCNN(2), batch[0], torch.bfloat16, torch.sum).dtype == torch.bfloat16,
    "model.measured_peak": lambda f, folder: f(*linear_and_optimizer(torch.ones(5, 2))) > 0,
    "model.memory_at": lambda f, folder: f(30, (10, {"sum": 5}), (20, {"sum": 6})) == {"sum": 7},
    "model.print_layers": lambda f, folder: f(model.SimpleCNN(2), batch[0]) is None,
    "model.print_memory": lambda f, folder: f(torch.nn.Linear(2, 3), lambda count: torch.ones(count, 2), 8) is None,
    "model.random_images": lambda f, folder: f(CPU, 3).shape == (3, 1, 28, 28),
    "model.random_tokens": lambda f, folder: len(f(CPU, 32)[3]) == 592,
    "model.count_parameters": lambda f, folder: f(torch.nn.Linear(2, 3)) == 9,
    "data.DataError": lambda f, folder: issubclass(f, ValueError),
    "data.fetch_mnist": lambda f, folder: f(data.SAMPLE) is None,
    "data.sigterm_cleans_up": lambda f, folder: cleans_up(f),
    "data.read_bytes": lambda f, folder: len(f(data.SAMPLE / "MNIST/raw/t10k-labels-idx1-ubyte")[0]) == 1008,
    "data.read_idx": lambda f, folder: f(data.SAMPLE / "MNIST/raw/t10k-labels-idx1-ubyte", 1).shape == (1000,),
    "data.check_labels": lambda f, folder: f(*few) is None,
    "data.load_mnist": lambda f, folder: len(f(data.SAMPLE)[0]) == 4000,
    "data.run_here": lambda f, folder: f(lambda: 3) == 3,
    "data.load_dataset": lambda f, folder: write_mnist(folder) and f("mnist", folder)[2]["name"] == "MNIST" and f("sample", "", False)[0] is None,
    "data.describe": lambda f, folder: f(*few, "MNIST", "digits")["shape"] == [1, 28, 28],
    "data.split_validation": lambda f, folder: len(f(24, 5, 0)[1]) == 2,
    "data.Digits": lambda f, folder: f(*few, augment=True).__getitems__([1, 2])[0].shape == (2, 1, 28, 28),
    "data.augment": lambda f, folder: f(batch[0], torch.zeros(4, 4)).shape == (4, 1, 28, 28),
    "data.normalize": lambda f, folder: f(batch[0], **NORM).shape == (4, 1, 28, 28),
    "data.collate_images": lambda f, folder: f(batch, **NORM)[1] is batch[1],
    "data.mix": lambda f, folder: f(0, 1) == data.mix(0, 1) != f(1, 0),
    "data.uniform_draws": lambda f, folder: f(0, 0, [1, 2], 3).shape == (2, 3),
    "data.cut_patches": lambda f, folder: f(batch[0]).shape == (4, 49, 1, 4, 4),
    "data.lengths_to_mask": lambda f, folder: f(torch.tensor([3, 1])).sum() == 4,
    "data.unpack": lambda f, folder: f(torch.ones(4), GATES).shape == (2, 3),
    "data.collate_default": lambda f, folder: f([1, 2]).tolist() == [1, 2] and f(batch) is batch,
    "data.collate_padded": lambda f, folder: f([torch.ones(3), torch.ones(1)])[0].shape == (2, 3),
    "data.collate_tokens": lambda f, folder: f(batch, **NORM)[0][0].shape == (4, 49, 16),
    "data.collate_masked": lambda f, folder: f(batch, **NORM)[0][0].shape == (4, 49, 16),
    "data.collate_packed": lambda f, folder: f(batch, **NORM)[0][0].shape == (4 * 49, 16),
    "data.padding_of_rank": lambda f, folder: [f(7, 3, rank) for rank in range(3)] == [0, 1, 1],
    "data.EpochSampler": lambda f, folder: len(list(f(20))) == len(list(f(20, labels=few[1]))) == 20,
    "data.gather_batch": lambda f, folder: f(*few[:2], [1, 2], True, 0, 0)[0].shape == (2, 1, 28, 28),
    "data.generators_in": lambda f, folder: len(f([random.Random(0), {"a": torch.Generator()}])) == 2,
    "data.reseed": lambda f, folder: f([torch.Generator()], 0) is None,
    "data.transform_each": lambda f, folder: f(torch.neg, batch[0], range(4)).equal(-batch[0]),
    "data.save_pictures": lambda f, folder: f(folder / "a.png", batch[0], torch.rand(4, 49)) is None,
    "data.DigitStream": lambda f, folder: len(list(f([data.SAMPLE / "MNIST/raw" / file for file in data.IDX_FILES[:2]], 20, 6))) == 4,
    "data.seed_worker": lambda f, folder: seed_worker_runs(f),
    "data.make_loader": lambda f, folder: len(next(iter(f(data.Digits(*few), 5)))[1]) == 5,
    "utils.number": lambda f, folder: f(int, 0, 9)("7") == 7,
    "utils.one_line": lambda f, folder: ends_with_2(f),
    "utils.show": lambda f, folder: f("line") is None,
    "utils.on_terminal": lambda f, folder: f() in (True, False),
    "utils.show_at_last": lambda f, folder: f("line", print) is None,
    "utils.file_path": lambda f, folder: f("~/a") == os.path.expanduser("~/a"),
    "utils.claimed": lambda f, folder: claims(f, folder),
    "train.check_size": lambda f, folder: f(args, about) is None,
    "train.resumed_automatically": lambda f, folder: f(args) is None,
    "utils.pick_device": lambda f, folder: f("cpu").type == "cpu",
    "utils.pick_amp": lambda f, folder: f(None, CPU) == "off",
    "utils.autocast": lambda f, folder: computes_in(f, "bf16") == torch.bfloat16 and computes_in(f, "off") == torch.float32,
    "utils.to_device": lambda f, folder: len(f((batch, tokens), CPU)) == 2,
    "utils.map_tensors": lambda f, folder: f(torch.neg, [torch.ones(1)])[0].item() == -1,
    "utils.warmup_steps": lambda f, folder: f(10, 0.5) == 5,
    "utils.keep_freed_memory": lambda f, folder: f() is None,
    "utils.set_seed": lambda f, folder: f(0) is None,
    "utils.rng_state": lambda f, folder: f(CPU)["device"] == "cpu",
    "utils.set_rng_state": lambda f, folder: f(utils.rng_state(CPU), CPU) is None,
    "utils.caught_signals": lambda f, folder: catches(f),
    "utils.init_distributed": lambda f, folder: f(CPU) == (0, 1, CPU),
    "utils.leave_distributed": lambda f, folder: f() is None,
    "utils.sum_over_ranks": lambda f, folder: f(torch.ones(1)).item() == 1,
    "utils.largest_over_ranks": lambda f, folder: f([3, 5])() == 5 and f([])() == 0,
    "utils.gather_over_ranks": lambda f, folder: f(3) == [3],
    "utils.once_per_machine": lambda f, folder: f(lambda: 3) == 3,
    "utils.distillation": lambda f, folder: f(torch.zeros(2, 3), torch.zeros(2, 3)) == 0,
    "utils.lr_at": lambda f, folder: f(0, 10) == 1.0,
    "utils.set_lr": lambda f, folder: f(torch.optim.SGD([torch.ones(1)]), 0.5) is None,
    "utils.UserError": lambda f, folder: issubclass(f, ValueError),
    "utils.copied": lambda f, folder: f({"a": [torch.ones(1)]}) == {"a": [torch.ones(1)]},
    "utils.plain_key": lambda f, folder: f("module._orig_mod.a.weight") == "a.weight",
    "utils.check_plain": lambda f, folder: f({"a": [1, None]}) is None,
    "utils.broadcast_from_rank_0": lambda f, folder: f(3) == 3,
    "utils.drop_on_plateau": lambda f, folder: f(0, 2, False) == (1, 0),
    "utils.new_folder": lambda f, folder: f(str(folder / "new"), "").is_dir(),
    "utils.write_atomically": lambda f, folder: f(folder / "a", lambda file: file.write(b"x")) is None,
    "utils.remove_scratch": lambda f, folder: f(folder / "a") is None,
    "utils.flush_folder": lambda f, folder: f(folder) is None,
    "utils.write_csv": lambda f, folder: f(folder / "a", [{"x": 1}]) is None,
    "utils.write_json": lambda f, folder: f(folder / "a", {"x": 1}) is None,
    "utils.versions": lambda f, folder: set(f()) == {"torch", "torchvision"},
    "utils.snapshot": lambda f, folder: snapshot_has(f),
    "utils.plain_weights": lambda f, folder: set(f(torch.nn.Linear(1, 1))) == {"weight", "bias"},
    "utils.save_checkpoint": lambda f, folder: f(folder / "a.pt", {"model": {}}) is None,
    "utils.load_checkpoint": lambda f, folder: "conv1.weight" in f(a_file(folder))["model"],
    "utils.load_weights": lambda f, folder: f(model.SimpleCNN(2), model.SimpleCNN(2).state_dict()) is None,
    "utils.restore": restore_it,
    "utils.load_matching": lambda f, folder: len(f(model.SimpleCNN(2), model.SimpleCNN(2).state_dict())[0]) == 8,
    "utils.confusion_table": lambda f, folder: f(torch.eye(2, dtype=torch.int64), ["cat", "dog"]).count("100.0%") == 2,
    "utils.WithPreparation": lambda f, folder: f(torch.nn.Flatten(), torch.neg)(BYTES).shape == (4, 784),
    "utils.CheckedPictures": lambda f, folder: f(torch.nn.Flatten(), [1, 28, 28], ["a"])(BYTES).shape == (4, 784),
    "utils.record_graph": lambda f, folder: f(torch.nn.Flatten(), [1, 28, 28]).module()(BYTES).shape == (4, 784),
    "utils.as_export": lambda f, folder: exports(f),
    "utils.as_torchscript": lambda f, folder: exports(f),
    "utils.as_onnx": lambda f, folder: importlib.util.find_spec("onnxscript") is None or exports(f),
    "utils.largest_difference": lambda f, folder: f(torch.neg, torch.abs, torch.ones(6)) == (2, 1),
    "utils.check_same_answers": lambda f, folder: f(torch.abs, torch.abs, torch.ones(6)) == 0,
    "train.parse_args": lambda f, folder: f(["--epochs", "3"]).epochs == 3,
    "utils.build_optimizer": lambda f, folder: len(f(model.SimpleCNN(2), SimpleNamespace(lr=1, weight_decay=0)).param_groups) == 2,
    "train.build_cnn": lambda f, folder: f(args, about)(batch[0]).shape == (4, 10),
    "train.build_attention": lambda f, folder: f(train.parse_args(["--model", "attention"]), about)(tokens).shape == (4, 10),
    "train.build_model": lambda f, folder: f(args, about)(batch[0]).shape == (4, 10),
    "train.collate_for_cnn": lambda f, folder: f(args, about)(batch)[1] is batch[1],
    "train.collate_for_attention": lambda f, folder: f(args, about)(batch)[1] is batch[1],
    "train.collate_for_exported_attention": lambda f, folder: f(args, about)(batch)[1] is batch[1],
    "train.export_checkpoint": lambda f, folder: exports_file(lambda *a: f(*a[:2], a[3]), folder, "export", "a.pt2"),
    "train.export_integers": lambda f, folder: exports_file(f, folder, "int8", "a.int8.pt"),
    "train.load_network": lambda f, folder: f(args, about, model.SimpleCNN(4).state_dict(), "a.pt").training is False,
    "train.prepared": lambda f, folder: f(model.SimpleCNN(2), collate)(BYTES).shape == (4, 10),
    "train.inputs_of": lambda f, folder: f(batch[0], collate).shape == (4, 1, 28, 28),
    "train.pictures_to_check": lambda f, folder: f(about).shape == (21, 1, 28, 28),
    "train.count_samples": lambda f, folder: f(batch[1]) == 4,
    "train.loss_and_metrics": lambda f, folder: f(torch.zeros(4, 10), batch[1])[1] == 4,
    "train.quality": lambda f, folder: f({"val_accuracy": 1, "val_loss": 2}) == (1, -2),
    "train.in_words": lambda f, folder: f({"loss": 1, "accuracy": 0.5}) == "loss 1.0000  accuracy 50.00 %",
    "train.new_state": lambda f, folder: f(5)["total_steps"] == 5,
    "train.split_batch": lambda f, folder: f({"x": 1, "targets": 2}) == ({"x": 1}, 2),
    "train.own_memory": lambda f, folder: f(batch[0]) is batch[0],
    "train.backward_window": lambda f, folder: f(model.SimpleCNN(2), [(*batch, 3)], 3, OFF, args, CPU)["loss"] > 0,
    "train.optimizer_step": optimizer_steps,
    "train.begin_epoch": lambda f, folder: len(list(f(DataLoader(range(5)), {"epoch": 0, "batch": 2}))) == 3,
    "train.draw_window": lambda f, folder: f(iter([batch]), 2, 1)[0][2] == 3,
    "train.means": lambda f, folder: f(TOTALS, 0) == {"loss": 1, "grad_norm": 1},
    "train.end_of_epoch": lambda f, folder: f({**train.new_state(), "this_rank": TOTALS}, 1, 0, 4, torch.optim.SGD([torch.ones(1)]))["epoch"] == 1,
    "train.samples_of_ranks": lambda f, folder: f([(*batch, 3)], True, 0) == (3, 3),
    "train.for_all_ranks": lambda f, folder: f(OFF) is OFF,
    "train.describe_run": lambda f, folder: f(args, about, {})["world_size"] == 1,
    "train.without_counts": lambda f, folder: f({"loss": 1, "samples": 2}) == {"loss": 1},
    "train.figures": lambda f, folder: f({"val_loss": 1, "lr": 2}, "val_") == {"loss": 1},
    "train.count_classes": lambda f, folder: f(data.Digits(*few)) == 10,
    "train.start_command": lambda f, folder: f(1) == "python train.py",
    "train.check_resumable": lambda f, folder: f(RESUMABLE, "a.pt", RESUMABLE["data"], {}) is None,
    "train.rescale_place": lambda f, folder: f({"batch": 10, "step": 5}, 256, 64, 1, 1) is None,
    "train.hardest_classes": lambda f, folder: f(torch.tensor([[1, 1], [0, 2]]), ["a", "b"], 1) == "a (50.0 % right)",
    "data.pixels_of": lambda f, folder: f(Image.new("RGB", (3, 2), (1, 2, 3)))[2].tolist() == [[3] * 3] * 2,
    "data.lay_on_background": lambda f, folder: f(Image.new("RGBA", (3, 2))).getpixel((0, 0)) == (255, 255, 255),
    "data.open_picture": lambda f, folder: f(a_picture(folder), 1).getpixel((0, 0)) == 7,
    "data.read_picture": lambda f, folder: f(a_picture(folder), (1, 2, 3)).tolist() == [[[7] * 3] * 2],
    "data.looks_grey": lambda f, folder: f(a_picture(folder)),
    "data.by_number": lambda f, folder: f(folder / "a9.png") < f(folder / "a10.png"),
    "data.list_pictures": lambda f, folder: f(a_picture(folder).parent)[0] == [folder / "0/a.png"],
    "data.find_classes": lambda f, folder: list(f(a_picture(folder).parent.parent)) == ["0"],
    "data.find_parts": lambda f, folder: f(a_picture(folder).parent.parent) == {"train": folder},
    "data.list_samples": lambda f, folder: f(a_picture(folder).parent.parent, ["0"]) == [(folder / "0/a.png", 0)],
    "data.keep_tenth": lambda f, folder: len(f([(folder / str(index), 0) for index in range(20)], 0)[1]) == 2,
    "data.check_classes": lambda f, folder: f(folder, ["a", "b"], [(folder, 0), (folder, 1)]) is None,
    "data.most_are_grey": lambda f, folder: f([(a_picture(folder), 0)]),
    "data.memory_left": lambda f, folder: (f() or 1) > 0,
    "data.read_pictures": lambda f, folder: f([(a_picture(folder), 5)], (1, 2, 3))[1].tolist() == [5],
    "data.load_folder": lambda f, folder: f(two_classes(folder), 28)[2]["shape"] == [1, 28, 28],
    "data.smooth_paper": lambda f, folder: (f(PAPER) - 0.8).abs().max() < 0.02,
    "data.step_paper": lambda f, folder: (f(PAPER) - 0.8).abs().max() < 0.02,
    "data.ink_in_shadow": lambda f, folder: f(PAPER)[12, 12] > 0.5,
    "data.otsu_threshold": lambda f, folder: 1 < f(torch.tensor([0.0, 1, 0, 1, 8, 9]))[0] < 8,
    "data.find_ink": lambda f, folder: f(PAPER)[12, 12] > 0.9,
    "data.keep_digit": lambda f, folder: torch.equal(f((PAPER < 0.5).float()), (PAPER < 0.5).float()),
    "data.thicken": lambda f, folder: f(1 - PAPER).shape == (28, 28),
    "data.fit_digit": lambda f, folder: f(1 - PAPER).shape == (28, 28),
    "data.is_like_mnist": lambda f, folder: f(few[0][0, 0] / 255) and not f(PAPER),
    "data.digit_steps": lambda f, folder: f(a_digit(folder))[-1][1].shape == (28, 28),
    "data.read_digit": lambda f, folder: torch.equal(f(a_digit(folder)), few[0][0]),
    "data.show_digit": lambda f, folder: f(a_digit(folder)) is None,
    "data.save_curve": lambda f, folder: f(folder / "a.png", [(1e-3, 2.0), (1e-2, 1.0)]) is None,
    "utils.NotFinite": lambda f, folder: str(f("x")) == "x",
    "utils.profiled_steps": lambda f, folder: profiles(f, folder),
    "utils.time_phases": lambda f, folder: phases(f) == 4,
    "utils.removed_at_end": lambda f, folder: f([]).__enter__() is None,
    "utils.why_worker_is_lost": lambda f, folder: f(RuntimeError()) is None and f(RuntimeError("DataLoader timed out\nx")) == "DataLoader timed out",
    "train.flag_of": lambda f, folder: f("save_every") == "--save-every" and f("augment", False) == "--no-augment",
    "utils.look_at_first": lambda f, folder: "data 50%" in f({"data": 1, "forward": 1, "backward": 0, "optimizer": 0}),
    "utils.watched_gradients": lambda f, folder: watches(f, folder),
    "utils.cause_of": lambda f, folder: f(1, 1e-3, 1e-3) is None,
    "utils.first_not_finite": lambda f, folder: finds_infinity(f),
    "utils.tensors_of": lambda f, folder: len(f((torch.ones(1), torch.ones(1, dtype=torch.int64)))) == 1,
    "utils.draw_curves": lambda f, folder: f({"a": [(1, 2.0)]}, 3, 2)[0] == "a = a",
    "utils.show_runs": lambda f, folder: f([a_run(folder)], lambda line: None) is None,
    "utils.describe_curve": lambda f, folder: f("a", [], 5) == "a: 0 epochs",
    "utils.show_checkpoint": lambda f, folder: f(a_file(folder), lambda line: None) is None,
    "utils.compare_checkpoints": lambda f, folder: f(a_file(folder), folder / "a.pt", lambda line: None) == 0,
    "utils.flat": lambda f, folder: f({"a": [1, {"b": 2}]}) == {"a.0": 1, "a.1.b": 2},
    "utils.show_schedules": lambda f, folder: f() is None,
    "train.call_all": lambda f, folder: f([lambda: None]) is None,
    "train.check_ranks_agree": lambda f, folder: f(OFF) is None,
    "train.range_test": lambda f, folder: len(f(*in_training(), low=1e-4, high=1e-2, steps=3)) == 3,
    "train.suggested_rate": lambda f, folder: f([(1, 2.0), (2, 1.2), (3, 1.0)]) == 2,
    "train.words_given": lambda f, folder: f(args, "amp") == "--width 4 ",
    "train.learn_by_heart": lambda f, folder: f(*in_training()[:3], args, CPU, 2)[0] == 2,
    "train.what_is_broken": lambda f, folder: "inputs" in f(*in_training()[:2], {name: 0 * p for name, p in model.SimpleCNN(2).named_parameters()}, args, CPU),
    "train.explain_not_finite": lambda f, folder: f(*in_training()[:2], torch.optim.SGD([torch.ones(1)]), OFF, train.new_state(), args, CPU) is None,
    "train.samples_not_finite": lambda f, folder: f(model.SimpleCNN(2), [(*batch, 4)], args, CPU, print) is None,
    "train.log_end": lambda f, folder: f({"loss": 1}, about, {"test": 9}, {"epoch": 1, "best": {"epoch": 1}, "metrics": [{"seconds": 1}]}, 2, folder, lambda line: None) is None,
    "train.begin_model": lambda f, folder: f(args, about, None, CPU, print).fc2.out_features == 10,
    "utils.free_what_errors_hold": lambda f, folder: f() is None,
    "train.leave_if_asked": lambda f, folder: f(0, {}, folder, print) is None,
    "data.outlive_a_stop": lambda f, folder: outlives(f),
    "train.training_mode": lambda f, folder: f(torch.nn.Linear(1, 1)) is None,
    "train.freeze": lambda f, folder: f(model.SimpleCNN(2), "conv", print) is None,
    "train.load_dataset": lambda f, folder: f(train.parse_args(["--dataset", "sample"]), False, print)[0] is None,
    "train.log_confusions": lambda f, folder: f(torch.eye(2, dtype=torch.int64), ["a", "b"], print) is None,
    "train.answers": lambda f, folder: f(model.SimpleCNN(2), data.Digits(*few), collate, CPU).shape == (20, 10),
    "train.save_mistakes": lambda f, folder: f(folder / "a.png", model.SimpleCNN(2), data.Digits(*few), collate, CPU, "off", print) is None,
    "train.pictures_in": lambda f, folder: f([folder / "a.png"]) == [folder / "a.png"],
    "train.answer_in_words": lambda f, folder: f("a.png", torch.tensor([0.9, 0.1]), "ab", False) == "a.png: a (90.0 %), or b (10.0 %)",
    "utils.multiplies_in_bf16": lambda f, folder: f() in (True, False),
    "utils.pick_workers": lambda f, folder: f(None, CPU) == 0,
    "utils.set_float32_precision": lambda f, folder: f(CPU) is None,
    "utils.rank_and_world_size": lambda f, folder: f() == (0, 1),
    "train.most_samples": lambda f, folder: f(args, 2) is None,
    "train.trained_on": lambda f, folder: f({"data": about}, "a.pt") is about,
    "train.check_same_kind": lambda f, folder: f("a.pt", about, about) is None,
    "train.record": records,
    "train.progress_line": lambda f, folder: "step 1/2" in f(records(train.record, folder), 1, 2, 1.0, 4, torch.optim.SGD([torch.ones(1)])),
    "train.train_one_epoch": train_it,
    "train.evaluate": lambda f, folder: f(model.SimpleCNN(2), data.make_loader(data.Digits(*few), 7, collate=collate), CPU)["samples"] == 20,
    "train.build_parser": lambda f, folder: f().parse_args([]).epochs == 10,
    "train.stored_arguments": lambda f, folder: "out" not in f(args) and f(args)["width"] == 4,
    "train.without_effect": lambda f, folder: f(args) == [],
    "train.evaluation_loader": lambda f, folder: len(f(data.Digits(*few), collate, CPU)) == 1,
    "train.collate_for_both": lambda f, folder: len(f(batch, collate, collate)[0]) == 2,
    "train.load_teacher": lambda f, folder: f(args, about, CPU) == (None, None),
    "train.prepare": lambda f, folder: f(model.SimpleCNN(2), args, CPU, print).fc2.out_features == 10,
    "train.title": lambda f, folder: f(about, {"test": 1000}, "test") == "(MNIST, 1,000 digits)",
    "train.resume_command": lambda f, folder: f(folder, 1).startswith("python train.py --resume"),
    "train.choose_folder": lambda f, folder: f(train.parse_args(["--out", str(folder / "a")]), about, {}, OFF, print).is_dir(),
    "train.load_best": lambda f, folder: f(a_file(folder), model.SimpleCNN(2), {"best": None})["world_size"] == 1,
    "train.check_stored": lambda f, folder: f({"epoch": 1, "data": about}, "a.pt") is None,
    "train.check_about": lambda f, folder: f(about, lambda right, key, value: right or 1 / 0) is None,
    "train.unpack_weights": lambda f, folder: torch.equal(f({"a": BYTES}, "a.pt")["a"], BYTES),
    "train.stored_as_words": lambda f, folder: f({"lr": 0.1, "augment": False, "out": "x"}, ["lr", "augment", "out"]) == ["--no-augment", "--lr=0.1"] and f({"lr": 1}, []) == [],
    "utils.printable": lambda f, folder: f("a\x1b[1m") == "a\\x1b[1m",
    "utils.check_weights": lambda f, folder: f({"a": torch.ones(1)}) is None,
    "utils.check_optimizer_state": lambda f, folder: f(torch.optim.SGD([torch.ones(1)])) is None,
    "train.silent": lambda f, folder: f("x") is None,
    "train.same_buffers": lambda f, folder: f(model.SimpleCNN(2)) is None,
    "train.report": lambda f, folder: f({"accuracy": 1, "loss": 0}, about, 1, "x", print) is None,
    "train.show_progress": lambda f, folder: f(lambda line, over: None, 1, 2, about, {"train": 1}, "c") is None,
}


def in_training():
    net = model.SimpleCNN(2)
    loader = data.make_loader(data.Digits(*few), 10, collate=collate)
    return net, loader, torch.optim.AdamW(net.parameters()), OFF, args, CPU


def profiles(f, folder):
    with f(folder / "a.json", 1, CPU, lambda line: None) as after_step:
        torch.ones(3).sum()
        after_step()
    return (folder / "a.json").is_file()


def phases(f):
    with f(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), CPU) as seconds:
        return len(seconds)


def watches(f, folder):
    net, _, optimizer, *_ = in_training()
    with f(net, optimizer, folder / "a.csv", 1, {"step": 0}, print):
        net(batch[0]).sum().backward()
        optimizer.step()
    return len((folder / "a.csv").read_text().splitlines()) == 9


def finds_infinity(f):
    net = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    with f(net, print) as found:
        net(torch.full((1, 1), torch.inf))
    return found == ["0 (Linear)"]


def a_run(folder):
    (folder / "metrics.csv").write_text("epoch,train_loss,val_loss\n1,0.5,0.4\n")
    (folder / "run.json").write_text('{"dataset": {"val": 5}}')
    return folder


PAPER = torch.full((28, 28), 0.8)
PAPER[10:14, 10:14] = 0.1  # a spot of ink


def a_picture(folder):
    """3 x 2 pixels of grey 7, of class "0"."""
    (folder / "0").mkdir()
    Image.new("L", (3, 2), 7).save(folder / "0/a.png")
    return folder / "0/a.png"


def a_digit(folder):
    Image.fromarray(few[0][0, 0].numpy()).save(folder / "a.png")
    return folder / "a.png"


def two_classes(folder):
    for name, grey in (("a", 50), ("b", 200)):
        (folder / name).mkdir()
        for index in range(10):
            Image.new("L", (3, 2), grey).save(folder / name / f"{index}.png")
    return folder


def claims(f, folder):
    with f(folder), pytest.raises(Exception, match="another run is writing into it"), f(folder):
        pass
    with f(folder):
        return True


def exports(f):
    content, answer = f(torch.nn.Flatten(), [1, 28, 28], ["a"])
    return len(content) > 100 and answer(BYTES).shape == (4, 784)


def exports_file(f, folder, kind, name):
    path = a_file(folder)
    args = train.parse_args(["--width", "2", "--export", str(path), "--format", kind])
    f(args, {**utils.load_checkpoint(path), "data": about}, about, print)
    return (folder / name).is_file()


def seed_worker_runs(f):
    done, kept = [], SimpleNamespace(own=random.Random(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "setsid", lambda: done.append(1))
        patch.setitem(f.__globals__, "get_worker_info", lambda: SimpleNamespace(dataset=kept))
        f(0)
    return done == [1] and kept.own.random() != random.Random(0).random()


def cleans_up(f):
    with pytest.raises(SystemExit) as end, f():
        os.kill(os.getpid(), signal.SIGTERM)
    return end.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def snapshot_has(f):
    net = model.SimpleCNN(2)
    taken = f(net, torch.optim.SGD(net.parameters()), OFF, {"step": 3})
    return {"model", "optimizer", "scaler", "rng", "step"} <= taken.keys()


def computes_in(f, amp):
    with f(CPU, amp):
        return torch.nn.Linear(2, 2)(torch.rand(1, 2)).dtype


def ends_with_2(f):
    with pytest.raises(SystemExit) as end, f(ValueError):
        raise ValueError("x")
    return end.value.code == 2


def outlives(f):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)}
    try:
        f()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        return 8 <= signal.alarm(0) <= 10
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def catches(f):
    caught = []
    with f(caught):
        os.kill(os.getpid(), signal.SIGTERM)
    return caught == [signal.SIGTERM]


@functools.cache
def public(module):
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@functools.cache
def constants(module):
    tree = ast.parse(inspect.getsource(module))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for name in ast.walk(node.targets[0]):
                if isinstance(name, ast.Name):
                    found[name.id] = ast.unparse(node)
    return found


@functools.cache
def imports(module):
    """For each name that an import at the top of a module binds, that import."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], node.level)
                found[alias.asname or alias.name.partition(".")[0]] = ast.unparse(one)
    return found


def needs(node):
    """All names after "Needs:" in the docstring, up to the full stop."""
    found = re.search(r"Needs:\s+(.+?)\.(\s|$)", ast.get_docstring(node) or "", re.S)
    return set(re.findall(r"\w+", found[1])) if found else set()


def uses(node):
    """Names that the source of an object reads and does not bind, and what it takes of other modules, as (module, name)."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {node.name} | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    own |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    taken = {
        (each.value.id, each.attr) for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in ("utils", "data", "networks")
    }
    return {each.id for each in names} - own, taken


ALL = [tuple(name.split(".")) for name in RUNS]


@pytest.mark.parametrize("module, name", ALL, ids=list(RUNS))
def test_lifted_alone_it_runs(module, name, tmp_path):
    """Under the imports that its docstring lists, and no others. Names that a fork has removed are passed over."""
    module = {"model": model, "data": data, "utils": utils, "train": train}[module]
    objects, values, imported = public(module), constants(module), imports(module)
    if name not in objects:
        pytest.skip(f"{module.__name__} has no {name}")
    wanted, done, header = [name], set(), set()
    while wanted:  # the helpers' own needs come along
        current = wanted.pop()
        if current in done:
            continue
        done.add(current)
        if current in imported:
            header.add(imported[current])
            continue
        if current in values:
            tree = ast.parse(values[current])
            wanted += [each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id in {*objects, *values, *imported}]
            continue
        used, taken = uses(objects[current])
        listed = needs(objects[current])
        if f"{module.__name__}.{current}" not in RUNS:  # of a project of your own: it need not list anything
            listed = used | {attribute for _, attribute in taken}
        used &= {*objects, *values, *imported} - {"utils", "data", "networks"}
        missing = used - listed
        missing |= {f"{other}.{attribute}" for other, attribute in taken if not {attribute, other} & listed}
        assert not missing, f"{current} uses {sorted(missing)}, which its docstring does not list"
        wanted += [each for each in listed if each in objects or each in values or each in imported]
        wanted += [other for other, _ in taken]
    namespace = {"__name__": "lifted", "__file__": module.__file__, "__doc__": "A program."}
    pieces = [values[each] for each in values if each in done]
    pieces += [ast.unparse(objects[each]) for each in objects if each in done]  # in the order of the file: base classes first
    pieces.sort(key=lambda piece: piece.startswith("NETWORKS"))  # a table of functions comes after them
    lifted = tmp_path / "lifted.py"  # torch.jit.script reads the source of what it compiles
    lifted.write_text("\n".join(sorted(header)) + "\n" + "\n".join(dict.fromkeys(pieces)))
    exec(compile(lifted.read_text(), lifted, "exec"), namespace)
    assert RUNS[f"{module.__name__}.{name}"](namespace[name], tmp_path)


def test_a_network_of_torchvision_is_quantized():
    """All 21 layers of a ResNet-18: each weight becomes what rounding it by hand gives, and so does the answer."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    network, by_hand = resnet18(num_classes=10).eval(), resnet18(num_classes=10).eval()
    by_hand.load_state_dict(network.state_dict())
    model.quantize(network, bits=4)
    layers = [layer for layer in network.modules() if isinstance(layer, model.QuantWeight)]
    for layer in by_hand.modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            rows = layer.weight.data.flatten(1)  # (output channels, the rest)
            scale = rows.abs().amax(1, keepdim=True) / 7
            rows.copy_((rows / scale).round().clamp(-7, 7) * scale)
    images = torch.rand(2, 3, 32, 32)
    assert len(layers) == 21 and torch.equal(network(images), by_hand(images))
    network.train()(images).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("module, words", [
    ("data", ["torch.uint8 (4000, 1, 28, 28)", "@@@"]), ("model", ["421,642", "(128, 64, 14, 14)"]), ("utils", ["cosine", "###"]),
])
def test_each_module_shows_itself(module, words, tmp_path):
    status, out, err = run_program(cwd=tmp_path, script=ROOT / f"{module}.py")
    assert (status, err) == (0, "")
    for word in words:
        assert word in out, out
