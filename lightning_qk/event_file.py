"""The scalars of one TensorBoard event file, many times faster than by protobuf alone.

The file is a sequence of TFRecords: length (uint64, little-endian), its CRC, the payload, its CRC (TensorFlow,
`tensorflow/core/lib/io/record_writer.h`). The payload is an `Event` message. All but a few are one scalar each, which
torch's `SummaryWriter` always lays out alike (field, wire type):

    09 wall_time:8 | 10 step:varint | 2a n | 0a n | 0a n tag | 15 value:4

The step is left out where it is 0. Records of exactly this layout, each length checked against the end of its record,
are decoded together by numpy; every other record goes through protobuf. CRCs are not checked: that alone would take
longer than all the rest.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

Ints = npt.NDArray[np.int64]
Points = tuple[Ints, Ints, npt.NDArray[np.float64]]
HEADER, FOOTER = 12, 4


@dataclass(frozen=True)
class EventFile:
    """What one event file holds.

    Attributes:
        wall_time: Time of the first record.
        records: How many records there are.
        points: By tag: the number of the record, the step and the value, in the order in which they were written.
        starts: Record number and step of every session that announces where it begins.
        problem: What is wrong with the file, or None. Everything before it was read.
    """

    wall_time: float
    records: int
    points: dict[str, Points]
    starts: list[tuple[int, int]]
    problem: str | None


def read_event_file(path: Path, tags: Collection[str] | None = None) -> EventFile | None:
    """Read the scalars of an event file; None if it holds no record, as after a kill before the first flush.

    Args:
        path: The file.
        tags: Tags to keep; all scalars by default.
    """
    data = path.read_bytes()
    start, end, problem = _frames(data)
    rest: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    starts, wall_time = [], 0.0
    plain, step, tag_at, tag_length = _plain(np.frombuffer(data + bytes(64), dtype=np.uint8), start, end)
    for number in np.flatnonzero(~plain).tolist():
        try:
            event = Event.FromString(data[start[number] : end[number]])
        except DecodeError:
            problem = f"a record that is no event at byte {start[number] - HEADER}"
            plain, start, end = plain[:number], start[:number], end[:number]
            break
        wall_time = event.wall_time if number == 0 else wall_time
        if event.session_log.status == SessionLog.START:
            starts.append((number, event.step))
        for value in event.summary.value:
            if (tags is None or value.tag in tags) and (scalar := _scalar(value)) is not None:
                rest[value.tag].append((number, event.step, scalar))
    if not len(start):
        return EventFile(wall_time, 0, {}, [], problem) if problem else None
    if plain[0]:
        (wall_time,) = struct.unpack_from("<d", data, int(start[0]) + 1)
    numbers = np.flatnonzero(plain)
    values = _gather(data, end[numbers] - 4, 4).view("<f4")[:, 0].astype(np.float64)
    points = {
        tag: (numbers[rows], step[numbers[rows]], values[rows])
        for tag, rows in _by_tag(data, tag_at[numbers], tag_length[numbers])
        if tags is None or tag in tags
    }
    for tag, found in rest.items():
        points[tag] = _merge(points.get(tag), found)
    return EventFile(wall_time, len(start), points, starts, problem)


def _frames(data: bytes) -> tuple[Ints, Ints, str | None]:
    """Where the payload of every complete record starts and ends, and where the file is broken off."""
    length_at, starts, ends = struct.Struct("<Q").unpack_from, [], []
    position, size = 0, len(data)
    while position + HEADER + FOOTER <= size:
        start = position + HEADER
        end = start + length_at(data, position)[0]
        if end + FOOTER > size:
            break
        starts.append(start)
        ends.append(end)
        position = end + FOOTER
    problem = f"a record broken off at byte {position}" if position < size else None
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64), problem


def _plain(bytes_: npt.NDArray[np.uint8], start: Ints, end: Ints) -> tuple[npt.NDArray[np.bool_], Ints, Ints, Ints]:
    """Which records are one scalar in torch's layout; the step, and where the tag begins and how long it is.

    `bytes_` is padded, so that a length that lies points at zeros and not past the end.
    """
    limit = len(bytes_) - 1

    def at(position: Ints) -> Ints:
        return bytes_[np.minimum(position, limit)].astype(np.int64)

    plain = at(start) == 0x09
    has_step = at(start + 9) == 0x10
    cursor, step = start + 9 + has_step, np.zeros_like(start)
    more = has_step
    for shift in range(0, 63, 7):
        byte = at(cursor)
        step |= np.where(more, (byte & 0x7F) << shift, 0)
        cursor = cursor + more
        more = more & (byte >= 0x80)
        if not more.any():
            break
    plain &= ~more  # a negative step has ten bytes
    for field in (0x2A, 0x0A):  # the summary and its only value end where the record ends
        length = at(cursor + 1)
        plain &= (at(cursor) == field) & (length < 0x80) & (cursor + 2 + length == end)
        cursor = cursor + 2
    length = at(cursor + 1)
    plain &= (at(cursor) == 0x0A) & (length < 0x80) & (cursor + 2 + length + 5 == end) & (at(end - 5) == 0x15)
    return plain, step, cursor + 2, length


def _gather(data: bytes, position: Ints, width: int) -> npt.NDArray[np.uint8]:
    """`width` bytes from every position, one row each."""
    return np.frombuffer(data, dtype=np.uint8)[position[:, None] + np.arange(width)]


def _by_tag(data: bytes, position: Ints, length: Ints) -> list[tuple[str, Ints]]:
    """The tags, each with its rows in ascending order."""
    found = []
    for width in np.unique(length).tolist():
        rows = np.flatnonzero(length == width)
        if width == 0:
            found.append(("", rows))
            continue
        names = _gather(data, position[rows], width).view(f"S{width}")[:, 0]
        first, group = np.unique(names, return_index=True, return_inverse=True)[1:]
        for index, row in enumerate(rows[first].tolist()):
            name = data[position[row] : position[row] + width].decode("utf-8", "surrogateescape")
            found.append((name, rows[group == index]))
    return found


def _merge(points: Points | None, found: list[tuple[int, int, float]]) -> Points:
    """Points of both kinds of record, in the order in which they were written."""
    number, step = (np.array([point[axis] for point in found], dtype=np.int64) for axis in (0, 1))
    value = np.array([point[2] for point in found], dtype=np.float64)
    if points is not None:
        number, step = np.concatenate([points[0], number]), np.concatenate([points[1], step])
        value = np.concatenate([points[2], value])
    order = np.argsort(number, kind="stable")
    return number[order], step[order], value[order]


def _scalar(value: Any) -> float | None:
    """The number in a summary value: `simple_value` as torch writes it, or a scalar tensor as TensorFlow 2 does."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        from tensorboard.util.tensor_util import make_ndarray

        return float(make_ndarray(value.tensor).item())
    return None
