"""What has to be settled before torch is imported."""

import os

# Threads of OpenMP that wait for work do so by spinning. Beside another busy program that takes the cores from those
# that have work: a test of 2 s then takes 20. Passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
