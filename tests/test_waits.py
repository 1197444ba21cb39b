"""What would halt a GPU, shown on a machine without one.

A GPU works behind the program: a line of Python puts an operation into its queue and goes on at once. That ends where
Python needs a number, or the size of a result that depends on values. There the program waits until the queue is empty,
and then the GPU waits until the program has filled it again. There are three ways to see such a place on a CPU:

1. A TorchDispatchMode is shown each operation that torch runs, forward and backward, so those that would wait can be
   counted, see WAITS and why_it_waits. It sees .item(), float(x), print(x) and `if x > 0`, which are all
   _local_scalar_dense, and nonzero, x[mask] and the like. On a CPU it does not see a copy from the GPU to the host, for
   there is nothing to copy: x.cpu() and x.tolist() are missed (x.cpu().item() is not). It never sees what waits inside
   of one operation: a kernel's own reading, memory that has to be allocated, the other ranks of a collective.
2. A FakeTensorMode runs operations on tensors that have a shape, a type and a device, here "cuda", and no values. It
   raises where a value is needed and where two devices meet. Its backward passes need a GPU.
3. The device "meta" has no values either, and it runs backward passes. But it is one device, so none can be mixed.
"""

import time
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import data
import model as networks
import train
import utils
from helpers import NORM

CPU = torch.device("cpu")
ABOUT = {"classes": [str(digit) for digit in range(10)], "shape": [1, 28, 28], **NORM}

# ------------------------------------------------------------------------------------------ what is expected
#
# None at all in a training step, but for the one read that fp16 cannot do without (did a gradient overflow?), and none in
# a batch of an evaluation.

A_STEP_WAITS_FOR = {"off": {}, "bf16": {}, "fp16": {"_local_scalar_dense": 1}}
AN_EVALUATION_BATCH_WAITS_FOR = {}

VARIANTS = {
    "cnn": "--model cnn",
    "cnn, batch norm": "--model cnn --norm batch",
    "cnn, 3 bits": "--model cnn --quant-bits 3",
    "packed": "--model attention",
    "packed, 3 bits": "--model attention --quant-bits 3",
    "packed, checkpointed": "--model attention --grad-checkpoint",
    "padded": "--model attention --tokens padded",
    "padded, written out": "--model attention --tokens padded --attention-kernel manual",
    "all": "--model attention --tokens all",
}
EACH = pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)

# ------------------------------------------------------------------------------------------ 1. counting

# The first is Python asking for a number. The others have results whose size depends on values, or look at values to
# choose how they compute: bincount looks for the largest.
WAITS = (
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "multinomial",
)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


def why_it_waits(function, args):
    """The name of an operation that waits for a GPU; None for one that does not."""
    name = function.overloadpacket.__name__
    if name in WAITS:
        return name
    if name in INDEXING and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return f"{name} by a mask"
    return None


class CountWaits(TorchDispatchMode):
    """`with CountWaits() as waits:` leaves in waits.found how often each kind came."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reason = why_it_waits(function, args)
        if reason:
            self.found[reason] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """No checks of values, which are made on CPU tensors alone; and no time passes, so that no line of progress is due."""
    monkeypatch.setattr(networks, "can_read", lambda x: False)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


def as_it_is(batch):
    return batch


def prepare(flags, count):
    """Returns (arguments, network, loader of `count` batches that are made already)."""
    args = train.parse_args(["--width", "4", "--amp", "off", *flags.split()])
    torch.manual_seed(0)
    network = train.build_model(args, ABOUT)
    collate = train.NETWORKS[args.model]["collate"](args, ABOUT)
    digits = data.Digits(*data.load_mnist(data.SAMPLE, train=False))
    batches = [collate(digits.__getitems__(range(4 * i, 4 * i + 4))) for i in range(count)]
    return args, network, DataLoader(batches, batch_size=None, collate_fn=as_it_is)


def waits_of_an_epoch(flags, steps):
    args, network, loader = prepare(flags, steps)
    optimizer = utils.build_optimizer(network, args)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16", init_scale=256.0)
    with CountWaits() as waits:
        row = train.train_one_epoch(network, loader, optimizer, scaler, train.new_state(steps), args, CPU)
    assert row["step"] == steps
    return waits.found


def waits_of_an_evaluation(flags, batches):
    args, network, loader = prepare(flags, batches)
    with CountWaits() as waits:
        result = train.evaluate(network, loader, CPU, args.amp, 10)
    assert result["samples"] == 4 * batches
    return waits.found


def waits_of_one_more(function, flags):
    """What the third step waits for: the beginning and the end of an epoch, which read their sums, do not count."""
    two, three = function(flags, 2), function(flags, 3)
    return {name: three[name] - two[name] for name in three if three[name] != two[name]}


@EACH
@pytest.mark.parametrize("amp", A_STEP_WAITS_FOR)
def test_a_training_step_waits_for_nothing_but_the_scale_of_fp16(flags, amp, as_on_a_gpu):
    assert waits_of_one_more(waits_of_an_epoch, f"{flags} --amp {amp}") == A_STEP_WAITS_FOR[amp]


@EACH
def test_a_batch_of_an_evaluation_waits_for_nothing(flags, as_on_a_gpu):
    assert waits_of_one_more(waits_of_an_evaluation, flags) == AN_EVALUATION_BATCH_WAITS_FOR


def test_a_packed_batch_without_places_is_searched_once(as_on_a_gpu):
    _, network, loader = prepare("--model attention", 1)
    inputs, _ = next(iter(loader))
    for batch, expected in ((inputs, {}), (inputs[:3], {"nonzero": 1})):
        with CountWaits() as waits:
            network(batch).sum().backward()
        assert waits.found == expected


def test_checks_of_values_are_made_on_a_cpu_only():
    _, network, loader = prepare("--model attention", 1)
    inputs, _ = next(iter(loader))
    with CountWaits() as waits:
        network(inputs)
    assert waits.found["_local_scalar_dense"] == 2  # the smallest and the largest position
    assert waits.found["equal"] == 3  # places, for two blocks and the pooling
    with FakeTensorMode():
        on_a_gpu = torch.zeros(2, device="cuda")
    assert networks.can_read(torch.zeros(2))
    assert not networks.can_read(on_a_gpu) and not networks.can_read(torch.zeros(2, device="meta"))


def halts_in_backward(x, mask):
    x.masked_fill(mask, 0.0).sum().backward()
    x[mask].sum().backward()


def asks_python(x, mask):
    if x.sum() > 100:
        x.add_(1)


@pytest.mark.parametrize("halting, expected", [
    (lambda x, mask: x.sum().item(), {"_local_scalar_dense": 1}),
    (lambda x, mask: float(x[0, 0].detach()), {"_local_scalar_dense": 1}),
    (asks_python, {"_local_scalar_dense": 1}),
    (lambda x, mask: mask.nonzero(), {"nonzero": 1}),
    (lambda x, mask: torch.where(mask), {"nonzero": 1}),
    (halts_in_backward, {"index by a mask": 1, "index_put by a mask": 1}),
    (lambda x, mask: x.detach().clone().index_put_((mask,), torch.ones(3)), {"index_put_ by a mask": 1}),
    (lambda x, mask: x.masked_select(mask), {"masked_select": 1}),
    (lambda x, mask: torch.equal(x, x), {"equal": 1}),
    (lambda x, mask: torch.bincount(torch.arange(3), minlength=5), {"bincount": 1}),
    (lambda x, mask: torch.tensor([2, 1, 2]).unique(), {"_unique2": 1}),
    (lambda x, mask: x[torch.tensor([0, 1])].index_select(1, torch.tensor([0])).masked_fill(mask[:, :1], 0.0), {}),
])
def test_the_counter_sees_what_it_says(halting, expected):
    x = torch.rand(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    with CountWaits() as waits:
        halting(x, mask)
    assert waits.found == expected


# ------------------------------------------------------------------------------------------ 2. pretended GPU tensors


def pretended(batch, device="cuda"):
    """A batch of the same shapes and types; within a FakeTensorMode nothing is allocated."""
    return utils.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device), batch)


@EACH
@pytest.mark.parametrize("ranges", [False, True])
def test_a_step_runs_on_one_device_and_needs_no_value(flags, ranges):
    args, _, loader = prepare(flags, 1)
    batch = next(iter(loader))
    with FakeTensorMode():
        with torch.device("cuda"):  # for what is built; a tensor that is made later has to be put there
            network = train.build_model(args, ABOUT)
        if ranges:
            networks.quantize(network, 4, activation_bits=8)
        # A number on the CPU may meet tensors on a GPU; to write into it would be a copy to the host.
        assert {part.device.type for part in network.state_dict().values()} == {"cuda"}
        inputs, targets = pretended(batch)
        outputs = network(inputs)
        loss, _, metrics = train.loss_and_metrics(outputs, targets, 0.05)
        assert outputs.shape == (4, 10)
        assert {part.device.type for part in (outputs, loss, *metrics.values())} == {"cuda"}
        for parameter in network.parameters():  # in place of a backward pass
            parameter.grad = torch.empty_like(parameter)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        train.optimizer_step(network, utils.build_optimizer(network, args), scaler, 1.0, 1.0)
        network.eval()
        assert network(inputs).device.type == "cuda"
        if args.model == "attention":
            assert networks.attention_weights(network, inputs).shape == (4, 49)


def test_a_causal_block_runs_on_one_device_and_needs_no_value():
    with FakeTensorMode():
        with torch.device("cuda"):
            block = networks.Block(8, 2, causal=True)
            x, row, mask = torch.randn(4, 4, 8), torch.randn(9, 8), torch.ones(4, 4, dtype=torch.bool).tril()
            places = torch.arange(9)
        for y in (block(x), block(x, mask), block(x, mask.expand(4, 4, 4)), block(row, mask, True, places)):
            assert y.device.type == "cuda"


def test_pretended_tensors_raise_where_a_gpu_would_wait_and_where_devices_meet():
    args, _, loader = prepare("--model attention", 1)
    batch = next(iter(loader))
    with FakeTensorMode():
        with torch.device("cuda"):
            network = train.build_model(args, ABOUT)
        inputs, _ = pretended(batch)
        network(inputs)
        with pytest.raises(DynamicOutputShapeException):
            network(inputs[:3])
        with pytest.raises(DataDependentOutputException):
            inputs[0].sum().item()
        elsewhere, _ = pretended(batch, "cpu")
        with pytest.raises(Exception, match="cuda"):
            network((*inputs[:3], elsewhere[3]))


# ------------------------------------------------------------------------------------------ 3. backward without values


@EACH
def test_a_backward_pass_needs_no_value(flags):
    args, network, loader = prepare(flags, 1)
    network = network.to("meta")
    inputs, targets = pretended(next(iter(loader)), "meta")
    loss, _, _ = train.loss_and_metrics(network(inputs), targets, 0.05)
    loss.backward()
    for parameter in network.parameters():
        assert parameter.grad.device.type == "meta" and parameter.grad.shape == parameter.shape
