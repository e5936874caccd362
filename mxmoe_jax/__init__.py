"""MXFP8 mixture-of-experts training for JAX.

    from mxmoe_jax import MoE, MoEConfig, Recipe

`layer.py` holds the whole algorithm; `explain` says what would run.
"""

from mxmoe_jax.config import MoEConfig
from mxmoe_jax.config import Recipe
from mxmoe_jax.config import Swiglu
from mxmoe_jax.experts import QuantizedWeights
from mxmoe_jax.experts import quantize_weights
from mxmoe_jax.explaining import Explanation
from mxmoe_jax.explaining import explain
from mxmoe_jax.layer import MoEStats
from mxmoe_jax.layer import moe
from mxmoe_jax.matmul import dequantize
from mxmoe_jax.matmul import grouped_matmul
from mxmoe_jax.matmul import quantize
from mxmoe_jax.module import BalanceBias
from mxmoe_jax.module import MoE
from mxmoe_jax.module import to_linen
from mxmoe_jax.routing import update_balance_bias

__all__ = [
    "BalanceBias", "Explanation", "MoE", "MoEConfig", "MoEStats",
    "QuantizedWeights", "Recipe", "Swiglu", "dequantize", "explain",
    "grouped_matmul", "moe", "quantize", "quantize_weights", "to_linen",
    "update_balance_bias",
]
