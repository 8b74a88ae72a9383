"""Model overrides of several files lie over each other key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_qk.cli import resolve_run
from lightning_qk.overlays import (
    PACKAGED,
    find_config,
    find_configs,
    keep_overrides,
    nest_nulls,
    refuse_dropped_callbacks,
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    contents = {
        "size": "model: {overrides: {context: 64, name: 'a b', bias: true}}",
        "arm": "model: {overrides: {softcap: 50.0, bias: false}}",
        "plain": "model: {lr: 0.1}",
        "none": "model: {overrides: null}",
        "broken": "model: {overrides: {",
        "list": "[1, 2]",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    return {name: str(tmp_path / f"{name}.yaml") for name in contents}


def test_a_later_file_keeps_what_it_does_not_name(files: dict[str, str]) -> None:
    args = ["fit", "-c", files["size"], "-c", files["plain"], f"--config={files['arm']}", "--model.overrides.context=8"]
    again = ["--model.overrides.context=64", "--model.overrides.name=a b"]
    assert keep_overrides(args) == [*args[:-1], *again, args[-1]]  # the command line has the last word


def test_the_first_file_comes_back_if_it_is_last_too(files: dict[str, str]) -> None:
    args = ["-c", files["arm"], "-c", files["size"]]
    assert keep_overrides(args) == [*args, "--model.overrides.softcap=50.0"]


def test_values_that_are_given_again_are_read_as_in_their_file(tmp_path: Path) -> None:
    """The parser reads 1e-4 as a number, PyYAML as text."""
    texts = ["{positions: rope, z_loss: 1e-4, bias: true}", "{n_layers: 3}"]
    args: list[str] = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(f"model: {{overrides: {text}}}")
        args += ["-c", str(tmp_path / f"{number}.yaml")]
    base = ["-c", "configs/base.yaml", "-c", "configs/proxy.yaml"]
    content = yaml.safe_load(resolve_run(find_configs([*base, *args])).deciding)["model"]["overrides"]
    expected = {"positions": "rope", "z_loss": 1e-4, "bias": True, "n_layers": 3}
    assert {key: content[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["plain", "none", "broken", "list", "missing"])
def test_other_files_are_the_parsers_business(files: dict[str, str], name: str) -> None:
    args = ["-c", files["size"], "-c", files.get(name, "/no/such.yaml")]
    assert keep_overrides(args) == args


def test_a_packaged_configuration_is_found_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = PACKAGED / "arms" / "fp32.yaml"
    assert find_configs(
        ["fit", "-c", "configs/arms/fp32.yaml", "--config=configs/base.yaml", "--x", "configs/base"]
    ) == [*("fit", "-c", str(packaged), f"--config={PACKAGED / 'base.yaml'}", "--x", "configs/base")]
    assert f"configs/arms/fp32.yaml: not here, using the package's own {packaged}" in capsys.readouterr().err
    assert find_config("configs/arms/fp32.yaml", tmp_path / "elsewhere") == packaged


def test_a_file_that_is_there_or_nowhere_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.yaml").touch()
    for args in (
        ["-c", "configs/base.yaml"],
        ["-c", "configs/none.yaml"],
        ["-c", "base.yaml"],
        ["-c", "configs"],
        ["-c"],
    ):
        assert find_configs(args) == args
    assert capsys.readouterr().err == ""


CALLBACKS = "trainer: {callbacks: [{class_path: pkg.First}, Second]}"


@pytest.mark.parametrize(
    "later",
    [
        "trainer: {callbacks: [{class_path: Third}]}",
        "trainer: {callbacks: Third}",
        "--trainer.callbacks=[Third]",
        "--trainer.callbacks={class_path: Third}",
        "--trainer.callbacks=Third",
    ],
)
def test_callbacks_are_not_dropped_silently(tmp_path: Path, later: str) -> None:
    paths = [tmp_path / f"{name}.yaml" for name in ("first", "empty", "later")]
    for path, text in zip(paths, (CALLBACKS, "trainer: {callbacks: []}", later), strict=True):
        path.write_text(text)
    first, empty, last = (["-c", str(path)] for path in paths)
    last = [later] if later.startswith("--") else last
    with pytest.raises(ValueError, match=r"would drop First, Second\. Write callbacks\+"):
        refuse_dropped_callbacks([*first, *last])
    for args in (
        [*first, *empty, *last],
        last,
        [*first, "--trainer.callbacks+=Third"],
        [*first, "--trainer.callbacks", "[]"],
    ):
        refuse_dropped_callbacks(args)


def test_a_null_below_an_argument_of_a_class(files: dict[str, str]) -> None:
    key = "--trainer.plugins.init_args.gradient"
    given = ["fit", f"{key}.block=null", f"{key}.scale.deep", "~", f"{key}=null", f"{key}.fmt=x", "--model.betas=null"]
    nested = [f'{key}={{"block": null}}', f'{key}={{"scale": {{"deep": null}}}}']
    assert nest_nulls(given) == ["fit", *nested, *given[4:]]
