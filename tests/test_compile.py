"""--compile: the same keys, the same numbers, graphs without a break, and one more for a short last batch.

The graphs are those that torch.compile would hand to its compiler. Here they are run as they are, which takes no compiler and
a second in place of a minute.
"""

import pytest
import torch

import data
import train
import utils
from helpers import NORM

CPU = torch.device("cpu")
ABOUT = {"classes": [str(digit) for digit in range(10)], "shape": [1, 28, 28], **NORM}


def train_and_evaluate(flags, compiled):
    """Two epochs of batches of 8, 8, 8 and 5. Returns (weights, loss of an evaluation, graphs in training, and in all)."""
    graphs = []

    def as_it_is(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    args = train.parse_args(["--width", "8", "--dropout", "0", "--amp", "off", *flags.split()])
    torch.manual_seed(0)
    network = train.build_model(args, ABOUT).to(memory_format=torch.channels_last)
    if compiled:
        network.compile(backend=as_it_is, fullgraph=True)  # an error where the graph would break
    images, labels, classes = data.load_mnist(data.SAMPLE)
    digits = data.Digits(images[:29], labels[:29], classes)
    collate = train.NETWORKS[args.model]["collate"](args, ABOUT)
    loader = data.make_loader(digits, 8, data.EpochSampler(29), collate=collate)
    optimizer, off, state = utils.build_optimizer(network, args), torch.amp.GradScaler("cpu", enabled=False), {}
    for _ in range(2):
        train.train_one_epoch(network, loader, optimizer, off, state, args, CPU)
    in_training = len(graphs)
    loss = train.evaluate(network, loader, CPU)["loss"]
    return utils.plain_weights(network), loss, in_training, len(graphs)


@pytest.mark.parametrize("flags", [
    "--model cnn", "--model cnn --quant-bits 4 --norm batch", "--model attention", "--model attention --tokens padded",
    "--model attention --attention-kernel manual --quant-bits 4",
])
def test_a_compiled_network_is_the_same_without_a_break_and_with_one_graph_for_other_sizes(flags):
    torch.compiler.reset()
    weights, loss, _, _ = train_and_evaluate(flags, compiled=False)
    other, other_loss, in_training, graphs = train_and_evaluate(flags, compiled=True)
    print(f"{in_training} graphs in training, {graphs - in_training} in evaluation")
    assert weights.keys() == other.keys() and other_loss == pytest.approx(loss, abs=1e-5)
    assert max((weights[key] - other[key]).abs().max().item() for key in weights) < 1e-5
    # The first batch has one graph; tokens of other numbers, if there are any, a second; the short last batch one more.
    assert in_training == (3 if "attention" in flags else 2) and graphs - in_training == 1
