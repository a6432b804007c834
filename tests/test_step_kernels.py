"""The training step's own Triton kernels, loss and optimizer, compile for every architecture and spill nothing."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
LOSS = dict(logits_ptr="*bf16", targets_ptr="*i64", nats_ptr="*fp32", V="i32", row_stride="i32")
ADAMW = dict(master_ptr="*fp32", weight_ptr="*bf16", grad_ptr="*bf16", m_ptr="*fp32", v_ptr="*fp32",
             grad_scale_ptr="*fp32", n="i32", shrink="fp32", lr="fp32", v_scale="fp32", beta1="fp32", beta2="fp32",
             eps="fp32")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def compile_all() -> None:
    """Prints a line of JSON for each kernel and architecture."""
    sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]
    import triton
    from test_compile import resources
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loss import softmax_kernel
    from runtime.optimizer import adamw_kernel
    for kernel, types, constants, warps in ((softmax_kernel, LOSS, dict(IGNORE=-1, GRADIENTS=True, BLOCK=8192), 16),
                                            (adamw_kernel, ADAMW, dict(BLOCK=4096), 8)):
        names = kernel.arg_names
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
                   if name.endswith("_ptr") or name in ("n", "V", "row_stride")}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
        for arch in ARCHITECTURES:
            out = triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options=dict(num_warps=warps))
            wide = "st.global.v4" in out.asm["ptx"] or ".v4.b32" in out.asm["ptx"]
            print(json.dumps(dict(kernel=kernel.fn.__name__, arch=arch, wide=wide, **resources(out.asm["cubin"]))))


@pytest.mark.timeout(600)
def test_they_compile_and_spill_nothing():
    """Both are bound by memory: their accesses must be 16 bytes wide."""
    done = subprocess.run([sys.executable, HERE], env=os.environ | {"TRITON_INTERPRET": "0"}, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["kernel"], row["arch"]) for row in rows} == {
        (kernel, arch) for kernel in ("softmax_kernel", "adamw_kernel") for arch in ARCHITECTURES}
    assert [row for row in rows if row["stack"] or not row["wide"]] == []


if __name__ == "__main__":
    compile_all()
