"""Instructions that the kernels ask of a processor, and those that this one has."""

from __future__ import annotations

from pathlib import Path

# Instruction sets by their name in ATEN_CPU_CAPABILITY, and what the processor must have.
INSTRUCTION_SETS = {
    "default": ("baseline", ()),
    "avx2": ("avx2", ("avx2", "fma")),
    "avx512": ("avx512", ("avx512f", "avx512dq", "avx512bw", "avx512vl")),
}
# Values of IKATTN_SIXTEEN_BITS, and what the processor must have. "amd": bfloat16 in AVX-512
# is no faster than float32 elsewhere, and not used.
AVX512 = INSTRUCTION_SETS["avx512"][1]
SIXTEEN_BITS = {
    "none": (),
    "avx512_vnni": (*AVX512, "avx512_vnni"),
    "avx512_bf16": (*AVX512, "avx512_vnni", "avx512_bf16", "amd"),
    "amx": (*AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
}


def processor_flags() -> set[str]:
    """Returns the flags of the first core, for all are alike, and "amd"."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return {*flags, *(["amd"] if "AuthenticAMD" in text else [])}
