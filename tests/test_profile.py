import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from runtime import profile

NAMES = {
    "attention": ["forward_kernel", "backward_kernel", "prepare_kernel", "finish_kernel", "delta_kernel", "dq_kernel",
                  "dkdv_kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64",
                  "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16",
                  "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>",
                  "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Kernel)",
                  "triton_tem_fused_flex_attention_0", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"],
    "matmul": ["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_stages_64x3",
               "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>",
               "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "triton_tem_fused_addmm_3",
               "aten::mm", "aten::addmm_"],
    "loss": ["triton_red_fused__to_copy_arange_clamp_eq_exp_logsumexp_ne_scalar_tensor_sub_unsqueeze_where_0",
             "triton_red_fused__log_softmax_nll_loss_forward_1", "cross_entropy_kernel", "softmax_kernel",
             "void (anonymous namespace)::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>"],
    "optimizer": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizer>",
                  "aten::_fused_adamw_",
                  "void at::native::lpnorm_cleanup<float, (NormType)1, float, float, float>"],
    "rest": ["triton_poi_fused__unsafe_view_gelu_gelu_backward_view_1", "Memcpy DtoD (Device -> Device)",
             "Memset (Device)", "triton_per_fused_native_layer_norm_backward_forward_kernel_2", "aten::_softmax",
             "triton_poi_fused__scaled_dot_product_flash_attention_transpose_view_3"],
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kinds_by_name(kind, name):
    assert profile.kind(name) == kind


def test_every_kind_has_a_name():
    assert set(NAMES) == set(profile.KINDS)


def step(device):
    """A small training step that has every kind of kernel but attention."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(512, 256, device=device), torch.randint(512, (512,), device=device)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_recorded(tmp_path, device):
    step(device)
    with profile.recorded(tmp_path):
        step(device)
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert list(found["kinds"]) == list(profile.KINDS)
    assert sum(found["kinds"].values()) == pytest.approx(found["step_ms"]) and found["step_ms"] > 0
    assert all(found["kinds"][kind] > 0 for kind in ("matmul", "loss", "optimizer", "rest"))
    assert found["kinds"]["attention"] == 0
    kernels = found["kernels"]
    assert [k["ms"] for k in kernels] == sorted((k["ms"] for k in kernels), reverse=True)
    assert all(k["ms"] > 0.001 * found["step_ms"] and k["calls"] >= 1 for k in kernels)
    assert sum(k["ms"] for k in kernels) <= found["step_ms"] * (1 + 1e-9)


@pytest.mark.gpu
def test_on_a_gpu_only_kernels_count(tmp_path):
    """A product large enough to be timed from outside too: its time is found once, under its kernel's name."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x @ x
    with profile.recorded(tmp_path), torch.profiler.record_function("an annotation"):
        began.record()
        for _ in range(10):
            x @ x
        ended.record()
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["step_ms"] == pytest.approx(began.elapsed_time(ended), rel=0.1)
    assert not any(k["name"].startswith(("aten::", "an annotation")) for k in found["kernels"])
    assert found["kinds"]["matmul"] > 0.9 * found["step_ms"]


def event(key, device, us, calls=1, annotation=False):
    return SimpleNamespace(key=key, count=calls, device_type=device, is_user_annotation=annotation,
                           self_device_time_total=us, self_cpu_time_total=us)


def test_a_gpu_step_counts_kernels_once():
    """torch gives an operator its kernels' time too, and an annotation all of what it spans."""
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    found = profile.summary([
        event("aten::mm", cpu, 3000.0), event("nvjet_tst", gpu, 3000.0, calls=2),
        event("Optimizer.step#AdamW.step", gpu, 5000.0, annotation=True), event("Memset (Device)", gpu, 1.0),
        event("multi_tensor_apply_kernel", gpu, 999.0)])
    assert found["step_ms"] == pytest.approx(4.0)
    assert found["kinds"] == pytest.approx(dict(attention=0, matmul=3.0, loss=0, optimizer=0.999, rest=0.001))
    assert [(k["name"], k["calls"]) for k in found["kernels"]] == [("nvjet_tst", 2), ("multi_tensor_apply_kernel", 1)]


def test_a_step_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), profile.recorded(tmp_path):
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


def test_table_shows_what_takes_more_than_a_percent(tmp_path):
    kernels = [dict(name="n" * 80 + "|", calls=3, ms=98.5, kind="rest"), dict(name="nvjet|x", calls=1, ms=1.1,
                                                                              kind="matmul"),
               dict(name="small", calls=1, ms=0.4, kind="rest")]
    (tmp_path / "kernels.json").write_text(json.dumps({"step_ms": 100.0, "kinds": {}, "kernels": kernels}))
    lines = profile.kernel_table(tmp_path).splitlines()
    assert len(lines) == 4 and all(line.count("|") == 6 for line in lines)
    assert lines[2] == f"| `{'n' * 67}...` | rest | 3 | 98.50 | 98.5% |"
    assert lines[3] == "| `nvjet/x` | matmul | 1 | 1.10 | 1.1% |"
