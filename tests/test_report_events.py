"""Reading events back: every record as TensorBoard's own loader has it, and one history over all resumes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from lightning_qk.event_file import read_event_file
from lightning_qk.events import read_history, read_scalars, session_of, session_suffix


def write_events(path: Path, steps: range, value: float, purge: int | None = None, new_style: bool = False) -> None:
    with SummaryWriter(str(path), purge_step=purge) as writer:
        for step in steps:
            writer.add_scalar("x", value, step, new_style=new_style)
            writer.add_scalar("other", value, step)


def write_file(path: Path, events: list[Event]) -> None:
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def by_loader(path: Path) -> tuple[int, dict[str, list[tuple[int, int, str]]], list[tuple[int, int]]]:
    """Number of records, points by tag and session starts, by TensorBoard's loader; values as text, for nan."""
    points: dict[str, list[tuple[int, int, str]]] = {}
    starts, number = [], -1
    for number, event in enumerate(LegacyEventFileLoader(str(path)).Load()):
        if event.session_log.status == SessionLog.START:
            starts.append((number, event.step))
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                points.setdefault(value.tag, []).append((number, event.step, repr(value.simple_value)))
            elif value.metadata.plugin_data.plugin_name == "scalars":
                points.setdefault(value.tag, []).append((number, event.step, repr(make_ndarray(value.tensor).item())))
    return number + 1, points, starts


def by_us(path: Path) -> tuple[int, dict[str, list[tuple[int, int, str]]], list[tuple[int, int]]]:
    file = read_event_file(path)
    if file is None:
        return 0, {}, []
    points = {tag: list(zip(*(axis.tolist() for axis in found), strict=True)) for tag, found in file.points.items()}
    return (
        file.records,
        {tag: [(number, step, repr(value)) for number, step, value in rows] for tag, rows in points.items()},
        file.starts,
    )


def test_torch_writes_what_is_read_at_once(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 300), 1.5)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    first = struct.unpack_from("<Q", data)[0] + 16  # after the record of the file's version
    (length,) = struct.unpack_from("<Q", data, first)
    record = data[first + 12 : first + 12 + length]
    assert record[:1] + record[9:] == b"\x09\x2a\x0a\x0a\x08\x0a\x01x\x15" + struct.pack("<f", 1.5), "no step: it is 0"
    assert by_us(path) == by_loader(path)


values = st.one_of(
    st.builds(lambda tag, x: Summary.Value(tag=tag, simple_value=x), st.text(max_size=300), st.floats(width=32)),
    st.builds(lambda tag: Summary.Value(tag=tag, histo=HistogramProto(min=1.0)), st.text(max_size=9)),
    st.builds(lambda tag: Summary.Value(tag=tag), st.text(max_size=9)),
)
steps = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
events = st.one_of(
    st.builds(
        lambda step, rows, wall: Event(wall_time=wall, step=step, summary=Summary(value=rows)),
        *(steps, st.lists(values, max_size=3), st.floats(0, 2e9)),
    ),
    st.builds(lambda step: Event(step=step, session_log=SessionLog(status=SessionLog.START)), steps),
    st.builds(lambda step: Event(step=step, session_log=SessionLog(status=SessionLog.STOP)), steps),
    st.just(Event()),
    st.just(Event(wall_time=1.0, file_version="brain.Event:2")),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(events, max_size=12))
def test_any_file_reads_as_tensorboard_reads_it(tmp_path: Path, written: list[Event]) -> None:
    path = tmp_path / "events.out.tfevents.1"
    write_file(path, written)
    assert by_us(path) == by_loader(path)


def test_cut_anywhere_a_file_reads_as_tensorboard_reads_it(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 2), 2.0, purge=1, new_style=True)
    (path,) = tmp_path.iterdir()
    data, cut = path.read_bytes(), tmp_path / "cut"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        assert by_us(cut) == by_loader(cut), f"cut to {size} bytes"
        file = read_event_file(cut)
        assert (file is None or file.problem is None) == (size in frames(data)), f"cut to {size} bytes"


def frames(data: bytes) -> list[int]:
    """Where every record begins, and where the last one ends."""
    positions = [0]
    while positions[-1] < len(data):
        positions.append(positions[-1] + struct.unpack_from("<Q", data, positions[-1])[0] + 16)
    return positions


def test_a_length_that_lies_ends_the_file(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 3), 2.0)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    at = frames(data)[2]
    data[at : at + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(data)
    scalars, problems = read_history(tmp_path)
    assert list(scalars) == ["x"]
    assert problems == [f"{path.name} has a record broken off at byte {at}; what comes before was read"]


def test_a_record_that_is_no_event_ends_the_file(tmp_path: Path) -> None:
    write_events(tmp_path, range(1, 4), 2.0)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    at = frames(data)[3]  # the version, x, other, and the second x
    data[data.index(b"\x0a\x01x", at) + 1] = 0x7F  # the tag would go on past the record
    path.write_bytes(data)
    scalars, problems = read_history(tmp_path)
    assert {tag: series.steps.tolist() for tag, series in scalars.items()} == {"x": [1], "other": [1]}
    assert problems == [f"{path.name} has a record that is no event at byte {at}; what comes before was read"]


def test_tags_are_picked(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 3), 2.0)
    assert list(read_scalars(tmp_path, ["other", "missing"])) == ["other"]


def test_last_write_wins_after_resume(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    write_events(tmp_path, range(6, 9), 2.0, new_style=True)
    series = read_scalars(tmp_path, ["x"])
    assert list(series) == ["x"]
    assert series["x"].steps.tolist() == list(range(10))
    assert series["x"].values.tolist() == [1.0] * 6 + [2.0] * 3 + [1.0]


def test_session_start_purges_orphaned_steps(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    write_events(tmp_path, range(6, 8), 2.0, purge=6)
    series = read_scalars(tmp_path)["x"]
    assert series.steps.tolist() == list(range(8))
    assert series.values.tolist() == [1.0] * 6 + [2.0] * 2


def test_files_are_read_in_the_order_they_were_begun(tmp_path: Path) -> None:
    def one(name: str, wall_time: float, value: float) -> None:
        summary: Any = Summary(value=[Summary.Value(tag="x", simple_value=value)])
        write_file(tmp_path / f"events.out.tfevents.{name}", [Event(wall_time=wall_time, step=1, summary=summary)])

    one("1.a", 20.0, 2.0)
    one("1.b", 10.0, 1.0)
    assert read_scalars(tmp_path)["x"].values.tolist() == [2.0]


def test_sessions_keep_their_order_though_the_clock_was_set_back(tmp_path: Path) -> None:
    for purge, steps in ((None, range(3)), (0, range(6)), (4, range(4, 8))):
        with SummaryWriter(str(tmp_path), purge_step=purge, filename_suffix=session_suffix(tmp_path)) as writer:
            for step in steps:
                writer.add_scalar("x", len(steps), step)
    files = {session_of(path): path for path in tmp_path.iterdir()}
    assert sorted(files) == [0, 1, 2]
    for session, path in files.items():  # each an hour before the one that it follows
        events = list(LegacyEventFileLoader(str(path)).Load())
        for event in events:
            event.wall_time -= 3600 * session
        path.unlink()
        write_file(tmp_path / f"events.out.tfevents.{events[0].wall_time:010.0f}.host.1.0.session_{session}", events)
    series = read_scalars(tmp_path)["x"]
    assert series.steps.tolist() == list(range(8))
    assert series.values.tolist() == [6.0] * 4 + [4.0] * 4


@pytest.mark.parametrize("name", ["1.host.7.0", "1.host.session_x", "1.host.session_"])
def test_a_file_of_another_writer_has_no_session(name: str) -> None:
    assert session_of(Path(f"events.out.tfevents.{name}")) == -1


def test_truncated_and_empty_event_files(tmp_path: Path) -> None:
    write_events(tmp_path, range(0, 10), 1.0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    (tmp_path / "events.out.tfevents.9999999999.killed").touch()
    series, problems = read_history(tmp_path)
    assert len(series["x"]) == 10
    assert len(series["other"]) == 9, "the record that was cut is the last one"
    assert len(problems) == 1


def test_run_without_events(tmp_path: Path) -> None:
    assert read_history(tmp_path) == ({}, [])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-45])
def test_unusual_values(tmp_path: Path, value: float) -> None:
    write_events(tmp_path, range(0, 2), value)
    (path,) = tmp_path.iterdir()
    assert by_us(path) == by_loader(path)
