"""Train a GPT in Lightning, break its arithmetic, watch the query-key channel run away, and stop it there."""

from typing import Any

import kernels as _kernels

if not hasattr(_kernels, "streaming_attention"):
    raise ImportError(
        f"`import kernels` found {getattr(_kernels, '__file__', _kernels)!r}, not the package that lightning_qk ships: "
        "another distribution uses the same name (PyPI has a `kernels`). Run `pip uninstall kernels` and install "
        "lightning-qk again, or use a fresh virtual environment."
    )

_EXPORTS = {
    "GPT": "model",
    "GPTConfig": "model",
    "GPTModule": "module",
    "route_parameters": "routes",
    "StudentTeacher": "student_teacher",
    "GaussianData": "gaussian_data",
    "StdlibCorpus": "data",
    "TokenFile": "data",
    "HubText": "data",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Lightning itself takes seconds to import: pay when a class is used, not when the package is named.
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lightning_qk' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"lightning_qk.{_EXPORTS[name]}"), name)
