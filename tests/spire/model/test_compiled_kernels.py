"""Triton compiles the kernels for a Hopper GPU, whose assembler spills no registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import thoroughly
from tests.paths import ROOT

triton = pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, pointers, numbers, fixed, options = json.loads(sys.argv[1])
kernels = importlib.import_module("spire.model." + module)
signature = pointers | numbers | dict.fromkeys(fixed, "constexpr")
names = getattr(kernels, name).arg_names
assert list(signature) == names, names
aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(pointers))}
source = ASTSource(getattr(kernels, name), signature=signature, constexprs=fixed, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""

BF16, FP8, I32, I64, F32 = "*bf16", "*fp8e4nv", "*i32", "*i64", "*fp32"
Case = tuple[str, str, dict[str, str], dict[str, str], dict[str, Any], dict[str, int]]


def stretch(rows: int, width: int) -> Case:
    pointers = dict.fromkeys(("queries", "keys", "values"), BF16) | {"table": I32, "lengths": I32}
    numbers = {"scale": "fp32"} | dict.fromkeys(("T", "GROUP", "G", "pages", "splits"), "i32")
    fixed = {"ROWS": rows, "K": width, "PAGE": 64, "SPLIT": 1024}
    options = {"num_warps": 4, "num_stages": 3}
    return "attention.paged_attention", "_stretch", pointers | {"parts": F32, "weights": F32}, numbers, fixed, options


def join(width: int) -> Case:
    pointers = {"parts": F32, "weights": F32, "lengths": I32, "found": BF16}
    fixed = {"K": width, "SPLIT": 1024, "JOINED": 16}
    return (
        "attention.paged_attention",
        "_join",
        pointers,
        dict.fromkeys(("T", "rows", "splits"), "i32"),
        fixed,
        {"num_warps": 2},
    )


def add_norm(width: int, fp8: bool = False) -> Case:
    pointers = dict.fromkeys(("x", "more", "weight", "total"), BF16) | {"out": FP8 if fp8 else BF16, "scales": F32}
    fixed = {"ADD": True, "FP8": fp8, "LARGEST": 448.0, "LEAST": 1e-12, "BLOCK": width}
    return (
        "backends.gpu.elementwise",
        "_add_norm",
        pointers,
        {"eps": "fp32", "D": "i32"},
        fixed,
        {"num_warps": width // 512},
    )


def quantise(width: int) -> Case:
    pointers, fixed = {"x": BF16, "out": FP8, "scales": F32}, {"LARGEST": 448.0, "LEAST": 1e-12, "BLOCK": width}
    return "backends.gpu.elementwise", "_quantise", pointers, {"D": "i32"}, fixed, {"num_warps": min(16, width // 512)}


def rotate(width: int) -> Case:
    pointers = dict.fromkeys(("projected", "cosine", "sine"), BF16) | {"rows": I64}
    pointers |= dict.fromkeys(("queries", "keys", "values"), BF16)
    numbers = dict.fromkeys(("H", "G", "T"), "i32")
    return "backends.gpu.elementwise", "_rotate_and_store", pointers, numbers, {"HALF": width // 2}, {"num_warps": 1}


def silu_mul() -> Case:
    pointers = dict.fromkeys(("gate_up", "out"), BF16)
    return "backends.gpu.elementwise", "_silu_mul", pointers, {"F": "i32"}, {"BLOCK": 1024}, {"num_warps": 4}


def attend_memory(entries: int, width: int) -> Case:
    pointers = dict.fromkeys(("queries", "keys", "values"), BF16) | {"positions": I64, "slots": I64}
    pointers |= {"own_keys": BF16, "own_values": BF16, "bases": I64, "found": BF16}
    numbers = {"scale": "fp32"}
    numbers |= dict.fromkeys(("passes", "GROUP", "G", "S", "k", "sink", "window", "attends_self"), "i32")
    fixed = {"ROWS": 16, "ENTRIES": entries, "K": width}
    return "backends.gpu.draft_attention", "_attend_memory", pointers, numbers, fixed, {"num_warps": 4}


CASES = {
    "64 queries of 128": stretch(64, 128),
    "16 queries of 128": stretch(16, 128),
    "32 queries of 128": stretch(32, 128),
    "64 queries of 64": stretch(64, 64),
    "joining": join(128),
    "norm of 4,096": add_norm(4096),
    "norm of 8,192": add_norm(8192),
    "norm of 4,096 in fp8": add_norm(4096, fp8=True),
    "4,096 numbers in fp8": quantise(4096),
    "16,384 numbers in fp8": quantise(16384),
    "rotation of 128": rotate(128),
    "rotation of 64": rotate(64),
    "gate": silu_mul(),
    "memory of 128": attend_memory(128, 128),
    "memory of 128, heads of 64": attend_memory(128, 64),
}
QUICK = ("64 queries of 128", "memory of 128")


@pytest.mark.parametrize("name", [name if name in QUICK else thoroughly(name) for name in CASES])
def test_a_kernel_compiles_for_a_hopper_gpu_and_spills_no_registers(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE, json.dumps(CASES[name])]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    compiled = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert compiled.returncode == 0, compiled.stderr
    (tmp_path / "kernel.ptx").write_text(compiled.stdout)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    asked = [assembler, "-v", "--gpu-name", "sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill", told) == ["0", "0"], told
