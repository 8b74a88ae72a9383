"""Which run a configuration is: its directory, and a hash of all that decides its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """What a ``fit`` command would run.

    Attributes:
        run_dir: its directory.
        gpus: how many it uses: none where the accelerator is the CPU or there is no GPU.
        deciding: all that decides the run's numbers, as YAML.
        named: the same with the names of experiment and arm.
    """

    run_dir: Path
    gpus: int
    deciding: str = dataclasses.field(repr=False)
    named: str = dataclasses.field(repr=False)

    @classmethod
    def of(cls, options: Namespace) -> ResolvedRun:
        """The run of a parsed configuration.

        Raises:
            ValueError: ``seed_everything`` is no number.
        """
        run, seed = options.run, options.seed_everything
        if isinstance(seed, bool) or seed is None:
            raise ValueError(f"seed_everything={seed}: give a number, the run's directory and its data depend on it.")
        run_dir = Path(run.root) / run.experiment / run.arm / f"seed_{seed}"
        there = torch.cuda.device_count() if options.trainer.accelerator != "cpu" else 0
        plain = _deciding(_plain(options.as_dict()))
        named = _as_yaml(plain)
        for key in ("experiment", "arm"):
            del plain["run"][key]
        return cls(run_dir, _devices(options.trainer.devices, there), _as_yaml(plain), named)

    @property
    def config_hash(self) -> str:
        """Hash of all that decides the run's numbers."""
        return _digest(self.deciding)

    def is_of(self, config_hash: str | None) -> bool:
        """Whether a hash that a run left in this run's directory is of the same configuration."""
        return config_hash in (self.config_hash, _digest(self.named))  # hashes once had the names in them

    def with_seed(self, seed: int) -> ResolvedRun:
        """The run that differs in nothing but its seed, without parsing again."""

        def other(text: str) -> str:
            return re.sub(r"^seed_everything: .*$", f"seed_everything: {seed}", text, flags=re.MULTILINE)

        run_dir = self.run_dir.with_name(f"seed_{seed}")
        return ResolvedRun(run_dir, self.gpus, other(self.deciding), other(self.named))


def _devices(devices: Any, there: int) -> int:
    """How many GPUs Lightning's ``trainer.devices`` asks for: a number, a list of them, or all (-1, auto)."""
    if not there:
        return 0
    text = str(devices)
    if isinstance(devices, list | tuple) or "," in text:
        return len(devices) if isinstance(devices, list | tuple) else len([part for part in text.split(",") if part])
    return there if text in ("-1", "auto") else int(text)


def resume_hash(options: Namespace) -> str:
    """Of what must agree between a checkpoint and the run that goes on; not its length, nor who only looks on."""
    return _digest(_as_yaml(_bound(_plain(options.as_dict()))))


def changes(options: Namespace, config_file: Path) -> list[str]:
    """What of that is not as in a run's configuration file, as ``model.lr=0.5 (there 0.01)``; sorted by key."""
    here = _flat(_bound(_plain(options.as_dict())))
    try:
        there = _flat(_bound(yaml.safe_load(config_file.read_text())))
    except (yaml.YAMLError, UnicodeError, AttributeError, KeyError, TypeError):  # no YAML, or none of a run
        return [f"{config_file} is damaged and does not say in what"]
    return [
        f"{key}={here.get(key)} (there {there.get(key)})"
        for key in sorted(there.keys() | here.keys())
        if str(there.get(key)) != str(here.get(key))
    ]


def _bound(plain: dict[str, Any]) -> dict[str, Any]:
    plain = _deciding(plain)
    for key in ("max_steps", "max_epochs", "max_time"):
        plain["trainer"].pop(key, None)
    every = plain["trainer"]["callbacks"] or []
    ours = [
        one for one in every if one["class_path"].startswith("callbacks.") and "StepProfile" not in one["class_path"]
    ]
    plain["trainer"]["callbacks"] = ours
    return plain


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in _flat(item, f"{key}.{name}".lstrip(".")).items()}
    return {key: value}


def _deciding(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration as plain values, less what does not change a run's numbers, but with its names."""
    for key in ("config", "ckpt_path", "weights_only", "verbose"):
        plain.pop(key, None)
    for key in ("root", "overwrite", *(["fork"] if plain["run"]["fork"] is None else [])):
        plain["run"].pop(key, None)
    plain["trainer"].pop("enable_progress_bar", None)
    return plain


def _as_yaml(plain: dict[str, Any]) -> str:
    return yaml.safe_dump(plain, sort_keys=True)


def _digest(text: str) -> str:
    """sha256, 16 hex digits of it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
