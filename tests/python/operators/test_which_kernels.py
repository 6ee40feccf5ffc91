"""ikattn.which_kernels and info: what a call would run on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ikattn
from ikattn._info import cuda_kernels, families, gpu
from ikattn.ops.kernels import KernelChoice

HAS_CUDA_KERNELS = "CUDA kernels     no" not in ikattn.info()
needs_kernels_and_gpu = pytest.mark.skipif(
    not (HAS_CUDA_KERNELS and torch.cuda.is_available()), reason="no CUDA kernels, or no GPU"
)


def inputs() -> tuple[torch.Tensor, ...]:
    return (*torch.randn(3, 2, 4, 10, 16), torch.randn(4, 16, 32))


def reason_of(*tensors: torch.Tensor, **options: object) -> str | None:
    return ikattn.which_kernels(*tensors, **options).forward.reason  # type: ignore[arg-type]


def test_nothing_is_in_the_way_on_this_processor() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    assert reason_of(*inputs()) is None
    assert reason_of(*inputs(), dropout_p=0.5, is_causal=True) is None


def test_a_processor_without_vector_units_is_named() -> None:
    program = (
        "import torch, ikattn; x = torch.randn(1, 1, 2, 8); "
        "print(ikattn.which_kernels(x, x, x, torch.randn(1, 8, 4)).forward.reason)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={"ATEN_CPU_CAPABILITY": "default", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "neither AVX2 with FMA nor AVX-512" in printed


@pytest.mark.skipif(HAS_CUDA_KERNELS, reason="this library has CUDA kernels")
def test_calls_on_a_gpu_without_kernels_are_refused() -> None:
    """Every operator with a kernel of its own for the CPU; called as by a tensor on a GPU."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    q, k, v, w1 = inputs()
    seed = torch.zeros(2, dtype=torch.int64)
    arguments: dict[str, tuple[object, ...]] = {
        "implicit_kernel_attention": (q, k, v, w1),
        "implicit_kernel_weights": (q, k, w1),
        "spectral_features": (q, w1),
        "dropout_keep_mask": (seed, 1, 1, 2, 2, 0.5),
    }
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("ikattn::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {s.name.removeprefix("ikattn::") for s in schemas if has_kernel(s.name, "CPU")}
    assert arguments.keys() <= names
    # those that are composed of torch's own operators anywhere but on the CPU
    composed = "attention_from_features", "edge_attention_from_features", "alti_distances"
    names -= {*composed, "edge_query_gradients", "edge_key_gradients"}
    names -= {name for name in names if "moments" in name}
    for name in names:
        assert has_kernel(f"ikattn::{name}", "CUDA"), name
    for name, call in arguments.items():
        with pytest.raises(
            NotImplementedError, match=rf"ikattn::{name}: there are no kernels .* built without"
        ):
            getattr(torch.ops.ikattn, name).default.redispatch(keys, *call)


@pytest.mark.skipif(not HAS_CUDA_KERNELS, reason="this library has no CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_library_with_cuda_kernels_and_no_gpu_says_so() -> None:
    half = [x.half() for x in inputs()[:3]]
    reason = reason_of(*half, inputs()[3], device="cuda")
    assert "torch finds no GPU" in reason
    said = ikattn.which_kernels(*half, inputs()[3], device="cuda")
    assert said == (KernelChoice("none", "none", reason),) * 2


@needs_kernels_and_gpu
def test_what_keeps_a_call_from_the_tensor_cores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = reason_of(*(x.double() for x in inputs()), device="cuda")
    assert reason == "not on tensor cores: float64"
    monkeypatch.setenv("IKATTN_KERNELS", "-split")
    reason = reason_of(*inputs(), device="cuda")
    assert reason is not None
    assert "IKATTN_KERNELS=+split" in reason
    monkeypatch.setenv("IKATTN_KERNELS", "+split")
    assert reason_of(*inputs(), device="cuda") is None
    wide = reason_of(*inputs()[:3], inputs()[3].repeat(1, 1, 20), device="cuda")
    assert wide is not None
    assert "fp32_precision" in wide
    half = [x.half() for x in inputs()[:3]]
    assert reason_of(*half, inputs()[3], device="cuda") is None
    mask = torch.zeros(10, 10, dtype=torch.float16, requires_grad=True)
    reason = reason_of(*half, inputs()[3], attn_mask=mask, device="cuda")
    assert "gradient of attn_mask" in reason


def test_bad_arguments_are_errors_as_in_the_call() -> None:
    query, key, value, w1 = inputs()
    with pytest.raises((RuntimeError, ValueError), match=r"which_kernels: .*key"):
        reason_of(query, key[..., :3], value, w1)
    with pytest.raises(RuntimeError, match="device"):
        reason_of(query, key, value, w1, device="nowhere")


def test_info_names_the_architectures_and_whether_hopper_has_its_own(monkeypatch):
    monkeypatch.setenv("IKATTN_KERNELS", "-hopper")

    def said(architectures: str, warpgroups: bool) -> str:
        return cuda_kernels({"cuda_architectures": architectures, "warpgroups": warpgroups})

    assert cuda_kernels({"no_cuda_reason": "WITH_CUDA=0"}) == "no: WITH_CUDA=0"
    assert said("80", False) == "for 80; those for Hopper alone: not built"
    assert "off (IKATTN_KERNELS)" in said("80-real 90", True)
    monkeypatch.delenv("IKATTN_KERNELS")
    for capability, state in (((9, 0), "on"), ((10, 0), "on, but this GPU is another")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        assert said("90", True).endswith(f": {state}")


def test_info_says_whether_a_gpu_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu().startswith("none that torch can use")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old")
    reason = torch.ops.ikattn.why_no_kernels(torch.device("cuda"))
    expected = f"no kernels of ikattn: {reason}" if reason else "ikattn's kernels run on it"
    assert gpu() == f"Old, compute capability 7.5; {expected}"


def long_call(length: int, **types: torch.dtype) -> tuple[torch.Tensor, ...]:
    # rows that are the same memory: nothing is read
    x = torch.zeros(1, 1, 1, 16, **types).expand(1, 2, length, 16)
    return (x, x, x, torch.zeros(2, 16, 8))


def test_which_kernels_says_what_the_cpu_takes() -> None:
    lines = dict(line.split("  ", maxsplit=1) for line in ikattn.info().splitlines())
    unit = lines["instruction set"].split()[0]
    assert lines["ikattn"].strip() == ikattn.__version__
    assert torch.__version__ in lines["torch"]

    def said(*tensors: torch.Tensor, **options: object) -> list[str]:
        choices = ikattn.which_kernels(*tensors, **options)  # type: ignore[arg-type]
        assert {choice.unit for choice in choices} == {unit}
        assert {choice.proven for choice in choices} == {"the CPU"}
        if unit != "baseline" and tensors[0].size(2) == 20000:  # nothing else is worth a reason
            reasons = {
                "dropout_p": "linear time takes no dropout",
                "attn_mask": "linear time takes no attn_mask that differs between queries",
            }
            is_held_back = {choice.algorithm for choice in choices} == {"quadratic"}
            expected = {reasons[name] for name in options} if is_held_back else {None}
            assert {choice.reason for choice in choices} == expected
        return [choice.algorithm for choice in choices]

    assert said(*inputs()) == ["quadratic"] * 2
    assert said(*long_call(20000)) == ["linear"] * 2
    assert said(*long_call(20000), dropout_p=0.5) == ["quadratic"] * 2
    of_keys, of_queries = torch.ones(1, 20000), torch.ones(20000, 1)
    for mask in (of_keys, of_keys[None, None], of_keys.bool().expand(20000, -1)):
        assert said(*long_call(20000), attn_mask=mask) == ["linear"] * 2
    for mask in (of_queries, of_queries.bool(), of_keys.expand(20000, -1)):
        assert said(*long_call(20000), attn_mask=mask) == ["quadratic"] * 2
    narrow = lines["16-bit products"].strip()
    choice = ikattn.which_kernels(*long_call(64, dtype=torch.bfloat16)).forward
    assert choice.algorithm == "quadratic"
    assert choice.unit == (unit if narrow == "none" else narrow)


def test_a_choice_of_kernels_prints_as_a_sentence() -> None:
    for choice, sentence in (
        (("quadratic", "hopper", None), "quadratic time on Hopper's tensor cores"),
        (("quadratic", "hopper", None, "int8"), "... on Hopper's tensor cores, scores in int8"),
        (("linear", "tensor_cores", "it is late"), "linear time on tensor cores: it is late"),
        (("none", "none", "no GPU"), "no kernels: no GPU"),
    ):
        assert str(KernelChoice(*choice)) == sentence.replace("...", "quadratic time")


def test_which_kernels_says_why_there_are_none() -> None:
    said = ikattn.which_kernels(*inputs(), device="xpu").forward
    assert (said.algorithm, said.unit, said.scores) == ("none", "none", None)
    assert said.reason == "there are kernels for CPU and CUDA only, not for xpu"
    if not HAS_CUDA_KERNELS:
        reason = ikattn.which_kernels(*inputs(), device="cuda").backward.reason
        assert str(reason).startswith("this library was built without CUDA kernels")
        assert reason_of(*inputs(), device="cuda") == reason


@needs_kernels_and_gpu
def test_which_kernels_says_what_a_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*tensors: torch.Tensor, **options: object) -> ikattn.ops.kernels.Kernels:
        return ikattn.which_kernels(*tensors, device="cuda", **options)  # type: ignore[arg-type]

    for slow in said(*inputs()):
        assert slow[:2] == ("quadratic", "cuda_cores")
        assert slow.scores is None
        assert "IKATTN_KERNELS=+split" in str(slow.reason)
        assert slow.proven == "H200 at c2071f5"
    monkeypatch.setenv("IKATTN_KERNELS", "+split")
    for split in said(*inputs()):
        assert split[:2] == ("quadratic", "tensor_cores")
        assert split.scores == "float16x2"
        assert str(split.reason).startswith("query, key and value must be float16")
        assert split.proven is None or split.proven.startswith("this machine")
    monkeypatch.delenv("IKATTN_KERNELS")
    cores = KernelChoice("quadratic", "cuda_cores", "float64", None, "H200 at c2071f5")
    assert said(*(x.double() for x in inputs())) == (cores, cores)
    half = [*(x.half() for x in inputs()[:3]), inputs()[3]]
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    by_mma = KernelChoice("quadratic", "tensor_cores", None, None, "H100 at 167924f")
    without_mask = by_mma._replace(unit="hopper", proven="H200 at c2071f5") if is_hopper else by_mma
    assert said(*half) == (without_mask, without_mask)
    linear = by_mma._replace(algorithm="linear")
    assert said(*long_call(20000, dtype=torch.float16)) == (linear, linear)
    mask = torch.zeros(10, 10, dtype=torch.float16, requires_grad=True)
    forward, backward = said(*half, attn_mask=mask)
    reason = "Hopper's own kernels take no attn_mask that differs between queries"
    assert forward == by_mma._replace(reason=reason if is_hopper else None)
    of_keys = torch.zeros(2, 1, 1, 10, requires_grad=True)
    assert said(*half, attn_mask=of_keys) == (without_mask, without_mask)
    reason = "the gradient of attn_mask is computed on CUDA cores"
    assert backward == by_mma._replace(reason=reason)


UNPROVEN = ["causal_linear", "split", "weights", "decoding", "given_maps", "streamed_maps"]


def test_no_family_is_on_that_no_gpu_has_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IKATTN_KERNELS", raising=False)
    ledger = {family["name"]: family for family in families()}
    unproven = [name for name, family in ledger.items() if family["gpu"] is None]
    assert unproven == UNPROVEN
    for family in ledger.values():
        assert family["on"] == (family["gpu"] is not None or family["here"] is not None)
        assert (family["gpu"] is None) == (family["commit"] is None)
    monkeypatch.setenv("IKATTN_KERNELS", "+unproven,-split,-int8")
    on = {family["name"]: family["on"] for family in families()}
    assert not on["split"]
    assert not on["int8"]
    assert all(on[name] for name in UNPROVEN if name != "split")
    assert "off: int8, split" in ikattn.info()


def test_an_unknown_family_is_an_error_that_lists_the_names(monkeypatch):
    monkeypatch.setenv("IKATTN_KERNELS", "+shrot")
    with pytest.raises(RuntimeError, match='names "shrot"') as caught:
        ikattn.info()
    assert all(name in str(caught.value) for name in (*UNPROVEN, "hopper", "unproven"))
