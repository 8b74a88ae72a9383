"""The Triton backend of streaming attention on a machine without a GPU: interpreted here, compiled in
test_triton_compile."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import triton_attention
from kernels.reference import Plan
from kernels.sites import RoundingSites

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
PLAN = Plan(RoundingSites(), 16, 16, 4, 4, True, 1.0)


def interpret(*arguments: str) -> None:
    """Runs the cases of triton_cases with Triton interpreting."""
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *arguments,
            str(ROOT / "tests/triton_cases.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-20000:] + process.stderr[-2000:]


@needs_triton
def test_interpreted_kernels_equal_the_reference_in_presets_and_variants():
    interpret("-k", "test_presets or test_variants or test_exact_ties")


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference():
    interpret()


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference_in_many_random_cases():
    interpret("-m", "slow")


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("triton_*.py")), ids=lambda path: path.name)
def test_every_product_names_its_precision(path: Path):
    """Triton's default for float32 operands is TF32, which has 10 mantissa bits."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    products = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("dot")]
    assert products or path.name != "triton_kernels.py"
    for call in products:
        named = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg == "input_precision"
        }
        assert named == {"input_precision": "ieee"}, f"{path.name}:{call.lineno}"


def test_a_large_head_dimension_names_the_remedy():
    x = torch.zeros(1, 4, 257)
    with pytest.raises(ValueError, match=r"head dimension 257 is above 256.*backend='reference'"):
        triton_attention.forward(x, x, x, PLAN)


def test_without_triton_the_module_imports_and_its_use_names_the_remedy():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "from kernels import triton_attention as backend, reference, RoundingSites\n"
        "assert not backend.interpreting()\n"
        "x = torch.zeros(1, 4, 16)\n"
        "plan = reference.Plan(RoundingSites(), 16, 16, 4, 4, True, 1.0)\n"
        "try: backend.forward(x, x, x, plan)\n"
        "except RuntimeError as error: print(error)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "pip install triton" in process.stdout and "backend='reference'" in process.stdout, process.stderr
