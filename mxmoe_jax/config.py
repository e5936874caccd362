"""What a layer computes (`MoEConfig`) and in which precision (`Recipe`).

Both are frozen and hashable, so that they can be static arguments of jit, and
every field is checked at construction. A recipe decides the numbers; a mesh
never does.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import groups, mxfp8, reference

Swiglu = reference.Swiglu
Precision = Literal["mxfp8", "bf16"]
Backend = Literal["auto", "mosaic", "xla"]
BACKENDS = ("auto", "mosaic", "xla")

_MATMULS = ("forward", "input_grad", "weight_grad")
_LEGS = ("dispatch", "combine", "combine_grad", "dispatch_grad")


def _one_of(owner: str, name: str, value: Any, allowed: tuple) -> None:
  if value not in allowed:
    raise ValueError(
        f"{owner}: {name} must be one of {allowed}; got {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
  """Which tensors are MXFP8 and which bf16.

  Attributes:
    forward: precision of both forward matmuls, "mxfp8" or "bf16".
    input_grad: of both input-gradient matmuls (dgrad).
    weight_grad: of both weight-gradient matmuls (wgrad); "bf16" dequantizes
      operands that exist in MXFP8 only.
    dispatch: x on its way to the experts. In MXFP8 a token is quantized once.
    combine: expert outputs on their way home. They feed a sum: bf16.
    combine_grad: dy on its way to the experts, quantized once per token.
    dispatch_grad: dx on its way home. It feeds a sum: bf16.
    rounding: scale rule, one of `mxfp8.RULES`.
    grad_dtype: fp8 type of gradients, "e4m3" or "e5m2". Activations and
      weights are e4m3.
    weight_block: "1x32", or "32x32": one copy of the weights serves forward
      and input gradient.
    save_preactivations: what of [gate | up] is kept for the backward pass:
      "bf16", "mxfp8", or "recompute" (one more matmul).
    save_hidden: what of SwiGLU's output is kept: "save" (in the precision
      that the weight gradient reads) or "recompute".
    hopper: on Hopper, "exact" MXFP8, or "folded": one scale per row, at the
      speed of fp8 matmuls.
  """

  forward: Precision = "mxfp8"
  input_grad: Precision = "mxfp8"
  weight_grad: Precision = "mxfp8"
  dispatch: Precision = "mxfp8"
  combine: Precision = "bf16"
  combine_grad: Precision = "mxfp8"
  dispatch_grad: Precision = "bf16"
  rounding: mxfp8.Rounding = "rceil"
  grad_dtype: Literal["e4m3", "e5m2"] = "e4m3"
  weight_block: mxfp8.Block = "1x32"
  save_preactivations: Literal["bf16", "mxfp8", "recompute"] = "bf16"
  save_hidden: Literal["save", "recompute"] = "save"
  hopper: Literal["exact", "folded"] = "exact"

  def __post_init__(self):
    for name in (*_MATMULS, *_LEGS):
      _one_of("Recipe", name, getattr(self, name), ("mxfp8", "bf16"))
    _one_of("Recipe", "rounding", self.rounding, mxfp8.RULES)
    _one_of("Recipe", "grad_dtype", self.grad_dtype, ("e4m3", "e5m2"))
    _one_of("Recipe", "weight_block", self.weight_block, mxfp8.BLOCKS)
    _one_of("Recipe", "save_preactivations", self.save_preactivations,
            ("bf16", "mxfp8", "recompute"))
    _one_of("Recipe", "save_hidden", self.save_hidden, ("save", "recompute"))
    _one_of("Recipe", "hopper", self.hopper, ("exact", "folded"))

  @classmethod
  def mxfp8(cls, **changes) -> "Recipe":
    """MXFP8 everywhere but on the two legs that feed sums (the default)."""
    return cls(**changes)

  @classmethod
  def mxfp8_bf16_wgrad(cls, **changes) -> "Recipe":
    """MXFP8 with weight gradients multiplied in bf16."""
    return cls(**{"weight_grad": "bf16", **changes})

  @classmethod
  def bf16(cls, **changes) -> "Recipe":
    """bf16 everywhere: the baseline."""
    everything = dict.fromkeys((*_MATMULS, *_LEGS), "bf16")
    return cls(**{**everything, **changes})

  @property
  def name(self) -> str:
    """The preset's name, or "custom" with the fields that differ from it."""
    for preset in (Recipe.mxfp8, Recipe.mxfp8_bf16_wgrad, Recipe.bf16):
      if self == preset():
        return preset.__name__
    default = Recipe()
    changed = [f"{f.name}={getattr(self, f.name)}"
               for f in dataclasses.fields(self)
               if getattr(self, f.name) != getattr(default, f.name)]
    return f"custom({', '.join(changed)})"

  @property
  def gradient_dtype(self) -> Any:
    """The fp8 dtype of gradients."""
    return mxfp8.E4M3 if self.grad_dtype == "e4m3" else mxfp8.E5M2

  @property
  def uses_mxfp8(self) -> bool:
    """Whether any tensor is quantized."""
    return any(getattr(self, name) == "mxfp8" for name in (*_MATMULS, *_LEGS))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
  """One mixture-of-experts layer.

  Attributes:
    d_model: width of a token, a multiple of 32 if anything is MXFP8.
    d_ff: width of one expert, likewise.
    num_experts: experts, over all devices.
    top_k: experts per token.
    score: router score, "softmax" over the experts or "sigmoid".
    renormalise: divide the chosen weights by their sum.
    num_groups: groups of experts for group-limited routing (DeepSeek-V3).
    groups_per_token: groups that one token may choose experts from.
    routed_scaling: factor on the combine weights, after renormalising.
    balance_bias: choose experts by score + bias (aux-loss-free balancing).
    aux_loss_coef: coefficient of the load-balancing loss (Switch form).
    z_loss_coef: coefficient of the router z-loss.
    d_ff_shared: width of the shared experts together; 0 for none.
    swiglu: the activation.
    bias: experts have biases (gate_up_bias, down_bias).
    forced_balance: ignore the scores' order and spread rows evenly over the
      experts; for benchmarks.
    expert_axis: mesh axis that experts are split over, or None.
    data_axes: mesh axes, beside the expert axis, that tokens are split over.
    fsdp_axis: one of data_axes that expert weights are split over too.
    buffer_factor: rows that a device has room for, as a multiple of its own
      tokens * top_k; None is the worst case: nothing is ever dropped.
    recipe: which tensors are MXFP8.
    backend: "auto", "mosaic" (our kernels) or "xla" (the plain-jnp reference).
    dtype: of activations between the steps; bfloat16.
    param_dtype: of freshly initialised parameters (the router is float32).

  Raises:
    ValueError: if a field is out of its range, or fields contradict.
  """

  d_model: int
  d_ff: int
  num_experts: int
  top_k: int
  score: Literal["softmax", "sigmoid"] = "softmax"
  renormalise: bool = True
  num_groups: int = 1
  groups_per_token: int = 1
  routed_scaling: float = 1.0
  balance_bias: bool = False
  aux_loss_coef: float = 0.0
  z_loss_coef: float = 0.0
  d_ff_shared: int = 0
  swiglu: Swiglu = Swiglu()
  bias: bool = False
  forced_balance: bool = False
  expert_axis: str | None = None
  data_axes: tuple[str, ...] = ()
  fsdp_axis: str | None = None
  buffer_factor: float | None = None
  recipe: Recipe = Recipe()
  backend: Backend = "auto"
  dtype: Any = jnp.bfloat16
  param_dtype: Any = jnp.bfloat16

  def __post_init__(self):
    if not isinstance(self.recipe, Recipe):
      raise TypeError(
          "MoEConfig: recipe must be a Recipe, such as Recipe.mxfp8(); got"
          f" {self.recipe!r}.")
    _check_sizes(self)
    _check_routing(self)
    _check_axes(self)
    _one_of("MoEConfig", "backend", self.backend, BACKENDS)
    if jnp.dtype(self.dtype) != jnp.bfloat16:
      raise ValueError(
          "MoEConfig: dtype must be bfloat16 (rows travel in bf16 or MXFP8);"
          f" got {jnp.dtype(self.dtype).name}. float32 inputs are accepted and"
          " rounded.")
    if not jnp.issubdtype(self.param_dtype, jnp.floating):
      raise ValueError(
          "MoEConfig: param_dtype must be a floating dtype; got"
          f" {self.param_dtype}.")

  def buffer_rows(self, tokens: int, ep: int = 1) -> int:
    """Rows of the buffer that one device's experts work on.

    Args:
      tokens: tokens per device.
      ep: devices along the expert axis.
    """
    spare = self.num_experts // ep * (groups.ROW_ALIGN - 1)
    return groups.round_up(self.real_rows(tokens, ep) + spare,
                           groups.ROW_ALIGN)

  def real_rows(self, tokens: int, ep: int = 1) -> int:
    """Rows, alignment apart, that one device has room for."""
    worst = ep * min(self.top_k, self.num_experts // ep) * tokens
    if self.buffer_factor is None:
      return worst  # an integer throughout: no row is lost to rounding
    return int(min(self.buffer_factor * tokens * self.top_k, worst))


def _check_sizes(c: MoEConfig) -> None:
  for name in ("d_model", "d_ff", "num_experts", "top_k"):
    value = getattr(c, name)
    if not isinstance(value, int) or value < 1:
      raise ValueError(
          f"MoEConfig: {name} must be a positive integer; got {value!r}.")
  if c.top_k > c.num_experts:
    raise ValueError(
        "MoEConfig: top_k must not exceed num_experts (a token goes to"
        f" distinct experts); got top_k={c.top_k},"
        f" num_experts={c.num_experts}.")
  if c.d_ff_shared < 0:
    raise ValueError(
        f"MoEConfig: d_ff_shared must be 0 or more; got {c.d_ff_shared}.")
  if c.recipe.uses_mxfp8:
    for name in ("d_model", "d_ff"):
      value = getattr(c, name)
      if value % mxfp8.BLOCK:
        raise ValueError(
            f"MoEConfig: {name} must be a multiple of {mxfp8.BLOCK} under an"
            f" MXFP8 recipe (one scale per {mxfp8.BLOCK} values); got"
            f" {name}={value}. Use {groups.round_up(value, mxfp8.BLOCK)}, or"
            " Recipe.bf16().")
  if c.buffer_factor is not None and not c.buffer_factor > 0:
    raise ValueError(
        "MoEConfig: buffer_factor must be positive, or None to drop nothing;"
        f" got {c.buffer_factor}.")


def _check_routing(c: MoEConfig) -> None:
  _one_of("MoEConfig", "score", c.score, ("softmax", "sigmoid"))
  if c.num_groups < 1 or c.num_experts % c.num_groups:
    raise ValueError(
        "MoEConfig: num_groups must divide num_experts; got"
        f" num_groups={c.num_groups}, num_experts={c.num_experts}.")
  if not 1 <= c.groups_per_token <= c.num_groups:
    raise ValueError(
        "MoEConfig: groups_per_token must lie in 1..num_groups; got"
        f" groups_per_token={c.groups_per_token},"
        f" num_groups={c.num_groups}.")
  reachable = c.groups_per_token * (c.num_experts // c.num_groups)
  if c.top_k > reachable:
    raise ValueError(
        "MoEConfig: top_k must not exceed the experts of groups_per_token"
        f" groups; got top_k={c.top_k}, but {c.groups_per_token} groups hold"
        f" {reachable} experts.")
  for name in ("aux_loss_coef", "z_loss_coef"):
    if getattr(c, name) < 0:
      raise ValueError(
          f"MoEConfig: {name} must not be negative; got {getattr(c, name)}.")


def _check_axes(c: MoEConfig) -> None:
  if not isinstance(c.data_axes, tuple):
    raise TypeError(
        "MoEConfig: data_axes must be a tuple of mesh axis names, such as"
        f" ('data',); got {c.data_axes!r}.")
  if c.expert_axis is not None and c.expert_axis in c.data_axes:
    raise ValueError(
        "MoEConfig: data_axes lists the axes beside the expert axis; got"
        f" expert_axis={c.expert_axis!r} in data_axes={c.data_axes}.")
  if c.fsdp_axis is not None and c.fsdp_axis not in c.data_axes:
    raise ValueError(
        "MoEConfig: fsdp_axis must be one of data_axes; got"
        f" fsdp_axis={c.fsdp_axis!r}, data_axes={c.data_axes}.")
