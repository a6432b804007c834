"""What Gluon calls differently from one triton to the next, what of it is private, and what it has no word for."""
import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.language.core import _aggregate as aggregate  # noqa: F401

from . import VERSION

# Of all threads of a partition (the warps that run one function of warp_specialize), or of the program outside one.
barrier = gl.thread_barrier if VERSION == "3.6" else gl.barrier


@builtin
def tma_reduce_add(descriptor, coordinates, tile, _semantic=None):
    """Adds a tile in shared memory to global memory, float32, atomically by element: cp.reduce.async.bulk.tensor."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates,
                                              tile.handle)


@builtin
def named_barrier(action, index, threads, _semantic=None):
    """bar.sync or bar.arrive on named barrier `index` of 16, complete at `threads` threads. Triton itself takes 0, 1
    and, from 2, one a partition; ours begin at 6 (a test reads the PTX)."""
    action, threads = map(_unwrap_if_constexpr, (action, threads))
    index = _semantic.to_tensor(index)
    return gl.inline_asm_elementwise(f"bar.{action} $1, {threads}; mov.u32 $0, 0;", "=r,r,~{memory}", [index],
                                     dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)
