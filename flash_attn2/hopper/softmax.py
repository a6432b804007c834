"""What a group does with a tile of scores in its registers: the mask at the edges, and a step of the online softmax."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def up_to(s, n0, hi):
    """Scores of a tile that begins at key n0: -inf past the last key hi that a row sees."""
    j = n0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(j[None, :] <= hi[:, None], s, float("-inf"))


@gluon.jit
def down_to(s, n0, lo):
    """-inf before the first key lo that a row sees."""
    j = n0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(j[None, :] >= lo[:, None], s, float("-inf"))


@gluon.jit
def thread_sums(p):
    """Sums over the columns that a thread holds, (ROWS, 8): no shuffles, which wait until the loop is over."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def softmax_step(s, m, l, scale_log2, edge, dtype: gl.constexpr):
    """-> p, alpha, m, l: as the Triton kernel's, p in q's dtype, l (ROWS, 8) by thread.

    The branch mends rows that have seen no key yet: -inf - -inf. It also stands between the exponentials and the wait
    for p v that follows, which ptxas otherwise hoists above them (flash_attn2/README.md, step 4)."""
    l_rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    l_tile = thread_sums(p)
    p_low = p.to(dtype)
    if edge:
        none = m_new == float("-inf")
        p_low = gl.where(none[:, None], 0.0, p_low)
        alpha = gl.where(none, 0.0, alpha)
        l_tile = gl.where(gl.convert_layout(none, l_rows)[:, None], 0.0, l_tile)
    return p_low, alpha, m_new, l * gl.convert_layout(alpha, l_rows)[:, None] + l_tile
