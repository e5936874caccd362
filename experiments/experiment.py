"""What one experiment is: frozen dataclasses, validated when they are built.

A config script defines ``def experiment() -> Experiment``. Everything that
decides the numbers of a run is a field here, so that the resolved experiment,
saved with each result, is enough to repeat it.

Plain Python only: a config can be read and compared without jax.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any, Literal

RecipeName = Literal["bf16", "mxfp8", "mxfp8_bf16_wgrad", "folded"]
FloatName = Literal["bfloat16", "float32"]

# One token is one byte of text.
VOCABULARY = 256

# Fields that may differ between the runs that share an output folder: they
# decide when work is saved, never what is computed.
BOOKKEEPING = frozenset({"checkpoint_every", "checkpoints_kept"})


def _require(holds: bool, message: str) -> None:
  if not holds:
    raise ValueError(message)


def _at_least(owner: object, minimum: float, *names: str) -> None:
  """Requires every named field of `owner` to be at least `minimum`."""
  for name in names:
    value = getattr(owner, name)
    _require(
      value >= minimum,
      f"{type(owner).__name__}.{name} must be at least {minimum}; got {value}.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
  """A decoder-only transformer whose every feed-forward is an MoE layer.

  Attributes:
    d_model: width of the residual stream, a multiple of 32.
    num_layers: transformer blocks.
    num_heads: attention heads; `d_model / num_heads` is even, for RoPE.
    d_ff: width of one expert, a multiple of 32.
    num_experts: experts per layer.
    top_k: experts per token.
    score: how router logits become scores.
    renormalise: whether the chosen scores are scaled to sum to 1.
    routed_scaling: factor on the combine weights.
    num_groups: expert groups of group-limited routing.
    groups_per_token: groups a token may choose from.
    d_ff_shared: width of the experts that every token visits, together.
    balance_bias: aux-free balancing, moved by `OptimizerConfig.balance_rate`.
    aux_loss_coef: weight of the balance loss.
    z_loss_coef: weight of the router z-loss.
    buffer_factor: rows a device makes room for, as a multiple of its share;
      None drops nothing.
    tied_head: whether the output head is the transposed embedding.
    rope_base: base of the rotary frequencies.
    remat: whether a block is recomputed in backward rather than saved.
    scan_layers: whether one compiled block runs for all layers, which compiles
      faster; it computes the same but for roundings that XLA leaves out.
    param_dtype: dtype of master parameters.
    backend: which implementation runs the experts.
  """

  d_model: int = 128
  num_layers: int = 2
  num_heads: int = 4
  d_ff: int = 128
  num_experts: int = 8
  top_k: int = 2
  score: Literal["softmax", "sigmoid"] = "softmax"
  renormalise: bool = True
  routed_scaling: float = 1.0
  num_groups: int = 1
  groups_per_token: int = 1
  d_ff_shared: int = 0
  balance_bias: bool = False
  aux_loss_coef: float = 0.01
  z_loss_coef: float = 0.0
  buffer_factor: float | None = None
  tied_head: bool = False
  rope_base: float = 10_000.0
  remat: bool = False
  scan_layers: bool = False
  param_dtype: FloatName = "float32"
  backend: Literal["auto", "mosaic", "xla"] = "auto"

  def __post_init__(self) -> None:
    _at_least(self, 1, "d_model", "num_layers", "num_heads", "d_ff", "top_k")
    for name in ("d_model", "d_ff"):
      width = getattr(self, name)
      _require(
        width % 32 == 0,
        f"ModelConfig.{name} must be a multiple of 32 (one MXFP8 scale per 32"
        f" values); got {width}. The next one is {-(-width // 32) * 32}.",
      )
    _require(
      self.d_model % (2 * self.num_heads) == 0,
      "ModelConfig: d_model must be a multiple of 2 * num_heads (RoPE turns"
      f" pairs inside a head); got d_model={self.d_model},"
      f" num_heads={self.num_heads}.",
    )
    _require(
      self.top_k <= self.num_experts,
      "ModelConfig: top_k must not exceed num_experts; got"
      f" top_k={self.top_k}, num_experts={self.num_experts}.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
  """Bytes of source files: Python's standard library, and packages if named.

  Attributes:
    packages: installed packages whose source files are read too.
    sequence_length: tokens the model sees; a window holds one byte more.
    batch_size: windows in a step, over all devices and processes.
    heldout_every: one file in this many is kept out of training.
    heldout_batches: batches of held-out text read at the end of a run.
  """

  packages: tuple[str, ...] = ()
  sequence_length: int = 128
  batch_size: int = 16
  heldout_every: int = 20
  heldout_batches: int = 4

  def __post_init__(self) -> None:
    _at_least(self, 1, "sequence_length", "batch_size", "heldout_batches")
    _at_least(self, 2, "heldout_every")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW with linear warm-up and cosine decay.

  Attributes:
    learning_rate: peak, reached after `warmup_steps`.
    warmup_steps: steps of linear warm-up, at most half of all steps.
    final_fraction: last learning rate as a fraction of the peak.
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    weight_decay: decoupled decay of matrices; vectors are not decayed.
    max_grad_norm: global norm above which gradients are scaled down.
    balance_rate: step of the balance bias, once per optimizer step.
  """

  learning_rate: float = 3e-3
  warmup_steps: int = 20
  final_fraction: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.95
  weight_decay: float = 0.1
  max_grad_norm: float = 1.0
  balance_rate: float = 1e-3

  def __post_init__(self) -> None:
    _at_least(self, 0, "warmup_steps", "weight_decay", "balance_rate")
    for name in ("learning_rate", "max_grad_norm"):
      value = getattr(self, name)
      _require(
        value > 0, f"OptimizerConfig.{name} must be positive; got {value}."
      )
    for name in ("beta1", "beta2"):
      value = getattr(self, name)
      _require(
        0 <= value < 1,
        f"OptimizerConfig.{name} must be in [0, 1); got {value}.",
      )
    _require(
      0 <= self.final_fraction <= 1,
      "OptimizerConfig.final_fraction must be in [0, 1]; got"
      f" {self.final_fraction}.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
  """Devices along each mesh axis; 1 x 1 runs without a mesh.

  Attributes:
    data: replicas of the experts; tokens are split over them.
    expert: devices that share the experts; tokens are split over them too.
    processes: processes that share the mesh. The command starts them on this
      machine, unless `--distributed` says that a cluster has.
    fsdp: whether expert weights and their moments are split over the data axis
      too, and gathered when they are used.
  """

  data: int = 1
  expert: int = 1
  processes: int = 1
  fsdp: bool = False

  def __post_init__(self) -> None:
    _at_least(self, 1, "data", "expert", "processes")
    _require(
      self.size % self.processes == 0,
      "MeshConfig: data * expert must be a multiple of processes; got"
      f" data={self.data}, expert={self.expert}, processes={self.processes}.",
    )

  @property
  def size(self) -> int:
    """Devices in the mesh."""
    return self.data * self.expert


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
  """One or several recipes trained on the same data from the same start.

  Attributes:
    name: names the default output folder.
    recipes: names of `mxmoe_jax.Recipe` presets, run one after another;
      "folded" is MXFP8 with Hopper's folded rows and weights.
    seed: decides the initial parameters and the order of the data.
    steps: optimizer steps of each recipe.
    checkpoint_every: steps between checkpoints; 0 saves none.
    checkpoints_kept: newest checkpoints kept of each recipe.
    model: the transformer.
    data: the text.
    optimizer: the optimizer.
    mesh: devices along each mesh axis.
  """

  name: str
  recipes: tuple[RecipeName, ...] = ("bf16", "mxfp8")
  seed: int = 0
  steps: int = 100
  checkpoint_every: int = 0
  checkpoints_kept: int = 2
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  mesh: MeshConfig = MeshConfig()

  def __post_init__(self) -> None:
    _require(
      bool(self.name) and "/" not in self.name,
      f"Experiment.name must be a folder name; got {self.name!r}.",
    )
    _require(
      len(self.recipes) > 0 and len(set(self.recipes)) == len(self.recipes),
      "Experiment.recipes must name at least one recipe and none twice; got"
      f" {self.recipes}.",
    )
    _at_least(self, 1, "steps", "checkpoints_kept")
    _at_least(self, 0, "seed", "checkpoint_every")
    _require(
      self.data.batch_size % self.mesh.size == 0,
      "Experiment: data.batch_size must be a multiple of the mesh's devices;"
      f" got batch_size={self.data.batch_size},"
      f" mesh={self.mesh.data} x {self.mesh.expert}.",
    )
    _require(
      self.model.num_experts % self.mesh.expert == 0,
      "Experiment: model.num_experts must be a multiple of mesh.expert; got"
      f" num_experts={self.model.num_experts}, expert={self.mesh.expert}.",
    )


def load(path: pathlib.Path) -> Experiment:
  """Runs a config script and returns its experiment.

  Args:
    path: a Python file that defines ``def experiment() -> Experiment``.

  Returns:
    The experiment.

  Raises:
    ValueError: the file does not exist, or defines no such function.
  """
  form = "A config script defines `def experiment() -> Experiment`."
  if not path.is_file():
    raise ValueError(f"{path} is not a file. {form}")
  spec = importlib.util.spec_from_file_location("experiment_config", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"{path} is not a Python file (.py). {form}")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  build = getattr(module, "experiment", None)
  if not callable(build):
    raise ValueError(f"{path} defines no function `experiment`. {form}")
  built = build()
  if not isinstance(built, Experiment):
    raise ValueError(
      f"experiment() of {path} returned a {type(built).__name__}. {form}"
    )
  return built


def to_dict(experiment: Experiment) -> dict[str, Any]:
  """Returns the experiment as JSON values; nested configs are dicts."""
  fields = dataclasses.asdict(experiment)
  fields["data"]["packages"] = list(experiment.data.packages)
  return fields | {"recipes": list(experiment.recipes)}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested dicts: ``{"model": {"d_ff": 32}}`` gives model.d_ff."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, dict):
      flat |= flatten(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat


def differences(
  saved: dict[str, Any], asked: dict[str, Any]
) -> tuple[str, ...]:
  """Says, one line a field, how two configs differ where it matters.

  Args:
    saved: a config as `to_dict` made it, found on disk.
    asked: the config of this run, in the same form.

  Returns:
    Lines such as ``model.d_ff: saved 128, asked 256``; empty when both
    configs compute the same numbers.
  """
  # A config saved before these fields existed computed what they leave alone.
  younger = {"data.packages": [], "model.scan_layers": False}
  old, new = younger | flatten(saved), younger | flatten(asked)
  absent = "nothing"
  return tuple(
    f"{name}: saved {old.get(name, absent)}, asked {new.get(name, absent)}"
    for name in sorted(old.keys() | new.keys())
    if name not in BOOKKEEPING
    and old.get(name, absent) != new.get(name, absent)
  )
