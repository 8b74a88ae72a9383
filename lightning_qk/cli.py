"""``fit``, ``validate`` and ``test``: LightningCLI with run directories, exact resume and errors instead of silence.

Several ``-c`` files merge from left to right; an arm is an overlay of a few lines. ``run.*`` and the seed name the
run's directory, ``<root>/<experiment>/<arm>/seed_<n>``. The model is a GPTModule, whose arguments are ``model.*``, or
what ``model.class_path`` names, with its arguments under ``model.init_args``.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from argparse import ArgumentError
from pathlib import Path
from typing import Any, ClassVar

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from typing_extensions import override

import callbacks  # noqa: F401  (short class names in YAML resolve to imported classes)
import lightning_qk.gaussian_data
import lightning_qk.precision
import lightning_qk.student_teacher  # noqa: F401
from callbacks import CollapseStop, RandomState, ResumedCheckpoints, ResumedValidation, RunRecorder
from lightning_qk.checkpoints import WholeCheckpointIO, callback_state, global_step, last_checkpoint, refuse_code
from lightning_qk.complaints import complain, explain
from lightning_qk.data import TokenData
from lightning_qk.fork import Fork
from lightning_qk.module import GPTModule
from lightning_qk.overlays import chooses_model, keep_overrides, nest_nulls, refuse_dropped_callbacks, refuse_duplicates
from lightning_qk.rehearsal import rehearse
from lightning_qk.resolved_run import ResolvedRun, changes, resume_hash
from lightning_qk.run_files import CONFIG_FILE, RunLogger, SaveConfig, remove_remains
from lightning_qk.strategies import SPLITS_WEIGHTS
from lightning_qk.trainer_settings import refuse_settings
from lightning_qk.verdict import DONE, read_verdict


@dataclasses.dataclass
class RunConfig:
    """Where a run's files go: ``<root>/<experiment>/<arm>/seed_<seed_everything>``.

    Args:
        root: directory of all runs.
        experiment: groups the arms that are compared.
        arm: name of the arm; every arm's YAML sets its own.
        overwrite: delete what an earlier run left in the directory.
        fork: begin with a checkpoint of another arm's run of the same seed; None begins at step 0. Model, data and
            optimizer are the other run's; plugin and callbacks are this one's, with the state that they have in common.
    """

    root: str = "runs"
    experiment: str = "default"
    arm: str = "base"
    overwrite: bool = False
    fork: Fork | None = None

    def __post_init__(self) -> None:
        for key in ("experiment", "arm"):
            value = getattr(self, key)
            if not value or value in (".", "..") or os.sep in value:
                raise ValueError(f"run.{key}={value!r} must be a plain directory name.")


class RunFinished(Exception):
    """The run that is to be resumed has its verdict already."""


class QKCLI(LightningCLI):
    """LightningCLI that gives every run a directory of its own."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # a key cut short would pass for the one it begins; errors are raised, to be told in a line
        return super().init_parser(allow_abbrev=False, exit_on_error=False, **kwargs)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunConfig, "run")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # not Lightning's: it warns of arguments given twice
        self._args = list(args)
        refuse_duplicates(args)
        refuse_dropped_callbacks(args)
        try:
            self.config = parser.parse_args(nest_nulls(keep_overrides(args)))
        except ArgumentError as error:
            parsers = [parser, *getattr(self, "_subcommand_parsers", {}).values()]
            keys = {action.dest for one in parsers for action in one._actions}
            raise ValueError(explain(str(error), args, keys)) from error

    @override
    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning's lets a checkpoint override the command line silently; GPTModule compares."""

    @property
    def _options(self) -> Namespace:
        return self.config[self.subcommand] if self.subcommand else self.config

    @override
    def before_instantiate_classes(self) -> None:
        self._check()
        self._fork: dict[str, Any] | None = None
        if self.subcommand and self._options.get("weights_only") is False:
            raise ValueError("weights_only=false: a checkpoint with more than plain values is code, and is not loaded.")
        if self.subcommand:
            self._options.weights_only = True
            self._refuse_missing_checkpoint()
        if self.subcommand == "fit":
            self._refuse_endless()
            self._prepare_directory()
            self._begin_with_fork()
            return
        self.save_config_callback = None  # config.yaml in a run's directory is that of its training
        if self.subcommand and self._options.get("ckpt_path") in (None, "last"):
            self._options.ckpt_path = last_checkpoint(self.resolved.run_dir)
            if self._options.ckpt_path is None:
                raise FileNotFoundError(
                    f"{self.subcommand}: {self.resolved.run_dir} has no checkpoint; name the run by run.* and "
                    "--seed_everything, or a file by --ckpt_path."
                )

    def _check(self) -> None:
        """Resolves the run, and refuses what can be told before anything of it is there."""
        self.resolved = ResolvedRun.of(self._options)
        self._refuse_trainer()
        # without a subcommand the arguments are those of fit
        refuse_settings(self._options.trainer, self.subcommand in (None, "fit"), self._args)
        chosen = None if self.subclass_mode_model else GPTModule
        rehearse(self._parser(self.subcommand), self._options, chosen, self._args)

    def _refuse_trainer(self) -> None:
        trainer = self._options.trainer
        if trainer.precision is not None and trainer.plugins is not None:
            raise ValueError(
                f"trainer.precision={trainer.precision}: the plugin owns the dtype. Leave it unset, and set base: bf16 "
                "or fp32 in trainer.plugins."
            )
        strategy = trainer.strategy
        name = str(getattr(strategy, "class_path", strategy)).rpartition(".")[2].lower()
        if name.startswith(("fsdp", "deepspeed")):
            raise ValueError(f"trainer.strategy: {name} {SPLITS_WEIGHTS}")

    def _refuse_endless(self) -> None:
        trainer = self._options.trainer
        if trainer.max_steps == -1 and trainer.max_epochs in (None, -1) and trainer.max_time is None:
            raise ValueError(
                "trainer.max_steps is not set: training would never end. Add a size file, such as "
                "-c configs/proxy.yaml, or --trainer.max_steps."
            )

    def _refuse_missing_checkpoint(self) -> None:
        path = self._options.get("ckpt_path")
        if path not in (None, "last") and "://" not in path and not Path(path).exists():
            raise FileNotFoundError(
                f"ckpt_path={path!r} does not exist. Name a checkpoint; --ckpt_path last is the newest of the run."
            )

    def _prepare_directory(self) -> None:
        """Every rank judges the same; what is in the way, and what is said, is rank zero's."""
        options, run_dir = self._options, self.resolved.run_dir
        first = getattr(rank_zero_only, "rank", 0) == 0
        if options.run.overwrite and first and run_dir.exists():
            shutil.rmtree(run_dir)
        if first:
            remove_remains(run_dir)
        verdict = None if options.run.overwrite else read_verdict(run_dir)
        if options.ckpt_path is None:
            if first:
                self._refuse_used(verdict)
            return
        finished = verdict is not None and verdict["status"] in DONE
        if verdict is not None and finished and self.resolved.is_of(verdict.get("config_hash")):
            raise RunFinished(f"{run_dir} is finished ({verdict['status']} at step {verdict['step']}): nothing to do.")
        if options.ckpt_path == "last":
            longest = -1 if finished else options.trainer.max_steps
            options.ckpt_path = None if options.run.overwrite else last_checkpoint(run_dir, longest)
            if finished and options.ckpt_path is None:
                raise FileNotFoundError(f"--ckpt_path last: {run_dir} is finished and has no checkpoint to go on from.")
            if first and options.ckpt_path is None:
                print(f"--ckpt_path last: {run_dir} has no checkpoint to go on from; starting at its beginning.")
        if options.ckpt_path is not None:
            self._refuse_other_configuration(Path(options.ckpt_path))
            if first:
                print(f"going on from step {global_step(options.ckpt_path)}: {options.ckpt_path}")

    def _refuse_used(self, verdict: dict[str, Any] | None) -> None:
        run_dir = self.resolved.run_dir
        trained = any((run_dir / "checkpoints").glob("*.ckpt"))
        if verdict is not None and not trained and (verdict["status"], verdict["step"]) == ("failed", 0):
            print(f"{run_dir}: beginning anew where a run failed at step 0 ({verdict['error']})")
            return
        if verdict is not None or trained or any(run_dir.glob("events.out.tfevents.*")):
            raise ValueError(
                f"{run_dir} holds a run already ({verdict['status'] if verdict else 'unfinished'}). Go on with it "
                "by --ckpt_path last, give another --run.experiment or --seed_everything, or replace it by "
                "--run.overwrite true."
            )

    def _refuse_other_configuration(self, checkpoint: Path) -> None:
        """Before anything is written: a resume by mistake leaves the run as it was."""
        there, here = callback_state(checkpoint, "RunRecorder").get("resume_hash"), resume_hash(self._options)
        if there in (None, here):
            return
        config_file = checkpoint.parent.parent / CONFIG_FILE
        found = changes(self._options, config_file) if config_file.exists() else []
        raise ValueError(
            f"{checkpoint} was trained with another configuration: {', '.join(found) or f'hash {there}, now {here}'}. "
            "Only the length of training and who looks on may change. Give the run's own configuration, which its "
            "config.yaml is, or another --run.experiment without --ckpt_path."
        )

    def _begin_with_fork(self) -> None:
        """Takes the other run's checkpoint where this run has none of its own yet."""
        options = self._options
        if options.ckpt_path is None and options.run.fork is not None:
            fork = Fork(**options.run.fork.as_dict())
            checkpoint, step = fork.checkpoint(self.resolved.run_dir)
            options.ckpt_path = str(checkpoint)
            self._fork = {"arm": fork.arm, "step": step, "checkpoint": checkpoint.name}

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options, run_dir = self._options, self.resolved.run_dir
        if options.get("ckpt_path") is not None:
            refuse_code(options.ckpt_path)
        kwargs.setdefault("default_root_dir", str(run_dir))
        if options.trainer.get("enable_progress_bar") is False:  # Lightning would call the base's bar a contradiction
            listed = self._get(self.config_init, "trainer").callbacks or []
            kwargs.setdefault("callbacks", [one for one in listed if not isinstance(one, ProgressBar)])
        if options.trainer.get("logger") in (None, True):
            kwargs.setdefault("logger", self._logger() if self.subcommand == "fit" else False)
        if self.subcommand == "fit":
            recorder = RunRecorder(
                options.run.experiment,
                options.run.arm,
                options.seed_everything,
                self.resolved.config_hash,
                resume_hash(options),
                fork=self._fork,
            )
            self.trainer_defaults["callbacks"] = [RandomState(), ResumedCheckpoints(), ResumedValidation(), recorder]
            if not any(str(one.get("class_path")).endswith("CollapseStop") for one in options.trainer.callbacks or []):
                self.trainer_defaults["callbacks"].append(CollapseStop())  # every run gets a judge
        trainer = super().instantiate_trainer(**kwargs)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not one of the user's own
            trainer.strategy.checkpoint_io = WholeCheckpointIO()
        return trainer

    def _logger(self) -> RunLogger:
        from lightning_qk.events import session_suffix  # here: parsing needs none of its imports

        options, run_dir = self._options, self.resolved.run_dir
        purge_step = None
        if options.ckpt_path is not None:
            purge_step = global_step(options.ckpt_path)
        elif any(run_dir.glob("events.out.tfevents.*")):
            purge_step = 0  # killed before its first checkpoint: starts over
        return RunLogger(
            run_dir.parent.parent, name=run_dir.parent.name, version=run_dir.name, default_hp_metric=False,
            purge_step=purge_step, filename_suffix=session_suffix(run_dir),
        )  # fmt: skip


_SETTINGS: dict[str, Any] = dict(
    subclass_mode_data=True,
    seed_everything_default=0,
    auto_configure_optimizers=False,
)


def _classes(args: list[str]) -> dict[str, Any]:
    """Which model and data ``args`` may name: a GPT and its tokens, unless they choose another model."""
    if chooses_model(args):
        return {"model_class": LightningModule, "datamodule_class": LightningDataModule, "subclass_mode_model": True}
    return {"model_class": GPTModule, "datamodule_class": TokenData}


def build(args: list[str], run: bool) -> QKCLI:
    """The CLI for ``args``; with ``run=False`` nothing is trained and there is no subcommand."""
    return QKCLI(
        save_config_callback=SaveConfig,
        save_config_kwargs={"save_to_log_dir": False},
        run=run,
        args=args,
        **_classes(args),
        **_SETTINGS,
    )


class _ParseOnly(QKCLI):
    """Stops before anything but the rehearsal is built, and before a run's directory is looked at.

    It knows the arguments of ``fit`` without that word: with subcommands all is parsed twice.
    """

    _parsers: ClassVar[dict[bool, LightningArgumentParser]] = {}

    @override
    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        # signatures and docstrings of all classes are read once for a GPT, and once for other models
        if self.subclass_mode_model not in self._parsers:
            super().setup_parser(*args, **kwargs)
            self._parsers[self.subclass_mode_model] = self.parser
        self.parser = self._parsers[self.subclass_mode_model]

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def _set_seed(self) -> None:
        """Does nothing: Lightning's says so in a line, of every run that a sweep looks at."""

    @override
    def before_instantiate_classes(self) -> None:
        self._check()

    @override
    def instantiate_classes(self) -> None:
        pass


def resolve_run(fit_args: list[str]) -> ResolvedRun:
    """Parses the arguments of ``fit`` and says what they would run, without starting it.

    Raises:
        ValueError: the configuration is wrong; the message names the key. What only a run finds out is left: its data,
            what callbacks ask of model and plugin, and the constructors of other packages' models and data modules.
    """
    settings = {**_classes(fit_args), **_SETTINGS, "load_from_checkpoint_support": False}  # which costs a dump
    return _ParseOnly(save_config_callback=None, run=False, args=fit_args, **settings).resolved


def main(args: list[str]) -> int:
    """Runs a subcommand of Trainer.

    Returns:
        0 when it is done, 2 when the configuration or its files are wrong, 143 when SIGTERM ended it between two steps.
    """
    try:
        if threads := os.environ.get("LIGHTNING_QK_THREADS"):
            if not threads.isdecimal() or int(threads) < 1:
                raise ValueError(f"LIGHTNING_QK_THREADS={threads!r} must be a whole number of threads, at least 1.")
            torch.set_num_threads(int(threads))
        build(args, run=True)
    except RunFinished as finished:
        print(finished)
    except SIGTERMException:
        return 128 + signal.SIGTERM  # Lightning leaves it at 0, as if the run were done
    except (ValueError, OSError, MisconfigurationException) as error:
        return complain(error, args)
    return 0
