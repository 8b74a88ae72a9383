"""What a run's configuration names, built without weights: what a constructor refuses is known before anything runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_qk.complaints import refusal
from lightning_qk.precision import FaultPrecision


def rehearse(
    parser: LightningArgumentParser, options: Namespace, model_class: type[LightningModule] | None, args: Sequence[str]
) -> None:
    """Builds plugins, callbacks, data module and model as the run would, and lets the plugin convert the model.

    The model has no weights (device ``meta``); no file is read and no random number is taken from the run. Models and
    data modules of other packages are not built: nobody knows what their constructors cost or do.

    Args:
        parser: the one that parsed.
        options: what it parsed, without a subcommand.
        model_class: the class that ``model.*`` are the arguments of; None where ``model.class_path`` names it.
        args: what was parsed, to tell the file of a mistake.

    Raises:
        ValueError: a constructor refuses its arguments; the message names the key and the file.
    """

    def build(key: str, value: Any) -> Any:
        config = Namespace()
        config[key] = value
        with _refusals(key, value.get("class_path") if isinstance(value, Namespace) else None, args):
            return parser.instantiate_classes(config.clone(), instantiate_groups=False)[key]

    trainer = options.trainer
    with isolate_rng(include_cuda=False):
        plugins = [build("trainer.plugins", one) for one in _listed(trainer.plugins)]
        for one in _listed(trainer.callbacks):
            build("trainer.callbacks", one)
        if _is_ours(options.data):
            build("data", options.data)
    with torch.device("meta"):
        if model_class is not None:
            with _refusals("model", _path(model_class), args):
                # uncompiled: that would import a compiler, which takes seconds
                model = model_class(**{**options.model.as_dict(), "compile": False})
        elif _is_ours(options.model):
            model = build("model", options.model)
        else:
            return
        for plugin in plugins:
            if isinstance(plugin, FaultPrecision):
                try:
                    with _refusals("trainer.plugins", _path(type(plugin)), args):
                        plugin.convert_module(model)
                finally:  # the patch of bfloat16 products ends here
                    plugin.teardown()


@contextmanager
def _refusals(key: str, class_path: str | None, args: Sequence[str]) -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
        raise ValueError(refusal(str(error), key, class_path or "", args)) from error


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_ours(chosen: Namespace) -> bool:
    return str(chosen.get("class_path")).startswith("lightning_qk.")
