"""The index of a sharded checkpoint, which PyTorch unpickles: what may be in it, and whether the shards are whole."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

INDEX = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"PosixPath"},  # its name on Python 3.13
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")
        return super().find_class(module, name)


def read_index(checkpoint: Path) -> Any:
    """The index of a sharded checkpoint, a ``Metadata`` of PyTorch's; call it before PyTorch reads the same file.

    Raises:
        pickle.UnpicklingError: it names anything but what an index is made of, or is damaged.
        OSError: there is none.
    """
    with (checkpoint / INDEX).open("rb") as file:
        try:
            return _IndexUnpickler(file).load()
        except (EOFError, AttributeError, IndexError, KeyError, ValueError, TypeError) as error:  # what damage raises
            raise pickle.UnpicklingError(f"{INDEX} is damaged ({type(error).__name__})") from error


def shards_are_whole(checkpoint: Path) -> bool:
    """Whether every part that the index names is there, as long as it was, with the bytes of its checksums."""
    try:
        for part in read_index(checkpoint).storage_data.values():
            with (checkpoint / part.relative_path).open("rb") as file:
                file.seek(part.offset)
                content = file.read(part.length)
            if len(content) < part.length or zipfile.ZipFile(io.BytesIO(content)).testzip() is not None:
                return False
    except (OSError, pickle.UnpicklingError, AttributeError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):
        return False  # RuntimeError is zipfile's, for what damage makes look encrypted or of another method
    return True
