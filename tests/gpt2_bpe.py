"""Fetch GPT-2's BPE for the tests that need it.

tiktoken takes it from openaipublic.blob.core.windows.net. Where only a package index can be reached, the same file,
byte for byte, is in the source distribution of openai-whisper.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from lightning_qk.hub_text import BPE_URL, bpe_cache_path

# What tiktoken itself expects of r50k_base.tiktoken.
BPE_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
WHISPER = "openai-whisper==20250625"
MEMBER = "whisper/assets/gpt2.tiktoken"


def gpt2_bpe_cache(directory: Path) -> Path:
    """Fill ``directory`` so that it can serve as TIKTOKEN_CACHE_DIR, and return the file in it.

    The file comes from LIGHTNING_QK_BPE (a path), tiktoken's present cache, or the package index, whichever is first.

    Raises:
        ConnectionError: If there is no file and no package index.
        ValueError: If the file found is not GPT-2's BPE.
    """
    cached = bpe_cache_path()
    if "LIGHTNING_QK_BPE" in os.environ:
        data = Path(os.environ["LIGHTNING_QK_BPE"]).read_bytes()
    elif cached.is_file():
        data = cached.read_bytes()
    else:
        data = _from_whisper(directory)
    if hashlib.sha256(data).hexdigest() != BPE_SHA256:
        raise ValueError(f"{os.environ.get('LIGHTNING_QK_BPE', cached)} is not r50k_base.tiktoken: its sha256 differs.")
    target = directory / hashlib.sha1(BPE_URL.encode()).hexdigest()
    target.write_bytes(data)
    return target


def _from_whisper(directory: Path) -> bytes:
    download = directory / "download"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai-whisper"]
    command += ["--retries", "1", "--timeout", "15", "--dest", str(download), WHISPER]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    archives = list(download.glob("*.tar.gz"))
    if not archives:
        raise ConnectionError(f"GPT-2's BPE is not cached and {WHISPER} cannot be downloaded: {result.stderr[-300:]}")
    with tarfile.open(archives[0]) as archive:
        member = next(name for name in archive.getnames() if name.endswith(MEMBER))
        extracted = archive.extractfile(member)
        assert extracted is not None
        data = extracted.read()
    shutil.rmtree(download)
    return data


if __name__ == "__main__":
    target_directory = Path(sys.argv[1])
    target_directory.mkdir(parents=True, exist_ok=True)
    print(gpt2_bpe_cache(target_directory))
