"""Train a GPT in Lightning, break its arithmetic, watch the query-key channel run away, and stop it there."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

for _name in ("kernels", "callbacks"):
    _spec, _ours = find_spec(_name), Path(__file__).parents[1] / _name
    if _spec is None or _spec.origin is None or Path(_spec.origin).resolve().parent != _ours.resolve():
        _found = _spec and (_spec.origin or next(iter(_spec.submodule_search_locations or ()), None))
        raise ImportError(
            f"`import {_name}` finds {_found}, not {_ours}, the package that lightning_qk ships. A folder of your own: "
            f"rename it or start from another directory. Another distribution (PyPI has a `kernels`): "
            f"`pip uninstall {_name}` and install lightning-qk again."
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
