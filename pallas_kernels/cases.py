"""Named shapes and group patterns, shared by tests, benchmarks and bring-up.

One list, so that a benchmark's shape is a tested shape and a bug report can
name its case. Model shapes are those of public mixture-of-experts models.
"""

import dataclasses

PATTERNS = ("even", "skewed", "one_hot", "empty_first", "empty_last",
            "all_empty", "single_row")


def group_sizes(pattern: str, groups: int, rows: int) -> list[int]:
  """Rows of each group under a named pattern; they sum to `rows` at most.

  Args:
    pattern: one of `PATTERNS`. "even" splits evenly (the first groups take
      the remainder), "skewed" halves from group to group, "one_hot" gives
      all rows to the middle group, "empty_first" and "empty_last" leave that
      group without rows, "all_empty" uses no row, "single_row" gives one row
      to each group that it can.
    groups: number of groups, at least 1.
    rows: rows to share out.

  Raises:
    ValueError: if the pattern is unknown.
  """
  if pattern == "even":
    return [rows // groups + (g < rows % groups) for g in range(groups)]
  if pattern == "skewed":
    sizes = [rows >> (g + 1) for g in range(groups)]
    sizes[0] += rows - sum(sizes)
    return sizes
  if pattern == "one_hot":
    return [rows * (g == groups // 2) for g in range(groups)]
  if pattern == "empty_first":
    return [0, *group_sizes("skewed", groups - 1, rows)] if groups > 1 else [0]
  if pattern == "empty_last":
    return [*group_sizes("skewed", groups - 1, rows), 0] if groups > 1 else [0]
  if pattern == "all_empty":
    return [0] * groups
  if pattern == "single_row":
    return [int(g < rows) for g in range(groups)]
  raise ValueError(f"pattern must be one of {PATTERNS}; got {pattern!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """The widths of one mixture-of-experts layer of a public model.

  Attributes:
    d_model: hidden width.
    d_ff: width of one expert.
    num_experts: experts of the layer.
    top_k: experts per token.
    score: router score, "softmax" or "sigmoid".
    shared_experts: experts that every token passes.
  """

  d_model: int
  d_ff: int
  num_experts: int
  top_k: int
  score: str = "softmax"
  shared_experts: int = 0


MODELS = {
    "deepseek_v3": ModelShape(d_model=7168, d_ff=2048, num_experts=256,
                              top_k=8, score="sigmoid", shared_experts=1),
    "kimi_k2": ModelShape(d_model=7168, d_ff=2048, num_experts=384, top_k=8,
                          score="sigmoid", shared_experts=1),
    "llama4_scout": ModelShape(d_model=5120, d_ff=8192, num_experts=16,
                               top_k=1, score="sigmoid", shared_experts=1),
    "llama4_maverick": ModelShape(d_model=5120, d_ff=8192, num_experts=128,
                                  top_k=1, score="sigmoid",
                                  shared_experts=1),
    "qwen3_30b": ModelShape(d_model=2048, d_ff=768, num_experts=128, top_k=8),
    "qwen3_235b": ModelShape(d_model=4096, d_ff=1536, num_experts=128,
                             top_k=8),
    "mixtral_8x7b": ModelShape(d_model=4096, d_ff=14336, num_experts=8,
                               top_k=2),
    "gpt_oss_20b": ModelShape(d_model=2880, d_ff=2880, num_experts=32,
                              top_k=4),
    "gpt_oss_120b": ModelShape(d_model=2880, d_ff=2880, num_experts=128,
                               top_k=4),
}

ROWS_PER_DEVICE = (16384, 32768, 131072)
LOCAL_EXPERTS = (1, 2, 4, 8, 32)
ODD_WIDTHS = (96, 160, 768, 1408, 2880)  # multiples of 32, not all of 128
ODD_ROWS = (1, 127, 128, 129)

# Small shapes for tests on a CPU: (rows, groups, k, n).
SMALL_MATMULS = ((64, 2, 64, 32), (300, 3, 96, 160), (384, 4, 128, 64))

# What bring_up runs first, (rows, groups, k, n): the first wraps the ring of a
# matmul kernel, the second ends inside every tile.
BRING_UP_MATMULS = ((1000, 4, 1024, 512), (300, 3, 96, 160))
BRING_UP_WGRADS = ((1000, 4, 512, 512), (300, 3, 192, 320))

# The grouped matmuls that kernels are timed at, (rows, groups, k, n): widths
# of a model, and as many rows as a device holds.
TIMED_MATMULS = {
    "llama4_scout": (32768, 8, 5120, 8192),
    "deepseek_v3": (32768, 32, 7168, 2048),
}
