"""What a user may get wrong and the error that it gives: exit status 2, and one line that names it and the remedy.

Every row is an input and what the line must say. Rows of one kind share the command that they are given to.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_runs import write_run
from runs import FAULT, callback, run_args, run_dir, write_tokens
from tiny import SIZE

from kernels import RoundingSites, TopSingular, mx_quantize, round_to, streaming_attention
from lightning_qk.__main__ import main
from lightning_qk.cli import main as cli
from lightning_qk.cli import resolve_run
from lightning_qk.report import main as report
from lightning_qk.sweep import main as sweep

pytestmark = pytest.mark.skipif(
    tuple(map(int, version("jsonargparse").split(".")[:2])) < (4, 49), reason="older jsonargparse says less of an error"
)
ARMS = Path(__file__).parents[1] / "configs" / "arms"
PLUGIN = "--trainer.plugins.init_args"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[list[str]], int], list[str]], str]:
    """Runs a command that must fail, and returns all that it says on stderr, which is one line."""

    def run(command: Callable[[list[str]], int], args: list[str]) -> str:
        capsys.readouterr()
        assert command(args) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said and "usage:" not in said
        line = said.rstrip("\n").splitlines()[-1]
        assert said.count("\n") == 1, said
        assert line.startswith("error: ") and len(line) < 800, line
        return line

    return run


# arguments of fit, over a run that is right

ARGUMENTS: list[tuple[list[str], str]] = [
    (["--model.lrr", "1"], "--model.lrr: no such key. Did you mean model.lr?"),
    (["--trainer.max_step", "1"], "trainer.max_step: no such key. Did you mean trainer.max_steps?"),
    (["--bogus"], "--bogus: no such key"),
    (["extra"], "extra: no such key"),
    (["--model.lr", "fast"], "model.lr: expected float, got fast"),
    (["--model.lr", "-1"], "lr=-1"),
    (["--model.optimizer", "adam"], "model.optimizer: expected one of 'adamw', 'sgd', 'muon', got adam"),
    (["--model.overrides", "{width: 3}"], "model.overrides.width does not exist; it takes n_layers"),
    (["--model.overrides.n_heads=3"], "n_heads=3"),
    (["--model.overrides.vocab_size", "16"], "set model.overrides.vocab_size to at least 32"),
    (["--model.preset", "gpt3"], "'gpt3' is not one of proxy"),
    (["--model.schedule", "linear"], "model.schedule: expected one of 'constant', 'cosine', got linear"),
    (["--trainer.plugins", "BF16Carry"], "no class 'BF16Carry'. Did you mean BF16CarryAttention?"),
    (["--trainer.plugins", "nowhere.Plugin"], "nowhere.Plugin: no class 'nowhere'. Give the full import path"),
    ([f"{PLUGIN}.mantissa", "2"], "'mantissa' is not an argument. It takes backend, base, carry"),
    ([f"{PLUGIN}.sites", "bf16"], "trainer.plugins: attention: sites='bf16' is not one of fp32, fa2"),
    ([f"{PLUGIN}.overrides", "{lsee: fp32}"], "lsee"),
    ([f"{PLUGIN}.carry", "99"], "99"),
    ([f"{PLUGIN}.tile", "0"], "tile=0"),
    ([f"{PLUGIN}.layers", "[5]"], "layers=[5]"),
    ([f"{PLUGIN}.gradient", "{route: qkv}"], "route='qkv' is not one of q, k, v, o"),
    ([f"{PLUGIN}.gradient", "{fmt: mxfp5}"], "mxfp5"),
    (["--trainer.precision", "16"], "trainer.precision=16: the plugin owns the dtype. Leave it unset"),
    (["--trainer.accelerator", "abacus"], "accelerator='abacus'"),
    (["--trainer.devices", "0"], "devices='0'"),
    (["--trainer.strategy", "fsdp"], "FSDP2 (configs/hardware/fsdp2.yaml, ModelParallelStrategy) work"),
    (["--trainer.strategy", "deepspeed_stage_2"], "DDP (configs/hardware/ddp.yaml"),
    (["--trainer.strategy", "warp"], "strategy='warp'"),
    (["--trainer.max_steps", "-1"], "trainer.max_steps is not set"),
    (["--trainer.gradient_clip_algorithm", "value"], "trainer.gradient_clip_algorithm: only 'norm'"),
    (["--trainer.callbacks+=QKGard"], "trainer.callbacks: no class 'QKGard'. Did you mean QKGuard?"),
    ([f"--trainer.callbacks+={callback('QKGuard', treshold=3)}"], "'treshold' is not an argument. Did you mean thresh"),
    ([f"--trainer.callbacks+={callback('QKGuard', threshold=-3)}"], "threshold=-3"),
    ([f"--trainer.callbacks+={callback('QKGuard', action='pray')}"], "action='pray' is not one of"),
    ([f"--trainer.callbacks+={callback('SpectralMonitor', every_n_steps=0)}"], "every_n_steps=0 must be at least 1"),
    ([f"--trainer.callbacks+={callback('RouteSplice', route='qkv')}"], "RouteSplice: route='qkv' is not one of"),
    ([f"--trainer.callbacks+={callback('RouteSplice')}", "--trainer.plugins=null"], "RouteSplice needs a plugin"),
    ([f"--trainer.callbacks+={callback('DirectionProbe', k=99)}"], "k=99"),
    (["--trainer.callbacks", "[QKGuard]"], "would drop ModelCheckpoint. Write callbacks+"),
    (["--data", "Corpus"], "data: no class 'Corpus'. Did you mean StdlibCorpus?"),
    (["--data.init_args.batch_size", "x"], "data: lightning_qk.TokenFile: batch_size: expected int, got x"),
    (["--data.init_args.batch_size", "0"], "batch_size=0 must be at least 1"),
    (["--data.init_args.dtype", "int64"], "dtype: expected one of 'uint16', 'uint32', got int64"),
    (["--run.arm", "a/b"], "run.arm='a/b' must be a plain directory name"),
    (["--run.experiment", ""], "run.experiment=''"),
    (["--run.overwrite", "maybe"], "run.overwrite: expected bool, got maybe"),
    (["--seed_everything", "false"], "seed_everything=False: give a number"),
    (["--weights_only", "false"], "weights_only=false: a checkpoint with more than plain values is code"),
    (["--ckpt_path", "/nowhere/last.ckpt"], "/nowhere/last.ckpt"),
    (["-c", "nowhere.yaml"], "nowhere.yaml: no such file"),
    (["-c", str(ARMS / "gaurd.yaml")], f"gaurd.yaml: no such file. Did you mean {ARMS / 'guard.yaml'}?"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "said"), ARGUMENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments(tmp_path: Path, tokens: dict[str, Any], complaint: Any, extra: list[str], said: str) -> None:
    assert said in complaint(cli, ["fit", *run_args(tmp_path, tokens, steps=1), *extra])


# configuration files

FILES: list[tuple[str, str]] = [
    ("trainer: {max_stepz: 3}", "trainer.max_stepz: no such key. Did you mean trainer.max_steps? (in {file})"),
    ("modle: {lr: 1}", "modle"),
    ("model: {lr: slow}", "model.lr: expected float, got slow. (in {file})"),
    ("trainer: {plugins: {class_path: BF16CarryAttention, init_args: {sies: fp32}}}", "Did you mean sites?"),
    ("trainer: {plugins: {init_args: {sites: bf16_cary}}}", "attention: sites='bf16_cary' is not one of fp32"),
    ("trainer: {plugins: {init_args: {clean_sites: fp23}}}", "Did you mean fp32? (in {file})"),
    ("trainer: {plugins: {init_args: {overrides: {lsee: fp32}}}}", "overrides.lsee is not one of the sites s,"),
    ("trainer: {plugins: {init_args: {overrides: {o_cary: 1}}}}", "Did you mean o_carry? (in {file})"),
    ("trainer: {plugins: {init_args: {layers: [7]}}}", "layers=[7] but the model has layers 0 to 1. (in {file})"),
    ("trainer: {plugins: {init_args: {gradient: {layers: [7]}}}}", "trainer.plugins: layers: 7 is not a layer"),
    ("trainer: {callbacks+: [{class_path: QKGuard, init_args: {threshold: -3}}]}", "threshold=-3.0 must"),
    ("trainer: {callbacks+: [{class_path: RouteSplice, init_args: {route: qvk}}]}", "route='qvk' is not one of"),
    ("trainer: {callbacks+: [{class_path: ModelCheckpoint, init_args: {save_top_k: -4}}]}", ">= -1 (in {file})"),
    ("model: {overrides: {contxt: 32}}", "model.overrides.contxt does not exist; it takes n_layers"),
    ("model: {overrides: {qk_nrm: rms}}", "Did you mean qk_norm? (in {file})"),
    ("model: {preset: proxi}", "model.preset='proxi' is not one of proxy, gpt2-small, gpt2-"),
    ("model: {lr: -1}", "model: GPTModule: lr=-1.0 must be positive and finite. (in {file})"),
    ("data: {init_args: {val_batches: 0}}", "data: TokenFile: val_batches=0 must be at least 1."),
    ("trainer: {callbacks+: [{class_path: Guard}]}", "trainer.callbacks: no class 'Guard'. Did you mean QKGuard?"),
    ("trainer: {callbacks: [{class_path: QKGuard}]}", "{file} would drop SpectralMonitor. Write callbacks+ to add"),
    ("trainer: {strategy: {class_path: FSDPStrategy}}", "FSDP2 (configs/hardware/fsdp2.yaml"),
    ("model: {lr: [", "-c {file}: not YAML: while parsing a flow node"),
    ("hello", "-c {file}: holds 'hello'; a configuration is a mapping of keys"),
    ("- a\n- b", "-c {file}: holds"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), FILES, ids=[text[:30] for text, _ in FILES])
def test_files(tmp_path: Path, tokens: dict[str, Any], complaint: Any, text: str, said: str) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "wrong.yaml"
    mine = ("--trainer.callbacks", "--trainer.plugins", "--model.overrides", "--model.lr", "--data")
    content = {"callbacks": [{"class_path": "SpectralMonitor"}], "plugins": json.loads(FAULT)}
    base.write_text(json.dumps({"trainer": content, "model": {"overrides": SIZE}, "data": tokens}))
    file.write_text(text)
    common = [arg for arg in run_args(tmp_path, tokens) if not arg.startswith(mine)]
    common.remove("0.01")
    args = ["-c", str(base), "-c", str(file), *common]
    line = complaint(cli, ["fit", *args])
    assert said.format(file=file) in line
    with pytest.raises(ValueError, match=re.escape(said.format(file=file))):  # and so a sweep is told
        resolve_run(args)
    assert not run_dir(tmp_path).exists()


def test_callbacks_can_be_replaced_on_purpose(tmp_path: Path, tokens: dict[str, Any]) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("trainer: {callbacks: []}")
    extra = ["-c", str(empty), f"--trainer.callbacks=[{callback('QKGuard')}]"]
    assert resolve_run([*run_args(tmp_path, tokens), *extra]).run_dir == run_dir(tmp_path)


# data files


def _odd(path: Path) -> None:
    path.write_bytes(b"\x01" * 2001)


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(2000, dtype=np.uint16))


def _large_tokens(path: Path) -> None:
    np.full(2000, 40, dtype=np.uint16).tofile(path)


def _short(path: Path) -> None:
    np.arange(16, dtype=np.uint16).tofile(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _sidecar(path: Path) -> None:
    np.zeros(2000, dtype=np.uint16).tofile(path)
    path.with_name(path.name + ".json").write_text("{}")


DATA: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: None, "train='{path}' does not exist"),
    (Path.touch, "train='{path}' is empty. Make it again"),
    (_directory, "train='{path}' is a directory. Name the file in it"),
    (_odd, "train='{path}' is truncated mid-token"),
    (_npy, "train='{path}' is an .npy file"),
    (_large_tokens, "is not below vocab_size=32. Set vocab_size"),
    (_short, "has 16 tokens, fewer than one window: context=16"),
    (_sidecar, "{path}.json is not the sidecar of a token file"),
]


@pytest.mark.parametrize(("make", "said"), DATA, ids=[said[:40] for _, said in DATA])
def test_data(tmp_path: Path, tokens: dict[str, Any], complaint: Any, make: Callable[[Path], Any], said: str) -> None:
    path = tmp_path / "train.bin"
    make(path)
    args = [*run_args(tmp_path / "runs", tokens, steps=1), "--data.init_args.train", str(path)]
    assert said.format(path=path) in complaint(cli, ["fit", *args])


# checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, Any]) -> Path:
    root = tmp_path_factory.mktemp("finished")
    assert cli(["fit", *run_args(root, tokens, steps=3)]) == 0
    return root


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def _text(path: Path) -> None:
    path.write_text("not a checkpoint")


def _object(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.save({**content, "surprise": Path("/")}, path)


def _other_model(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["lr"] = 0.5
    torch.save(content, path)


def _other_configuration(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["callbacks"]["RunRecorder"]["resume_hash"] = "0123"
    torch.save(content, path)


def _stateless(path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, path)


CHECKPOINTS: list[tuple[Callable[[Path], Any], str]] = [
    (Path.unlink, "{path}"),
    (_cut, "{path} is no checkpoint that can be read: it is cut short or damaged"),
    (_text, "{path} is no checkpoint that can be read"),
    (_object, "{path} is no checkpoint that can be read: it is cut short or damaged, or holds more than plain values"),
    (_stateless, "{path} is no checkpoint that can be read"),
    (_other_model, "model.lr=0.01 but the checkpoint was trained with 0.5"),
    (_other_configuration, "trained with another configuration: hash 0123, now "),
]


@pytest.mark.parametrize(("harm", "said"), CHECKPOINTS, ids=[harm.__name__ for harm, _ in CHECKPOINTS])
def test_checkpoints(
    tmp_path: Path, tokens: dict[str, Any], finished: Path, complaint: Any, harm: Callable[[Path], Any], said: str
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(finished, root)
    path = run_dir(root) / "checkpoints" / "last.ckpt"
    harm(path)
    args = [*run_args(root, tokens, steps=6), "--ckpt_path", str(path)]
    assert said.format(path=path) in complaint(cli, ["fit", *args])


def test_evaluation_without_a_checkpoint(tmp_path: Path, tokens: dict[str, Any], complaint: Any) -> None:
    line = complaint(cli, ["validate", *run_args(tmp_path, tokens)])
    assert f"{run_dir(tmp_path)} has no checkpoint; name the run by run.*" in line


# the state of the machine and of its directories


@pytest.mark.parametrize("threads", ["many", "0", "-2", "1.5"])
def test_threads(
    tmp_path: Path, tokens: dict[str, Any], complaint: Any, monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("LIGHTNING_QK_THREADS", threads)
    line = complaint(cli, ["fit", *run_args(tmp_path, tokens)])
    assert f"LIGHTNING_QK_THREADS={threads!r} must be a whole number of threads" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path: Path, tokens: dict[str, Any], complaint: Any) -> None:
    assert "No supported gpu backend found" in complaint(
        cli, ["fit", *run_args(tmp_path, tokens), "--trainer.accelerator=gpu"]
    )


def test_directories(tmp_path: Path, tokens: dict[str, Any], finished: Path, complaint: Any) -> None:
    file = tmp_path / "file"
    file.touch()
    assert str(file) in complaint(cli, ["fit", *run_args(file, tokens, steps=1)])
    line = complaint(cli, ["fit", *run_args(finished, tokens, steps=1)])
    assert "holds a run already (completed). Go on with it by --ckpt_path last" in line


def test_a_traceback_on_request(tmp_path: Path, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_QK_TRACEBACK", "1")
    for extra, said in ((["--model.lr", "-1"], "lr=-1"), (["--model.lrr", "1"], "no such key")):
        with pytest.raises(ValueError, match=said):
            cli(["fit", *run_args(tmp_path, tokens), *extra])


# experiments

SWEEPS: list[tuple[str, list[str], str]] = [
    ("{}", [], "name: missing in"),
    ("", [], "holds 'None'"),
    ("name: a/b", [], "name: 'a/b' names a directory"),
    ("name: x", [], "a sweep needs at least one of each"),
    ("{name: x, arms: {a: none.yaml}}", [], "arm a: no such file"),
    ("{name: x, arms: {a: arm.yaml}}", ["--seeds", "1,b"], "seeds: 'b' is not a whole number"),
    ("{name: x, arms: {a: arm.yaml}, seeds: [1, 1]}", [], "must be different, not negative and below 2^32"),
    ("{name: x, arms: {a: arm.yaml}}", ["--only", "b"], "only: b: not an arm; the arms are a"),
    ("{name: x, arms: {a: arm.yaml}, report: {reference: b}}", [], "report.reference: 'b' is not an arm"),
    ("{name: x, arms: {a: arm.yaml}, overrides: {run.arm: b}}", [], "run.arm is the sweep's own"),
    ("{name: x, arms: {a: arm.yaml}, grid: {model.lr: []}}", [], "grid.model.lr: [] must be a list of different"),
    ("{name: x, arms: {a: arm.yaml}}", ["--size", "large"], "size: 'large' is not a size; this experiment has none"),
    ("{name: x, arms: {a: arm.yaml}}", ["--executor", "cloud"], "cloud"),
    ("{name: x, arms: {a: arm.yaml}, sedes: [1]}", [], "sedes: no such key. Did you mean seeds? (in experiment.yaml)"),
    ("{name: x, arms: {a: arm.yaml}}", ["x.yaml"], "x.yaml: write -c before a configuration file"),
    ("{name: x, arms: {a: wrong.yaml}}", [], "arm a (wrong.yaml): model.lrr: no such key"),
    ("{name: x, arms: {a: refused.yaml}}", [], "arm a (refused.yaml): trainer.callbacks: QKGuard: threshold=-3"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "extra", "said"), SWEEPS, ids=[said[:40] for *_, said in SWEEPS])
def test_experiments(tmp_path: Path, complaint: Any, text: str, extra: list[str], said: str) -> None:
    (tmp_path / "arm.yaml").write_text("trainer: {max_steps: 1}")
    (tmp_path / "wrong.yaml").write_text("model: {lrr: 1}")
    guard = "{class_path: QKGuard, init_args: {threshold: -3}}"
    (tmp_path / "refused.yaml").write_text(f"{{trainer: {{callbacks+: [{guard}]}}, data: StdlibCorpus}}")
    (tmp_path / "experiment.yaml").write_text(text)
    line = complaint(sweep, ["-c", str(tmp_path / "experiment.yaml"), "--root", str(tmp_path / "runs"), *extra])
    assert said in line.replace(f"{tmp_path}/", "")


# other commands


def test_no_such_command(complaint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(args: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["lightning-qk", *args])
        return main()

    assert "'train' is not a command; the commands are fit, " in complaint(command, ["train", "-c", "x.yaml"])
    assert "required: fit.data. No configuration file is given; write -c configs/base.yaml" in complaint(
        command, ["fit"]
    )
    assert "--devise: no such key" in complaint(command, ["doctor", "--devise", "cpu"])
    assert "device" in complaint(command, ["doctor", "--device", "abacus"])


# run directories of a report


def test_reports(tmp_path: Path, complaint: Any) -> None:
    assert f"{tmp_path}/none: no such directory" in complaint(report, [f"{tmp_path}/none"])
    assert "holds no runs" in complaint(report, [str(tmp_path)])
    run = write_run(tmp_path / "exp", "fp32", 0)
    verdict = run / "verdict.json"
    assert "--reference none: give one of the arms fp32" in complaint(report, [str(tmp_path), "--reference", "none"])
    for text, said in (
        ('{"schema": 1, "sta', f"{verdict} is not valid JSON"),
        ('{"schema": 9, "status": "completed"}', f"{verdict} is not a verdict of schema"),
        ('{"schema": 1, "status": "fine"}', f"{verdict} is not a verdict of schema"),
    ):
        verdict.write_text(text)
        assert said in complaint(report, [str(tmp_path)])


# tensors

X = torch.zeros(2, 2, 8, 4)
TENSORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: streaming_attention(X, X[..., :2], X), r"k"),
    (lambda: streaming_attention(X[0], X[0], X[0]), r"4"),
    (lambda: streaming_attention(X.double(), X, X), r"float64|dtype"),
    (lambda: streaming_attention(X, X, X, sites="fp8"), r"'fp8' is not one of"),
    (lambda: streaming_attention(X, X, X, tile=0), r"tile=0"),
    (lambda: streaming_attention(X, X, X, backend="tpu"), r"backend='tpu'"),
    (lambda: RoundingSites.build("fp32", {"lse": "fp7"}), r"lse"),
    (lambda: mx_quantize(X.int()), r"float32, bfloat16 or float16"),
    (lambda: mx_quantize(X, "mxfp5"), r"mxfp5"),
    (lambda: mx_quantize(X, axis=7), r"axis=7"),
    (lambda: mx_quantize(X, scale="round"), r"scale='round'"),
    (lambda: round_to(X, 99), r"99"),
    (lambda: round_to(X, 3, mode="up"), r"mode='up'"),
    (lambda: TopSingular(k=0), r"k=0"),
]


@pytest.mark.parametrize(("call", "said"), TENSORS, ids=[said for _, said in TENSORS])
def test_tensors(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_there_are_enough_rows() -> None:
    rows = len(ARGUMENTS) + len(FILES) + len(DATA) + len(CHECKPOINTS) + len(SWEEPS) + len(TENSORS)
    assert rows >= 60
