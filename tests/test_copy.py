"""The copy rule: each public function and class runs, pasted under the imports and helpers that its docstring says it needs."""

import ast
import functools
import inspect
import os
import random
import re
import signal
from types import SimpleNamespace

import pytest
import torch

import data
import model
import train
import utils
from helpers import NORM, ROOT, run_program, write_mnist

# What is pasted above objects of modules whose docstrings do not list their imports.
IMPORTS = """
import argparse, copy, csv, ctypes, gc, gzip, importlib, io, json, math, mmap, os, random, shutil, signal, socket, struct, sys, tempfile
import threading, time, traceback, zipfile, zlib
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler
import utils, data, model as networks
"""

CPU = torch.device("cpu")
digits = data.load_mnist(data.SAMPLE)
few = digits[0][:20], digits[1][:20], digits[2]
batch = torch.rand(4, 1, 28, 28), torch.arange(4)
tokens = data.collate_tokens(batch, **NORM)[0]
GATES = torch.tensor([[True, False, True], [True, True, False]])


def a_file(folder):
    utils.save_checkpoint(folder / "a.pt", {"model": model.SimpleCNN(2).state_dict(), "world_size": 1})
    return folder / "a.pt"


def train_it(f, folder):
    args = train.parse_args(["--width", "2", "--amp", "off"])
    net, loader = model.SimpleCNN(2), data.make_loader(data.Digits(*few), 5, data.EpochSampler(20))
    off = torch.amp.GradScaler("cpu", enabled=False)
    return f(net, loader, utils.build_optimizer(net, args), off, utils.new_state(4), args, CPU)["step"] == 4


def restore_it(f, folder):
    args = train.parse_args(["--resume", "a.pt"])
    net = model.SimpleCNN(2)
    optimizer, off, state = utils.build_optimizer(net, args), torch.amp.GradScaler("cpu", enabled=False), {"epoch": 0}
    state |= {"batch": 0, "step": 0}
    saved = {"epoch": 3, "step": 4, "rng": [utils.rng_state(CPU)], "amp": "off", "batch": 2, "optimizer": optimizer.state_dict(), "scaler": {}, "args": vars(args), "sums": [None]}
    f(saved | {"data": {}, "world_size": 1}, args, {}, state, optimizer, off, CPU)
    return state == {"epoch": 3, "batch": 2, "step": 4, "sums": None}


# For each name: runs the lifted object and says whether it did its work.
RUNS = {
    "model.SimpleCNN": lambda f, folder: f(2)(batch[0]).shape == (4, 10),
    "model.check_mask": lambda f, folder: f(GATES, GATES.shape) is None,
    "model.check_padding_mask": lambda f, folder: f(GATES, GATES.shape) is None,
    "model.can_read": lambda f, folder: f(GATES) is True,
    "model.check_tokens": lambda f, folder: f(torch.zeros(2, 3, 4), False) is None,
    "model.unpack": lambda f, folder: f(torch.ones(4), GATES).sum() == 4,
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
    "model.print_shape": lambda f, folder: f("layer", None, (), torch.ones(2)) is None,
    "model.count_parameters": lambda f, folder: f(torch.nn.Linear(2, 3)) == 9,
    "data.DataError": lambda f, folder: issubclass(f, ValueError),
    "data.fetch_mnist": lambda f, folder: f(data.SAMPLE) is None,
    "data.sigterm_cleans_up": lambda f, folder: cleans_up(f),
    "data.read_bytes": lambda f, folder: len(f(data.SAMPLE / "MNIST/raw/t10k-labels-idx1-ubyte")[0]) == 1008,
    "data.read_idx": lambda f, folder: f(data.SAMPLE / "MNIST/raw/t10k-labels-idx1-ubyte", 1).shape == (1000,),
    "data.check_labels": lambda f, folder: f(*few) is None,
    "data.load_mnist": lambda f, folder: len(f(data.SAMPLE)[0]) == 4000,
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
    "data.pad_rows": lambda f, folder: f(torch.ones(4), GATES).shape == (2, 3),
    "data.collate_default": lambda f, folder: f([1, 2]).tolist() == [1, 2] and f(batch) is batch,
    "data.collate_padded": lambda f, folder: f([torch.ones(3), torch.ones(1)])[0].shape == (2, 3),
    "data.collate_tokens": lambda f, folder: f(batch, **NORM)[0][0].shape == (4, 49, 16),
    "data.collate_packed": lambda f, folder: f(batch, **NORM)[0][0].shape == (4 * 49, 16),
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
    "utils.pick_device": lambda f, folder: f("cpu").type == "cpu",
    "utils.pick_amp": lambda f, folder: f(None, CPU) == "off",
    "utils.autocast": lambda f, folder: computes_in(f, "bf16") == torch.bfloat16 and computes_in(f, "off") == torch.float32,
    "utils.to_device": lambda f, folder: len(f((batch, tokens), CPU)) == 2,
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
    "utils.lr_at": lambda f, folder: f(0, 10, 1.0) == 1.0,
    "utils.drop_on_plateau": lambda f, folder: f(0, 2, False) == (1, 0),
    "utils.new_folder": lambda f, folder: f(str(folder / "new"), "").is_dir(),
    "utils.write_atomically": lambda f, folder: f(folder / "a", lambda file: file.write(b"x")) is None,
    "utils.write_csv": lambda f, folder: f(folder / "a", [{"x": 1}]) is None,
    "utils.write_json": lambda f, folder: f(folder / "a", {"x": 1}) is None,
    "utils.versions": lambda f, folder: set(f()) == {"torch", "torchvision"},
    "utils.new_state": lambda f, folder: f(5)["total_steps"] == 5,
    "utils.snapshot": lambda f, folder: snapshot_has(f),
    "utils.plain_weights": lambda f, folder: set(f(torch.nn.Linear(1, 1))) == {"weight", "bias"},
    "utils.save_checkpoint": lambda f, folder: f(folder / "a.pt", {"model": {}}) is None,
    "utils.load_checkpoint": lambda f, folder: "conv1.weight" in f(a_file(folder))["model"],
    "utils.load_weights": lambda f, folder: f(model.SimpleCNN(2), model.SimpleCNN(2).state_dict()) is None,
    "utils.restore": restore_it,
    "utils.load_matching": lambda f, folder: len(f(model.SimpleCNN(2), model.SimpleCNN(2).state_dict())[0]) == 8,
    "utils.confusion_table": lambda f, folder: f(torch.eye(2, dtype=torch.int64), ["cat", "dog"]).count("100.0%") == 2,
    "utils.attention_picture": lambda f, folder: f(folder / "a.png", model.AttentionClassifier(16), tokens, batch[0]) is None,
    "train.parse_args": lambda f, folder: f(["--epochs", "3"]).epochs == 3,
    "train.build_model": lambda f, folder: f(SimpleNamespace(model="cnn", norm="none", quant_bits=0, width=2, dropout=0.1), "ab").fc2.out_features == 2,
    "utils.build_optimizer": lambda f, folder: len(f(model.SimpleCNN(2), SimpleNamespace(lr=1, weight_decay=0)).param_groups) == 2,
    "train.collate_of": lambda f, folder: f(train.parse_args([]), **NORM)(batch)[1] is batch[1],
    "train.train_one_epoch": train_it,
    "utils.finite_means": lambda f, folder: f(torch.ones(6), 0) == (1, 1, 1),
    "train.evaluate": lambda f, folder: f(model.SimpleCNN(2), data.make_loader(data.Digits(*few), 7), CPU)["samples"] == 20,
}


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
    taken = f(net, torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu", enabled=False), utils.new_state(4), CPU)
    return {"model", "optimizer", "scaler", "rng", "sums", "step"} <= taken.keys()


def computes_in(f, amp):
    with f(CPU, amp):
        return torch.nn.Linear(2, 2)(torch.rand(1, 2)).dtype


def ends_with_2(f):
    with pytest.raises(SystemExit) as end, f(ValueError):
        raise ValueError("x")
    return end.value.code == 2


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
    """Names after "Needs:" in the docstring, up to the full stop."""
    found = re.search(r"Needs: (.+?)\.(\s|$)", ast.get_docstring(node) or "", re.S)
    return [name for name in re.split(r"[,;]\s+", found[1]) if "." not in name] if found else []


LIST_IMPORTS = {data}  # the modules whose docstrings list what to import
ALL = [(module, name) for module in (model, data, utils, train) for name in public(module) if name != "main"]


def test_every_public_object_is_run_here():
    assert sorted(RUNS) == sorted(f"{module.__name__}.{name}" for module, name in ALL)


@pytest.mark.parametrize("module, name", ALL, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_lifted_alone_it_runs(module, name, tmp_path):
    objects, values, imported = public(module), constants(module), imports(module) if module in LIST_IMPORTS else {}
    wanted, pieces, header = [name], [], set()
    while wanted:  # the helpers' own needs come along
        current = wanted.pop()
        if current in imported:
            header.add(imported[current])
            continue
        pieces.insert(0, ast.unparse(objects[current]) if current in objects else values[current])
        if current in objects:
            names = [n for n in ast.walk(objects[current]) if isinstance(n, ast.Name)]
            own = {current} | {n.id for n in names if isinstance(n.ctx, ast.Store)} | {n.arg for n in ast.walk(objects[current]) if isinstance(n, ast.arg)}
            used = {n.id for n in names} - own
            needed = set(needs(objects[current]))
            needed |= {other for other in values for name in needed if values.get(name) == values[other]}  # a, b = 0, 1
            used_here = used & (objects.keys() | values.keys() | imported.keys())
            if imported:
                assert needed <= used, f"{current} needs no {needed - used}"
            assert used_here <= needed, f"{current} uses {used_here - needed}, its docstring says it needs {needed or 'nothing'}"
            wanted += [name for name in needs(objects[current]) if name in objects or name in values]  # not the imports
    namespace = {"__name__": "lifted", "__file__": module.__file__, "__doc__": "A program."}
    exec(("\n".join(header) if imported else IMPORTS) + "\n" + "\n".join(dict.fromkeys(pieces)), namespace)
    assert RUNS[f"{module.__name__}.{name}"](namespace[name], tmp_path)


@pytest.mark.parametrize("module, words", [
    ("data", ["torch.uint8 (4000, 1, 28, 28)", "@@@"]), ("model", ["421,642", "(2, 64, 14, 14)"]), ("utils", ["cosine", "###"]),
])
def test_each_module_shows_itself(module, words, tmp_path):
    status, out, err = run_program(cwd=tmp_path, script=ROOT / f"{module}.py")
    assert (status, err) == (0, "")
    for word in words:
        assert word in out, out
