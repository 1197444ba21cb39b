"""Networks: a batch goes in, one row of logits for each sample comes out.

SimpleCNN   images (B, 1, 28, 28) -> logits (B, K)

This file knows nothing of files, batches or training; it imports torch alone. `python model.py` shows the shapes on
their way through the network.

Letters: B samples in a batch, C channels (the width), H x W pixels, K classes.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


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


def count_parameters(model):
    """Number of trainable scalars in `model`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    model = SimpleCNN().eval()

    def show(name, layer, output):
        print(f"{name:8} {str(tuple(output.shape)):18} {count_parameters(layer):7,} parameters")

    for name, layer in model.named_children():  # a forward hook sees what a layer returns; pool and relu are functions
        layer.register_forward_hook(lambda layer, _, output, name=name: show(name, layer, output))
    with torch.no_grad():
        show("in all", model, model(torch.zeros(2, 1, 28, 28)))
