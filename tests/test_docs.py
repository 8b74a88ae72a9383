"""The README's and the guide's code runs as it stands, what they name exists, and the guide can be rendered."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "guide").glob("*.md"))
READ = [ROOT / "README.md", *PAGES]
CODE = [
    pytest.param(block, id=f"{page.stem}-{n}")
    for page in READ
    for n, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S))
]


def test_there_are_pages_and_all_are_included() -> None:
    included = re.findall(r"include:: (\S+)", (ROOT / "docs" / "guide" / "__init__.py").read_text())
    assert sorted(included) == [page.name for page in PAGES] and len(CODE) >= 5


@pytest.mark.parametrize("code", CODE)
def test_the_code_of_a_page_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<guide>", "exec"), {"__name__": "guide"})


def test_the_bare_loop_needs_no_lightning(tmp_path: Path) -> None:
    (code,) = [block.values[0] for block in CODE if "optimizer.zero_grad" in str(block.values[0])]
    check = (
        "\nimport sys\nassert len(sites) == 2 and sigma_q > 0 and logit == logit\nassert 'lightning' not in sys.modules"
        "\nassert rule.status == 'completed' and rule.verdict_fields()['loss'] > 0"
    )
    command = [sys.executable, "-c", str(code) + check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", READ, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:lightning_qk|kernels|callbacks)(?:\.\w+)+)`", text):
        assert pkgutil.resolve_name(name) is not None
    for path in re.findall(r"(?:configs|kernels|tests|lightning_qk)/[\w/]+\.(?:yaml|py)", text):
        assert (ROOT / path).is_file(), path
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        assert not heading or heading in anchors(linked.read_text()), target


@pytest.mark.slow
def test_the_documentation_can_be_built(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^`pdoc (.*)`$", (ROOT / "README.md").read_text(), re.M)
    command = [sys.executable, "-m", "pdoc", *shown.split(), "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "Using the guard in your own training" in (tmp_path / "guide.html").read_text()
    for page, names in (
        ("callbacks", ("QKGuard", "StepProfile")),
        ("kernels", ("streaming_attention", "mx_quantize")),
        ("lightning_qk/precision", ("FaultPrecision", "GradientFault")),
        ("lightning_qk/routes", ("attention_sites", "route_parameters")),
    ):
        text = (tmp_path / f"{page}.html").read_text()
        assert all(f'id="{name}"' in text for name in names), page
