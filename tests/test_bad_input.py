"""What a user may get wrong and the error that it gives: exit status 2, and one line that names it and the remedy.

Every row is an input and what the line must say. Rows of one kind share the command that they are given to.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import FAULT, callback, run_args, run_dir, write_tokens
from tiny import SIZE

from lightning_qk.__main__ import main
from lightning_qk.cli import main as cli
from lightning_qk.cli import resolve_run
from lightning_qk.sweep import main as sweep

pytestmark = pytest.mark.skipif(
    tuple(map(int, version("jsonargparse").split(".")[:2])) < (4, 49), reason="older jsonargparse says less of an error"
)
ARMS = Path(__file__).parents[1] / "configs" / "arms"
NAMED = "--trainer.callbacks+={{class_path: {}, init_args: {{{}}}}}"  # JSON has no word for infinity
PLUGIN = "--trainer.plugins.init_args"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


# arguments of fit, over a run that is right

ARGUMENTS: list[tuple[list[str], str]] = [
    (["--model.lrr", "1"], "--model.lrr: no such key. Did you mean model.lr?"),
    (["--trainer.max_step", "1"], "trainer.max_step: no such key. Did you mean trainer.max_steps?"),
    (["--bogus"], "--bogus: no such key"),
    (["extra"], "extra: no such key"),
    (["--model.lr", "fast"], "model.lr: expected float, got fast"),
    (["--model.lr", "-1"], "model: GPTModule: lr=-1.0 must be positive and finite"),
    (["--model.lr", "nan"], "model.lr: expected a finite number, got nan"),
    (["--model.lr=-inf"], "model.lr: expected a finite number, got -inf"),
    (["--model.lr", ".inf"], "model: GPTModule: lr=inf must be positive and finite"),
    (["--model.optimizer", "adam"], "model.optimizer: expected one of 'adamw', 'sgd', 'muon', got adam"),
    (["--model.optimizer.lr", "1"], "model.optimizer: has no key 'lr'; it is one of 'adamw', 'sgd', 'muon'"),
    (["--model.overrides", "{width: 3}"], "model.overrides.width does not exist; it takes n_layers"),
    (["--model.overrides.n_heads=3"], "model.overrides.d_model=16 must be a multiple of n_heads=3"),
    (["--model.overrides.vocab_size", "16"], "set model.overrides.vocab_size to at least 32"),
    (["--model.preset", "gpt3"], "'gpt3' is not one of proxy"),
    (["--model.schedule", "linear"], "model.schedule: expected one of 'constant', 'cosine', got linear"),
    (["--trainer.plugins", "BF16Carry"], "no class 'BF16Carry'. Did you mean BF16CarryAttention?"),
    (["--trainer.plugins", "nowhere.Plugin"], "nowhere.Plugin: no class 'nowhere'. Give the full import path"),
    ([f"{PLUGIN}.mantissa", "2"], "'mantissa' is not an argument. It takes backend, base, carry"),
    ([f"{PLUGIN}.sites", "bf16"], "trainer.plugins: attention: sites='bf16' is not one of fp32, fa2"),
    ([f"{PLUGIN}.overrides", "{lsee: fp32}"], "overrides.lsee is not one of the sites s, s_scaled, "),
    ([f"{PLUGIN}.overrides", "{lsee: fp32}"], "Did you mean lse?"),
    ([f"{PLUGIN}.carry", "99"], "trainer.plugins: carry: mantissa_bits=99 must be from 1 to 23"),
    ([f"{PLUGIN}.tile", "0"], "trainer.plugins: attention: tile=0 and q_tile=None must be at least 1"),
    ([f"{PLUGIN}.layers", "[5]"], "layers=[5] but the model has layers 0 to 1"),
    ([f"{PLUGIN}.gradient", "{route: qkv}"], "route='qkv' is not one of q, k, v, o"),
    ([f"{PLUGIN}.gradient", "{fmt: mxfp5}"], "fmt='mxfp5' is not one of mxfp8_e4m3, mxfp8_e5m2, "),
    (["--trainer.precision", "16"], "trainer.precision=16: the plugin owns the dtype. Leave it unset"),
    (["--trainer.strategy", "fsdp"], "FSDP2 (configs/hardware/fsdp2.yaml, ModelParallelStrategy) work"),
    (["--trainer.strategy", "deepspeed_stage_2"], "DDP (configs/hardware/ddp.yaml"),
    (["--trainer.max_steps", "-1"], "trainer.max_steps is not set: training would never end. Add a size file"),
    (["--trainer.gradient_clip_val", "inf"], "trainer.gradient_clip_val: expected a finite number, got inf"),
    (["--trainer.gradient_clip_algorithm", "value"], "trainer.gradient_clip_algorithm: only 'norm'"),
    (["--trainer.callbacks+=QKGard"], "trainer.callbacks: no class 'QKGard'. Did you mean QKGuard?"),
    ([f"--trainer.callbacks+={callback('QKGuard', treshold=3)}"], "'treshold' is not an argument. Did you mean thresh"),
    ([f"--trainer.callbacks+={callback('QKGuard', threshold=-3)}"], "threshold=-3.0 must be positive and finite"),
    ([NAMED.format("QKGuard", "threshold: .inf")], "threshold=inf must be positive and finite"),
    ([NAMED.format("QKGuard", "threshold: nan")], "QKGuard: threshold: expected a finite number, got nan."),
    ([NAMED.format("CollapseStop", "excess: .inf")], "excess=inf, and both must be finite"),
    ([NAMED.format("CollapseStop", "excess: .nan")], "excess=nan, and both must be finite"),
    ([NAMED.format("CollapseStop", "margin: .nan")], "margin=nan must be at least 0 and below"),
    ([f"--trainer.callbacks+={callback('QKGuard', action='pray')}"], "action='pray' is not one of qk_norm, qk_clip, "),
    ([f"--trainer.callbacks+={callback('SpectralMonitor', every_n_steps=0)}"], "every_n_steps=0 must be at least 1"),
    ([f"--trainer.callbacks+={callback('RouteSplice', route='qkv')}"], "RouteSplice: route='qkv' is not one of "),
    ([f"--trainer.callbacks+={callback('RouteSplice')}", "--trainer.plugins=null"], "set trainer.plugins to a Fault"),
    ([f"--trainer.callbacks+={callback('DirectionProbe', k=99)}"], "DirectionProbe: k=99 leaves nothing"),
    ([f"--trainer.callbacks+={callback('DirectionProbe', k=99)}"], "(16, 16); set k below 16"),
    (["--trainer.callbacks", "[QKGuard]"], "would drop ModelCheckpoint. Write callbacks+"),
    (["--data", "Corpus"], "data: no class 'Corpus'. Did you mean StdlibCorpus?"),
    (["--data.init_args.batch_size", "x"], "data: lightning_qk.TokenFile: batch_size: expected int, got x"),
    (["--data.init_args.batch_size", "0"], "batch_size=0 must be at least 1"),
    (["--data.init_args.dtype", "int64"], "dtype: expected one of 'uint16', 'uint32', got int64"),
    (["--run.arm", "a/b"], "run.arm='a/b' must be a plain directory name"),
    (["--run.experiment", ""], "run.experiment='' must be a plain directory name"),
    (["--run.overwrite", "maybe"], "run.overwrite: expected bool, got maybe"),
    (["--seed_everything", "false"], "seed_everything=False: give a number"),
    (["--weights_only", "false"], "weights_only=false: a checkpoint with more than plain values is code"),
    (["--ckpt_path", "/nowhere/last.ckpt"], "ckpt_path='/nowhere/last.ckpt' does not exist. Name a checkpoint; --"),
    (["-c", "nowhere.yaml"], "nowhere.yaml: no such file"),
    (["-c", str(ARMS / "gaurd.yaml")], f"gaurd.yaml: no such file. Did you mean {ARMS / 'guard.yaml'}?"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "said"), ARGUMENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments(tmp_path: Path, tokens: dict[str, Any], complaint: Any, extra: list[str], said: str) -> None:
    assert said in complaint(cli, ["fit", *run_args(tmp_path, tokens, steps=1), *extra])


# configuration files

FILES: list[tuple[str, str]] = [
    ("trainer: {max_stepz: 3}", "trainer.max_stepz: no such key. Did you mean trainer.max_steps? (in {file})"),
    ("modle: {lr: 1}", "modle.lr: no such key. Did you mean model.lr? (in {file})"),
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
    ("- a\n- b", "-c {file}: holds \"['a', 'b']\"; a configuration is a mapping of keys"),
    ("trainer: {accumulate_grad_batches: 0}", "=0 must be at least 1, the micro-batches of a step. (in {file})"),
    ("trainer: {limit_train_batches: 0}", "a part of an epoch above 0.0; leave it out for all. (in {file})"),
    ("trainer:\n  max_steps: 1\n  max_steps: 2", "{file}: trainer.max_steps is given twice, in lines 2 and 3. Keep"),
    ("{model: {lr: 1}, trainer: {},\nmodel: {}}", "{file}: model is given twice, in lines 1 and 2. Keep one"),
    (
        "trainer:\n  callbacks+:\n  - class_path: QKGuard\n    init_args: {threshold: 3}\n    init_args: {patience: 2}",
        "{file}: trainer.callbacks+.init_args is given twice, in lines 4 and 5. Keep one",
    ),
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


def test_a_merged_key_may_be_given_again(tmp_path: Path, tokens: dict[str, Any]) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text(
        "trainer:\n  callbacks+:\n  - {class_path: QKGuard, init_args: &mine {threshold: 3, patience: 2}}\n"
        "  - {class_path: QKGuard, init_args: {<<: *mine, threshold: 4}}\n"
    )
    deciding = yaml.safe_load(resolve_run([*run_args(tmp_path, tokens), "-c", str(file)]).deciding)
    guards = [one["init_args"] for one in deciding["trainer"]["callbacks"] if one["class_path"].endswith("QKGuard")]
    assert [(one["threshold"], one["patience"]) for one in guards] == [(3, 2), (4, 2)]


def test_callbacks_can_be_replaced_on_purpose(tmp_path: Path, tokens: dict[str, Any]) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("trainer: {callbacks: []}")
    extra = ["-c", str(empty), f"--trainer.callbacks=[{callback('QKGuard')}]"]
    assert resolve_run([*run_args(tmp_path, tokens), *extra]).run_dir == run_dir(tmp_path)


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


def test_a_traceback_on_request(tmp_path: Path, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_QK_TRACEBACK", "1")
    for extra, said in ((["--model.lr", "-1"], "lr=-1"), (["--model.lrr", "1"], "no such key")):
        with pytest.raises(ValueError, match=said):
            cli(["fit", *run_args(tmp_path, tokens), *extra])


# experiments

SWEEPS: list[tuple[str, list[str], str]] = [
    ("{}", [], "name: missing in experiment.yaml; it names the directory of the runs"),
    ("", [], "holds 'None'; a configuration is a mapping of keys"),
    ("name: a/b", [], "name: 'a/b' names a directory; use letters, digits, '.', '_' and '-'"),
    ("name: x", [], "a sweep needs at least one of each"),
    ("{name: x, arms: {a: none.yaml}}", [], "arm a: no such file: none.yaml; paths are relative to the experiment"),
    ("{name: x, arms: {a: arm.yaml}}", ["--seeds", "1,b"], "seeds: 'b' is not a whole number"),
    ("{name: x, arms: {a: arm.yaml}, seeds: [1, 1]}", [], "must be different, not negative and below 2^32"),
    ("{name: x, arms: {a: arm.yaml}}", ["--only", "b"], "only: b: not an arm; the arms are a"),
    ("{name: x, arms: {a: arm.yaml}, report: {reference: b}}", [], "report.reference: 'b' is not an arm"),
    ("{name: x, arms: {a: arm.yaml}, overrides: {run.arm: b}}", [], "run.arm is the sweep's own"),
    ("{name: x, arms: {a: arm.yaml}, grid: {model.lr: []}}", [], "grid.model.lr: [] must be a list of different"),
    ("{name: x, arms: {a: arm.yaml}}", ["--size", "large"], "size: 'large' is not a size; this experiment has none"),
    (
        "{name: x, arms: {a: arm.yaml}}",
        ["--executor", "cloud"],
        "executor: expected one of 'local', 'slurm', 'submitit_local', got cloud",
    ),
    ("name: x\narms: {a: arm.yaml}\narms: {b: arm.yaml}", [], "experiment.yaml: arms is given twice, in lines 2 and 3"),
    ("{name: x, arms: {a: twice.yaml}}", [], "(twice.yaml): twice.yaml: model.lr is given twice, in lines 1 and 2"),
    ("{name: x, arms: {a: nothing.yaml}}", [], "(nothing.yaml): trainer.max_steps=0 must be at least 1, or -1 for"),
    ("{name: x, arms: {a: arm.yaml}, sedes: [1]}", [], "sedes: no such key. Did you mean seeds? (in experiment.yaml)"),
    ("{name: x, arms: {a: arm.yaml}}", ["x.yaml"], "x.yaml: write -c before a configuration file"),
    ("{name: x, arms: {a: wrong.yaml}}", [], "arm a (wrong.yaml): model.lrr: no such key"),
    ("{name: x, arms: {a: refused.yaml}}", [], "(refused.yaml): trainer.callbacks: QKGuard: threshold=-3.0 must be"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "extra", "said"), SWEEPS, ids=[said[:40] for *_, said in SWEEPS])
def test_experiments(tmp_path: Path, complaint: Any, text: str, extra: list[str], said: str) -> None:
    (tmp_path / "arm.yaml").write_text("trainer: {max_steps: 1}")
    (tmp_path / "wrong.yaml").write_text("model: {lrr: 1}")
    guard = "{class_path: QKGuard, init_args: {threshold: -3}}"
    (tmp_path / "refused.yaml").write_text(f"{{trainer: {{callbacks+: [{guard}]}}, data: StdlibCorpus}}")
    (tmp_path / "twice.yaml").write_text("model: {lr: 1,\n lr: 2}")
    (tmp_path / "nothing.yaml").write_text("{trainer: {max_steps: 0}, data: StdlibCorpus}")
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
    line = complaint(command, ["doctor", "--device", "abacus"])
    assert "argument --device: invalid choice: 'abacus' (choose from " in line


def test_there_are_enough_rows() -> None:
    rows = len(ARGUMENTS) + len(FILES) + len(SWEEPS)
    assert rows >= 60
