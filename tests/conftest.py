"""What has to be settled before torch is imported."""

import os

# Threads of OpenMP that wait for work do so by spinning. Beside another busy program that takes the cores from those
# that have work: a test of 2 s then takes 20. Passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_finish(session):
    """Starts the server of processes beside the first tests: it imports torch, which takes seconds."""
    from multiprocessing import get_all_start_methods

    import helpers  # noqa: F401: says what the server imports

    if session.items and "forkserver" in get_all_start_methods():
        from multiprocessing import forkserver

        forkserver.ensure_running()
