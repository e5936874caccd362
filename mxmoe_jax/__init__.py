"""MXFP8 mixture-of-experts training for JAX.

    from mxmoe_jax import MoE, MoEConfig, Recipe

`layer.py` holds the whole algorithm; `explain` says what would run.
"""

from mxmoe_jax.config import MoEConfig, Recipe, Swiglu
from mxmoe_jax.explaining import Explanation, explain
from mxmoe_jax.layer import MoEStats, moe
from mxmoe_jax.matmul import dequantize, grouped_matmul, quantize
from mxmoe_jax.module import BalanceBias, MoE, to_linen
from mxmoe_jax.routing import update_balance_bias
from mxmoe_jax.weights import QuantizedWeights, quantize_weights

__all__ = [
    "BalanceBias", "Explanation", "MoE", "MoEConfig", "MoEStats",
    "QuantizedWeights", "Recipe", "Swiglu", "dequantize", "explain",
    "grouped_matmul", "moe", "quantize", "quantize_weights", "to_linen",
    "update_balance_bias",
]
