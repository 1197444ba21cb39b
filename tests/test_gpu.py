"""What only a GPU can show. All other tests hide GPUs, so that they are about the same bits everywhere.

    GPU_TESTS=1 python -m pytest -m gpu -s     these tests
    python tests/gpu.py                        these tests, and then the figures, in some four minutes

GPU_TESTS=cpu runs them on the CPU, as far as they can: it shows that the tests themselves are in order.
"""

import os
import subprocess
import sys
import warnings

import pytest
import torch

import data
import model as networks
import train
import utils
from helpers import NORM, ROOT

ASKED = os.environ.get("GPU_TESTS", "")
DEVICE = torch.device("cpu") if ASKED == "cpu" else torch.device("cuda", 0)
NO_GPU = ASKED != "cpu" and not (ASKED and torch.cuda.is_available())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_GPU, reason="needs a GPU, and GPU_TESTS=1 in the environment, for the other tests hide it"),
]
ON_A_GPU_ONLY = pytest.mark.skipif(ASKED == "cpu", reason="a CPU cannot stand in")

CPU = torch.device("cpu")
ABOUT = {"classes": [str(digit) for digit in range(10)], "shape": [1, 28, 28], **NORM}
VARIANTS = {
    "cnn": "--model cnn",
    "cnn, batch norm": "--model cnn --norm batch",
    "cnn, 3 bits": "--model cnn --quant-bits 3",
    "packed": "--model attention",
    "packed, written out": "--model attention --attention-kernel manual",
    "padded, checkpointed": "--model attention --tokens padded --grad-checkpoint",
}
EACH = pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture(autouse=True)
def settings_as_before():
    """TF32 and determinism belong to the whole process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


def prepare(flags, batches, device, size=64):
    """(arguments, network on the device, loader of batches of the sample, made already; pinned for a GPU)."""
    args = train.parse_args(["--width", "16", "--dropout", "0", "--amp", "off", "--clip", "1", *flags.split()])
    torch.manual_seed(0)
    network = train.prepare(train.build_model(args, ABOUT), args, device, print)
    collate = train.NETWORKS[args.model]["collate"](args, ABOUT)
    digits = data.Digits(*data.load_mnist(data.SAMPLE))
    made = [collate(digits.__getitems__(range(size * i, size * (i + 1)))) for i in range(batches)]
    if device.type == "cuda":
        made = [utils.map_tensors(torch.Tensor.pin_memory, batch) for batch in made]
    return args, network, torch.utils.data.DataLoader(made, batch_size=None, collate_fn=lambda batch: batch)


def gradients(flags, device, amp="off"):
    """(loss, {name: gradient on the CPU}) of a window of two batches."""
    args, network, loader = prepare(flags, 2, device)
    args.amp = amp
    window = [(inputs, targets, len(targets)) for inputs, targets in loader]
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    sums = train.backward_window(network.train(), window, 128, scaler, args, device)
    return sums["loss"].item() / 128, {name: p.grad.cpu() for name, p in network.named_parameters()}


@EACH
def test_gradients_are_those_of_the_cpu(flags):
    utils.set_float32_precision(DEVICE, deterministic=True)  # no TF32: all digits of float32
    loss, here = gradients(flags, DEVICE)
    expected_loss, expected = gradients(flags, CPU)
    scale = max(gradient.abs().max() for gradient in expected.values())
    worst = max(((here[name] - expected[name]).abs().max() / scale).item() for name in expected)
    print(f"{flags}: loss {loss:.6f} and {expected_loss:.6f}, gradients differ by {worst:.1e} of the largest")
    # Rounding to 3 bits: a weight at the edge of two steps may fall to either side.
    assert abs(loss - expected_loss) < 1e-4 and worst < (1e-2 if "quant" in flags else 1e-3)


@EACH
@pytest.mark.parametrize("amp", ("bf16", "fp16"))
def test_mixed_precision_has_nearly_the_same_gradients(flags, amp):
    if amp == "bf16" and DEVICE.type == "cuda" and utils.pick_amp(None, DEVICE) != "bf16":
        pytest.skip("this GPU has no bf16")
    loss, here = gradients(flags, DEVICE, amp)
    expected_loss, expected = gradients(flags, CPU)
    similar = [
        torch.cosine_similarity(here[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in expected if expected[name].norm() > 1e-4
    ]
    print(f"{flags} {amp}: loss {loss:.4f} and {expected_loss:.4f}, smallest cosine of the gradients {min(similar):.4f}")
    assert abs(loss - expected_loss) < 0.05 and min(similar) > 0.9


@ON_A_GPU_ONLY
@EACH
@pytest.mark.parametrize("amp", ("off", "bf16", "fp16"))
def test_a_step_waits_for_nothing_but_the_scale_of_fp16(flags, amp, monkeypatch):
    monkeypatch.setattr(train.time, "perf_counter", lambda: 0.0)  # no line of progress is due
    args, network, loader = prepare(flags, 6, DEVICE)
    args.amp = amp
    optimizer = utils.build_optimizer(network, args)
    scaler = torch.amp.GradScaler("cuda", enabled=amp == "fp16", init_scale=256.0)
    state = train.new_state(12)
    train.train_one_epoch(network, loader, optimizer, scaler, state, args, DEVICE)  # allocates, chooses kernels
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        train.train_one_epoch(
            network, loader, optimizer, scaler, state, args, DEVICE,
            after_step=lambda: counts.append(sum("synchroniz" in str(each.message) for each in caught)),
        )
        torch.cuda.set_sync_debug_mode("default")
    each_step = [after - before for before, after in zip(counts, counts[1:])]
    print(f"{flags} {amp}: waits in each step {each_step}")
    assert each_step == [1 if amp == "fp16" else 0] * 5


def program(*flags, cwd, ranks=0):
    """Runs train.py, with the GPU in sight. Returns (status, standard output, standard error)."""
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, str(ROOT / "train.py"), *map(str, flags), "--device", DEVICE.type]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_the_program_learns_stops_and_resumes_to_the_bit(tmp_path):
    common = ("--dataset", "sample", "--deterministic")
    status, out, err = program(*common, "--epochs", 3, "--out", "straight", cwd=tmp_path)
    print(out)
    assert status == 0, err
    assert "4 workers" not in out or DEVICE.type == "cuda"
    accuracy = utils.load_checkpoint(tmp_path / "straight/best.pt")["best"]["val_accuracy"]
    assert accuracy > 0.93
    # The rates of three epochs, and a stop after the first one: SystemExit, as at a signal.
    stop = f"""
import sys, signal, os
sys.path.insert(0, {str(ROOT)!r}); sys.argv = ["train.py", *{[*common, "--epochs", "3", "--out", "halted", "--device", DEVICE.type]!r}]
import utils
def lr_at(step, *rest, real=utils.lr_at):
    if step == 40: os.kill(os.getpid(), signal.SIGTERM)
    return real(step, *rest)
utils.lr_at = lr_at
import train
train.main()
"""
    assert subprocess.run([sys.executable, "-c", stop], cwd=tmp_path, capture_output=True, timeout=120).returncode == 143
    status, out, err = program("--resume", "halted/last.pt", cwd=tmp_path)
    assert status == 0, err
    straight, resumed = (utils.load_checkpoint(tmp_path / f"{name}/last.pt") for name in ("straight", "halted"))
    different = [key for key, value in straight["model"].items() if not torch.equal(value, resumed["model"][key])]
    print("weights that differ after a stop at step 40 and a resume:", different or "none")
    assert not different and straight["step"] == resumed["step"]
    # Written on the GPU, evaluated on the CPU.
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--evaluate", "straight/best.pt", "--device", "cpu", "--amp", "off"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", ("--amp fp16", "--norm batch --sync-bn", "--compile", "--model attention --compile", "--workers 2 --accum 2"))
def test_dry_runs(flags, tmp_path):
    status, out, err = program(*flags.split(), "--dataset", "sample", "--dry-run", cwd=tmp_path)
    print(out[-400:])
    assert status == 0 and "Traceback" not in err, err
    assert "test accuracy" in out


@ON_A_GPU_ONLY
def test_ranks_have_a_gpu_each_or_say_so(tmp_path):
    count = torch.cuda.device_count()
    status, out, err = program("--dataset", "sample", "--dry-run", "--norm", "batch", "--sync-bn", cwd=tmp_path, ranks=count)
    print(out[-400:])
    assert status == 0, err
    status, out, err = program("--dataset", "sample", "--dry-run", cwd=tmp_path, ranks=count + 1)
    assert status != 0 and f"--nproc-per-node: more than the {count} GPUs" in out + err


@ON_A_GPU_ONLY
def test_the_memory_that_is_predicted_is_what_the_allocator_gives():
    network = networks.SimpleCNN(32).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    images = torch.rand(512, 1, 28, 28, device=DEVICE)
    predicted = networks.memory_report(network, images, optimizer)["sum"]
    for _ in range(2):  # the second step has gradients and state from the beginning, as the report has
        torch.cuda.reset_peak_memory_stats(DEVICE)
        network(images).sum().backward()
        optimizer.step()
    measured = torch.cuda.max_memory_allocated(DEVICE)
    print(f"predicted {predicted:,} bytes, measured {measured:,}: {predicted / measured:.3f}")
    assert 0.8 < predicted / measured < 1.2  # workspaces of cuDNN are not seen by the prediction


def test_random_state_of_the_gpu_is_saved_and_restored():
    utils.set_seed(3)
    state = utils.rng_state(DEVICE)
    first = torch.rand(5, device=DEVICE)
    torch.rand(100, device=DEVICE)
    utils.set_rng_state(state, DEVICE, print)
    assert torch.equal(torch.rand(5, device=DEVICE), first)
