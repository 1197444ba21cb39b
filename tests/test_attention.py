"""Attention, masks and tokens: against nn.MultiheadAttention, F.scaled_dot_product_attention, and samples on their own."""

import doctest
import math
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import utils
from helpers import NORM
from model import (
    AttentionClassifier, Block, MaskedPooling, SimpleSelfAttention, TemperatureSoftmax, attention_weights, find_places,
    init_weights, pack, quantize, unpack,
)

KERNELS = pytest.mark.parametrize("kernel", ["manual", "fused"])
collate_tokens, collate_packed = (partial(collate, **NORM) for collate in (data.collate_tokens, data.collate_packed))
MASK = torch.arange(7) < torch.tensor([3, 1, 5, 7])[:, None]  # (4, 7): lengths 3, 1, 5, 7


def digits(indices, augment=False):
    """A batch of the bundled sample, as Digits returns it."""
    return data.Digits(*data.load_mnist(data.SAMPLE), augment).__getitems__(list(indices))


def attention(kernel, d=16, H=4):
    torch.manual_seed(0)
    return SimpleSelfAttention(d, H, kernel)


def gradients(output, inputs, seed=0):
    """Gradients of a random projection of `output`: every element counts, each with another weight."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


def largest(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------------------------------- attention


@KERNELS
@pytest.mark.parametrize("masked", [False, True])
def test_equals_multihead_attention_in_outputs_and_gradients(kernel, masked):
    ours, theirs = attention(kernel), nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(4, 7, 16, requires_grad=True)
    if masked:
        x = x.detach().masked_fill(~MASK[..., None], 0).requires_grad_()  # theirs looks at padded queries as well
    mask = MASK if masked else None
    mine, reference = ours(x, mask), theirs(x, x, x, key_padding_mask=~MASK if masked else None, need_weights=False)[0]
    real = MASK[..., None] if masked else torch.ones(4, 7, 1)  # nobody asks what a padded query answers
    assert ((mine - reference) * real).abs().max() < 1e-5
    if masked:
        assert not mine[~MASK].any()
    mine = gradients(mine * real, [x, ours.qkv.weight, ours.qkv.bias, ours.out.weight, ours.out.bias])
    theirs = gradients(reference * real, [x, theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias])
    error = largest([(mine[0] * real), *mine[1:]], [(theirs[0] * real), *theirs[1:]])
    print(f"largest difference of a gradient: {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize("shape", [(4, 7), (4, 7, 7)])
def test_manual_equals_fused_also_with_a_mask_for_each_query(shape):
    torch.manual_seed(1)
    mask, x = torch.rand(shape) < 0.6, torch.randn(4, 7, 16, requires_grad=True)
    mask[0] = False  # fully masked
    results = []
    for kernel in ("manual", "fused"):
        layer = attention(kernel)
        y = layer(x, mask)
        results.append([y, *gradients(y, [x, *layer.parameters()])])
    assert largest(*results) < 1e-5
    assert not results[0][0][0].any()


@KERNELS
def test_causal_is_that_of_scaled_dot_product_attention(kernel):
    layer = attention(kernel)
    x = torch.randn(2, 7, 16, requires_grad=True)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    theirs = layer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    by_mask = layer(x, torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7))
    layer.causal = True
    inputs = [x, *layer.parameters()]
    for reference in (theirs, by_mask):
        ours = layer(x)
        assert (ours - reference).abs().max() < 1e-5
        assert largest(gradients(ours, inputs), gradients(reference, inputs)) < 1e-5


@KERNELS
def test_causal_with_padding_and_packed_equals_a_mask_for_each_query(kernel):
    torch.manual_seed(0)
    layer = SimpleSelfAttention(16, 4, kernel, causal=True)
    plain = SimpleSelfAttention(16, 4, kernel)
    plain.load_state_dict(layer.state_dict())
    row = torch.randn(16, 16, requires_grad=True)
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    reference = plain(unpack(row, MASK), MASK[:, None] & triangle)[MASK]
    expected = gradients(reference, [row, *plain.parameters()])
    for ours in (layer(unpack(row, MASK), MASK)[MASK], layer(row, MASK, packed=True)):
        assert (ours - reference).abs().max() < 1e-5
        assert largest(gradients(ours, [row, *layer.parameters()]), expected) < 1e-5


class LanguageModel(nn.Module):
    """What somebody makes of Block who copies it: a causal model of text. tokens int64 -> logits of the next token."""

    def __init__(self, letters=11, width=16):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.position_embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList([Block(width, 4, causal=True), Block(width, 4, causal=True)])
        self.head = nn.Linear(width, letters)

    def forward(self, tokens, positions, mask, packed=False):
        x = self.embed(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, mask, packed)
        return self.head(x)


def test_a_causal_language_model_agrees_padded_and_packed_and_never_looks_ahead():
    torch.manual_seed(0)
    network = LanguageModel()
    tokens, positions = torch.randint(11, (4, 7)), torch.arange(7).expand(4, 7)
    padded = network(tokens, positions, MASK)
    packed = network(tokens[MASK], positions[MASK], MASK, packed=True)
    assert (padded[MASK] - packed).abs().max() < 1e-5
    targets, parameters = torch.randint(11, (16,)), list(network.parameters())
    theirs, ours = (torch.autograd.grad(F.cross_entropy(logits, targets), parameters) for logits in (padded[MASK], packed))
    assert largest(theirs, ours) < 1e-5
    for column in range(7):
        changed = tokens.clone()
        changed[:, column] = (changed[:, column] + 1) % 11
        again = network(changed, positions, MASK)
        assert not (again - padded)[:, :column].any()
        assert (again - padded)[MASK[:, column], column].abs().amax() > 1e-3
        again = network(changed[MASK], positions[MASK], MASK, packed=True)
        earlier = positions[MASK] < column
        assert not (again - packed)[earlier].any()


@KERNELS
def test_gradient_is_the_derivative(kernel):
    layer = attention(kernel, d=4, H=2).double()
    x, mask = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    assert torch.autograd.gradcheck(lambda x: layer(x, mask), x)
    pool = MaskedPooling(4).double()
    assert torch.autograd.gradcheck(lambda x: pool(x, mask), x)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_fully_masked_row_gives_zeros_and_finite_gradients(kernel, dtype):
    layer, mask = attention(kernel).to(dtype), MASK.clone()
    mask[1] = False
    x = (30 * torch.randn(4, 7, 16)).to(dtype).requires_grad_()  # scores in the thousands
    y = layer(x, mask)
    assert y[1].eq(0).all() and y.isfinite().all() and y[0].any()
    for gradient in torch.autograd.grad(y.float().mean(), [x, *layer.parameters()]):
        assert gradient.isfinite().all()


@KERNELS
@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_mixed_precision_is_close_and_finite(kernel, amp):
    layer, x, mask = attention(kernel), torch.randn(4, 7, 16), MASK.clone()
    mask[1] = False
    with utils.autocast(torch.device("cpu"), amp):
        y = layer(x, mask)
    assert (y - layer(x, mask)).abs().max() < 0.02
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@KERNELS
def test_garbage_and_nan_in_padding_have_no_effect(kernel):
    layer, x = attention(kernel), torch.randn(4, 7, 16)
    clean = layer(x, MASK)
    for garbage in (1e6, math.inf, math.nan):
        dirty = x.masked_fill(~MASK[..., None], garbage).requires_grad_()
        y = layer(dirty, MASK)
        assert torch.equal(y[MASK], clean[MASK])
        assert all(g.isfinite().all() for g in gradients(y, [dirty, *layer.parameters()]))


def test_a_mask_of_another_type_or_shape_is_an_error():
    layer, x = attention("manual"), torch.randn(4, 7, 16)
    for mask in (MASK.int(), MASK.float(), MASK.byte(), torch.zeros(4, 7).masked_fill(~MASK, -math.inf)):
        for call in (lambda: layer(x, mask), lambda: TemperatureSoftmax()(x[..., 0], mask), lambda: MaskedPooling(16)(x, mask)):
            with pytest.raises(TypeError, match="bool expected, True = a real token"):
                call()
        with pytest.raises(TypeError, match="bool expected"):
            AttentionClassifier(16)((x, torch.zeros(4, 7, dtype=torch.int64), mask))
    with pytest.raises(ValueError, match=r"\(4, 7\) expected, \(7, 4\)"):
        layer(x, MASK.T)
    with pytest.raises(ValueError, match=r"\(4, 7, 7\) expected, \(4, 7, 6\)"):
        layer(x, torch.ones(4, 7, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="10 is not a multiple of n_heads 4"):
        SimpleSelfAttention(10, 4)
    with pytest.raises(ValueError, match="kernel 'flash': manual or fused"):
        SimpleSelfAttention(8, 4, "flash")


def test_packed_tokens_are_never_guessed():
    layer, pool, row, one = attention("manual"), MaskedPooling(16), torch.randn(16, 16), torch.ones(16, dtype=torch.bool)
    for mask in (None, MASK, one, torch.ones(16, 16, dtype=torch.bool)):  # one sample without a batch is no packed row
        with pytest.raises(ValueError, match=r"\(B, L, d\) expected, \(16, 16\) found; one sample alone is x\[None\]"):
            layer(row, mask)
        with pytest.raises(ValueError, match=r"\(B, L, d\) expected, \(16, 16\) found; one sample alone is x\[None\]"):
            pool(row, mask)
    with pytest.raises(TypeError, match="mask: bool expected.*NoneType"):
        layer(row, None, packed=True)
    for part in (layer, pool):
        with pytest.raises(ValueError, match=r"packed tokens: shape \(T, d\) expected, \(1, 16, 16\)"):
            part(row[None], MASK, packed=True)
    for mask in (one, torch.ones(2, 8, 8, dtype=torch.bool)):
        for call in (lambda: layer(row, mask, packed=True), lambda: pool(row, mask, packed=True), lambda: unpack(row, mask)):
            with pytest.raises(ValueError, match=r"mask: shape \(B, L\) expected"):
                call()
    with pytest.raises(TypeError, match="bool expected"):
        layer(row, MASK.int(), packed=True)
    for count in (1, 15, 17):  # one token alone would be copied into all places
        x = torch.randn(count, 16)
        for call in (lambda: layer(x, MASK, packed=True), lambda: pool(x, MASK, packed=True), lambda: unpack(x, MASK)):
            with pytest.raises(ValueError, match=f"{count} packed tokens, but 16 times True"):
                call()


@pytest.mark.parametrize("count", [3, 7])
def test_a_causal_mask_is_not_taken_for_padding_where_both_fit(count):
    layer, network = attention("manual"), classifier()
    x, places = torch.randn(count, count, 16), torch.arange(count).expand(count, count)
    triangle = torch.ones(count, count, dtype=torch.bool).tril()
    for mask in (triangle, ~triangle):
        for call in (lambda: layer(x, mask), lambda: layer(x[mask], mask, packed=True), lambda: network((x, places, mask))):
            with pytest.raises(ValueError, match="is this a causal mask"):
                call()
    layer(x, triangle.flip(0))  # the same samples in another order
    layer(x, triangle.expand(count, count, count))  # for each query


def test_tokens_that_do_not_fit_their_places_are_an_error():
    network, places = classifier(), torch.arange(16)
    for tokens, positions, mask in (
        (torch.randn(7, 16), torch.arange(7), torch.ones(7, dtype=torch.bool)),  # one sample without a batch
        (torch.randn(16, 16), places[:15], MASK),
        (torch.randn(16, 16), places, torch.ones(2, 8, 8, dtype=torch.bool)),
        (torch.randn(15, 16), places[:15], MASK),
        (torch.randn(4, 7, 16), places[:7], MASK),
        (torch.randn(4, 7, 16), places[:7].expand(4, 7), torch.ones(4, 7, 7, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match="expected|packed tokens"):
            network((tokens, positions, mask))


@KERNELS
def test_packed_equals_a_block_diagonal_mask_and_the_padded(kernel):
    layer, places = attention(kernel), find_places(MASK)
    sample = places // 7  # of which sample each token is
    row = torch.randn(16, 16, requires_grad=True)  # 3 + 1 + 5 + 7 tokens
    results = []
    for y in (
        layer(row, MASK, packed=True, places=places),
        layer(row[None], (sample[:, None] == sample)[None])[0],
        layer(unpack(row, MASK), MASK)[MASK],
    ):
        results.append([y, *gradients(y, [row, *layer.parameters()])])
    assert largest(results[0], results[1]) < 1e-5 and largest(results[0], results[2]) < 1e-5


def test_places_and_unpack_and_pack_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    places = find_places(mask)
    assert places.tolist() == [0, 1, 2, 4] and places.dtype == torch.int64
    assert find_places(torch.tensor([[1, 0], [0, 0], [0, 1]]).bool()).tolist() == [0, 5]  # with an empty row
    row = torch.tensor([1.0, 2, 3, 4])
    for given in (None, places):
        grid = unpack(row, mask, given)
        assert grid.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
        assert torch.equal(pack(grid, places), row)
    shape = (16, 2, 3)  # whatever follows the first dimension stays, and the type
    for x in (torch.randn(shape), torch.randint(9, shape), torch.randn(shape).to(torch.bfloat16)):
        expected = x.new_zeros(4, 7, 2, 3)
        expected[MASK] = x
        assert torch.equal(unpack(x, MASK, find_places(MASK)), expected)
        assert torch.equal(pack(expected, find_places(MASK)), x)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert unpack(torch.zeros(0, 5), nothing).shape == (2, 3, 5)
    assert pack(torch.zeros(2, 3, 5), find_places(nothing)).shape == (0, 5)


def test_gradients_of_unpack_and_pack_are_the_derivatives():
    places = find_places(MASK)
    row = torch.randn(16, 2, dtype=torch.float64, requires_grad=True)
    grid = torch.randn(4, 7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack(x, MASK, places), row)
    assert torch.autograd.gradcheck(lambda x: pack(x, places), grid)


def test_places_of_another_mask_are_an_error():
    row = torch.randn(16, 16)
    sample = find_places(MASK) // 7
    for places in (sample, torch.arange(16), find_places(MASK).flip(0), find_places(MASK)[:-1]):
        for call in (
            lambda: attention("manual")(row, MASK, True, places), lambda: MaskedPooling(16)(row, MASK, True, places),
            lambda: unpack(row, MASK, places), lambda: classifier()((row, torch.arange(16), MASK, places)),
        ):
            with pytest.raises(ValueError, match="places: not where the mask is True"):
                call()
    with pytest.raises(ValueError, match="15 packed tokens, but 16 times True"):
        unpack(row[:15], MASK, find_places(MASK))


# ---------------------------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("start", [0.01, 0.1, 0.7, 1.0, 1.3, 3.0, 50.0])
def test_temperature_starts_at_its_value_exactly_and_stays_positive(start):
    torch.manual_seed(0)
    softmax, scores = TemperatureSoftmax(start), torch.randn(5, 6)
    assert softmax.temperature().item() == torch.tensor(start).item()
    assert torch.equal(softmax(scores), (scores / torch.tensor(start)).softmax(-1))
    optimizer = torch.optim.SGD(softmax.parameters(), lr=0.5)
    for _ in range(20):  # asks for the sharpest distribution
        optimizer.zero_grad()
        (-softmax(scores).amax(-1).sum()).backward()
        optimizer.step()
    assert 0 < softmax.temperature().item() < start
    with pytest.raises(ValueError, match="must be above 0"):
        TemperatureSoftmax(0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_temperature_stays_positive_where_softplus_underflows(dtype):
    softmax = TemperatureSoftmax(2.0).to(dtype)
    scores = torch.tensor([[3.0, 1.0, -2.0]], dtype=dtype, requires_grad=True)
    for raw in (-110.0, -1000.0, -10.0):
        softmax.raw.data.fill_(raw)
        assert softmax.temperature().item() > 2 / 71
        weights = softmax(scores)
        weights.float().square().sum().backward()
        assert weights[0].tolist() == pytest.approx([1, 0, 0]) and scores.grad.isfinite().all() and softmax.raw.grad.isfinite()


def test_examples_in_the_docstrings():
    weights = (torch.tensor([0.0, 2.0])).softmax(0)
    assert weights.tolist() == pytest.approx([0.12, 0.88], abs=0.005) and weights @ torch.tensor([10.0, 20.0]) == pytest.approx(18.8, abs=0.01)
    for t, expected in ((0.2, [0.99, 0.01]), (1.0, [0.73, 0.27]), (5.0, [0.55, 0.45])):
        assert TemperatureSoftmax(t)(torch.tensor([2.0, 1.0])).tolist() == pytest.approx(expected, abs=0.005)
    pool = MaskedPooling(2)
    pool.query.data = torch.tensor([3.0, 4.0])
    x, mask = torch.tensor([[[1.0, 0], [0, 2], [5, 5]]]), torch.tensor([[True, True, False]])
    assert pool.weights(x, mask)[0].tolist() == pytest.approx([0.12, 0.88, 0], abs=0.005)
    assert pool(x, mask)[0].tolist() == pytest.approx([0.12, 1.76], abs=0.005)


def test_temperature_is_learnt_as_gradcheck_says():
    softmax, scores = TemperatureSoftmax(0.5).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert torch.autograd.gradcheck(lambda scores, raw: torch.func.functional_call(softmax, {"raw": raw}, (scores, mask)), (scores, softmax.raw))
    assert softmax(scores, mask).sum(-1).tolist() == pytest.approx([1, 0, 1])
    assert not softmax(scores, mask)[~mask].any()
    for hidden in (math.nan, -math.inf, math.inf):  # what the mask hides is kept from the gradient of the temperature, too
        softmax(scores.detach().masked_fill(~mask, hidden), mask)[:, 0].sum().backward()
        assert softmax.raw.grad.isfinite() and softmax.raw.grad != 0


def test_pooling_leaves_padding_out():
    x = torch.tensor([[[1.0, 0], [1, 0], [0, 2], [0, 2]]])
    mask = torch.tensor([[True, True, False, False]])
    for padding in (2.0, math.nan, math.inf):
        x[0, 2:] = padding
        assert MaskedPooling(2)(x, mask).tolist() == [[1, 0]]
    assert MaskedPooling(2)(x, torch.zeros(1, 4, dtype=torch.bool)).tolist() == [[0, 0]]


@pytest.mark.parametrize("packed", [False, True])
def test_pooling_is_the_formula(packed):
    torch.manual_seed(0)
    pool, x = MaskedPooling(6), torch.randn(4, 7, 6, requires_grad=True)
    theirs = []
    for row, mask in zip(x, MASK):
        real = row[mask]
        scores = torch.stack([token @ pool.query / (token.norm() * pool.query.norm()) for token in real])
        theirs.append(((scores / 0.1).softmax(0)[:, None] * real).sum(0))
    theirs = torch.stack(theirs)
    ours = pool(pack(x, find_places(MASK)) if packed else x, MASK, packed)
    assert (ours - theirs).abs().max() < 1e-6
    assert largest(gradients(ours, [x, pool.query]), gradients(theirs, [x, pool.query])) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pooling_in_16_bits_stays_finite_beside_tokens_of_zeros(dtype):
    pool, x = MaskedPooling(16).to(dtype), torch.randn(4, 7, 16).to(dtype)
    x[0, 1] = 0  # a real token without a direction
    mask = MASK.clone()
    mask[1] = False
    x.requires_grad_()
    y = pool(x, mask)
    y.float().square().sum().backward()
    assert y.isfinite().all() and not y[1].any() and y[0].any()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in pool.parameters())


# ---------------------------------------------------------------------------------------------------- tokens


def test_worked_examples_are_what_the_code_prints():
    results = doctest.testmod(data)
    assert results.attempted >= 5 and results.failed == 0


def test_tokens_are_the_patches_that_are_not_blank_in_their_positions():
    images, labels = digits(range(200))
    (tokens, positions, mask), same = collate_tokens((images, labels))
    assert same is labels and mask.dtype == torch.bool and positions.dtype == torch.int64
    for image, token, position, real in zip(images, tokens, positions, mask):
        rebuilt = torch.zeros(28, 28)
        for patch, where in zip(token[real], position[real].tolist(), strict=True):  # by hand, patch by patch
            rebuilt[where // 7 * 4 :, where % 7 * 4 :][:4, :4] = patch.view(4, 4) * 0.3081 + 0.1307
        assert (rebuilt - image[0]).abs().max() < 1e-6
    filled = F.max_pool2d(images, 4).flatten(1) > 0
    assert torch.equal(mask.sum(1), filled.sum(1)) and mask.shape[1] == filled.sum(1).max()
    assert not tokens[~mask].any() and not positions[~mask].any()
    print(f"{mask.sum(1).float().mean():.1f} tokens an image, padded to {mask.shape[1]}")


def test_all_patches_and_unusual_memory():
    images, labels = digits(range(20))
    (tokens, positions, mask), _ = collate_tokens((images, labels), blank=True)
    assert tokens.shape == (20, 49, 16) and mask.all() and positions.tolist() == [list(range(49))] * 20
    for strange in (images.to(memory_format=torch.channels_last), images.transpose(2, 3).contiguous().transpose(2, 3), images[::1]):
        for collate in (collate_tokens, collate_packed):
            for ours, theirs in zip(collate((strange, labels))[0], collate((images, labels))[0], strict=True):
                assert torch.equal(ours, theirs)


def test_collate_padded_takes_any_ragged_tensors():
    for shape in ((), (2,), (3, 4)):
        sequences = [torch.randn(length, *shape) for length in (3, 1, 5, 0)]
        padded, mask = data.collate_padded(sequences)
        assert mask.sum(1).tolist() == [3, 1, 5, 0] and padded.shape == (4, 5, *shape) and not padded[~mask].any()
        theirs = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        assert torch.equal(padded, theirs)
    padded, mask = data.collate_padded([torch.zeros(0, 2)])
    assert padded.shape == (1, 1, 2) and not mask.any()


# ---------------------------------------------------------------------------------------------------- the classifier


def classifier(kernel="manual", dropout=0.0):
    torch.manual_seed(0)
    return AttentionClassifier(32, dropout, kernel=kernel)


@KERNELS
def test_packed_gives_the_logits_and_gradients_of_padded(kernel):
    batch, network, results = digits(range(64)), classifier(kernel), []
    batch[0][5] = 0  # one that is blank, and the last
    batch[0][63] = 0
    packed = collate_packed(batch)[0]
    for inputs in (collate_tokens(batch)[0], packed, packed[:3]):  # the last one without places
        logits = network(inputs)
        results.append([logits, *torch.autograd.grad(F.cross_entropy(logits, batch[1]), list(network.parameters()))])
    error = largest(*results[:2])
    print(f"largest difference of packed and padded: {error:.1e}")
    assert error < 1e-5 and all(part.isfinite().all() for part in results[0])
    assert largest(*results[1:]) == 0


@KERNELS
@pytest.mark.parametrize("training", [True, False])
def test_padding_never_moves_the_logits(kernel, training):
    network = classifier(kernel).train(training)
    (tokens, positions, mask), _ = collate_tokens(digits(range(16)))
    together = network((tokens, positions, mask))
    for i in range(16):
        n = mask[i].sum()
        for more in (0, 1, 5, 50):  # alone, and beside padding: 50 is more than there are positions
            wider = torch.arange(n + more)[None] < n  # (1, n + more)
            padded = unpack(tokens[i, :n], wider), unpack(positions[i, :n], wider), wider
            assert (network(padded) - together[i]).abs().max() < 1e-5
    noise = torch.randn_like(tokens) * 100
    noise[mask.sum(1).argmin(), -1] = math.nan
    dirty = torch.where(mask[..., None], tokens, noise), torch.where(mask, positions, 10**6), mask
    assert (network(dirty) - together).abs().max() < 1e-6
    parameters = list(network.parameters())
    assert largest(gradients(network(dirty), parameters), gradients(together, parameters)) < 1e-4
    changed = tokens.clone()
    changed[:, 0] += 1
    moved = (network((changed, positions, mask)) - together).abs().amax(1)
    assert moved.min() > 1e-4, moved


@KERNELS
def test_one_fully_masked_row_leaves_the_others_alone(kernel):
    network = classifier(kernel)
    (tokens, positions, mask), labels = collate_tokens(digits(range(8)))
    mask[3] = False
    logits = network((tokens, positions, mask))
    F.cross_entropy(logits, labels).backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in network.parameters())
    others = [i for i in range(8) if i != 3]
    assert (logits[others] - network((tokens[others], positions[others], mask[others]))).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", ["fixed", "dynamic"])
def test_export_takes_any_batch(tokens):
    batches, lengths = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("tokens", min=1, max=49)
    sizes = {0: batches, 1: lengths} if tokens == "dynamic" else {0: batches}
    network = classifier("fused").eval()
    example = torch.randn(3, 49, 16), torch.arange(49).expand(3, 49).contiguous(), torch.rand(3, 49) < 0.5
    program = torch.export.export(network, (example,), dynamic_shapes=((sizes, sizes, sizes),)).module()
    for B in (1, 2, 5):
        for L in (1, 5, 20, 49) if tokens == "dynamic" else (49,):
            mask = torch.rand(B, L) < 0.5
            batch = torch.randn(B, L, 16), torch.randint(49, (B, L)), mask
            assert (program(batch) - network(batch)).abs().max() < 1e-5


def test_export_takes_any_packed_batch():
    network, T = classifier("fused").eval(), torch.export.Dim("T", min=2, max=100_000)
    B, L = torch.export.Dim("B", min=1, max=4096), torch.export.Dim("L", min=2, max=49)
    example, _ = collate_packed(digits(range(3)))
    program = torch.export.export(network, (example,), dynamic_shapes=(({0: T}, {0: T}, {0: B, 1: L}, {0: T}),)).module()
    for count in (1, 2, 20):
        batch, _ = collate_packed(digits(range(count)))
        assert (program(batch) - network(batch)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own inductor
@pytest.mark.parametrize("collate, bits, grad_checkpoint", [(collate_packed, 0, False), (collate_tokens, 3, True)])
def test_one_graph_without_a_break_holds_for_batches_of_all_sizes(collate, bits, grad_checkpoint):
    torch.manual_seed(0)
    network = AttentionClassifier(16, grad_checkpoint=grad_checkpoint, blocks=1)
    if bits:
        quantize(network, bits)
    torch._dynamo.reset()
    graphs = []

    def count_graphs(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(network, backend=count_graphs, fullgraph=True, dynamic=True)  # a break in the graph would raise
    made = []
    for batch in (range(8), range(8, 16), range(20, 33), range(5)):
        inputs, labels = collate(digits(batch))
        results = []
        for function in (compiled, network):
            logits = function(inputs)
            loss = F.cross_entropy(logits, labels)
            results.append([logits, *torch.autograd.grad(loss, list(network.parameters()))])
        assert largest(*results) < 1e-5
        made.append(len(graphs))
    assert made == made[:1] * 4  # all by the first batch


@pytest.mark.parametrize("collate", [collate_tokens, collate_packed])
def test_attention_weights_say_what_entered_the_answer(collate):
    images, labels = digits(range(8))
    images[3] = 0
    batch, _ = collate((images, labels))
    network = classifier(dropout=0.5)
    network.head.eval()  # a part that is frozen stays so
    seen = []
    hook = network.pool.softmax.register_forward_hook(lambda layer, inputs, weights: seen.append(weights))
    network.eval()(batch)
    hook.remove()
    network.train()
    network.head.eval()
    weights = attention_weights(network, batch)
    assert network.training and network.blocks[0].dropout.training and not network.head.training
    assert weights.shape == (8, 49) and weights.dtype == torch.float32 and not weights.requires_grad and (weights >= 0).all()
    filled = F.max_pool2d(images, 4).flatten(1) > 0  # (8, 49)
    assert torch.equal(weights > 0, filled)
    assert weights.sum(1).tolist() == pytest.approx([1, 1, 1, 0, 1, 1, 1, 1])
    for i in range(8):  # tokens stand in the order of their positions
        assert torch.equal(weights[i][filled[i]], seen[0][i][: filled[i].sum()])


def test_attention_weights_ignore_what_padding_holds():
    network, (tokens, positions, mask) = classifier(), collate_tokens(digits(range(4)))[0]
    garbage = positions.masked_fill(~mask, 10**6)
    assert torch.equal(attention_weights(network, (tokens, garbage, mask)), attention_weights(network, (tokens, positions, mask)))


def test_a_position_that_does_not_exist_is_an_error():
    network, mask = classifier(), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="positions 3 to 49 found, 0 to 48 expected"):
        network((torch.zeros(1, 2, 16), torch.tensor([[3, 49]]), mask))


@pytest.mark.parametrize("collate", [collate_tokens, collate_packed])
def test_gradient_checkpointing_gives_the_same_gradients(collate):
    inputs, labels = collate(digits(range(16)))
    results, stored = [], []
    for grad_checkpoint in (False, True):
        network = classifier(dropout=0.3)
        network.grad_checkpoint = grad_checkpoint
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            torch.manual_seed(1)
            loss = F.cross_entropy(network(inputs), labels)
        stored.append(sum(sizes))
        results.append(torch.autograd.grad(loss, list(network.parameters())))
    print(f"numbers kept for the backward pass: {stored[0]:,} without, {stored[1]:,} with")
    assert largest(*results) == 0 and stored[1] < stored[0] / 4


def test_positions_count_and_order_does_not():
    network = classifier()
    (tokens, positions, mask), _ = collate_tokens(digits(range(4)))
    logits = network((tokens, positions, mask))
    shuffled = torch.randperm(mask.shape[1])
    assert (network((tokens[:, shuffled], positions[:, shuffled], mask[:, shuffled])) - logits).abs().max() < 1e-5
    assert (network((tokens, positions.flip(0) * mask, mask)) - logits).abs().max() > 1e-4


def test_init_weights_by_apply():
    layers = nn.Sequential(nn.Linear(400, 300), nn.Embedding(100, 50), nn.LayerNorm(5)).apply(init_weights)
    assert not layers[0].bias.any() and layers[0].weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert layers[1].weight.std().item() == pytest.approx(0.5, rel=0.05) and layers[2].weight.eq(1).all()


@pytest.mark.parametrize("collate", [collate_packed, partial(collate_tokens, blank=True)])
def test_overfits_a_tiny_batch(collate):
    inputs, labels = collate(digits(range(16)))
    network = classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits := network(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")
    assert loss.item() < 0.01 and torch.equal(logits.argmax(1), labels)


def test_picture_of_attention(tmp_path):
    from PIL import Image

    images, labels = digits(range(5))
    images[4] = 0
    batch, _ = collate_tokens((images, labels))
    data.save_pictures(tmp_path / "a.png", images, attention_weights(classifier(), batch).detach())
    picture = Image.open(tmp_path / "a.png")
    assert picture.mode == "RGB" and picture.size == (5 * 120 + 8, 128)
    red, green, blue = (channel.getextrema() for channel in picture.crop((8, 8, 120, 120)).split())
    assert red[1] == 255 and green == blue and green[0] == 0  # what is drawn, and red where the weight is
    last = picture.crop((8 + 4 * 120, 8, 4 * 120 + 120, 120))  # nothing to look at
    assert last.getextrema() == ((0, 0), (0, 0), (0, 0))
