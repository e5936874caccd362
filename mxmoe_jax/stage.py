"""What every step of one device shares: operations, options, precisions.

`Stage.read` is the one place where an array gets the form that a matmul reads:
a view that exists already, or one quantized (or dequantized) on the spot.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import operands
from mxmoe_jax import sharding as sharding_lib
from pallas_kernels import mxfp8, reference, wire

MxArray = mxfp8.MxArray
MoEConfig = config_lib.MoEConfig
Recipe = config_lib.Recipe
Views = reference.Views


@dataclasses.dataclass(frozen=True)
class Stage:
  """What every step of one device needs: operations and options.

  Attributes:
    ops: the operations of the backend.
    config: the layer.
    sharding: the mesh and its axes, or None on one device.
    folded: whether rows and weights get one scale each (`reference.fold`), for
      the fast matmul of Hopper.
  """

  ops: backend_lib.Ops
  config: MoEConfig
  sharding: sharding_lib.Sharding | None = None
  folded: bool = False

  @property
  def recipe(self) -> Recipe:
    """The recipe of the layer."""
    return self.config.recipe

  @property
  def expert_axis(self) -> str | None:
    """Mesh axis of the exchange, None on one device."""
    return self.sharding.expert_axis if self.sharding else None

  @property
  def fsdp_axis(self) -> str | None:
    """Mesh axis that axis 1 of the expert weights is split over."""
    return self.sharding.fsdp_axis if self.sharding else None

  def folds(self, precision: str) -> bool:
    """Whether rows for a matmul of this precision are folded."""
    return self.folded and precision == "mxfp8"

  def sum_data(self, x: jax.Array) -> jax.Array:
    """The sum over the data axes."""
    axes = self.sharding.data_axes if self.sharding else ()
    return lax.psum(x, axes) if axes else x

  def reduce_gradients(self, grads: dict[str, jax.Array],
                       params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """float32 gradients summed over the data axes, shaped as params."""
    return {name: sharding_lib.reduce_gradient(grads[name], w, self.sharding)
            for name, w in params.items()}

  def read(self, x: Views, axis: int, precision: str,
           grad: bool = False) -> Any:
    """The form of x that a matmul contracts along `axis`.

    Args:
      x: the forms that there are.
      axis: -1, or -2 for a weight gradient.
      precision: "mxfp8" or "bf16".
      grad: whether x is a gradient, if it has to be quantized here.
    """
    mx = x.rows if axis == -1 else x.columns
    if precision == "mxfp8" and mx is not None:
      return mx
    found = next(v for v in (x.plain, x.rows, x.columns) if v is not None)
    dtype = self.recipe.gradient_dtype if grad else mxfp8.E4M3
    form = operands.read_form(self.ops, axis, self.folded)
    return operands.operand(found, axis, precision, self.ops, self.recipe,
                            dtype, form)

  def numbers(self, x: Views) -> jax.Array:
    """x in float32."""
    plain: Any = self.read(x, -1, "bf16")
    return plain.astype(jnp.float32)

  def quantize_leg(self, x: jax.Array, precision: str,
                   grad: bool = False) -> jax.Array | MxArray:
    """Tokens or rows in the precision that a wire leg carries.

    Scales are linear and rows not folded: `take_rows` and `pack` fold.
    """
    dtype = self.recipe.gradient_dtype if grad else mxfp8.E4M3
    return operands.operand(x, -1, precision, self.ops, self.recipe, dtype)

  def wanted(self, rows: str | None, columns: str | None,
             plain: bool = False, kept: bool = False) -> dict[str, Any]:
    """Options of the `views` that two readers of given precisions need.

    Args:
      rows: precision of the matmul that reads the rows, or None.
      columns: of the one that reads the columns, or None.
      plain: whether the numbers themselves are read.
      kept: the columns are kept for the backward pass. On a mesh they then
        leave the shard_map, which joins devices along the rows: the second
        axis of blocked scales, so they are linear.
    """
    layouts = [operands.read_form(self.ops, axis).layout for axis in (-1, -2)]
    if kept and self.sharding is not None:
      layouts[1] = "linear"
    return dict(rows=layouts[0] if rows == "mxfp8" else None,
                columns=layouts[1] if columns == "mxfp8" else None,
                plain=plain or "bf16" in (rows, columns),
                folded=rows is not None and self.folds(rows))


def arrived(x: jax.Array | MxArray | wire.WireRows, stage: Stage,
            grad: bool = False) -> Views:
  """Rows as they came over the wire, in the forms that matmuls read.

  MXFP8 rows stay as they are; bf16 rows are quantized both ways in one read.

  Args:
    x: [R, D] MxArray, rows on the wire, or bf16.
    stage: operations and options.
    grad: dy on its way back, rather than x.
  """
  recipe = stage.recipe
  if isinstance(x, MxArray | wire.WireRows):
    return Views(rows=x)
  matmul_reads = recipe.input_grad if grad else recipe.forward
  dtype = recipe.gradient_dtype if grad else mxfp8.E4M3
  if {matmul_reads, recipe.weight_grad} == {"bf16"}:
    return Views(plain=x)
  forms = stage.wanted(matmul_reads, recipe.weight_grad, kept=not grad)
  return stage.ops.views(x, rounding=recipe.rounding, dtype=dtype, **forms)


def make_stage(config: MoEConfig, sharding: sharding_lib.Sharding | None,
               device: Any = None,
               listen: backend_lib.Listener | None = None) -> Stage:
  """The stage of a layer on the devices it runs on.

  Args:
    config: the layer.
    sharding: of the layer, or None.
    device: to run on; default is the mesh's first.
    listen: as for `backend.select`.

  Raises:
    NotImplementedError: the backend cannot run there, or cannot fold there.
  """
  device = device or sharding_lib.first_device(sharding)
  ops = backend_lib.select(config.backend, device, listen)
  folded = folds_on(config, device)
  return Stage(ops, config, sharding, folded)


def folds_on(config: MoEConfig, device: Any = None) -> bool:
  """Whether a layer folds its rows and weights on a device: only on Hopper.

  Raises:
    NotImplementedError: it should, but its weights cannot be folded.
  """
  capability = backend_lib.device_capability(device)
  if (config.recipe.hopper != "folded"
      or backend_lib.generation(capability) != "hopper"):
    return False
  instead = "Use hopper='exact', the default."
  if config.recipe.weight_block != "1x32":
    raise NotImplementedError(
        "Recipe(hopper='folded'): a weight has one scale per output channel,"
        f" so weight_block must be '1x32'; got {config.recipe.weight_block!r}."
        f" {instead}")
  if config.fsdp_axis is not None:
    raise NotImplementedError(
        "Recipe(hopper='folded'): weights that are split over fsdp_axis="
        f"{config.fsdp_axis!r} are quantized where they lie, and one scale per"
        f" output channel needs them whole. {instead}")
  return True
