"""utils.py: schedules against torch's, files against crashes."""

import argparse
import collections
import os
import pathlib
import random
import signal
import threading
import warnings

import pytest
import torch

import utils
from helpers import multiplies_in_bf16, pick_device, run_program

# -------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "11", "x", "", "1e400"])
def test_number_refuses(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        utils.number(float, 0, 10)(text)


def test_number_takes_its_bounds():
    assert [utils.number(int, 0, 10)(text) for text in ("0", "10")] == [0, 10]


def test_one_line_ends_with_status_2_and_lets_bugs_through(capsys):
    with pytest.raises(SystemExit) as end, utils.one_line(ValueError):
        raise ValueError("first\n second")
    assert end.value.code == 2 and capsys.readouterr().err == "train.py: error: first second\n"
    with pytest.raises(KeyError), utils.one_line(ValueError):
        raise KeyError("a bug")


# ------------------------------------------------------------------------------------------------------------- device


def test_pick_device():
    assert utils.pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda:0.*cpu"):
            utils.pick_device("cuda:0")
    for name in ("quantum", "cpu:x", "cuda:-1", ":", "meta"):
        with pytest.raises(ValueError, match=name):
            utils.pick_device(name)


@pytest.mark.parametrize("tiles, cpuinfo, expected", [
    (True, "", "bf16"), (False, "flags : fpu avx512_bf16 amx_int8", "off"), (False, "Features : fp asimd bf16 sve", "bf16"),
    (False, "Features : fp asimd bf16x", "off"), (False, None, "off"),
])
def test_bf16_is_the_default_where_the_cpu_multiplies_in_it(tiles, cpuinfo, expected, monkeypatch):
    def read_text(path):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return f"processor : 0\n{cpuinfo}\n"

    monkeypatch.setattr(utils, "multiplies_in_bf16", multiplies_in_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    assert utils.pick_amp(None, torch.device("cpu")) == expected
    assert utils.pick_amp("off", torch.device("cpu")) == "off" and utils.pick_amp("bf16", torch.device("cpu")) == "bf16"


def test_workers_are_picked_by_device_cores_and_ranks(monkeypatch):
    monkeypatch.setattr(utils.os, "sched_getaffinity", lambda pid: range(24))
    cuda = torch.device("cuda", 0)
    assert utils.pick_workers(None, torch.device("cpu")) == 0 and utils.pick_workers(3, cuda) == 3
    assert utils.pick_workers(None, cuda) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert utils.pick_workers(None, cuda) == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert utils.pick_workers(None, cuda) == 1


def test_the_same_request_twice_is_one_and_a_later_one_ends_the_program(monkeypatch):
    clock, ended, caught = [0.0], [], []
    monkeypatch.setattr(utils.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(utils.signal, "raise_signal", ended.append)
    before = signal.getsignal(signal.SIGTERM)
    with utils.caught_signals(caught):
        for clock[0] in (0.0, 0.1, 5.0):
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM] and ended == []
        clock[0] = 5.1
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM] and ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal on Windows")
def test_a_closed_terminal_is_a_request_unless_it_was_to_be_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        for handler, expected in ((signal.SIG_IGN, []), (signal.SIG_DFL, [signal.SIGHUP])):
            signal.signal(signal.SIGHUP, handler)
            caught = []
            with utils.caught_signals(caught):
                os.kill(os.getpid(), signal.SIGHUP)
            assert caught == expected
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_no_signal_is_caught():
    def body():
        with utils.caught_signals([]):
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers, before = [], signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [before]


@pytest.fixture
def two_gpus(monkeypatch):
    """torch believes in two GPUs. Returns what it is asked to do with them."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: asked.append((args, options)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    return asked


def test_the_device_is_one_and_the_same_for_all(two_gpus, monkeypatch):
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)
    second = utils.pick_device("cuda:1")
    assert utils.init_distributed(second) == (0, 1, second) and two_gpus == [second]
    with pytest.raises(utils.UserError, match="cuda:2"):
        utils.pick_device("cuda:2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert utils.init_distributed(torch.device("cuda", 0)) == (1, 2, second)
    assert two_gpus[1:] == [second, (("cpu:gloo,cuda:nccl",), {"device_id": second})]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(utils.UserError, match="--nproc-per-node: more than the 2 GPUs"):
        utils.init_distributed(torch.device("cuda", 0))
    lines = []
    assert utils.init_distributed(torch.device("mps"), lines.append)[2] == torch.device("cpu") and "mps" in lines[0]


def test_tf32_is_the_same_for_products_and_convolutions(two_gpus):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for deterministic, expected in ((False, ("high", True)), (True, ("highest", False))):
            utils.set_float32_precision(torch.device("cuda", 0), deterministic)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_only_pinned_memory_is_copied_beside_the_computation(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: calls.append(non_blocking) or tensor)
    for pinned in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
        utils.to_device([torch.zeros(1), {"a": torch.zeros(1), "name": "kept"}], torch.device("mps"))
    assert calls == [False, False, True, True]


def test_seed_and_state_of_the_generators():
    draws = []
    for _ in range(2):
        utils.set_seed(5)
        draws.append((random.random(), torch.rand(2).tolist()))
    assert draws[0] == draws[1]
    state = utils.rng_state(torch.device("cpu"))
    expected = random.random(), torch.rand(2).tolist()
    utils.set_rng_state(state, torch.device("cpu"))
    assert (random.random(), torch.rand(2).tolist()) == expected


# ------------------------------------------------------------------------------------------------------ learning rate


def test_cosine_equals_torchs_schedulers():
    total, warmup, peak = 50, 10, 0.3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR warns about itself before torch 2.7
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - 1 - warmup, eta_min=peak / 100)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])
        expected = []
        for _ in range(total):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    ours = [peak * utils.lr_at(step, total, warmup / total) for step in range(total)]
    assert ours == pytest.approx(expected, rel=1e-6)


SCHEDULES = pytest.mark.parametrize("schedule", ["cosine", "step", "one-cycle", "plateau", "constant"])


@SCHEDULES
@pytest.mark.parametrize("warmup", [0, 0.1, 0.15, 0.5, 1])
@pytest.mark.parametrize("total", [1, 2, 3, 10, 58, 4290])
def test_lr_is_within_bounds_and_has_its_peak(total, warmup, schedule):
    factors = [utils.lr_at(step, total, warmup, schedule) for step in range(total + 5)]  # also past the end
    assert all(0 < factor <= 1 for factor in factors) and max(factors[:total]) == 1.0
    if schedule in ("cosine", "one-cycle"):
        assert factors[:total].count(1.0) == 1  # the rate that was announced, in one step
    assert factors[total:] == [factors[total - 1]] * 5


def test_lr_rises_once_then_falls_to_its_minimum():
    factors = [utils.lr_at(step, 900, 0.15) for step in range(900)]
    peak = factors.index(1.0)
    assert peak == 135 and factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == min(factors) == pytest.approx(0.01)


def test_without_a_known_end_the_rate_stays_at_its_peak():
    assert {utils.lr_at(step, schedule="cosine", warmup=0.1) for step in (0, 1, 1000)} == {1.0}


# ------------------------------------------------------------------------------------------------------- a run on disk


def test_folders_are_numbered_and_runs_are_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [utils.new_folder(None, "sample-cnn").name for _ in range(3)] == [f"sample-cnn-{n}" for n in (1, 2, 3)]
    folder = utils.new_folder(str(tmp_path / "a/b"), "ignored")
    assert utils.new_folder(str(folder), "ignored") == folder  # an empty folder is free
    (folder / "last.pt").write_text("")
    with pytest.raises(ValueError, match="a/b"):
        utils.new_folder(str(folder), "ignored")


DIES_WHILE_WRITING = """
import os, utils
def write(file):
    file.write(b"half of the new")
    file.flush()
    if {how!r} == "raise":
        raise RuntimeError("in the middle")
    os._exit(9)
utils.write_atomically("last.pt", write)
"""


@pytest.mark.parametrize("how, status", [("raise", 1), ("exit", 9)])
def test_death_while_writing_leaves_the_old_file(how, status, tmp_path):
    path = tmp_path / "last.pt"
    utils.write_atomically(path, lambda file: file.write(b"the old one"))
    assert run_program(cwd=tmp_path, script=None, before=DIES_WHILE_WRITING.format(how=how))[0] == status
    assert path.read_bytes() == b"the old one"
    assert [p.name for p in tmp_path.glob("*.pt")] == ["last.pt"]  # what is left behind looks like no checkpoint ...
    utils.write_atomically(path, lambda file: file.write(b"the new one"))
    assert [p.name for p in tmp_path.glob("*last*")] == ["last.pt"] and path.read_bytes() == b"the new one"  # ... and goes


def test_csv_and_json(tmp_path):
    utils.write_csv(tmp_path / "a.csv", [{"epoch": 1, "val": None}, {"epoch": 2, "val": 0.5}])
    assert (tmp_path / "a.csv").read_text().splitlines() == ["epoch,val", "1,", "2,0.5"]
    utils.write_json(tmp_path / "a.json", {"versions": utils.versions()})
    assert str(torch.__version__) in (tmp_path / "a.json").read_text()


def test_table_has_the_columns_of_all_rows(tmp_path):
    utils.write_csv(tmp_path / "a.csv", [{"epoch": 1}, {"epoch": 2, "f1": 0.5}])  # a column that a new version adds
    assert (tmp_path / "a.csv").read_text().splitlines() == ["epoch,f1", "1,", "2,0.5"]


def test_a_package_without_metadata_is_no_error(monkeypatch):
    def missing(name):
        raise utils.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(utils.metadata, "version", missing)
    assert utils.versions()["torchvision"] is None


def unreadable():
    import numpy

    return {
        "numpy.float64": numpy.float64(0.5), "numpy.ndarray": numpy.zeros(2), "pathlib": pathlib.Path("a"),
        "defaultdict": collections.defaultdict(int), "Version": torch.__version__, "function": print,
    }


@pytest.mark.parametrize("kind", ["numpy.float64", "numpy.ndarray", "pathlib", "defaultdict", "Version", "function"])
def test_what_could_not_be_read_is_not_written(kind, tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(TypeError, match=r"checkpoint\['metrics'\]\[1\]\['f1'\] is a .*" + kind):
        utils.save_checkpoint(path, {"model": {}, "metrics": [{"f1": 0.5}, {"f1": unreadable()[kind]}]})
    assert not path.exists()


# --------------------------------------------------------------------------------------------- snapshot and restore


def a_run(optimizer_class=torch.optim.AdamW, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    return model, optimizer_class(model.parameters(), lr=0.01)


def steps(model, optimizer, count):
    losses = []
    for _ in range(count):
        loss = model(torch.randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_restore_takes_any_run_back_to_its_snapshot(optimizer_class, through_a_file, tmp_path):
    """In a plain loop, with a state that this file knows nothing of, an optimizer of any class, and no scaler."""
    model, optimizer = a_run(optimizer_class)
    steps(model, optimizer, 3)
    state = {"mine": [1, 2], "average": {"weight": torch.ones(2)}, "note": None}
    taken = utils.snapshot(model, optimizer, state=state)
    if through_a_file:
        utils.save_checkpoint(tmp_path / "a.pt", taken)
        taken = utils.load_checkpoint(tmp_path / "a.pt")
    expected = steps(model, optimizer, 4)  # the snapshot must not go along
    state["mine"].append(3)
    state["average"]["weight"] += 1
    other_model, other_optimizer = a_run(optimizer_class, seed=1)
    other_state = {}
    utils.restore(taken, other_model, other_optimizer, state=other_state)
    assert other_state["mine"] == [1, 2] and other_state["average"]["weight"].tolist() == [1, 1]
    assert steps(other_model, other_optimizer, 4) == expected


def test_another_class_of_optimizer_is_refused_by_name():
    model, optimizer = a_run(torch.optim.SGD)
    taken = utils.snapshot(model, optimizer)
    with pytest.raises(utils.UserError, match="SGD, here it is AdamW"):
        utils.restore(taken, *a_run(torch.optim.AdamW))


def test_keys_of_wrapped_models_are_read_by_bare_ones_and_the_reverse():
    bare, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        weights = {prefix + key: torch.full_like(value, 3.0) for key, value in bare.state_dict().items()}
        utils.load_weights(bare, weights)
        utils.load_matching(other, weights, log=lambda line: None)
        assert all((value == 3).all() for model in (bare, other) for value in model.state_dict().values())
        bare[0].reset_parameters(), other[0].reset_parameters()
    partly = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)))  # its keys are 0._orig_mod.weight, ...
    utils.load_weights(partly, bare.state_dict())
    assert torch.equal(partly[0]._orig_mod.weight, bare[0].weight)


def test_weights_that_hardly_fit_are_an_error_unless_forced():
    small, large = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)  # the bias alone fits: 3 of 18
    with pytest.raises(utils.UserError, match="only 3 of 18 parameters .*--width.*--force"):
        utils.load_matching(large, small.state_dict(), log=lambda line: None)
    assert utils.load_matching(large, small.state_dict(), log=lambda line: None, force=True)[0] == ["bias"]
    assert torch.equal(large.bias, small.bias)


def test_plain_weights_however_wrapped():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    keys = list(model.state_dict())
    assert list(utils.plain_weights(torch.compile(model))) == keys
    assert list(utils.plain_weights(torch.nn.DataParallel(model))) == keys
    assert list(utils.plain_weights(torch.compile(torch.nn.DataParallel(model)))) == keys
    model[0] = torch.compile(model[0])
    assert list(utils.plain_weights(model)) == keys


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.pt"
    utils.save_checkpoint(path, {"model": {"weight": torch.arange(1000.0)}, "step": 3, "best": None})
    return path


def test_checkpoint_comes_back(saved):
    checkpoint = utils.load_checkpoint(saved)
    assert torch.equal(checkpoint["model"]["weight"], torch.arange(1000.0))
    assert checkpoint["step"] == 3 and checkpoint["versions"] == utils.versions()
    assert torch.load(saved, weights_only=True).keys() == checkpoint.keys()


def flip_a_bit(content):
    at = content.index(torch.arange(1000.0).numpy().tobytes()[400:800])
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"plain text\n" * 9, flip_a_bit], ids=["half", "empty", "text", "bit"]
)
def test_damaged_checkpoint_is_named(damage, saved):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(ValueError) as error:
        utils.load_checkpoint(saved)
    assert str(saved) in str(error.value) and "\n" not in str(error.value)
    print(error.value)


def test_folder_or_nothing_for_a_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "absent.pt"):
        with pytest.raises((ValueError, OSError), match=str(path)):
            utils.load_checkpoint(path)


def test_flipped_bit_names_the_record(saved):
    saved.write_bytes(flip_a_bit(saved.read_bytes()))
    torch.load(saved, weights_only=True)  # notices nothing: this is why there is a check of our own
    with pytest.raises(ValueError, match="checksum of archive/data/0"):
        utils.load_checkpoint(saved)


class Harmless:
    def __reduce__(self):
        return print, ("it ran",)


def test_pickle_with_a_program_is_refused_unrun(tmp_path, capsys):
    path = tmp_path / "a.pt"
    torch.save({"model": Harmless()}, path)
    with pytest.raises(ValueError, match="a.pt"):
        utils.load_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_one_process_needs_no_group():
    assert utils.init_distributed(torch.device("cpu")) == (0, 1, torch.device("cpu"))
    assert utils.sum_over_ranks(torch.tensor(3)).item() == 3 and utils.gather_over_ranks("x") == ["x"]
    assert utils.once_per_machine(lambda: "y") == "y" and utils.broadcast_from_rank_0("z") == "z"


@pytest.mark.parametrize("odd", [{"model": torch.ones(1)}, {"model": {"a": 3}}, {"model": {}, "args": []}, {"weights": {}}, [1, 2]])
def test_a_file_of_another_make_is_an_error_with_its_path(odd, tmp_path):
    torch.save(odd, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match="odd.pt: not a checkpoint of this program"):
        utils.load_checkpoint(tmp_path / "odd.pt")
