"""What has to be settled before torch is imported."""

import multiprocessing
import os
from multiprocessing import forkserver

import pytest

# Threads of OpenMP that wait for work do so by spinning. Beside another busy program that takes the cores from those
# that have work: a test of 2 s then takes 20. Passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Whoever runs the tests inside of a job has some of these, and is no rank.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# Bits, ranks and defaults are tested on the CPU, also where there are GPUs. GPU_TESTS=1 shows them to tests/test_gpu.py.
if "GPU_TESTS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, which is the current one, and the made data set in the place of MNIST. Some files have their own."""
    import helpers

    monkeypatch.chdir(tmp_path)
    helpers.small_task(monkeypatch)
    return tmp_path


@pytest.fixture(autouse=True)
def cross_entropy(monkeypatch):
    """The numbers that tests expect are those of cross-entropy and accuracy, whatever a project of your own minimizes."""
    import helpers

    if helpers.has_another_loss():
        monkeypatch.setattr(helpers.train, "loss_and_metrics", helpers.small_loss)
        monkeypatch.setattr(helpers.train, "quality", helpers.small_quality)


def pytest_sessionstart(session):
    """Starts the server that processes are forked from (helpers.start), beside the collection of the tests.

    It imports torch and what is imported with the first optimizer, which takes seconds.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        forkserver.set_forkserver_preload(["torch", "torch._dynamo", "torchvision.datasets", "pytest"])
        forkserver.ensure_running()
