"""The one operation that joins a split of the history to what came before it.

The attention kernel folds in registers and the combine kernel folds partial results from memory; both call
this, so that how the work is divided changes no bit. Multiply-adds are written as explicit fma: a compiler
that chose by context whether to contract would choose differently in the two kernels.
"""

from executor.kernels.lang import jit, tl


@jit
def fold(b_max, b_sum, b_acc, b_split_max, b_split_sum, b_split_acc, scale_log2):
    """Join (max, sum, acc) so far and of the next split: [rows], [rows], [rows, head_dim] float32; maxima are
    unscaled products.

    A split that is entirely masked for a row has max -inf and weight exactly 0; an empty left side leaves the
    split as it is.
    """
    b_new_max = tl.maximum(b_max, b_split_max)
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_left = tl.exp2((b_max - b_base) * scale_log2)
    b_right = tl.exp2((b_split_max - b_base) * scale_log2)
    b_sum = tl.fma(b_sum, b_left, b_split_sum * b_right)
    b_left = tl.broadcast_to(b_left[:, None], b_acc.shape)
    b_acc = tl.fma(b_acc, b_left, b_split_acc * b_right[:, None])
    return b_new_max, b_sum, b_acc
