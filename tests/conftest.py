"""What every test process needs before jax is imported, and nothing else.

* ``JAX_PLATFORMS=cpu``: the suite never touches a GPU, and without it jax looks
  for one for tens of seconds when the ``aot`` extra is installed.
* Eight host devices stand in for GPUs in the mesh tests.
* ``NPROC=32``: XLA:CPU sizes its thread pool by it. A collective parks one
  thread a device, so with fewer threads than devices in flight it deadlocks;
  the machine's core count (2 in CI) is not enough.
* Collectives get minutes, not XLA's 40 seconds, before they abort the process:
  a slow machine is not a deadlock. ``pytest-timeout`` ends real ones.

Child processes inherit these; a test that starts one sets what it needs itself.
"""

import os
import sys

import hypothesis

if "jax" in sys.modules:
  raise RuntimeError(
    "tests/conftest.py must run before jax is imported: NPROC, JAX_PLATFORMS "
    "and XLA_FLAGS are read at import; a pytest plugin or a -p option already "
    "imported jax. Remove it."
  )

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    "--xla_cpu_collective_timeout_seconds=240",
  ]
).strip()

# The first example compiles, so a deadline per example would only measure XLA.
# Derandomized: the same examples on every run, in CI as at a desk.
hypothesis.settings.register_profile(
  "suite", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("suite")
