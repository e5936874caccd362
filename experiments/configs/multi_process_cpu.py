"""The same training as expert_parallel_cpu, in two processes of four devices.

The command starts both processes on this machine; they find each other through
jax.distributed, as processes on several machines would. The losses are those
of one process with eight devices, but for the order of float32 sums.
"""

import dataclasses

from experiments.configs import expert_parallel_cpu
from experiments.experiment import Experiment


def experiment() -> Experiment:
  """Returns expert_parallel_cpu on two processes."""
  whole = expert_parallel_cpu.experiment()
  return dataclasses.replace(
    whole,
    name="multi_process_cpu",
    mesh=dataclasses.replace(whole.mesh, processes=2),
  )
