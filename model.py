"""Networks: a batch goes in, one row of logits for each sample comes out.

SimpleCNN             images (B, 1, 28, 28) -> logits (B, K)
AttentionClassifier   (tokens (B, L, P), positions (B, L), mask (B, L)) -> logits (B, K)
SimpleSelfAttention, TemperatureSoftmax, MaskedPooling, Block   what it is made of

A mask is bool, True = a real token, everywhere. This file knows nothing of files, batches or training; it imports torch
alone. `python model.py` shows the shapes on their way through the networks.

Letters: B samples in a batch, C channels, K classes; L tokens of the longest sample, T real tokens in the batch, each
with P pixels, d its width in the network, H heads of width D = d / H. "Needs" in a docstring: what to copy along.
"""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------- convolutions


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers, in the line of LeNet-5 (LeCun, Bottou, Bengio, Haffner 1998).

    width    channels C of the first convolution; the layers after it have 2C, 4C and K outputs
    dropout  probability with which a hidden unit is dropped (Srivastava et al. 2014), 0 <= dropout < 1
    classes  K

    images float (B, 1, 28, 28), normalized -> logits (B, K). Width 32 and 10 classes make 421,642 parameters.
    """

    def __init__(self, width=32, dropout=0.5, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3, padding=1)  # padding 1 keeps 28 x 28 pixels
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(2 * width * 7 * 7, 4 * width)  # two pools leave 28 / 2 / 2 = 7 x 7 pixels
        self.fc2 = nn.Linear(4 * width, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images):
        # Textbooks write pool(relu(x)). ReLU is monotone, so the largest of four stays the largest: relu(pool(x))
        # is the same function to the bit, gradients included, and ReLU has a quarter of the elements to go through.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))  # (B, C, 14, 14)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # (B, 2C, 7, 7)
        x = x.flatten(1)  # (B, 2C * 49)
        x = self.dropout(F.relu(self.fc1(x)))  # (B, 4C)
        return self.fc2(x)  # (B, K); no softmax: cross_entropy applies log_softmax, which does not overflow


# ---------------------------------------------------------------------------------------------------- self-attention


def check_mask(mask, shape):
    """TypeError unless `mask` is bool, ValueError unless it has `shape`. Of numbers nobody knows which means real."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: bool expected, True = a real token, but {mask.dtype} found")
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

    Packed: x (T, d), the real tokens of all samples in one row, mask (B, L) with T times True -> (T, d). The samples do
    not see each other, as if a block-diagonal mask (1, T, T) forbade it, and padding takes no part in the projections.
    """

    def __init__(self, d_model, n_heads, kernel="manual"):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        self.n_heads, self.kernel = n_heads, kernel
        self.qkv = nn.Linear(d_model, 3 * d_model)  # queries, keys and values in one product
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        packed = x.ndim == 2
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
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

    temperature  what t is before the first step, exactly; > 0, and softplus keeps it there

    scores (..., L), mask bool (..., L) or None -> weights (..., L), 0 where the mask is False, even if all of it is.
    """

    def __init__(self, temperature=1.0):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        self.start = temperature
        self.raw = nn.Parameter(torch.zeros(()))

    def temperature(self):
        # Relative to softplus(0), because softplus of its own inverse is 0.99999994 for some numbers, not 1.
        return self.start * (F.softplus(self.raw) / F.softplus(torch.zeros_like(self.raw)))

    def forward(self, scores, mask=None):
        scores = scores / self.temperature()
        if mask is None:
            return scores.softmax(-1)
        check_mask(mask, scores.shape)
        nothing = ~mask.any(-1, keepdim=True)  # as in SimpleSelfAttention: no softmax over nothing
        return scores.masked_fill(~(mask | nothing), -math.inf).softmax(-1).masked_fill(nothing, 0)


class MaskedPooling(nn.Module):
    """Mean of each sample's real tokens, weighted by a learnt score. Needs: TemperatureSoftmax, check_mask, unpack.

    x (B, L, d), mask bool (B, L), or packed x (T, d), mask (B, L), segments int64 (T,), the sample of each token
    -> (B, d); zeros for a sample without tokens.
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

    x (B, L, d), or packed (T, d), mask bool (B, L) -> the shape of x. Needs: SimpleSelfAttention.
    """

    def __init__(self, d_model, n_heads, dropout=0.0, kernel="manual"):
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
    """A small vision transformer (Dosovitskiy et al. 2021), for samples of any number of patches.

    width, dropout   d, and the probability with which the output of a branch is dropped
    patch, places    P pixels of a patch, and the number of places where one can lie
    grad_checkpoint  keep only what enters a block, and compute the rest again in the backward pass (Chen et al. 2016)
    Needs: Block, MaskedPooling, check_mask, init_weights.

    batch = (tokens float (B, L, P), positions int64 (B, L), mask bool (B, L)), in which padding may hold anything
    or packed (tokens (T, P), positions (T,), mask (B, L), segments int64 (T,)) -> logits (B, K). ValueError for a
    position that is not one of the `places` (a GPU has an error of its own). Width 64: 105,036 parameters.
    """

    def __init__(
        self, width=64, dropout=0.0, classes=10, blocks=2, n_heads=4, patch=16, places=49,
        kernel="manual", grad_checkpoint=False,
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
            raise ValueError(f"position {positions.max()}, but places 0 to {self.place.num_embeddings - 1}") from None
        for block in self.blocks:
            if self.grad_checkpoint and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)  # puts the generator back for the second dropout
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


def count_parameters(model):
    """Number of trainable scalars in `model`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    mask = torch.arange(5) < torch.tensor([3, 1])[:, None]  # two samples: three tokens, and one; padded to five
    tokens = torch.randn(2, 5, 16), torch.arange(5).expand(2, 5), mask
    print(f"mask, True = a real token:\n{mask.int()}")
    for model, batch in ((SimpleCNN(), torch.zeros(2, 1, 28, 28)), (AttentionClassifier(), tokens)):

        def show(layer, inputs, output, name):
            print(f"{name:22} {str(tuple(output.shape)):18} {count_parameters(layer):7,} parameters")

        for name, layer in [*model.named_modules()][1:]:  # a hook sees what a layer returns, but not the functions
            if not isinstance(layer, nn.ModuleList):
                layer.register_forward_hook(partial(show, name=name))
        model.register_forward_hook(partial(show, name=type(model).__name__))
        with torch.no_grad():
            model.eval()(batch)
