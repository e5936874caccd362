"""What the forward pass keeps for the backward pass, by recipe.

    rows    MXFP8 as they came over the wire, else what wgrad reads
    pre     [gate | up] in bf16 or MXFP8, or nothing: one more matmul
    hidden  what wgrad reads, or nothing: SwiGLU again

Never an expert output, never a second copy of the weights. Bytes a row for
DeepSeek-V3's widths (7168, 2048): 26.6 kB in bf16, 17.7 kB in MXFP8.
"""

import dataclasses
from typing import Any

import jax
from jax import ad_checkpoint

from mxmoe_jax import config as config_lib
from mxmoe_jax import experts as experts_lib
from pallas_kernels import groups, mxfp8

MxArray = mxfp8.MxArray
Recipe = config_lib.Recipe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
  """Kept from forward to backward, beside the inputs themselves.

  Attributes:
    rows: [R, D] MxArray or bf16, the rows that the experts saw.
    pre: [R, 2 F] bf16 or MxArray pre-activations, or None.
    hidden: [R, F] MxArray or bf16, weighted, or None.
    row_weights: [R] float32 combine weights.
    counts: [1, ep, E] int32 rows of every device for every expert.
  """

  rows: Any
  pre: Any
  hidden: Any
  row_weights: jax.Array
  counts: jax.Array


def keep(rows, pre, hidden, row_weights, counts,
         stage: experts_lib.Stage) -> Residuals:
  """Chooses the kept form of each array; names them for remat policies."""
  recipe = stage.recipe
  kept = Residuals(_keep_rows(rows, recipe, stage),
                   _keep_pre(pre, recipe, stage),
                   _keep_hidden(hidden, recipe, stage), row_weights,
                   counts[None])
  named = {f.name: _name(f"moe_{f.name}", getattr(kept, f.name))
           for f in dataclasses.fields(kept)}
  return Residuals(**named)


def _name(name: str, tree: Any) -> Any:
  """`checkpoint_name` on each leaf, fp8 data included."""
  return jax.tree.map(lambda x: ad_checkpoint.checkpoint_name(x, name), tree)


def _keep_rows(rows, recipe: Recipe, stage: experts_lib.Stage):
  """MXFP8 rows as they are; bf16 rows as wgrad reads them."""
  again = recipe.save_preactivations == "recompute"  # forward reads them too
  if isinstance(rows, MxArray) or again:
    return rows
  return stage.operand(rows, -2, recipe.weight_grad)


def _keep_pre(pre, recipe: Recipe, stage: experts_lib.Stage):
  if recipe.save_preactivations == "recompute":
    return None
  return stage.operand(pre, -1, recipe.save_preactivations)


def _keep_hidden(hidden, recipe: Recipe, stage: experts_lib.Stage):
  """32x1 columns for an MXFP8 wgrad, the forward's operand for a bf16 one."""
  if recipe.save_hidden == "recompute":
    return None
  if recipe.weight_grad == "mxfp8":
    return stage.operand(hidden, -2, "mxfp8")
  return stage.operand(hidden, -1, recipe.forward)


def restore(kept: Residuals, params: dict[str, jax.Array],
            quantized: experts_lib.QuantizedWeights,
            layout: groups.GroupLayout, stage: experts_lib.Stage
            ) -> tuple[Any, Any]:
  """(pre, hidden): what was kept, or computed again from what was."""
  pre, hidden = kept.pre, kept.hidden
  if pre is None:
    pre = experts_lib.up(kept.rows, params, quantized, layout, stage)
  if hidden is None:
    hidden = experts_lib.activate(pre, kept.row_weights, params, layout,
                                  stage)
  return pre, hidden


def bytes_per_row(kept: Residuals) -> float:
  """Bytes kept per row of the buffer, exact; takes abstract arrays too."""
  arrays = (kept.rows, kept.pre, kept.hidden, kept.row_weights)
  total = sum(leaf.size * leaf.dtype.itemsize
              for leaf in jax.tree.leaves(arrays))
  return total / kept.row_weights.shape[0]
