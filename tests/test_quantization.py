"""Quantization: against torch.fake_quantize_*, the stated surrogate, and files of the size that is claimed."""

import io
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import data
import train
import utils
from helpers import NORM, small_task
from model import (
    AttentionClassifier, QuantActivation, QuantConv2d, QuantLinear, RoundSTE, SimpleCNN, fake_quantize, pack_weights,
    pack_integers, quantization_scale, quantize, unpack_integers, unpack_weights,
)

GRID = torch.cat([
    torch.tensor([-200, -128.4, -128, 0.3, 127, 127.4, 127.6, 200]), torch.arange(-300, 300) / 2,
    torch.tensor([float("inf"), -float("inf"), float("nan")]),
])


def test_values_and_gradients_by_hand():
    x = GRID[:8].clone().requires_grad_()
    y, inside = RoundSTE.apply(x, torch.tensor(1.0), -128, 127)
    assert not inside.requires_grad
    y.sum().backward()
    assert y.tolist() == [-128, -128, -128, 0, 127, 127, 127, 127]
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 1, 0, 0] == inside.tolist()
    assert RoundSTE.apply(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), torch.tensor(1.0), -128, 127)[0].tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.1, 3.7])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_equals_torch_per_tensor(scale, bits):
    high, weights, results = 2 ** (bits - 1) - 1, torch.randn(len(GRID)), []
    for function in (lambda x: fake_quantize(x, bits, scale=torch.tensor(scale)), lambda x: torch.fake_quantize_per_tensor_affine(x, scale, 0, -high, high)):
        x = (GRID * scale).requires_grad_()
        y = function(x)
        results.append((y.detach(), *torch.autograd.grad((y * weights).sum(), x)))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_equals_torch_per_channel_of_a_convolution(axis, bits):
    torch.manual_seed(0)
    x, high, results = torch.randn(4, 3, 3, 5), 2 ** (bits - 1) - 1, []
    x[1] *= 100
    scale = quantization_scale(x, bits, axis)
    assert scale.shape == torch.Size(size if dim == axis else 1 for dim, size in enumerate(x.shape))
    weights = torch.randn_like(x)
    zero = torch.zeros(scale.numel(), dtype=torch.int32)
    for function in (lambda x: fake_quantize(x, bits, axis), lambda x: torch.fake_quantize_per_channel_affine(x, scale.flatten(), zero, axis, -high, high)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y.detach(), *torch.autograd.grad((y * weights).sum(), leaf)))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_negative_axis_counts_from_the_last(axis):
    x = torch.randn(4, 3, 2, 5)
    scale = quantization_scale(x, 8, axis - 4)
    assert torch.equal(scale, quantization_scale(x, 8, axis))
    assert scale.numel() == x.shape[axis]
    assert torch.equal(fake_quantize(x, 4, axis - 4), fake_quantize(x, 4, axis))


@pytest.mark.parametrize("axis", [0, -1])
def test_a_vector_gets_one_scale_for_each_element(axis):
    x = torch.tensor([127.0, -254.0, 0.0, 1.27])
    scale = quantization_scale(x, 8, axis)
    assert scale.shape == (4,)
    assert scale.tolist() == pytest.approx([1, 2, 0, 0.01])
    assert fake_quantize(x, 8, axis).tolist() == pytest.approx(x.tolist())


def test_what_would_give_one_scale_in_silence_is_an_error():
    for x, axis in ((torch.ones(2, 3), 2), (torch.ones(2, 3), -3), (torch.ones(3), 1), (torch.tensor(1.0), 0)):
        with pytest.raises(IndexError, match=f"axis {axis}"):
            quantization_scale(x, 8, axis)
        with pytest.raises(IndexError, match=f"axis {axis}"):
            fake_quantize(x, 8, axis)
    with pytest.raises(ValueError, match="axis 0 and a scale"):
        fake_quantize(torch.ones(2, 3), 8, axis=0, scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="9 bits: 2 to 8"):
        fake_quantize(torch.ones(2), 9, scale=torch.tensor(1.0))


def test_error_is_half_a_step_in_each_row():
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    x[0] *= 100
    error = (fake_quantize(x, 8, axis=0) - x).abs().amax(1)
    steps = x.abs().amax(1) / 127
    print(f"error in steps: {(error / steps).tolist()}")
    assert (error <= steps / 2 * 1.0001).all() and quantization_scale(x, 8, 0).shape == (4, 1)
    assert (fake_quantize(x, 8) - x).abs().amax(1)[1] > 10 * error[1]  # one scale for all would drown the other rows


def test_three_levels_in_two_bits():
    assert fake_quantize(torch.tensor([-1.0, -0.6, -0.4, 0.0, 0.4, 0.6, 1.0]), 2).tolist() == [-1, -1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_channels_of_nothing_and_nearly_nothing_stay_finite(dtype):
    x = torch.tensor([[0.0, 0.0], [1e-40, -1e-40], [1e-3, -5e-4], [1e-7, 2e-7], [60000.0, -1.0]]).to(dtype).requires_grad_()
    y = fake_quantize(x, 8, axis=0)
    y.float().sum().backward()
    assert y.dtype == dtype and y.isfinite().all() and torch.equal(x.grad, torch.ones_like(x))
    assert not y[0].any() and (y[2] - x[2]).abs().max() <= 1.001e-3 / 127 / 2 + 1e-3 * torch.finfo(dtype).eps


def test_the_surrogate_is_what_the_backward_pass_differentiates():
    x = (torch.rand(200, dtype=torch.float64) * 40 - 20).requires_grad_()
    scale = torch.tensor(1.0, dtype=torch.float64)
    straight = torch.autograd.grad(fake_quantize(x, 4, scale=scale).sum(), x)[0]
    surrogate = torch.autograd.grad(x.clamp(-7.5, 7.5).sum(), x)[0]  # round(x) within -7..7
    assert torch.equal(straight, surrogate)


def test_gradcheck_of_all_but_the_staircase():
    layer = QuantLinear(3, 2, bits=4).double()  # in its input it is linear
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(QuantConv2d(1, 2, 3, bits=2).double(), torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True))


def test_the_largest_weight_moves():
    weight = torch.tensor([[-1.0, 0.3, 1.0]], requires_grad=True)
    loss = (fake_quantize(weight, 8, axis=0) * torch.tensor([[-1.0, 0.0, 1.0]])).sum()
    assert torch.autograd.grad(loss, weight)[0].tolist() == [[-1, 0, 1]]
    optimizer = torch.optim.SGD([weight], lr=0.02)
    for _ in range(20):
        optimizer.zero_grad()
        (fake_quantize(weight, 8, axis=0) * torch.tensor([[-1.0, 0.0, 1.0]])).sum().backward()
        optimizer.step()
    assert weight.tolist() == [pytest.approx([-0.6, 0.3, 0.6], abs=1e-5)]


def test_torch_func_and_autocast_and_compile():
    x = torch.randn(6, 3)
    function = lambda x: fake_quantize(x, 4, axis=0).square().sum()
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(function(leaf), leaf)[0]
    assert torch.equal(torch.func.grad(function)(x), expected)
    by_row = torch.func.vmap(torch.func.grad(lambda row: fake_quantize(row, 4).square().sum()))(x)
    assert torch.equal(by_row, expected)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)  # a break in the graph would raise
    assert torch.equal(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    layer = quantize(nn.Sequential(nn.Linear(3, 4)), 4)
    with utils.autocast(torch.device("cpu"), "bf16"):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and (y - layer(x)).abs().max() < 0.05 and layer[0].weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own inductor
def test_bits_are_checked():
    for bits in (1, 9, 0, -4):
        with pytest.raises(ValueError, match=f"{bits} bits: 2 to 8 expected"):
            fake_quantize(torch.ones(2), bits)


@pytest.mark.parametrize("build", [SimpleCNN, AttentionClassifier])
def test_quantize_keeps_keys_parameters_and_mode(build):
    network = build(16).eval()
    before = dict(network.named_parameters())
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    quantize(network, 4)
    assert dict(network.named_parameters()).keys() == before.keys() == network.state_dict().keys()
    assert all(parameter is before[name] for name, parameter in network.named_parameters()) and not network.training
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert len(layers) >= 4 and all(type(layer) in (QuantConv2d, QuantLinear) and layer.bits == 4 for layer in layers)
    network.load_state_dict(weights)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_of_torch_computes_the_same_in_training_and_evaluation(activation, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first)
    x = torch.randn(3, 5, 16)
    plain = layer.eval()(x).detach()
    quantize(layer, 3)
    with_gradients = layer(x)
    with torch.no_grad():
        without = layer(x)
    training = layer.train()(x)
    assert (without - with_gradients).abs().max() < 1e-6
    assert (without - training).abs().max() < 1e-6
    assert (without - plain).abs().max() > 1e-2


def test_an_encoder_of_torch_with_padding_computes_the_same_in_training_and_evaluation():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = quantize(nn.TransformerEncoder(layer, 2), 3)
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([5, 3])[:, None]  # of torch's kind: True = padding
    training = encoder.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        without = encoder.eval()(x, src_key_padding_mask=padding)
    assert (without - training)[~padding].abs().max() < 1e-6


def test_a_layer_that_is_the_whole_model_is_quantized():
    for layer, x in ((nn.Linear(8, 4), torch.randn(2, 8)), (nn.Conv2d(1, 4, 3), torch.randn(2, 1, 8, 8))):
        plain = layer(x)
        assert quantize(layer, 2) is layer and type(layer) in (QuantLinear, QuantConv2d)
        assert (layer(x) - plain).abs().max() > 1e-2


def test_what_cannot_be_quantized_is_an_error():
    with pytest.raises(ValueError, match="MultiheadAttention: there is no"):
        quantize(nn.MultiheadAttention(8, 2), 4)
    attention = nn.MultiheadAttention(8, 2)
    attention.out_proj = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="past a quantized layer"):
        quantize(nn.Sequential(attention, nn.Linear(8, 8)), 4)


@pytest.mark.parametrize("layer, x", [(QuantConv2d(2, 6, 3, stride=2, padding=1, groups=2, padding_mode="reflect", bits=3), torch.randn(2, 2, 8, 8)), (QuantLinear(5, 4, bias=False, bits=3), torch.randn(3, 5))])
def test_layers_compute_with_the_rounded_weight(layer, x):
    plain = nn.Conv2d(2, 6, 3, stride=2, padding=1, groups=2, padding_mode="reflect") if isinstance(layer, nn.Conv2d) else nn.Linear(5, 4, bias=False)
    plain.load_state_dict({**layer.state_dict(), "weight": fake_quantize(layer.weight.detach(), 3, axis=0)})
    assert torch.equal(layer(x), plain(x))
    assert all(len(channel.unique()) <= 7 for channel in fake_quantize(layer.weight, 3, axis=0))


def test_activations_by_a_running_range():
    quantizer, x = QuantActivation(8), torch.linspace(-2, 2, 101)
    assert (quantizer(x) - x).abs().max() <= 2 / 127 / 2 + 1e-6 and quantizer.range == 2
    quantizer(4 * x)
    assert quantizer.range.item() == pytest.approx(2 + 0.05 * 6)
    quantizer.eval()
    large = torch.tensor([100.0, 1.0], requires_grad=True)
    y = quantizer(large)
    y.sum().backward()
    assert y[0].item() == pytest.approx(2.3) and large.grad.tolist() == [0, 1] and quantizer.range.item() == pytest.approx(2.3)

    network = quantize(quantize(SimpleCNN(4).eval(), 2), 8, activation_bits=8)  # the second call counts
    plain, noise = SimpleCNN(4), torch.randn(2, 1, 28, 28)
    assert network.fc1.bits == 8 and torch.equal(network(noise), network(noise)) and not network.conv1.quantize_input.training
    assert (network(noise) - quantize(network, 8)(noise)).abs().max() == 0  # without a range, all passes
    quantize(network, 8, activation_bits=8)
    assert set(plain.state_dict()) < set(network.state_dict())
    utils.load_matching(network, plain.state_dict(), log=lambda line: None)
    images = torch.rand(64, 1, 28, 28)
    network.train()(images)
    assert (network.eval()(images) - plain.eval()(images)).abs().max() < 0.05


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_range_moves_once_a_step_under_gradient_checkpointing(use_reentrant):
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block = quantize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), 4, activation_bits=4)
        for _ in range(3):
            x = torch.randn(5, 6, requires_grad=True)
            y = checkpoint(block, x, use_reentrant=use_reentrant) if checkpointed else block(x)
            block.zero_grad()
            y.square().sum().backward()
        results.append([block[0].quantize_input.range, block[2].quantize_input.range, block[0].weight.grad, x.grad])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranges_work_and_move_in_half_precision(dtype):
    quantizer = QuantActivation(8).to(dtype)
    for x in (torch.tensor([2.0, -1.0]), *[torch.tensor([2.1, -1.0])] * 100):
        x = x.to(dtype).requires_grad_()
        y = quantizer(x)
        y.sum().backward()
    assert y.dtype == dtype and x.grad.isfinite().all()
    assert quantizer.range.item() == pytest.approx(2.1, abs=0.01)  # 5 % of 0.1 is too small a step for 16 bits
    layer = quantize(nn.Sequential(nn.Linear(4, 4)), 8, activation_bits=8).to(dtype)
    assert layer(torch.ones(2, 4, dtype=dtype)).dtype == dtype
    assert quantizer.double().range.dtype == torch.float64


def test_layers_with_ranges_compile_without_a_break():
    layer, x = quantize(nn.Sequential(nn.Linear(4, 4)), 8, activation_bits=8), torch.randn(3, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x)) and layer[0].quantize_input.range > 0


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("bits, share", [(8, 0.27), (4, 0.15), (3, 0.15), (2, 0.09)])
def test_packed_weights_are_small_and_give_the_same_logits(bits, share):
    torch.manual_seed(0)
    network, images = quantize(SimpleCNN(), bits).eval(), torch.randn(8, 1, 28, 28)
    sizes = []
    for content in (SimpleCNN().state_dict(), pack_weights(network)):
        file = io.BytesIO()
        torch.save(content, file)
        sizes.append(len(file.getvalue()))
    file.seek(0)
    plain = SimpleCNN().eval()
    plain.load_state_dict(unpack_weights(torch.load(file, weights_only=True)))
    error = (plain(images) - network(images)).abs().max().item()
    print(f"{bits} bits: {sizes[1]:,} of {sizes[0]:,} bytes, {sizes[1] / sizes[0]:.3f}; logits off by {error:.0e}")
    assert sizes[1] <= share * sizes[0] and error <= 1e-6
    packed = pack_weights(network)["fc1.weight"]["integers"]
    assert packed.dtype == torch.int8 and packed.numel() == 401_408 * {8: 8, 4: 4, 3: 4, 2: 2}[bits] // 8


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_integer_survives_packing(bits):
    high = 2 ** (bits - 1) - 1
    layer = quantize(nn.Sequential(nn.Linear(2 * high + 1, 3)), bits)  # an odd number: the last byte is not full
    with torch.no_grad():
        layer[0].weight.copy_(torch.arange(-high, high + 1).repeat(3, 1))
    assert torch.equal(unpack_weights(pack_weights(layer))["0.weight"], layer[0].weight)


def test_a_model_that_is_one_layer_is_packed():
    layer = quantize(nn.Linear(5, 3), 3)
    plain = nn.Linear(5, 3)
    plain.load_state_dict(unpack_weights(pack_weights(layer)))
    x = torch.randn(2, 5)
    assert (plain(x) - layer(x)).abs().max() < 1e-6


@pytest.mark.parametrize("bits, expected", [(2, [0b01001101, 0b00000011]), (4, [-15, 16, 15])])
def test_the_bits_of_a_byte(bits, expected):
    integers = torch.tensor([1, -1, 0, 1, -1], dtype=torch.int8)
    packed = pack_integers(integers, bits)
    print([f"{byte % 256:08b}" for byte in packed.tolist()])
    assert packed.dtype == torch.int8 and packed.tolist() == expected
    assert torch.equal(unpack_integers(packed, bits, 5), integers)


def test_examples_in_the_docstrings():
    assert fake_quantize(torch.tensor([0.9, -0.31, 0.1]), 3).tolist() == pytest.approx([0.9, -0.3, 0.0])
    weight = torch.tensor([[50.8, 12.7], [0.127, 0.05]])
    assert not fake_quantize(weight, 8)[1].any()
    assert quantization_scale(weight, 8, axis=0).flatten().tolist() == pytest.approx([0.4, 0.001])
    assert fake_quantize(weight, 8, axis=0)[1].tolist() == pytest.approx([0.127, 0.05])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small_task(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FLAGS = ["--epochs", "2", "--batch-size", "16", "--width", "8"]


@pytest.mark.parametrize("kind", ["cnn", "attention"])
def test_program_trains_evaluates_and_exports_with_few_bits(kind, folder, capfd):
    train.main([*FLAGS, "--model", kind, "--out", "float"])
    train.main([*FLAGS, "--model", kind, "--out", "two", "--quant-bits", "2", "--init", "float/best.pt"])
    capfd.readouterr()
    answers = {}
    for name, flags in {
        "float": ["float/best.pt"], "ptq": ["float/best.pt", "--quant-bits", "3"], "qat": ["two/best.pt"],
    }.items():
        train.main(["--evaluate", *flags])
        answers[name] = capfd.readouterr().out.splitlines()[-1]
    assert answers["ptq"].endswith("weights of 3 bits") and answers["qat"].endswith("weights of 2 bits")
    assert answers["float"].endswith("float/best.pt")
    for checkpoint, flags, exported, like in (
        ("float/best.pt", ["--quant-bits", "3"], "float/best.int3.pt", "ptq"), ("two/best.pt", [], "two/best.int2.pt", "qat"),
    ):
        train.main(["--export", checkpoint, "--format", "int8", *flags])
        assert exported in capfd.readouterr().out
        train.main(["--evaluate", exported])
        assert capfd.readouterr().out.splitlines()[-1].split(":")[0] == answers[like].split(":")[0]
    train.main([*FLAGS, "--model", kind, "--out", "again", "--init", "two/best.int2.pt", "--dry-run"])  # goes on from it


def test_exported_file_equals_the_fake_quantized_model(folder):
    train.main([*FLAGS, "--out", "float"])
    train.main(["--export", "float/best.pt"])
    exported = utils.load_checkpoint("float/best.int8.pt")
    assert exported["model"]["conv2.weight"]["integers"].dtype == torch.int8 and exported["classes"] == [str(i) for i in range(10)]
    plain, quantized = SimpleCNN(8).eval(), quantize(SimpleCNN(8), 8).eval()
    plain.load_state_dict(unpack_weights(exported["model"]))
    quantized.load_state_dict(utils.load_checkpoint("float/best.pt")["model"])
    images = data.Digits(*data.load_mnist(data.SAMPLE, False)).__getitems__(range(200))[0]
    assert (plain(images) - quantized(images)).abs().max() <= 1e-6


# ---------------------------------------------------------------------------------------------------- distillation


def test_distillation_is_the_sum_of_divergences_and_its_gradient_does_not_depend_on_t():
    torch.manual_seed(0)
    logits, wanted = torch.randn(5, 10, dtype=torch.float64, requires_grad=True), torch.randn(5, 10, dtype=torch.float64)
    by_hand = sum(
        9 * (q.softmax(0) * (q.log_softmax(0) - p.log_softmax(0))).sum() for p, q in zip(logits / 3, wanted / 3)
    )
    ours = utils.distillation(logits, wanted, temperature=3.0)
    assert ours.item() == pytest.approx(by_hand.item()) and utils.distillation(wanted, wanted).item() == pytest.approx(0)
    assert torch.autograd.gradcheck(lambda x: utils.distillation(x, wanted), logits)
    cold, hot = (torch.autograd.grad(utils.distillation(logits * 1e-2, wanted * 1e-2, T), logits)[0] for T in (1.0, 10.0))
    assert (cold - hot).norm() < 0.02 * cold.norm()


def test_teacher_is_normalised_as_the_loss_is(folder):
    """One step with a teacher: the gradient is that of the mean over the window's samples, for any cut into batches."""
    images, labels, classes = data.load_mnist(data.SAMPLE)
    digits = data.Digits(images[:12], labels[:12], classes)
    torch.manual_seed(0)
    teacher, start = SimpleCNN(4).eval().requires_grad_(False), SimpleCNN(4, dropout=0.0).state_dict()
    x, y = data.collate_images(digits.__getitems__(range(12)), **NORM)
    collate = partial(data.collate_images, **NORM)
    both = partial(train.collate_for_both, collate=collate, teacher_collate=collate)
    expected = SimpleCNN(4, dropout=0.0)
    expected.load_state_dict(start)
    logits = expected(x)
    loss = F.cross_entropy(logits, y) + F.kl_div((logits / 4).log_softmax(1), (teacher(x) / 4).softmax(1), reduction="batchmean") * 16
    loss.backward()
    for batch, accum in ((12, 1), (5, 3)):
        args = train.parse_args(["--batch-size", str(batch), "--accum", str(accum), "--clip", "0", "--label-smoothing", "0", "--amp", "off"])
        network = SimpleCNN(4, dropout=0.0)
        network.load_state_dict(start)
        optimizer, off = torch.optim.SGD(network.parameters(), lr=0.0), torch.amp.GradScaler("cpu", enabled=False)
        loader = data.make_loader(digits, batch, data.EpochSampler(12), collate=both)
        row = train.train_one_epoch(network, loader, optimizer, off, train.new_state(1), args, torch.device("cpu"), teacher=teacher)
        assert row["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
        for ours, theirs in zip(network.parameters(), expected.parameters(), strict=True):
            assert (ours.grad - theirs.grad).abs().max() < 1e-6


def test_teacher_on_the_command_line(folder, capfd):
    train.main([*FLAGS, "--out", "teacher"])
    train.main([*FLAGS, "--out", "student", "--width", "4", "--quant-bits", "2", "--teacher", "teacher/best.pt", "--amp", "bf16"])
    assert utils.load_checkpoint("student/last.pt")["args"]["teacher"] == "teacher/best.pt"
    capfd.readouterr()
    # A teacher may be any network that takes the same data; each has its own collate.
    for tokens in ("packed", "all"):
        train.main([*FLAGS, "--model", "attention", "--tokens", tokens, "--teacher", "teacher/best.pt", "--out", tokens, "--dry-run"])
    train.main([*FLAGS, "--teacher", "all/best.pt", "--out", "back", "--dry-run"])
    checkpoint = utils.load_checkpoint("teacher/best.pt")
    checkpoint["data"]["classes"] = ["cat", "dog"]
    utils.save_checkpoint("pets.pt", checkpoint)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main([*FLAGS, "--teacher", "pets.pt"])
    err = capfd.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and "classes ['cat', 'dog']" in err
