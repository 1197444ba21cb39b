"""Networks: a batch goes in, one row of logits for each sample comes out.

SimpleCNN            images (B, C, H, W) -> logits (B, K)
AttentionClassifier  (tokens (B, L, P), positions (B, L), mask (B, L)) -> logits (B, K); its parts stand above it
quantize             either of them with weights of 2 to 8 bits, by the straight-through estimator RoundSTE

A mask is bool, True = a real token, everywhere. This file knows nothing of files or training and imports torch alone.
`python model.py` shows the shapes on their way through the networks.

Letters: B samples in a batch, C channels, K classes; L tokens of the longest sample, T real tokens in the batch, each
with P pixels, d its width in the network, H heads of width D = d / H. "Needs" in a docstring: what to copy along.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

# ---------------------------------------------------------------------------------------------------- convolutions


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers, in the line of LeNet-5.

    A convolution slides one small filter, here 3 x 3 pixels, over the whole image: an edge is found
    wherever it is, with 9 weights instead of one for every pair of pixels. Each of the two blocks
    does four things, and an image of 28 x 28 pixels passes through them like this:

        convolution   new channels, each a map of where one pattern was found    1 x 28 x 28
        norm          brings channels to one scale (optional)                   32 x 28 x 28
        max-pooling   keeps the strongest of 2 x 2 neighbours: small shifts     32 x 14 x 14
                      no longer matter, and later layers have less to do
        ReLU          max(0, x): without it two linear layers would be one      32 x 14 x 14

    The second block turns that into 64 x 7 x 7, and from these 3,136 numbers two linear layers
    decide. Dropout between them removes hidden units at random in training, so that no unit can
    rely on one other alone.

    width    channels of the first convolution; the layers after it have 2, 4 times as many
    dropout  probability with which a hidden unit is dropped, 0 <= dropout < 1
    classes  K, the number of logits
    norm     "none"; "batch", with statistics of all images of one forward pass, which differ
             between one large batch and several small ones that are accumulated; "group", with
             statistics of each image alone, which do not
    shape    (C, H, W) of an image: its channels, height and width; H and W are at least 4

    images float (B, C, H, W), normalized -> logits (B, K). The defaults make 421,642 parameters.
    ValueError for an unknown norm and for images too small for two poolings.

    LeCun, Bottou, Bengio, Haffner 1998. Dropout: Srivastava et al. 2014. Batch norm: Ioffe and
    Szegedy 2015. Group norm: Wu and He 2018. Needs: math, nn, F.
    """

    def __init__(self, width=32, dropout=0.5, classes=10, norm="none", shape=(1, 28, 28)):
        super().__init__()
        channels, height, breadth = shape
        if height < 4 or breadth < 4:
            raise ValueError(
                f"images of {height} x {breadth} pixels: two poolings by 2 need 4 x 4 at least"
            )
        if norm == "none":
            self.norm1 = nn.Identity()
            self.norm2 = nn.Identity()
        elif norm == "batch":
            self.norm1 = nn.BatchNorm2d(width)
            self.norm2 = nn.BatchNorm2d(2 * width)
        elif norm == "group":  # groups of C / 8 channels where C is a multiple of 8
            self.norm1 = nn.GroupNorm(math.gcd(8, width), width)
            self.norm2 = nn.GroupNorm(math.gcd(8, 2 * width), 2 * width)
        else:
            raise ValueError(f"norm {norm!r}: none, batch or group expected")
        # Padding 1 adds a frame of zeros, so that a 3 x 3 filter leaves as many pixels as there were.
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        # Each pooling halves height and width and drops an odd last row: 28 -> 14 -> 7, 30 -> 15 -> 7.
        self.fc1 = nn.Linear(2 * width * (height // 4) * (breadth // 4), 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images):
        # Textbooks write pool(relu(x)). ReLU never changes which of four numbers is the largest, so
        # relu(pool(x)) is the same function to the bit, gradients included, and ReLU has a quarter
        # of the elements to go through.
        x = self.norm1(self.conv1(images))  # (B, width, H, W)
        x = F.relu(F.max_pool2d(x, 2))  # (B, width, H / 2, W / 2)
        x = self.norm2(self.conv2(x))  # (B, 2 width, H / 2, W / 2)
        x = F.relu(F.max_pool2d(x, 2))  # (B, 2 width, H / 4, W / 4)
        x = x.flatten(1)  # (B, 2 width * H / 4 * W / 4), 64 * 7 * 7 = 3,136 by default
        x = self.dropout(F.relu(self.fc1(x)))  # (B, 4 width)
        # No softmax here: F.cross_entropy works on logits, with a log_softmax that cannot overflow.
        return self.fc2(x)  # (B, K)


# ---------------------------------------------------------------------------------------------------- self-attention


def check_mask(mask, shape):
    """TypeError unless `mask` is bool, ValueError unless it has `shape`. In numbers, 1 may mean real, or padding."""
    if getattr(mask, "dtype", None) != torch.bool:
        raise TypeError(f"mask: bool expected, True = a real token, but {getattr(mask, 'dtype', type(mask))} found")
    if mask.shape != shape:
        raise ValueError(f"mask: shape {tuple(shape)} expected, {tuple(mask.shape)} found")


def unpack(x, mask):
    """(T, ...), the T real tokens in order -> (B, L, ...): in their places where `mask` (B, L) is True, 0 elsewhere."""
    grid = x.new_zeros(*mask.shape, *x.shape[1:])
    grid[mask] = x
    return grid


class SimpleSelfAttention(nn.Module):
    """Multi-head scaled dot-product self-attention (Vaswani et al. 2017), by hand. Needs: check_mask, unpack.

    d_model, n_heads  width d of a token, and the number H of heads that share it
    kernel            "manual", written out, or "fused", F.scaled_dot_product_attention: the same function

    x (B, L, d), mask bool (B, L), True = a real token, or (B, L, L), True = the query (row) may look at the key
    (column); None = all real -> (B, L, d). What x holds where mask (B, L) is False has no effect, not even NaN. A query
    that may look at nothing gets zeros. TypeError for a mask that is not bool.

    Packed: x (T, d), the real tokens of all samples in one row, and a mask (B, L) with T times True -> (T, d). Samples
    do not see each other, as with a block-diagonal mask (1, T, T), and padding takes no part in the projections.
    """

    def __init__(self, d_model, n_heads, kernel="fused"):
        super().__init__()
        if d_model % n_heads or kernel not in ("manual", "fused"):
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}, or kernel {kernel} unknown")
        self.n_heads, self.kernel = n_heads, kernel
        self.qkv = nn.Linear(d_model, 3 * d_model)  # queries, keys and values in one product
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        packed = x.ndim == 2
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        grid = mask.shape if packed else x.shape[:2]  # (B, L)
        check_mask(mask, grid if mask.ndim == 2 else (*grid, grid[1]))
        if not packed and mask.ndim == 2:
            x = x.masked_fill(~mask[..., None], 0)  # a weight of 0 does not keep NaN out: 0 * NaN is NaN
        qkv = self.qkv(x)  # (B, L, 3d), or (T, 3d)
        if packed:
            qkv = unpack(qkv, mask)  # (B, L, 3d): scores are the one thing that needs a grid
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, D) each

        allowed = mask[:, None, None] if mask.ndim == 2 else mask[:, None]  # (B, 1, 1, L) or (B, 1, L, L)
        # A softmax over nothing is NaN, and its gradient spoils all weights. So a query that may look at nothing looks
        # at everything here, and gets its zeros at the end.
        nothing = ~allowed.any(-1, keepdim=True)  # (B, 1, 1 or L, 1)
        allowed = allowed | nothing
        if self.kernel == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)  # (B, H, L, D); True = look, here too
        else:
            # A product of D random numbers has variance D: undivided, the softmax would choose one key and learn
            # no more. Dividing q, not the scores, keeps these within the range of fp16.
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, L, L), queries in rows
            weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)  # a row adds up to 1
            mixed = weights.to(v.dtype) @ v  # (B, H, L, D)
        mixed = mixed.transpose(1, 2).flatten(2)  # (B, L, d), the heads side by side
        if packed:
            return self.out(mixed[mask])  # (T, d)
        return self.out(mixed).masked_fill(nothing[:, 0], 0)  # (B, L, d); the bias of `out` goes, too


class TemperatureSoftmax(nn.Module):
    """softmax(scores / t) over the last dimension, with a temperature t that is learnt. Needs: check_mask.

    temperature: what t is before the first step, exactly; > 0. It never falls below a 70th of it.
    scores (..., L), mask bool (..., L) or None -> weights (..., L), 0 where the mask is False, even if all of it is.
    """

    def __init__(self, temperature=1.0):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        self.start = temperature
        self.raw = nn.Parameter(torch.zeros(()))

    def temperature(self):
        # softplus(raw) = log(1 + e^raw) is above 0 on paper, and 0 in float32 where raw is below -104: hence the 0.01.
        # Divided by its value at raw = 0, because softplus of its own inverse is 0.99999994 for some numbers, not 1.
        now = F.softplus(self.raw) + 0.01
        first = F.softplus(torch.zeros_like(self.raw)) + 0.01
        return self.start * (now / first)

    def forward(self, scores, mask=None):
        if mask is None:
            return (scores / self.temperature()).softmax(-1)
        check_mask(mask, scores.shape)
        nothing = ~mask.any(-1, keepdim=True)  # as in SimpleSelfAttention: no softmax over nothing
        scores = scores.masked_fill(~mask, 0) / self.temperature()  # before: t's gradient would be NaN where they are
        return scores.masked_fill(~(mask | nothing), -math.inf).softmax(-1).masked_fill(nothing, 0)


class MaskedPooling(nn.Module):
    """Mean of each sample's real tokens, weighted by a learnt score. Needs: TemperatureSoftmax, check_mask, unpack.

    x (B, L, d), mask bool (B, L), or x (T, d), mask, segments int64 (T,), packed -> (B, d); zeros where no token is.
    """

    def __init__(self, d_model):
        super().__init__()
        self.score = nn.Linear(d_model, 1)
        self.softmax = TemperatureSoftmax()

    def forward(self, x, mask, segments=None):
        check_mask(mask, x.shape[:2] if segments is None else mask.shape)
        if segments is None:
            x = x.masked_fill(~mask[..., None], 0)  # as in SimpleSelfAttention: 0 * NaN is NaN
            weights = self.softmax(self.score(x).squeeze(-1), mask)  # (B, L)
            return (weights[:, None] @ x).squeeze(1)  # (B, 1, L) @ (B, L, d) -> (B, d)
        weights = self.softmax(unpack(self.score(x).squeeze(-1), mask), mask)[mask]  # (T,)
        return x.new_zeros(len(mask), x.shape[1]).index_add(0, segments, weights[:, None] * x)  # (B, d)


class Block(nn.Module):
    """Pre-norm transformer block (Xiong et al. 2020): tokens look at each other, then each is worked on by itself.

    x (B, L, d), finite, or packed (T, d), mask bool (B, L) -> the shape of x. Needs: SimpleSelfAttention.
    """

    def __init__(self, d_model, n_heads, dropout=0.0, kernel="fused"):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d_model), SimpleSelfAttention(d_model, n_heads, kernel)
        self.norm2 = nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        # The norms stand inside the branches: the way along the sums is free, and gradients reach the first layer.
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class AttentionClassifier(nn.Module):
    """A small vision transformer (Dosovitskiy et al. 2021), for any number of patches, of P pixels in `places` places.

    grad_checkpoint: store only each block's input and recompute the rest in the backward pass (Chen et al. 2016).

    batch = (tokens float (B, L, P), positions int64 (B, L), mask bool (B, L)), in which padding may hold anything
    or packed (tokens (T, P), positions (T,), mask (B, L), segments int64 (T,)) -> logits (B, K). ValueError for a
    position that is no place (a GPU has its own error). Needs: Block, MaskedPooling, check_mask, init_weights.
    """

    def __init__(
        self, width=64, dropout=0.0, classes=10, kernel="fused", grad_checkpoint=False,
        blocks=2, n_heads=4, patch=16, places=49,
    ):
        super().__init__()
        self.embed, self.place = nn.Linear(patch, width), nn.Embedding(places, width)
        self.blocks = nn.ModuleList(Block(width, n_heads, dropout, kernel) for _ in range(blocks))
        self.norm, self.pool, self.head = nn.LayerNorm(width), MaskedPooling(width), nn.Linear(width, classes)
        self.grad_checkpoint = grad_checkpoint
        self.apply(init_weights)

    def forward(self, batch):
        tokens, positions, mask, *segments = batch
        if tokens.ndim == 3:
            check_mask(mask, positions.shape)
            tokens, positions = tokens.masked_fill(~mask[..., None], 0), positions.masked_fill(~mask, 0)
        try:
            # Attention itself does not know an order: without the place a digit would be a bag of patches.
            x = self.embed(tokens) + self.place(positions)  # (B, L, d) or (T, d)
        except IndexError:
            low, high = positions.min(), positions.max()
            raise ValueError(f"positions {low} to {high}, places 0 to {self.place.num_embeddings - 1}") from None
        for block in self.blocks:
            if self.grad_checkpoint and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)  # restores the generator: dropout repeats
            else:
                x = block(x, mask)
        return self.head(self.pool(self.norm(x), mask, *segments))  # (B, K)


def init_weights(module):
    """For model.apply(init_weights): linear layers as Glorot and Bengio (2010), biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)  # places about as large as the embedded pixels that they join


# ---------------------------------------------------------------------------------------------------- quantization


class RoundSTE(torch.autograd.Function):
    """Rounding to s times an integer in low..high, with the straight-through estimator (Bengio et al. 2013).

    forward   y(x) = s min(max(round(x / s), low), high), halves to the even integer; NaN to low, as in torch's own
    backward  dy/dx is 0 wherever it exists, and nothing would be learnt. In its place stands that of x limited to the
              range: 1 where round(x / s) is in low..high, both ends included, and 0 outside.

    Not by x + (y - x).detach() and clamp: its gradient at the bounds is 1 in one version of torch and 0 in the next,
    and on a bound lies the largest weight, which would then stay there for good.
    """

    generate_vmap_rule = True  # for torch.func.vmap

    @staticmethod
    def forward(x, scale, low, high):
        steps = (x.to(scale.dtype) * (1 / scale)).round().nan_to_num(nan=low)  # times 1 / s, to the bit as torch's own
        return (steps.clamp(low, high) * scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward, as torch.func wants it, which may return y alone
        x, scale, low, high = inputs
        steps = (x.to(scale.dtype) * (1 / scale)).round()
        ctx.save_for_backward((steps >= low) & (steps <= high))

    @staticmethod
    def backward(ctx, gradient):  # for forward mode there would be a jvp, but torch.compile takes no Function with one
        return gradient * ctx.saved_tensors[0], None, None, None


def largest_integer(bits):
    """The largest integer of so many bits, 2^(bits - 1) - 1: 127 for 8 bits, 1 for 2. ValueError unless 2 to 8."""
    if bits not in range(2, 9):
        raise ValueError(f"{bits} bits: 2 to 8 expected")
    return 2 ** (bits - 1) - 1


def quantization_scale(x, bits, axis=None):
    """The step s for which x / s fills -high..high, high = 2^(bits - 1) - 1: the largest magnitude / high.

    One for all of x, or one for each index along `axis`, in a shape such as (C, 1, 1, 1); float32, or 64 as x is; no
    gradient. ValueError unless bits is 2 to 8, IndexError for an axis that x has not. Needs: torch, largest_integer.
    """
    high = largest_integer(bits)
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))  # in fp16 the step of small weights would be 0
    largest = x.abs()
    if axis is None:
        largest = largest.amax()
    else:
        if not -x.ndim <= axis < x.ndim:
            raise IndexError(f"axis {axis}: a tensor of shape {tuple(x.shape)} has no such dimension")
        others = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
        if others:  # amax over an empty list would be amax over all dimensions
            largest = largest.amax(others, keepdim=True)
    return (largest / high).clamp(min=torch.finfo(x.dtype).tiny)  # of zeros: 0 / 0 would be NaN


def fake_quantize(x, bits=8, axis=None, scale=None):
    """x rounded to integers of so many bits times a scale, by default its quantization_scale; shape and dtype of x.

    Symmetric: without -2^(bits - 1), which mirrors nothing; 2 bits say -s, 0 and s. Within the range, x is off by s / 2
    at most and the gradient is 1 (Jacob et al. 2018). `scale` is a tensor. Needs: RoundSTE, quantization_scale, largest_integer.
    """
    high = largest_integer(bits)
    if scale is None:
        scale = quantization_scale(x, bits, axis)
    elif axis is not None:
        raise ValueError(f"axis {axis} and a scale: the scale's own shape says which dimension it belongs to")
    return RoundSTE.apply(x, scale, -high, high)


class QuantActivation(nn.Module):
    """Fake-quantizes by a running mean of largest magnitudes in training.

    Needs: torch, nn, ModuleTracker, fake_quantize, quantization_scale.
    """

    def __init__(self, bits):
        super().__init__()
        self.bits = bits
        self.register_buffer("range", torch.zeros(()))

    def forward(self, x):
        if self.training and not self.is_recomputation():
            largest = x.detach().abs().amax().to(self.range.dtype)
            moved = self.range.lerp(largest, 0.05)
            self.range.copy_(torch.where(self.range > 0, moved, largest))
        y = fake_quantize(x, self.bits, scale=quantization_scale(self.range, self.bits))
        return torch.where(self.range > 0, y, x)  # never trained, it lets all pass

    def is_recomputation(self):
        """True where gradient checkpointing runs the forward pass again: in the midst of a backward pass."""
        if torch.compiler.is_compiling():
            return False
        return ModuleTracker().is_bw

    def _apply(self, fn, recurse=True):
        """What .to(), .half() and .cuda() call. A mean in 16 bits would stop moving: 5 % of a small change is lost."""
        full = self.range
        super()._apply(fn, recurse)
        if self.range.dtype in (torch.float16, torch.bfloat16):
            self.range = full.to(self.range.device)
        return self


class QuantConv2d(nn.Conv2d):
    """nn.Conv2d whose weight is fake-quantized in each forward pass, by output channel. Needs: fake_quantize.

    The weight itself stays float, and steps add up in it until it rounds to another integer. Its key is the same, so a
    float checkpoint loads. A `quantize_input`, such as QuantActivation, is optional and adds a key, its range.
    """

    def __init__(self, *args, bits=8, quantize_input=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.bits, self.quantize_input = bits, quantize_input or nn.Identity()

    def forward(self, x):
        return self._conv_forward(self.quantize_input(x), fake_quantize(self.weight, self.bits, axis=0), self.bias)


class QuantLinear(nn.Linear):
    """nn.Linear in the way of QuantConv2d, by output feature. Needs: fake_quantize."""

    def __init__(self, *args, bits=8, quantize_input=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.bits, self.quantize_input = bits, quantize_input or nn.Identity()

    def forward(self, x):
        return F.linear(self.quantize_input(x), fake_quantize(self.weight, self.bits, axis=0), self.bias)


def quantize(model, bits, activation_bits=None):
    """Makes each nn.Conv2d and nn.Linear (no subclass) quantized. Needs: QuantConv2d, QuantLinear, QuantActivation, leave_fast_path."""
    plain = (nn.Conv2d, nn.Linear, QuantConv2d, QuantLinear)
    layers = [layer for layer in model.modules() if type(layer) in plain]
    if not layers:
        raise ValueError(f"{type(model).__name__}: there is no nn.Conv2d or nn.Linear in it to quantize")
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and type(module.out_proj) in plain:
            raise ValueError("nn.MultiheadAttention reads out_proj.weight past a quantized layer: it cannot be an nn.Linear")
    for layer in layers:
        # The same object with another class: parameters, hooks, device and place in the model stay.
        layer.__class__ = QuantConv2d if isinstance(layer, nn.Conv2d) else QuantLinear
        layer.bits = bits
        layer.quantize_input = nn.Identity()
        if activation_bits:
            layer.quantize_input = QuantActivation(activation_bits).to(layer.weight.device)
        layer.quantize_input.train(layer.training)
    leave_fast_path(model)
    return model


def leave_fast_path(model):
    """Makes each nn.TransformerEncoderLayer call its own layers, in evaluation as in training.

    In evaluation without gradients it hands its float weights to one fused kernel, past layers that were replaced. That
    kernel knows ReLU and GELU alone, so a layer that says its activation is neither calls its parts one by one.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only the fused kernel takes the nested tensors it makes of padded input


def pack_weights(model):
    """The state_dict of a model from `quantize`, each weight as {"integers": int8 (bytes,), "scale", "bits", "shape"}.

    2 bits: four to a byte; 3 or 4 bits: two.
    Needs: QuantConv2d, QuantLinear, quantization_scale, fake_quantize, field_of.
    """
    weights = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, (QuantConv2d, QuantLinear)):
            weight, bits = layer.weight.detach(), layer.bits
            scale, (wide, shifts) = quantization_scale(weight, bits, axis=0), field_of(bits, weight.device)
            integers = (fake_quantize(weight, bits, scale=scale) / scale).round().to(torch.int8).flatten()
            fields = F.pad(integers, (0, -len(integers) % len(shifts))).view(torch.uint8).view(-1, len(shifts))
            packed = ((fields & 2**wide - 1) << shifts).sum(1, dtype=torch.uint8).view(torch.int8)
            weights[f"{name}.weight"] = {"integers": packed, "scale": scale, "bits": bits, "shape": list(weight.shape)}
    return weights


def unpack_weights(weights):
    """The plain float state_dict of what pack_weights returned; of a plain one, the same. Needs: field_of."""
    weights = dict(weights)
    for key, value in weights.items():
        if isinstance(value, dict):
            wide, shifts = field_of(value["bits"], value["scale"].device)
            # Each field is moved to the upper end of its byte, and back down as int8: that takes its sign along.
            integers = (value["integers"].view(torch.uint8)[:, None] << 8 - wide - shifts).view(torch.int8) >> 8 - wide
            weights[key] = integers.flatten()[: math.prod(value["shape"])].view(value["shape"]) * value["scale"]
    return weights


def field_of(bits, device=None):
    """How many bits a packed integer takes, 2, 4 or 8, and where in a byte they begin."""
    wide = 2 if bits == 2 else 4 if bits <= 4 else 8
    return wide, torch.arange(0, 8, wide, dtype=torch.uint8, device=device)


def count_parameters(model):
    """Number of trainable scalars in `model`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    mask = torch.arange(5) < torch.tensor([3, 1])[:, None]  # two samples, of three tokens and of one, padded to five
    batches = torch.zeros(2, 1, 28, 28), (torch.randn(2, 5, 16), torch.arange(5).expand(2, 5), mask)
    for model, batch in zip((SimpleCNN(), AttentionClassifier()), batches):
        print(f"{type(model).__name__}, {count_parameters(model):,} parameters")
        for name, layer in model.named_modules():  # a hook sees what a layer returns
            layer.register_forward_hook(lambda _, __, y, name=name: print(f"    {name:22} {tuple(y.shape)}"))
        model.eval()(batch)
