"""The report in TensorBoard: `<experiment>/aggregate/`.

* a run an arm, `aggregate/<arm>`: at every step that a counted seed logged, the mean over the seeds that logged it
  under the tag of the runs themselves, so that arms lie over their seeds; the least and the largest as `<tag>/low` and
  `<tag>/high`; and how many seeds that was as `<tag>/seeds`, since it falls where seeds stop. A value that is not
  finite makes its mean so;
* a layout of margin charts for the custom scalars, and the report's figures as images, in `aggregate` itself;
* a session a run for the hyperparameter table, `aggregate/hparams/<arm>/<seed>`.

The directory is written whole under another name and then takes the place of the old one. Every file tells a
TensorBoard that is running to drop what it read of the run before (`SessionLog.START` at step 0), so that no point is
there twice.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, PLUGIN_NAME
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_qk.events import Scalars, Series
from lightning_qk.figures import TAGS
from lightning_qk.runs import AGGREGATE, Arm, Run, is_aggregate, read_experiment
from lightning_qk.verdict import write_json_atomic

LOW, HIGH, COUNT = "/low", "/high", "/seeds"
METRICS = ("collapse_step", "guard_step", "loss", "min_loss", "val_loss", "sigma_q", "max_logit_peak")


def export(arms: Sequence[Arm], scalars: Scalars, figures: Sequence[Path], out: Path) -> Path:
    """Write `aggregate/`, in place of an older one.

    Args:
        arms: Arms in the order in which they are listed.
        scalars: What each run logged, by run directory and tag.
        figures: PNG files.
        out: Directory in which `aggregate/` is written.
    """
    target = place(out)
    directory = Path(tempfile.mkdtemp(prefix=f".{AGGREGATE}.", dir=out))
    try:
        directory.chmod(0o755)
        write_json_atomic(directory / f"{AGGREGATE}.json", {"arms": [arm.name for arm in arms]})
        _write(directory, [(0, _layout()), (0, _columns(arms)), (0, Summary(value=[_image(path) for path in figures]))])
        for arm in arms:
            _write(directory / arm.name, _curves(arm, scalars))
            for run in arm.counted:
                _write(directory / "hparams" / arm.name / str(run.seed), [(0, _session(arm, run)), (0, _outcome(run))])
        _replace(directory, target)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return target


def place(out: Path) -> Path:
    """Where the export goes.

    Raises:
        ValueError: there is an `aggregate/` that the report did not write, such as an arm of that name.
    """
    target = out / AGGREGATE
    if target.exists() and not is_aggregate(target):
        raise ValueError(f"{target}: not written by `report`, so it stays; rename it, or give another --out DIR")
    return target


def over_seeds(lines: Sequence[Series]) -> dict[str, Series]:
    """Mean, least, largest and number of the values at every step that one of the lines has, by suffix of the tag."""
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    values = np.concatenate([line.values for line in lines])
    at = np.searchsorted(steps, np.concatenate([line.steps for line in lines]))
    low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    with np.errstate(invalid="ignore"):  # a value that is not a number makes the limits so
        np.minimum.at(low, at, values)
        np.maximum.at(high, at, values)
    count = np.bincount(at, minlength=len(steps)).astype(np.float64)
    mean = np.bincount(at, weights=values, minlength=len(steps)) / count
    columns = {"": mean, LOW: low, HIGH: high, COUNT: count}
    return {suffix: Series(steps, column) for suffix, column in columns.items()}


def _curves(arm: Arm, scalars: Scalars) -> list[tuple[int, Summary]]:
    """An event a step, with all that an arm has there."""
    found: dict[int, list[Summary.Value]] = defaultdict(list)
    for tag in TAGS:
        lines = [scalars[run.path][tag] for run in arm.counted if tag in scalars[run.path]]
        for suffix, series in over_seeds(lines).items() if lines else ():
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                found[int(step)].append(Summary.Value(tag=tag + suffix, simple_value=value))
    return [(step, Summary(value=found[step])) for step in sorted(found)]


def _layout() -> Summary:
    """One margin chart a tag, for all arms."""
    margin = layout_pb2.MarginChartContent
    charts = [
        layout_pb2.Chart(title=tag, margin=margin(series=[margin.Series(value=tag, lower=tag + LOW, upper=tag + HIGH)]))
        for tag in TAGS
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Arms: mean and range over seeds", chart=charts)])
    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME)
    tensor = TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()])
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata)])


def _columns(arms: Sequence[Arm]) -> Summary:
    """What the table of hyperparameters shows."""
    states = sorted({run.state for arm in arms for run in arm.counted})
    columns = [
        hparams.HParam("arm", hparams.Discrete([arm.name for arm in arms])),
        hparams.HParam("seed", hparams.Discrete(sorted({run.seed for arm in arms for run in arm.runs}))),
        hparams.HParam("status", hparams.Discrete(states or ["completed"])),
        *(hparams.HParam(key) for key in dict.fromkeys(key for arm in arms for key in _point(arm))),
    ]
    return hparams.hparams_config_pb(columns, [hparams.Metric(f"final/{key}") for key in METRICS])


def _point(arm: Arm) -> dict[str, str | int | float | bool]:
    """The values of an arm at its point of the sweep's grid, as the table of hyperparameters can hold them."""
    points = read_experiment(arm.runs[0].path.parent.parent).get("points") or {}
    found = points.get(arm.runs[0].arm) or {}
    return {key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in found.items()}


def _session(arm: Arm, run: Run) -> Summary:
    columns = {"arm": arm.name, "seed": run.seed, "status": run.state, **_point(arm)}
    return hparams.hparams_pb(columns, trial_id=f"{arm.name}/{run.seed}")


def _outcome(run: Run) -> Summary:
    """A run's final numbers; one that it does not have is left empty in the table."""
    values = {f"final/{key}": value for key in METRICS if (value := run.number(key)) is not None}
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def _image(path: Path) -> Summary.Value:
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # of the PNG's header
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
    return Summary.Value(tag=f"report/{path.stem}", image=image)


def _write(directory: Path, summaries: Iterable[tuple[int, Summary]]) -> None:
    """Write one event file: later ones sort after it."""
    now, seconds = time.time_ns(), time.time()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"events.out.tfevents.{now // 10**9}.{now % 10**9:09d}.report").open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=seconds, file_version="brain.Event:2").SerializeToString())
        start = SessionLog(status=SessionLog.START)
        writer.write(Event(wall_time=seconds, step=0, session_log=start).SerializeToString())
        for step, summary in summaries:
            writer.write(Event(wall_time=seconds, step=step, summary=summary).SerializeToString())


def _replace(new: Path, old: Path) -> None:
    """Put a directory in another's place: a reader finds the old one, the new one, or for an instant none."""
    retired = Path(tempfile.mkdtemp(prefix=f"{new.name}.", dir=new.parent))
    if old.exists():
        os.rename(old, retired / old.name)
    os.rename(new, old)
    shutil.rmtree(retired)
