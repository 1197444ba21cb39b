"""Networks: a batch goes in, one row of logits for each sample comes out.

    1. Convolutions    SimpleCNN             images (B, C, H, W) -> logits (B, K)

    2. Attention       check_mask            what a mask is: True = a real token, everywhere
                       unpack, pack          from one row of tokens to a padded grid, and back
                       SimpleSelfAttention   tokens look at each other; padding, packing, causal
                       TemperatureSoftmax    a softmax whose sharpness is learnt
                       MaskedPooling         one vector for each sample
                       Block                 attention and a small network for each token
                       AttentionClassifier   (tokens, positions, mask) -> logits (B, K)
                       attention_weights     which patches contributed to the answer
                       init_weights, count_parameters

    3. Quantization    RoundSTE              rounding that can be learnt through
                       fake_quantize         floats that take only the values of few bits
                       QuantConv2d, QuantLinear, QuantActivation
                       quantize              either network with weights of 2 to 8 bits

    Extras             pack_weights, unpack_weights: such weights as bytes in a file

    Looking inside     layer_table           what each layer computes, and keeps for backward
                       memory_report         what a training step holds in memory, and why
                       measured_peak         the same, measured

This file knows nothing of files or training, and imports torch alone. `python model.py` prints the
tables of the last section for both networks, with a number after it for batches of that size.

Letters in shapes: B samples in a batch, C channels, H and W height and width, K classes; L tokens
of the longest sample, T real tokens of all samples, V values of a patch, P positions in an image, d
the width of a token in the network; in attention, H heads of width D = d / H. "Needs" at the end of
a docstring: what to copy along, imports first.
"""

import copy
import math
import os
import sys
from functools import partial
from weakref import WeakSet

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

# --------------------------------------------------------------------------------------------------
# 1. Convolutions
# --------------------------------------------------------------------------------------------------


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

    width    channels of the first convolution; the second has 2 width, the hidden layer 4 width
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
        # Padding 1 adds a frame of zeros, so that a 3 x 3 filter does not shrink the image.
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        # Each pooling halves height and width, rounded down: 28 -> 14 -> 7, and 30 -> 15 -> 7.
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


# --------------------------------------------------------------------------------------------------
# 2. Attention: masks, self-attention, pooling, block, classifier
# --------------------------------------------------------------------------------------------------


def check_mask(mask, shape=None):
    """Raises an error unless `mask` is a bool tensor, of this shape if one is given.

    What a mask is: samples have different numbers of tokens, and a batch is one tensor. So short
    samples are filled up with padding, and a mask says which tokens are real. In this project True
    = a real token, or "may be looked at", in every function. `nn.MultiheadAttention` has it the
    other way round: its key_padding_mask is True where there is padding, so ours is its ~mask. (The
    attn_mask of F.scaled_dot_product_attention is of our kind.) A mask of numbers is refused,
    because nobody can see whether its 1 means real or padding.

        mask (B, L): two samples, of 3 tokens and of 1       1 1 1 .
                                                             1 . . .

    From its row of the mask follows, for each sample, which token may look (the query, a row below)
    at which other token (the key, a column). With `causal`, a token looks only at itself and at
    earlier ones, as a language model must. For the sample of 3 tokens (1 = may look, . = may not):

        padding       1 1 1 .      causal    1 . . .      both    1 . . .
                      1 1 1 .                1 1 . .              1 1 . .
                      1 1 1 .                1 1 1 .              1 1 1 .
                      1 1 1 .                1 1 1 1              1 1 1 .

    The last row belongs to a padding token: what it sees does not matter, its output is set to 0.

    TypeError unless the dtype is bool, ValueError unless the shape is `shape`. Needs: torch.
    """
    dtype = getattr(mask, "dtype", type(mask))
    if dtype != torch.bool:
        raise TypeError(f"mask: bool expected, True = a real token, but {dtype} found")
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask: shape {tuple(shape)} expected, {tuple(mask.shape)} found")


def check_padding_mask(mask, shape=None):
    """Raises an error unless `mask` is bool (B, L), and also for what looks like a causal mask.

    Somebody may give a causal mask (L, L) to a layer that expects padding (B, L). If B happens to
    equal L it fits, and the numbers that come out look right. So a triangle of 3 or more tokens, of
    either polarity, is taken for a causal mask. As a padding mask it would say that the samples
    have 1, 2, ... L tokens, in this very order, which hardly ever happens by itself.

    TypeError for another dtype, ValueError for another shape (None: any B and L) and the triangle.
    Needs: torch, check_mask, can_read.
    """
    check_mask(mask, shape)
    if mask.ndim != 2:
        raise ValueError(f"mask: shape (B, L) expected, {tuple(mask.shape)} found")
    if not can_read(mask):
        return
    B, L = mask.shape
    if B == L and L > 2:
        triangle = torch.ones_like(mask).tril()
        if torch.equal(mask, triangle) or torch.equal(mask, ~triangle):
            raise ValueError(
                f"mask {tuple(mask.shape)}: is this a causal mask? Give causal=True to the"
                " layer, or a mask (B, L, L). If it is padding, put the samples in another order"
            )


def can_read(x):
    """Says whether Python may look at the values of x. On a GPU it should not.

    `if x.max() > 3` needs the number now. A GPU works some way behind the program, and at each such
    line the program would have to wait until it has caught up. And while a graph is being traced
    (torch.compile, torch.export) there is no number yet. So values are checked on a CPU alone.
    Needs: torch.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return x.device.type == "cpu"


def check_tokens(x, packed):
    """ValueError unless x is (B, L, d), or (T, d) and said to be packed: nothing is guessed."""
    if packed and x.ndim != 2:
        raise ValueError(f"packed tokens: shape (T, d) expected, {tuple(x.shape)} found")
    if not packed and x.ndim != 3:
        raise ValueError(
            f"x: shape (B, L, d) expected, {tuple(x.shape)} found; one sample alone is x[None],"
            " and tokens of all samples in one row need packed=True"
        )


def find_places(mask):
    """The places of the real tokens in a padded grid, whose cells are numbered row by row.

        mask  1 1 1 .      cells  0 1 2 3      returned  0 1 2 4      place = row * L + column
              1 . . .             4 5 6 7

    On a GPU this is a line at which the program stops and waits: how long the result is depends on
    values that only the GPU has. So it is best done once, in the data loader, where the mask is in
    the CPU's memory (see collate_packed in data.py).

    mask bool (B, L) with T times True -> int64 (T,). Needs nothing.
    """
    return mask.flatten().nonzero().squeeze(1)


def unpack(x, mask, places=None):
    """Puts packed tokens into their places in a padded grid; pack is the way back.

    Padding is one way to make one tensor of samples of different lengths. Packing is the other: all
    real tokens stand in one row, and no work is spent on padding. Linear layers and norms work on
    each token by itself and take that row as it is. Attention works on whole samples, and for it
    the tokens move into the grid:

        x       a b c d       mask  1 1 1 .       returned  a b c 0
        places  0 1 2 4             1 . . .                 d 0 0 0

    x       (T, ...)
    mask    bool (B, L) with T times True
    places  int64 (T,), find_places(mask); None: they are looked for here, and a GPU has to wait
    returns (B, L, ...), 0 where the mask is False

    TypeError for another mask. ValueError for another number of True, and for places that are not
    those of the mask (where can_read). Needs: torch, can_read, check_mask, find_places.
    """
    check_mask(mask)
    if mask.ndim != 2:
        raise ValueError(f"mask: shape (B, L) expected, {tuple(mask.shape)} found")
    if places is None:
        places = find_places(mask)
    elif can_read(mask) and not torch.equal(places, find_places(mask)):
        raise ValueError("places: not where the mask is True, row by row; see find_places")
    # This compares shapes, not values: it costs a GPU nothing.
    T = x.shape[0]  # not len(x), which a traced graph would take for a constant
    if places.shape != (T,):
        raise ValueError(f"{T} packed tokens, but {places.numel()} times True in the mask")
    B, L = mask.shape
    cells = x.new_zeros(B * L, *x.shape[1:])
    cells[places] = x  # index_copy_ does the same, but keeps x in memory for the backward pass
    return cells.unflatten(0, (B, L))  # (B, L, ...)


def pack(x, places):
    """Takes the real tokens out of a padded grid, into one row: x (B, L, ...), (T,) -> (T, ...).

    Needs nothing.
    """
    cells = x.flatten(0, 1)  # (B * L, ...)
    return cells.index_select(0, places)  # (T, ...)


class SimpleSelfAttention(nn.Module):
    """Multi-head scaled dot-product self-attention, written out.

    Each token asks a question (its query q), offers a label (its key k) and holds some content (its
    value v); all three are learnt linear maps of it. It compares its query with every key, turns
    the scores into weights that add up to 1, and takes the weighted mean of the values:

        attention(Q, K, V) = softmax(Q K^T / sqrt(D)) V

    With D = 1, two tokens with keys 0 and 1, values 10 and 20, and a token whose query is 2:

        scores   [2 * 0, 2 * 1] = [0, 2]
        weights  [1, e^2] / (1 + e^2) = [0.12, 0.88]
        output   0.12 * 10 + 0.88 * 20 = 18.8

    Why divide by sqrt(D): a score is a sum of D products. If the factors are independent with mean
    0 and variance 1, its variance is D. At D = 64 scores of 8 or -8 would be usual, the softmax
    would choose one key with a weight near 1, and almost no gradient would reach the others.

    Why several heads: one softmax gives one set of weights, so a token could look for one thing at
    a time. H heads of width D = d / H look for H things, for the price of one head of width d.

    d_model, n_heads  width d of a token, and the number H of heads that share it
    kernel            "manual", written out, or "fused", F.scaled_dot_product_attention: the same
                      function, which need not store the (L, L) weights
    causal            each token looks at itself and earlier ones only

    Padded: x (B, L, d), mask (B, L), True = a real token; or (B, L, L), True = the query (row) may
    look at the key (column); None = all real -> (B, L, d). What x holds where mask (B, L) is False
    has no effect, not even NaN, and the output there is 0. So is that of a query that may look at
    nothing.

    Packed: packed=True, x (T, d), the real tokens of all samples in one row, and a mask (B, L) with
    T times True -> (T, d). Samples do not see each other, and padding is never projected. Give
    `places` along if you have them, see unpack: without them a GPU has to wait.

    TypeError for a mask that is not bool, ValueError for shapes that do not fit.

    Vaswani et al. 2017, arXiv 1706.03762.
    Needs: math, torch, nn, F, check_tokens, check_mask, check_padding_mask, find_places, unpack,
    pack.
    """

    def __init__(self, d_model, n_heads, kernel="fused", causal=False):
        super().__init__()
        if d_model % n_heads != 0:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        if kernel not in ("manual", "fused"):
            raise ValueError(f"kernel {kernel!r}: manual or fused expected")
        self.n_heads = n_heads
        self.kernel = kernel
        self.causal = causal
        self.qkv = nn.Linear(d_model, 3 * d_model)  # queries, keys and values in one product
        self.out = nn.Linear(d_model, d_model)  # mixes what the heads have found

    def forward(self, x, mask=None, packed=False, places=None):
        mask = self.checked(x, mask, packed)
        if packed and places is None:
            places = find_places(mask)
        if not packed and mask.ndim == 2:
            # A weight of 0 does not keep NaN out, as 0 * NaN is NaN. So padding becomes 0 first.
            x = x.masked_fill(~mask[..., None], 0)  # (B, L, d)
        qkv = self.qkv(x)  # (B, L, 3d), or packed (T, 3d)
        if packed:
            qkv = unpack(qkv, mask, places)  # (B, L, 3d): only the scores need padded samples
        qkv = qkv.unflatten(-1, (3, self.n_heads, -1))  # (B, L, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, H, L, D) each

        allowed = self.who_may_look(mask)  # (B, 1, 1 or L, L)
        # A softmax over nothing is 0 / 0 = NaN, and its gradient would spoil all weights. So a
        # query that may look at nothing looks at everything here, and gets its zeros at the end.
        sees_nothing = ~allowed.any(-1, keepdim=True)  # (B, 1, 1 or L, 1)
        found = self.attend(q, k, v, allowed | sees_nothing)  # (B, H, L, D)
        found = found.transpose(1, 2).flatten(2)  # (B, L, d): the heads side by side
        if packed:
            return self.out(pack(found, places))  # (T, d)
        # The output becomes 0 after `out`, whose bias would otherwise stand there.
        nothing = sees_nothing[:, 0]  # (B, 1 or L, 1)
        if mask.ndim == 2:
            nothing = nothing | ~mask[..., None]  # (B, L, 1)
        return self.out(found).masked_fill(nothing, 0)  # (B, L, d)

    def checked(self, x, mask, packed):
        """The mask, if x and it are of the shapes in the docstring above; otherwise an error."""
        check_tokens(x, packed)
        if packed:
            check_padding_mask(mask)  # None is an error here: the mask says where a sample ends
            return mask
        B, L = x.shape[:2]
        if mask is None:
            return torch.ones(B, L, dtype=torch.bool, device=x.device)
        if torch.is_tensor(mask) and mask.ndim == 3:
            check_mask(mask, (B, L, L))
        else:
            check_padding_mask(mask, (B, L))
        return mask

    def who_may_look(self, mask):
        """mask (B, L) or (B, L, L) -> bool (B, 1, 1 or L, L), the same for all heads."""
        if mask.ndim == 2:
            allowed = mask[:, None, None]  # (B, 1, 1, L): all queries of a sample see the same keys
        else:
            allowed = mask[:, None]  # (B, 1, L, L)
        if self.causal:
            L = mask.shape[-1]
            earlier = torch.ones(L, L, dtype=torch.bool, device=mask.device).tril()
            allowed = allowed & earlier  # (B, 1, L, L)
        return allowed

    def attend(self, q, k, v, allowed):
        """softmax(q k^T / sqrt(D)) v, over the keys that are allowed: the formula at the top."""
        if self.kernel == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        # To divide q, not the scores, keeps the scores within the range of fp16.
        q = q / math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-2, -1)  # (B, H, L, L), queries in rows
        scores = scores.masked_fill(~allowed, -math.inf)  # e^-inf = 0: no weight at all
        weights = scores.softmax(-1)  # (B, H, L, L), each row adds up to 1
        return weights.to(v.dtype) @ v  # (B, H, L, D)


class TemperatureSoftmax(nn.Module):
    """softmax(scores / t), with a temperature t that is learnt.

    The temperature says how decided the softmax is. For scores 2 and 1:

        t = 0.2    0.99  0.01      cold: nearly the largest alone
        t = 1      0.73  0.27      the usual softmax
        t = 5      0.55  0.45      hot: nearly the mean

    It is worth learning where the scores are bounded, as in MaskedPooling. A linear layer before
    the softmax can make its scores larger or smaller by itself.

    A temperature must stay above 0, and an optimizer knows no bounds. So the parameter is a number
    `raw` without bounds, and t = start * (softplus(raw) + 0.01) / (softplus(0) + 0.01), where
    softplus(raw) = log(1 + e^raw) bends smoothly from 0 on the left into raw on the right.

    temperature  what t is before the first step, exactly; > 0, else ValueError. t never falls below
                 a 71st of it.

    scores (..., L), mask bool (..., L) or None -> weights (..., L), 0 where the mask is False, even
    if all of it is. Needs: math, torch, nn, F, check_mask.
    """

    def __init__(self, temperature=1.0):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        self.start = temperature
        self.raw = nn.Parameter(torch.zeros(()))

    def temperature(self):
        # Softplus alone is above 0 on paper, but in float32 it is 0 where raw is below -104: hence
        # the 0.01. A raw with softplus(raw) = start would not do either: rounded, the softplus of
        # its own inverse is 0.99999994 for some numbers. Divided by itself, it is 1 exactly.
        now = F.softplus(self.raw) + 0.01
        first = F.softplus(torch.zeros_like(self.raw)) + 0.01
        return self.start * (now / first)

    def forward(self, scores, mask=None):
        if mask is None:
            return (scores / self.temperature()).softmax(-1)
        check_mask(mask, scores.shape)
        # Hidden scores may be NaN, which would reach the gradient of t: so they are 0 first.
        scores = scores.masked_fill(~mask, 0) / self.temperature()
        # A softmax over nothing would be NaN: it runs over everything, and its result becomes 0.
        nothing = ~mask.any(-1, keepdim=True)  # (..., 1)
        weights = scores.masked_fill(~(mask | nothing), -math.inf).softmax(-1)
        return weights.masked_fill(nothing, 0)


class MaskedPooling(nn.Module):
    """One vector for each sample: the mean of its real tokens, weighted by a learnt score.

    A classifier needs one vector, and a sample has many tokens. Vision transformers often add one
    more token, the class token, that looks at the others and is read at the end. Pooling does the
    same with less: a learnt vector, the query, says what to look for, and a token's score is the
    cosine of the angle between the two. A softmax makes weights of the scores, and the answer is
    the weighted mean. The weights can be looked at: they say where the answer came from.

        tokens x     [1, 0]  [0, 2]  padding       query [3, 4], of length 5
        scores         0.6     0.8      -          3 / 5 and 4 / 5; the tokens' lengths do not count
        weights       0.12    0.88      0          softmax([0.6, 0.8] / t) with t = 0.1
        returned     0.12 * [1, 0] + 0.88 * [0, 2] = [0.12, 1.76]

    The temperature t has work to do here. A cosine is at most 1, and a softmax over numbers from -1
    to 1 cannot choose: no weight is more than e^2 = 7.4 times another. So t begins at 0.1, where it
    can be e^20 times another, and is learnt. Behind a linear score, t would do nothing: to divide
    the scores by t is to divide the layer's weight.

    x (B, L, d), mask bool (B, L), or packed=True, x (T, d), a mask with T times True and perhaps
    places (see unpack) -> (B, d); zeros for a sample without a token. The errors are those of
    SimpleSelfAttention.

    Cosine and temperature: Liu et al. 2022, arXiv 2111.09883.
    Needs: torch, nn, TemperatureSoftmax, check_tokens, check_mask, unpack.
    """

    def __init__(self, d_model):
        super().__init__()
        self.query = nn.Parameter(torch.randn(d_model))
        self.softmax = TemperatureSoftmax(0.1)

    def forward(self, x, mask, packed=False, places=None):
        x = self.padded(x, mask, packed, places)  # (B, L, d)
        weights = self.weights(x, mask)  # (B, L)
        return (weights[:, None] @ x).squeeze(1)  # (B, 1, L) @ (B, L, d) -> (B, d)

    def padded(self, x, mask, packed=False, places=None):
        """x (B, L, d), or packed (T, d) -> (B, L, d), with 0 in the padding."""
        check_tokens(x, packed)
        if packed:
            return unpack(x, mask, places)
        check_mask(mask, x.shape[:2])
        return x.masked_fill(~mask[..., None], 0)  # as in SimpleSelfAttention: 0 * NaN is NaN

    def weights(self, x, mask):
        """The weights of padded tokens, (B, L): a row adds up to 1, or to 0 where none is real."""
        # The cosine of an angle is the product x . q over the product of both lengths. Padding has
        # length 0, and 0 / 0 would be NaN: hence a least length.
        lengths = x.norm(dim=-1) * self.query.norm()  # (B, L)
        scores = (x @ self.query) / lengths.clamp(min=1e-3)  # (B, L)
        return self.softmax(scores, mask)


class Block(nn.Module):
    """A pre-norm transformer block: tokens look at each other, then each is worked on by itself.

        x = x + attention(norm1(x))             what the other tokens know
        x = x + down(gelu(up(norm2(x))))        what can be made of it, token by token

    Both lines add to x instead of replacing it. This is the residual connection: through the plus
    sign a gradient reaches the first layer unchanged, however many blocks lie between, and a block
    that has learnt nothing yet does no harm. The norm brings each token to mean 0 and variance 1
    before it enters a branch. It stands inside the branch (pre-norm); on the way itself, as in the
    first transformers, it would rescale the gradient at every block, and training would need a long
    warm-up.

    d_model, n_heads, kernel, causal  as in SimpleSelfAttention
    dropout                           of what each branch adds

    x (B, L, d), mask (B, L), or packed=True, x (T, d) and perhaps places -> the shape of x. Padding
    may hold any finite number.

    Xiong et al. 2020, arXiv 2002.04745. Needs: nn, F, SimpleSelfAttention.
    """

    def __init__(self, d_model, n_heads, dropout=0.0, kernel="fused", causal=False):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = SimpleSelfAttention(d_model, n_heads, kernel, causal)
        self.norm2 = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None, packed=False, places=None):
        seen = self.attention(self.norm1(x), mask, packed, places)
        x = x + self.dropout(seen)
        made = self.down(F.gelu(self.up(self.norm2(x))))
        return x + self.dropout(made)


class AttentionClassifier(nn.Module):
    """A small vision transformer: patches of an image are tokens, and blocks let them talk.

        tokens (B, L, V)  -> embed, + position embedding -> blocks -> norm -> pool -> head -> (B, K)

    Attention treats its tokens as a set: shuffled, they give the same answers, and a digit would be
    a bag of patches. So each token carries where in the image it was: a learnt vector for each
    position, the position embedding, is added to it. Then the order does not matter, and blank
    patches can be left out.

    Gradient checkpointing trades time for memory. A backward pass needs what the forward pass
    computed, and usually every layer's output is kept for it. With grad_checkpoint only the input
    of each block is kept. When the backward pass comes to a block, it runs that block forward once
    more from its input, and so has what it needs, for one block at a time. The price is about a
    third more work: a forward pass costs 1, a backward pass 2, and here 1 + 1 + 2.

    Dropout draws the same again, and QuantActivation counts such a pass once. Batch norm does not:
    a fork that puts it into a block would move its running statistics twice a step (halve its
    momentum, or take a norm without running statistics).

    width            d
    dropout, kernel  of each block
    classes          K
    grad_checkpoint  as above, in training
    blocks, n_heads  number of blocks, and of heads in each
    patch            V: 4 x 4 pixels, times channels
    positions        P, from which a patch can come: 7 x 7 = 49 for MNIST

    A batch is a tuple, padded or packed:

                     padded       packed
        tokens       (B, L, V)    (T, V)     float
        positions    (B, L)       (T,)       int64: where in the image the patch was, 0 to P - 1
        mask         (B, L)       (B, L)     bool, True = a real token
        places                    (T,)       int64: where in the grid (B, L) its token is, unpack

    -> logits (B, K). Padding may hold anything. Places may be missing: they are then found from the
    mask, for which a GPU has to wait. ValueError for shapes that do not fit, and for positions and
    places that cannot be (on a GPU only those out of range are noticed, by an error of its own).

    Dosovitskiy et al. 2021, arXiv 2010.11929. Checkpointing: Chen et al. 2016, arXiv 1604.06174.
    Needs: nn, checkpoint, Block, MaskedPooling, check_padding_mask, can_read, find_places,
    init_weights.
    """

    def __init__(
        self,
        width=64,
        dropout=0.0,
        classes=10,
        kernel="fused",
        grad_checkpoint=False,
        blocks=2,
        n_heads=4,
        patch=16,
        positions=49,
    ):
        super().__init__()
        self.embed = nn.Linear(patch, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            self.blocks.append(Block(width, n_heads, dropout, kernel))
        self.norm = nn.LayerNorm(width)
        self.pool = MaskedPooling(width)
        self.head = nn.Linear(width, classes)
        self.grad_checkpoint = grad_checkpoint
        self.apply(init_weights)

    def forward(self, batch):
        x, mask, packed, places = self.features(batch)
        return self.head(self.pool(x, mask, packed, places))  # (B, K)

    def features(self, batch):
        """The tokens after all blocks, (B, L, d) or (T, d), and what the pooling needs beside."""
        tokens, positions, mask = batch[:3]
        packed = tokens.ndim == 2
        self.check_batch(tokens, positions, mask, packed)
        places = None
        if packed and len(batch) > 3:
            places = batch[3]
        elif packed:
            places = find_places(mask)  # once here, and not again in each block
        else:
            tokens = tokens.masked_fill(~mask[..., None], 0)
            positions = positions.masked_fill(~mask, 0)
        self.check_positions(positions)
        x = self.embed(tokens) + self.position_embedding(positions)  # (B, L, d), or (T, d)
        for block in self.blocks:
            if self.grad_checkpoint and self.training:
                x = checkpoint(block, x, mask, packed, places, use_reentrant=False)
            else:
                x = block(x, mask, packed, places)
        return self.norm(x), mask, packed, places

    def check_batch(self, tokens, positions, mask, packed):
        """A ValueError or TypeError unless the three tensors fit together."""
        if tokens.ndim not in (2, 3) or tokens.shape[:-1] != positions.shape:
            raise ValueError(
                "tokens (B, L, V) with positions (B, L), or packed (T, V) with (T,) expected,"
                f" {tuple(tokens.shape)} with {tuple(positions.shape)} found"
            )
        if packed:
            check_padding_mask(mask)
        else:
            check_padding_mask(mask, positions.shape)

    def check_positions(self, positions):
        """ValueError for a position beyond the last: the embedding's own error names no number."""
        if not can_read(positions) or positions.numel() == 0:
            return
        low = positions.min().item()
        high = positions.max().item()
        last = self.position_embedding.num_embeddings - 1
        if low < 0 or high > last:
            raise ValueError(f"positions {low} to {high} found, 0 to {last} expected")


def attention_weights(model, batch):
    """How much each patch of each image contributed to the answer of an AttentionClassifier.

    These are the weights of the pooling, put back to where in the image the tokens came from. A
    position without a token has 0; the weights of a sample add up to 1 (to 0 if it has no token).
    Drawn over the image they show where the network looked at the end. It is not the whole story,
    for tokens have looked at each other in the blocks before.

    model   an AttentionClassifier; it computes in evaluation mode and is left as it was
    batch   what the model takes, padded or packed
    returns float32 (B, P), >= 0, without a gradient. Needs: torch, unpack.
    """
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            x, mask, packed, places = model.features(batch)
            x = model.pool.padded(x, mask, packed, places)  # (B, L, d)
            weights = model.pool.weights(x, mask).float()  # (B, L)
    finally:
        for module in in_training:
            module.training = True
    positions = batch[1]
    if packed:
        positions = unpack(positions, mask, places)  # (B, L)
    else:
        positions = positions.masked_fill(~mask, 0)  # padding may hold anything; its weight is 0
    B, P = mask.shape[0], model.position_embedding.num_embeddings
    by_position = weights.new_zeros(B, P)
    return by_position.scatter_add(1, positions, weights)  # (B, P)


def init_weights(module):
    """Starting weights, for model.apply(init_weights).

    Outputs should vary about as much as inputs, and gradients likewise on their way back, or both
    shrink or grow from layer to layer. For a linear layer from n to m features Glorot and Bengio
    (2010) chose the variance 2 / (n + m) between the two demands. Biases start at 0. Position
    embeddings start about as large as the embedded pixels that they are added to.

    module: any; layers other than nn.Linear and nn.Embedding stay as they are. Needs: nn.
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


def count_parameters(model):
    """Number of numbers in `model` that training changes: frozen parameters are not counted."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# --------------------------------------------------------------------------------------------------
# 3. Quantization: a network that is trained to live with weights of few bits
# --------------------------------------------------------------------------------------------------


class RoundSTE(torch.autograd.Function):
    """Rounding that can be learnt through: the straight-through estimator.

    Forward, with a step s and integers from low to high:

        y(x) = s * min(max(round(x / s), low), high)

    That is a staircase, here for s = 1, low = -2, high = 2:

         y                                          used as dy/dx
         2                     ________
         1                 ____                      1     ____________________
         0             ____                               |                    |
        -1         ____                              0 ___|                    |___
        -2 ________
          -3.5    -1.5 -.5 .5  1.5   3.5  x             -2.5                  2.5   x

    A staircase is flat everywhere but at its jumps. So its derivative is 0, and nothing would be
    learnt. Backward uses a substitute: where x rounds to an integer in low..high, dy/dx = 1, as if
    there were no rounding; elsewhere the range cuts x off, and dy/dx = 0. The range reaches half a
    step beyond its outermost integers, as the picture shows.

    x        float, any shape
    scale    s, a float tensor that broadcasts with x
    low      the smallest integer
    high     the largest
    returns  (y, inside): y with the shape and dtype of x, and inside bool, where the gradient is 1

    Halves go to the even integer (2.5 to 2, 3.5 to 4), NaN to low, both as in
    torch.fake_quantize_per_tensor_affine, to the bit. It works under torch.func and torch.compile.
    It has no forward-mode gradient (jvp), because torch.compile takes no Function with one.

    Not by x + (y - x).detach() and clamp, as often seen: the gradient of clamp at its bound is 1 in
    one version of torch and 0 in the next, and the largest weight, which lies on the bound, would
    then never move again.

    Bengio, Leonard, Courville 2013, arXiv 1308.3432. Needs: torch.
    """

    generate_vmap_rule = True  # torch.func.vmap may run both passes on batches of x

    @staticmethod
    def forward(x, scale, low, high):
        # Times 1 / s, not divided by s, as torch's own does: the last bit can differ.
        steps = (x.to(scale.dtype) * (1 / scale)).round()
        inside = (steps >= low) & (steps <= high)
        steps = steps.nan_to_num(nan=low).clamp(low, high)
        return (steps * scale).to(x.dtype), inside

    @staticmethod
    def setup_context(ctx, inputs, output):
        # torch.func wants a forward without ctx, so what backward needs is one of its outputs.
        _, inside = output
        ctx.mark_non_differentiable(inside)
        ctx.save_for_backward(inside)

    @staticmethod
    def backward(ctx, gradient, _):
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None  # for x, scale, low, high


def largest_integer(bits):
    """The largest integer of so many bits, 2^(bits - 1) - 1: 127 for 8 bits, 1 for 2.

    The smallest is its negative. -2^(bits - 1), such as -128, is left out: it has no counterpart,
    and -x should become the negative of what x becomes. ValueError unless bits is 2 to 8.
    """
    if bits not in range(2, 9):
        raise ValueError(f"{bits} bits: 2 to 8 expected")
    return 2 ** (bits - 1) - 1


def quantization_scale(x, bits, axis=None):
    """The step between two neighbouring values, such that the largest magnitude just fits.

        scale = largest |x| / largest integer

    One large number makes the step large for all. For a weight with two output channels at 8 bits:

        channel 0   [ 50.8,  12.7 ]      one scale, 50.8 / 127 = 0.4:   channel 1 becomes [0, 0]
        channel 1   [ 0.127, 0.05 ]      axis=0, scales 0.4 and 0.001:  it becomes [0.127, 0.05]

    That is what "per channel" buys, for one more float a channel. It costs nothing in the product:
    a scale of an output channel can be multiplied in after all its weights have been summed up.

    x        float, any shape
    bits     2 to 8
    axis     dimension that keeps one scale for each index: 0 for the weight of a Conv2d or Linear,
             -1 for the last; None: one scale for all of x
    returns  without axis a scalar; with it a tensor that broadcasts with x, such as (C, 1, 1, 1);
             float32 (float64 for such x), without a gradient

    ValueError for other bits, IndexError for an axis that x has not. Needs: torch, largest_integer.
    """
    high = largest_integer(bits)
    # In fp16 the step of small weights would be rounded to 0.
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs()
    if axis is None:
        largest = largest.amax()
    else:
        if not -x.ndim <= axis < x.ndim:
            raise IndexError(
                f"axis {axis}: a tensor of shape {tuple(x.shape)} has no such dimension"
            )
        axis = axis % x.ndim  # -1 becomes the last
        others = [dim for dim in range(x.ndim) if dim != axis]
        if others:  # of a vector, none: amax over an empty list would be amax over all dimensions
            largest = largest.amax(others, keepdim=True)
    # Where all of x is 0, x / scale would be 0 / 0 = NaN: the smallest step there is does no harm.
    return (largest / high).clamp(min=torch.finfo(x.dtype).tiny)


def fake_quantize(x, bits=8, axis=None, scale=None):
    """Rounds x to the few values that `bits` bits can tell apart, and returns them as floats.

    A file or a chip that stores a weight in 8 bits stores an integer q, and q * scale stands for
    the weight. To train for that, each forward pass uses exactly those values, so the loss feels
    the error; but the weight that the optimizer moves stays float, or steps smaller than `scale`
    would be lost. No integer is stored anywhere, hence "fake". For 3 bits, integers -3 to 3:

        x                  0.90   -0.31    0.10
        scale              0.90 / 3 = 0.30
        x / scale          3.00   -1.03    0.33
        rounded            3      -1       0
        times scale        0.90   -0.30    0.00        returned
        error              0.00    0.01   -0.10        at most scale / 2 = 0.15

    The gradient of all three is 1, by the straight-through estimator.

    x        float, any shape
    bits     2 to 8; with 2 bits the integers are -1, 0 and 1
    axis     one scale for each index along it, see quantization_scale; None: one for all of x
    scale    float tensor that broadcasts with x, in place of quantization_scale(x, bits, axis);
             what lies beyond its largest integer is cut off
    returns  a tensor with the shape and dtype of x

    ValueError for other bits, and for axis and scale together; IndexError for an axis that x has
    not. Jacob et al. 2018, arXiv 1712.05877. Needs: RoundSTE, quantization_scale, largest_integer.
    """
    high = largest_integer(bits)
    if scale is None:
        scale = quantization_scale(x, bits, axis)
    elif axis is not None:
        raise ValueError(
            f"axis {axis} and a scale: the scale's own shape says which dimension it belongs to"
        )
    rounded, _ = RoundSTE.apply(x, scale, -high, high)
    return rounded


class QuantActivation(nn.Module):
    """Fake-quantizes what flows between layers, by a range that it remembers from training.

    A weight is there to be measured at any time. An activation depends on the batch, and in use a
    sample's answer must not depend on its neighbours. So training keeps a running mean of the
    largest magnitude in a batch, and evaluation uses that mean, as in batch norm:

        range = 0.95 * range + 0.05 * largest |x| of this batch        (the first: largest |x|)

    Gradient checkpointing runs a forward pass twice; the range moves at the first only.

    bits     2 to 8

    x float, any shape -> the same shape and dtype; before the first training pass, x itself. The
    range is a buffer, so it is in the state_dict; it stays float32 in a module of 16 bits.

    Needs: torch, nn, ModuleTracker, fake_quantize, quantization_scale.
    """

    def __init__(self, bits):
        super().__init__()
        self.bits = bits
        self.register_buffer("range", torch.zeros(()))

    def forward(self, x):
        if self.training and not self.is_recomputation():
            largest = x.detach().abs().amax().to(self.range.dtype)
            moved = self.range.lerp(largest, 0.05)  # 5 % of the way
            self.range.copy_(torch.where(self.range > 0, moved, largest))
        rounded = fake_quantize(x, self.bits, scale=quantization_scale(self.range, self.bits))
        # `if self.range > 0` would have to wait for a GPU's answer; torch.where does not.
        return torch.where(self.range > 0, rounded, x)

    def is_recomputation(self):
        """True where gradient checkpointing runs forward again: in the midst of a backward pass."""
        if torch.compiler.is_compiling():
            return False
        return ModuleTracker().is_bw

    def _apply(self, fn, recurse=True):
        # nn.Module calls this for .to(), .half(), .cuda(). The range does not follow to 16 bits,
        # where 5 % of a small change would be rounded away: it would stop short of its value.
        in_full = self.range
        super()._apply(fn, recurse)
        if self.range.dtype in (torch.float16, torch.bfloat16):
            self.range = in_full.to(self.range.device)
        return self


class QuantWeight:
    """What QuantConv2d and QuantLinear share: `bits`, and an optional layer for the input.

    bits            2 to 8, for the weight, with one scale for each output channel
    quantize_input  a module such as QuantActivation(8) that the input goes through; None: nothing
    All other arguments are those of nn.Conv2d or nn.Linear.

    The weight itself stays float. An optimizer's steps are far smaller than the distance between
    two quantized values; they add up in the float weight until it rounds to another integer. Its
    key in the state_dict is unchanged, so a float checkpoint loads. Needs: nn, fake_quantize.
    """

    def __init__(self, *args, bits=8, quantize_input=None, **kwargs):
        super().__init__(*args, **kwargs)  # of nn.Conv2d or nn.Linear, which comes next in line
        self.bits = bits
        if quantize_input is None:
            quantize_input = nn.Identity()
        self.quantize_input = quantize_input

    def quantized_weight(self):
        return fake_quantize(self.weight, self.bits, axis=0)  # axis 0: the output channels


class QuantConv2d(QuantWeight, nn.Conv2d):
    """nn.Conv2d whose weight is fake-quantized in each forward pass. Needs: nn, QuantWeight."""

    def forward(self, x):
        return self._conv_forward(self.quantize_input(x), self.quantized_weight(), self.bias)


class QuantLinear(QuantWeight, nn.Linear):
    """nn.Linear whose weight is fake-quantized in each forward pass. Needs: nn, F, QuantWeight."""

    def forward(self, x):
        return F.linear(self.quantize_input(x), self.quantized_weight(), self.bias)


def quantize(model, bits, activation_bits=None):
    """Turns each nn.Conv2d and nn.Linear of `model`, in place, into QuantConv2d and QuantLinear.

    Two ways to use it. After training (post-training quantization): load float weights, call this,
    evaluate; 8 bits usually cost nothing. Before or during training (quantization-aware training):
    the network learns weights that survive rounding; that is what makes 2 or 3 bits work.

    model            any nn.Module, also a single layer; parameters, their names, hooks and devices
                     stay. Subclasses of the two layers stay as they are
    bits             2 to 8, of the weights
    activation_bits  2 to 8, of the inputs of these layers; None: they stay float
    returns          the model. A second call replaces bits and activation ranges of the first

    nn.MultiheadAttention keeps its float weights, which it reads without calling a layer; all else
    in nn.TransformerEncoderLayer is quantized. ValueError for other bits, for a model without any
    such layer, and for an nn.MultiheadAttention whose out_proj is an nn.Linear, as it reads that
    layer's weight without calling it.

    Jacob et al. 2018, arXiv 1712.05877.
    Needs: nn, QuantConv2d, QuantLinear, QuantActivation, largest_integer, leave_fast_path.
    """
    largest_integer(bits)  # an error here, not in the first forward pass
    if activation_bits:
        largest_integer(activation_bits)
    known = (nn.Conv2d, nn.Linear, QuantConv2d, QuantLinear)
    layers = [layer for layer in model.modules() if type(layer) in known]
    if not layers:
        raise ValueError(
            f"{type(model).__name__}: there is no nn.Conv2d or nn.Linear in it to quantize"
        )
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and type(module.out_proj) in known:
            raise ValueError(
                "nn.MultiheadAttention reads out_proj.weight past a quantized layer: its out_proj"
                " cannot be an nn.Linear here"
            )
    for layer in layers:
        # The same object gets another class: parameters, hooks and its place in the model stay.
        if isinstance(layer, nn.Conv2d):
            layer.__class__ = QuantConv2d
        else:
            layer.__class__ = QuantLinear
        layer.bits = bits
        layer.quantize_input = nn.Identity()
        if activation_bits:
            layer.quantize_input = QuantActivation(activation_bits).to(layer.weight.device)
        layer.quantize_input.train(layer.training)
    leave_fast_path(model)
    return model


def leave_fast_path(model):
    """Makes each nn.TransformerEncoderLayer call its own layers, in evaluation as in training.

    In evaluation without gradients it hands its float weights to one fused kernel, past the layers
    that were replaced: it would evaluate another network than the one that was trained. The kernel
    knows ReLU and GELU alone, so a layer that says its activation is neither calls its parts one by
    one (which activation it computes is kept elsewhere). Needs: nn.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            # It would turn padded input into nested tensors, which the fused kernel alone takes.
            module.use_nested_tensor = False


# --------------------------------------------------------------------------------------------------
# Extras, which few need: quantized weights as bytes, for a small file
# --------------------------------------------------------------------------------------------------


def pack_weights(model):
    """The state_dict of a model from `quantize`, its quantized weights as integers of few bits.

    Here quantization is no longer fake: an 8-bit weight takes a quarter of the bytes of float32, a
    4-bit weight an eighth, a 2-bit weight a sixteenth.

    returns a dict with the state_dict's keys. Each quantized weight is {"integers": int8 (bytes,),
    "scale": float, "bits": int, "shape": list of int}, everything else is its tensor.
    Needs: torch, QuantWeight, quantization_scale, fake_quantize, pack_integers.
    """
    weights = dict(model.state_dict())
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantWeight):
            continue
        weight = layer.weight.detach()
        scale = quantization_scale(weight, layer.bits, axis=0)
        steps = fake_quantize(weight, layer.bits, scale=scale) / scale  # integers, but for rounding
        integers = steps.round().to(torch.int8).flatten()
        key = f"{name}.weight" if name else "weight"  # the model itself may be the layer
        weights[key] = {
            "integers": pack_integers(integers, layer.bits),
            "scale": scale,
            "bits": layer.bits,
            "shape": list(weight.shape),
        }
    return weights


def unpack_weights(weights):
    """What pack_weights returned -> the plain float state_dict; a plain one stays as it is.

    Needs: math, unpack_integers.
    """
    plain = dict(weights)
    for key, value in weights.items():
        if isinstance(value, dict):
            shape = value["shape"]
            integers = unpack_integers(value["integers"], value["bits"], math.prod(shape))
            plain[key] = integers.view(shape) * value["scale"]
    return plain


def pack_integers(integers, bits):
    """Integers of 2, 3 or 4 bits, several to a byte.

    Small negative integers are stored like large ones, as two's complement: -1 is all ones. At 2
    bits four of them share a byte, the first in the lowest bits. For 1, -1, 0, 1:

        as int8      00000001  11111111  00000000  00000001
        2 bits       01        11        00        01
        one byte     01 00 11 01         the last one in front

    integers  int8 (n,), each at most largest_integer(bits) in magnitude
    returns   int8 (bytes,); the last byte is filled up with zeros.
    Needs: math, torch, F, field_width.
    """
    width = field_width(bits)
    in_a_byte = 8 // width
    needed = math.ceil(len(integers) / in_a_byte) * in_a_byte
    integers = F.pad(integers, (0, needed - len(integers)))
    fields = integers.view(torch.uint8).view(-1, in_a_byte)  # (bytes, in_a_byte)
    lowest_bits = 2**width - 1  # 00000011 for a width of 2
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=integers.device)  # 0 2 4 6
    fields = (fields & lowest_bits) << shifts
    # No two fields share a bit, so their sum is the byte with all of them.
    return fields.sum(1, dtype=torch.uint8).view(torch.int8)  # (bytes,)


def unpack_integers(packed, bits, count):
    """The way back: int8 (bytes,) from pack_integers -> the first `count` integers, int8 (count,).

    Each field is shifted left until its sign is the sign of the byte, and then back to the right as
    int8, which copies the sign into the bits that become free. The 11 of the example above:

        01001101  << 4  11010000  >> 6  11111111 = -1

    Needs: torch, field_width.
    """
    width = field_width(bits)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)  # 0 2 4 6
    to_the_left = 8 - width - shifts  # 6 4 2 0
    fields = packed.view(torch.uint8)[:, None] << to_the_left  # (bytes, in a byte)
    fields = fields.view(torch.int8) >> (8 - width)
    return fields.flatten()[:count]


def field_width(bits):
    """Bits of a byte that one integer takes: 2, 4 or 8, so that none lies across two bytes."""
    if bits == 2:
        return 2
    if bits <= 4:
        return 4
    return 8


# --------------------------------------------------------------------------------------------------
# Looking inside: what each layer computes and keeps, and what a training step holds in memory
# --------------------------------------------------------------------------------------------------


def layer_table(model, inputs, loss=torch.sum):
    """What each layer computes, and what it keeps for the backward pass: the rows of a table.

    A FLOP is one floating-point operation, an addition or a multiplication. Nearly all of them are
    in matrix products and convolutions, and only these are counted. A weight of a linear layer is
    used once a sample, one of a convolution once for each pixel that comes out. conv2 of SimpleCNN
    has 64 * 288 weights (32 channels of 3 x 3 pixels for each of 64), so a batch of 128 takes

        2 * 128 images * 14 * 14 pixels * 64 * 288 weights = 924,844,032 FLOPs, forward

    Backward takes twice as many. With y = W x, and the gradient dL/dy of the loss given, it needs

        dL/dW = dL/dy x^T     how the loss depends on the weights: that is the gradient
        dL/dx = W^T dL/dy     how it depends on the input, which is dL/dy of the layer before

    and each is a product as large as the one of forward. The first layer needs dL/dW alone, as no
    layer before it asks. So a training step costs about three forward passes.

    The first formula also says what has to be kept from forward to backward: the layer's input x.
    Other operations keep what their derivative needs. ReLU keeps its output, because the gradient
    passes where that is above 0. Max-pooling keeps its input and, for each number that comes out,
    where it was found, as an int64 of 8 bytes: half as much again as the input.

    Memory belongs to a storage, a row of bytes, and a tensor is only a view of one: a shape and
    where to begin. x.flatten(1), x[0] and x.mT are new views of the same bytes and cost nothing. An
    in-place operation such as relu_() writes its result into bytes that are there. So each storage
    is counted once, for whoever keeps it first. The output of a ReLU is the input of the next layer
    (flattened or not): both keep it, it exists once, and the next layer has 0 in the table. But a
    view of one row keeps all rows. Parameters and buffers are not counted; they stay anyway.

    In-place operations save less than it seems. What nobody keeps is freed as soon as the next
    operation has read it, so a convolution and relu() leave one storage behind, as with relu_().
    And where values are kept, as a sigmoid keeps its output, backward raises an error if something
    was written over them.

    model    any with something to train; a copy of it computes, so it stays as it is. Its mode and
             its frozen layers count: after model.eval() dropout keeps nothing. (In training mode
             dropout draws from the global generator, here and in the functions below.)
    inputs   what the model takes, a tensor or a tuple
    loss     outputs -> one number, where backward begins
    returns  a list of dicts, one a layer, in the order of their first calls; a layer that is never
             called comes last if it has parameters
                 layer       its name; "" for the model itself
                 output      shape of its (last) output, a tuple; None without one
                 parameters  how many of its numbers are trained, as in count_parameters
                 forward     FLOPs, int
                 backward    FLOPs; with gradient checkpointing, forward once more is among them
                 kept        bytes that its forward pass keeps for backward

    A row is the layer without the layers inside of it, so that each column adds up to the whole
    network. What is no layer, such as F.relu or the product of queries and keys, is counted for the
    layer whose forward calls it. The sums of FLOPs are those of FlopCounterMode in torch, but for
    the fused attention of a CPU: of that it knows nothing, see flop_formulas.

    Needs: copy, torch, saved_tensors_hooks, LayerTrace, unchanged.
    """
    model = copy.deepcopy(model)
    trace = LayerTrace(model)
    with trace:
        with saved_tensors_hooks(trace.keep, unchanged):
            result = loss(model(inputs))
        trace.phase = "backward"
        result.backward()
    # The graph and its hooks hold each other where Python's garbage collector does not see it, and
    # would keep the copy for good.
    trace.owners.clear()
    never_called = []
    for row in trace.rows.values():
        if row not in trace.called and row["parameters"]:
            never_called.append(row)
    return trace.called + never_called


class LayerTrace(TorchDispatchMode):
    """Finds out, for each operation and for each tensor that is kept, to which layer it belongs.

    In forward that is simple. PyTorch calls hooks before and after each layer, so there is a stack
    of the layers whose forward is running, and what happens belongs to the innermost:

        enter SimpleCNN      [SimpleCNN]
        enter conv1          [SimpleCNN, conv1]    the convolution
        leave conv1          [SimpleCNN]           pooling, ReLU

    Backward calls no layer. It runs the nodes of a graph that forward has left: `y.grad_fn` is the
    node of the operation that made y, and `next_functions` of a node are those before it. So at
    each hook we look which nodes are new, note whose they are, and let each say, when backward
    comes to it, that now this layer's work is done.

    Each operation of PyTorch passes through __torch_dispatch__ while the mode is on (`with trace:`)
    and its FLOPs follow from the shapes. model: gets the hooks, for good. The results are in
    `rows`, a dict from layer to row, and `called`, a list of rows; see layer_table.

    Needs: partial, TorchDispatchMode, WeakSet, flop_formulas, tensors_in.
    """

    def __init__(self, model):
        super().__init__()
        self.formulas = flop_formulas()
        self.phase = "forward"
        self.rows = {}
        self.called = []
        self.owners = {}  # node of the graph -> row
        self.known = WeakSet()  # storages that need not be counted (again)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.known.add(tensor.untyped_storage())
        counted = set()
        for name, layer in model.named_modules():
            row = {"layer": name, "output": None, "parameters": 0}
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad and parameter not in counted:  # shared: counted once
                    counted.add(parameter)
                    row["parameters"] += parameter.numel()
            self.rows[layer] = {**row, "forward": 0, "backward": 0, "kept": 0}
            layer.register_forward_pre_hook(self.enter, with_kwargs=True)
            # Checkpointing stops its second forward by an exception as soon as it has enough.
            layer.register_forward_hook(self.leave, always_call=True)
        self.inside = [self.rows[model]]  # the innermost comes last

    def enter(self, layer, args, kwargs):
        self.claim([args, kwargs])  # made by the layer around this one
        row = self.rows[layer]
        self.inside.append(row)
        if row not in self.called:
            self.called.append(row)

    def leave(self, layer, args, output):
        self.claim(output)
        row = self.inside.pop()
        for tensor in tensors_in(output):
            row["output"] = tuple(tensor.shape)
            break

    def claim(self, value):
        """Notes that the operations which led to these tensors are the innermost layer's."""
        nodes = [tensor.grad_fn for tensor in tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self.owners:
                self.owners[node] = self.inside[-1]
                node.register_prehook(partial(self.begin_node, self.inside[-1]))
                nodes.extend(earlier for earlier, _ in node.next_functions)

    def begin_node(self, row, gradients):
        self.inside = [row]

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known.add(storage)
            self.inside[-1]["kept"] += storage.nbytes()
        return tensor

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        formula = self.formulas.get(operation.overloadpacket)
        if formula:
            self.inside[-1][self.phase] += formula(*args, **kwargs, out_val=result)
        return result


def flop_formulas():
    """Operation -> function that computes its FLOPs from the arguments: those of FlopCounterMode.

    It has no formula for the fused attention of a CPU, which is counted like that of a GPU: two
    products forward, and five backward, as the weights are not kept but computed again.

    Needs: torch.
    """
    # Imported here, because on some machines this import prints a warning.
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    forward = flop_registry[aten._scaled_dot_product_flash_attention]
    backward = flop_registry[aten._scaled_dot_product_flash_attention_backward]
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def tensors_in(value):
    """All tensors in a tensor, or in dicts, lists and tuples of them, one after the other.

    Needs: torch.
    """
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def unchanged(tensor):
    """For saved_tensors_hooks: what was kept is what backward gets. Needs nothing."""
    return tensor


def bytes_of(*values):
    """Bytes of all tensors in `values`; two that share a storage count once. Needs: tensors_in."""
    storages = {tensor.untyped_storage() for tensor in tensors_in(values)}
    return sum(storage.nbytes() for storage in storages)


def memory_report(model, inputs, optimizer, dtype=None, loss=torch.sum):
    """What a training step holds in memory, by purpose, in bytes.

    Most of the memory that training takes is not the network. If its weights have w bytes, there
    are (in brackets, in MB: SimpleCNN with AdamW and a batch of 128 images)

        parameters    w         [ 1.69]   421,642 numbers of 4 bytes
        gradients     w         [ 1.69]   one for each weight, from backward to zero_grad
        optimizer    2w         [ 3.37]   AdamW: running means of the gradient and of its square;
                                          SGD: nothing, or w with momentum
        activations  batch * a  [34.32]   what forward keeps for backward (see layer_table), and
                                          the batch itself: a = 0.27 MB an image
        temporary    batch * b  [ 6.23]   how far backward rises above all that
        sum                     [47.29]

    The first three are there whatever the batch is, and the others grow with it. Temporary are
    above all the gradients of activations, on their way from a layer to the one before. Such a
    gradient is as large as the activation. In the CNN the worst moment is the second pooling: 1.61
    MB of gradient come in, 6.42 MB go out to conv2, and of the activations only 1.80 MB are free by
    then: 1.61 + 6.42 - 1.80 = 6.23. So memory rises in forward, a little more in backward, falls as
    backward passes one layer after the other, and ends where it began:

                                     __
                              ______|  |_        temporary
                         ____|           |__     activations
                    ____|                   |
        ___________|                        |_________
        parameters, gradients, optimizer: always
                    forward            backward

    The largest line says which remedy helps. Against activations: smaller batches and
    accumulation; bf16, which halves what is kept of products and convolutions (and keeps a copy of
    the weights in bf16); gradient checkpointing, which keeps only the inputs of blocks and makes
    the rest once more, for one block at a time, so that it becomes temporary. Against the
    optimizer's state: an optimizer with less of it. In use, under torch.no_grad(), there are only
    the weights and one or two activations at a time.

    The step that is looked at is the second or a later one of a window of accumulation: gradients
    are there from the beginning. Where zero_grad() has just set them to None they come one by one
    while activations go, and the peak is lower, by w at most.

    model      any that copy.deepcopy copies; copies of it and of the optimizer take the step, and
               both stay as they are
    inputs     what the model takes, of the batch size in question
    optimizer  of the model's parameters; its step must not need a closure
    dtype      torch.bfloat16 or torch.float16 for autocast; None: no autocast
    loss       outputs -> one number, where backward begins
    returns    a dict of int: the five lines above, and their "sum". Buffers are in parameters, the
               batch is in activations

    The first four are computed, from sizes and from what autograd says that it keeps. What is
    temporary is seen in a step: see LiveBytes. What an operation allocates for itself while it runs
    is not seen; on a CPU that is a few percent.

    Checkpointing: Chen et al. 2016, arXiv 1604.06174. What states of optimizers take, and how to
    share them out over processes: Rajbhandari et al. 2020, arXiv 1910.02054.
    Needs: partial, torch, saved_tensors_hooks, WeakSet, LiveBytes, bytes_of, forward_pass,
    keep_storage, ready_to_step, tensors_in, unchanged.
    """
    model, optimizer = ready_to_step(model, optimizer)
    parameters = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = list(optimizer.state.values())
    report = {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(gradients),
        "optimizer": bytes_of(state),
    }
    # Only looked at: a list of the tensors themselves would keep them alive.
    kept = WeakSet(tensor.untyped_storage() for tensor in tensors_in(inputs))
    permanent = {tensor.untyped_storage() for tensor in parameters}
    with LiveBytes(parameters, gradients, state, inputs) as live:
        with saved_tensors_hooks(partial(keep_storage, kept, permanent), unchanged):
            result = forward_pass(model, inputs, dtype, loss)
        report["activations"] = sum(storage.nbytes() for storage in kept)
        after_forward = live.now()
        result.backward()
        optimizer.step()
    report["temporary"] = live.peak - after_forward
    report["sum"] = sum(report.values())
    return report


def keep_storage(kept, permanent, tensor):
    """A hook for tensors that forward keeps: notes the storage, unless it is a permanent one.

    Needs nothing.
    """
    storage = tensor.untyped_storage()
    if storage not in permanent:
        kept.add(storage)
    return tensor


class LiveBytes(TorchDispatchMode):
    """Counts, within `with LiveBytes(...) as live:`, the bytes of all tensors that are alive.

    Each operation of PyTorch, forward and backward, passes through __torch_dispatch__, and so do
    the tensors that it makes. A weak reference to the storage of each does not keep it alive: when
    the last tensor with that storage is gone, it disappears from the set by itself.

        a = torch.zeros(1000)     4,000 bytes are alive
        b = a.view(10, 100)       4,000           another view of the same storage
        b.add_(1)                 4,000           in place
        c = b + 1                 8,000
        del a                     8,000           b still needs the storage
        del b                     4,000           live.now(); live.peak is 8,000

    values: tensors, and dicts, lists and tuples of them, that exist already and should count.
    Needs: TorchDispatchMode, WeakSet, tensors_in.
    """

    def __init__(self, *values):
        super().__init__()
        self.storages = WeakSet()
        self.peak = 0
        self.see(values)

    def now(self):
        return sum(storage.nbytes() for storage in self.storages)

    def see(self, value):
        for tensor in tensors_in(value):
            self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now())

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.see(result)
        return result


def ready_to_step(model, optimizer):
    """Copies of both as they are within a window: gradients are there, and the optimizer's state.

    A step with gradients of 0 makes the state that an optimizer builds up in its first step. To
    copy both at once keeps them together: the copied optimizer moves the copied parameters.
    Needs: copy, torch.
    """
    model, optimizer = copy.deepcopy((model, optimizer))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def forward_pass(model, inputs, dtype, loss):
    """The loss as a number to call backward on; `dtype` is that of autocast, None for none.

    Needs: torch.
    """
    device_type = next(model.parameters()).device.type
    enabled = dtype is not None
    with torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=enabled):
        outputs = model(inputs)
    return loss(outputs)


def measured_peak(model, inputs, optimizer, dtype=None, loss=torch.sum):
    """The most bytes that are alive at any moment of a training step: to compare with a report.

    On a GPU it is what PyTorch's allocator says (with the workspaces of cuBLAS and cuDNN, and sizes
    rounded up to 512 bytes), elsewhere the tensors alive, see LiveBytes. Arguments and the step are
    those of memory_report; copies take the step.

    Needs: torch, LiveBytes, bytes_of, forward_pass, ready_to_step.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        model, optimizer = ready_to_step(model, optimizer)
        gradients = [parameter.grad for parameter in model.parameters()]
        there = (list(model.parameters()), list(model.buffers()), gradients)
        with LiveBytes(there, list(optimizer.state.values()), inputs) as live:
            forward_pass(model, inputs, dtype, loss).backward()
            optimizer.step()
        return live.peak
    before = torch.cuda.memory_allocated(device)
    model, optimizer = ready_to_step(model, optimizer)
    for _ in range(2):  # libraries get their workspaces in the first
        torch.cuda.reset_peak_memory_stats(device)
        forward_pass(model, inputs, dtype, loss).backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated(device) - before + bytes_of(inputs)


def memory_at(batch_size, small, large):
    """The report of a batch size that was not tried: a line through those of two smaller ones.

    Each part of a report is a constant and so many bytes a sample. So two small batches say what a
    large one would take, and which is the largest that fits, before a GPU has run out of memory:

        SimpleCNN     32 images 17.3 MB, 64 images 27.0 MB: 0.30 MB an image, 7.6 MB without any
        so for 128    27.0 + 64 * 0.30 = 46.5 MB; measured are 47.3
        8 GB hold     (8,000 - 7.6) / 0.30 = 26,000 images

    In small batches another moment may be the worst one of the step, so the line has a bend. Take
    sizes at which activations are several times the weights, and samples that are alike, as in
    length.

    batch_size    the one in question
    small, large  (batch size, its memory_report), two different sizes
    returns       a report, int. Needs nothing.
    """
    small_size, small_report = small
    large_size, large_report = large
    steps = (batch_size - small_size) / (large_size - small_size)
    report = {}
    for key, value in small_report.items():
        report[key] = round(value + steps * (large_report[key] - value))
    return report


# --------------------------------------------------------------------------------------------------
# python model.py
# --------------------------------------------------------------------------------------------------


def print_layers(model, inputs):
    """Prints the table of layers, without those that do nothing. Needs: layer_table."""
    columns = ("parameters", "forward", "backward", "kept")
    form = "{:22} {:17} {:>10} {:>13} {:>13} {:>11}"
    print(form.format("layer", "output", "parameters", "FLOPs forward", "backward", "bytes kept"))
    together = dict.fromkeys(columns, 0)
    for row in layer_table(model, inputs):
        figures = [row[key] for key in columns]
        for key in columns:
            together[key] += row[key]
        if any(figures):
            name = row["layer"] or "the network itself"
            print(form.format(name, str(row["output"]), *(f"{figure:,}" for figure in figures)))
    print(form.format("together", "", *(f"{figure:,}" for figure in together.values())))


def print_memory(model, make_inputs, batch_size):
    """Prints the memory of a batch as two smaller ones predict it, and as it is measured.

    make_inputs: number of samples -> inputs. Needs: torch, measured_peak, memory_at, memory_report.
    """
    columns = ("parameters", "gradients", "optimizer", "activations", "temporary", "sum")
    form = "{:14} {:>10} {:>9} {:>9} {:>11} {:>9} {:>6} {:>8} {:>6}"
    print(form.format("in MB", *columns, "measured", ""))
    quarter, half = batch_size // 4, batch_size // 2
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(model.parameters(), lr=1e-3)
        for precision, dtype in (("float32", None), ("bf16", torch.bfloat16)):
            small = memory_report(model, make_inputs(quarter), optimizer, dtype)
            large = memory_report(model, make_inputs(half), optimizer, dtype)
            report = memory_at(batch_size, (quarter, small), (half, large))
            measured = measured_peak(model, make_inputs(batch_size), optimizer, dtype)
            figures = [f"{report[key] / 1e6:.2f}" for key in columns]
            off = f"{report['sum'] / measured - 1:+.1%}"
            name = f"{kind.__name__}, {precision}"
            print(form.format(name, *figures, f"{measured / 1e6:.2f}", off))


def random_images(device, count):
    """Images of noise. Needs: torch."""
    return torch.randn(count, 1, 28, 28, device=device)


def random_tokens(device, count):
    """Packed tokens of noise, 5 to 32 a sample as in handwritten digits, 18.5 on average.

    count: a multiple of 32. Needs: torch, find_places, pack.
    """
    lengths = torch.linspace(5, 32, 32).round().long().repeat(count // 32)
    mask = torch.arange(32) < lengths[:, None]  # (B, L)
    places = find_places(mask)
    positions = pack(torch.arange(32).expand(count, 32), places)
    batch = (torch.randn(len(places), 16), positions, mask, places)
    return tuple(tensor.to(device) for tensor in batch)


def main(batch_size=128):
    """Prints for both networks what layers compute and keep, and what a training step holds.

    batch_size  a multiple of 128. Needs: what it calls.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # several would wait for each other where other programs are running
    networks = [
        (SimpleCNN(), random_images, ""),
        (AttentionClassifier(), random_tokens, ""),
        (AttentionClassifier(grad_checkpoint=True), random_tokens, ", gradient checkpointing"),
    ]
    for model, make_inputs, special in networks:
        model.to(device)
        make_inputs = partial(make_inputs, device)
        print(f"{type(model).__name__}{special}, {count_parameters(model):,} parameters")
        if not special:
            print(f"each layer, without the layers inside of it, for a batch of {batch_size}:")
            print_layers(model, make_inputs(batch_size))
        smaller = f"{batch_size // 4} and {batch_size // 2}"
        print(f"a step with a batch of {batch_size}, predicted from batches of {smaller}:")
        print_memory(model, make_inputs, batch_size)
        print(flush=True)  # what is there can be read while the next network computes


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
        sys.stdout.flush()
    except BrokenPipeError:  # `python model.py | head` has read enough
        os._exit(0)  # a usual exit would try to write the rest, and complain
