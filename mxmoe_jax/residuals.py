"""What the forward pass keeps for the backward pass, by recipe.

    rows    MXFP8 as they came, in their wire rows; else what wgrad reads
    pre     [gate | up] in bf16 or MXFP8, or nothing: one more matmul
    hidden  what wgrad reads, or nothing: SwiGLU again

Never an expert output, never a second copy of the weights. Bytes a row for
DeepSeek-V3's widths (7168, 2048): 26.6 kB in bf16, 17.7 kB in MXFP8.
"""

import dataclasses
from typing import Any

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from mxmoe_jax import experts as experts_lib
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib
from pallas_kernels import groups, mxfp8, reference, wire

MxArray = mxfp8.MxArray
Views = reference.Views


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
  """Kept from forward to backward, beside the inputs themselves.

  Attributes:
    rows: [R, D], the form of the rows that wgrad reads (or comes from).
    pre: [R, 2 F] bf16 or MxArray pre-activations, or None.
    hidden: [R, F], the form of weighted hidden that wgrad reads, or None.
    row_weights: [R] float32 combine weights.
    counts: [1, ep, E] int32 rows of every device for every expert.
  """

  rows: Views
  pre: jax.Array | MxArray | None
  hidden: Views | None
  row_weights: jax.Array
  counts: jax.Array


def keeps_hidden(stage: stage_lib.Stage) -> bool:
  """Whether hidden is kept, rather than computed again."""
  return stage.recipe.save_hidden == "save"


def keep(rows: Views, pre: jax.Array, hidden: Views, row_weights: jax.Array,
         counts: jax.Array, stage: stage_lib.Stage) -> Residuals:
  """Chooses the kept form of each array; names them for remat policies."""
  again = stage.recipe.save_preactivations == "recompute"
  kept = Residuals(
      _one_form(rows, stage, forward_too=again), _keep_pre(pre, stage),
      _one_form(hidden, stage) if keeps_hidden(stage) else None, row_weights,
      counts[None])
  named = {f.name: _name(f"moe_{f.name}", getattr(kept, f.name))
           for f in dataclasses.fields(kept)}
  return Residuals(**named)


def _name(name: str, tree: Any) -> Any:
  """`checkpoint_name` on each leaf, fp8 data included."""
  return jax.tree.map(lambda x: ad_checkpoint.checkpoint_name(x, name), tree)


def _one_form(x: Views, stage: stage_lib.Stage, *,
              forward_too: bool = False) -> Views:
  """The one form that is kept: MXFP8 if there is one, bf16 otherwise.

  Args:
    x: the forms that the forward pass had.
    stage: operations and options.
    forward_too: the forward matmul is run again, so its form is kept.
  """
  recipe = stage.recipe
  if forward_too and x.rows is None:
    return Views(plain=x.plain)
  if recipe.weight_grad == "mxfp8" and x.columns is not None and (
      not forward_too):
    return Views(columns=x.columns)
  return Views(rows=x.rows) if x.rows is not None else Views(plain=x.plain)


def _keep_pre(pre: jax.Array, stage: stage_lib.Stage):
  kind = stage.recipe.save_preactivations
  if kind == "recompute":
    return None
  return stage.quantize_leg(pre, kind)


def restore(kept: Residuals, params: dict[str, jax.Array],
            quantized: weights_lib.QuantizedWeights,
            layout: groups.GroupLayout, stage: stage_lib.Stage
            ) -> tuple[jax.Array | MxArray, Views]:
  """(pre, hidden): what was kept, or computed again from what was."""
  pre, hidden = kept.pre, kept.hidden
  if pre is None:
    pre = experts_lib.up(kept.rows, params, quantized, layout, stage)
  if hidden is None:
    hidden = experts_lib.activate(pre, kept.row_weights, params, layout,
                                  stage, rows=False, columns=True)
  return pre, hidden


def over_wire(kept: Residuals) -> Residuals:
  """Abstract residuals of one device as they are where a wire lies between."""
  mx = kept.rows.rows
  if not isinstance(mx, MxArray):
    return kept
  rows, width = mx.shape
  packed: Any = jax.ShapeDtypeStruct((rows, wire.stride(width, "mxfp8")),
                                     jnp.uint8)
  there = wire.WireRows(packed, width, mx.data.dtype, mx.folded)
  return dataclasses.replace(kept, rows=Views(rows=there))


def bytes_per_row(kept: Residuals) -> float:
  """Bytes kept per row of the buffer, exact; takes abstract arrays too."""
  arrays = (kept.rows, kept.pre, kept.hidden, kept.row_weights)
  total = sum(leaf.size * leaf.dtype.itemsize
              for leaf in jax.tree.leaves(arrays))
  return total / kept.row_weights.shape[0]
