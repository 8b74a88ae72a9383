"""The student-teacher proxy: its equations, its data, its teacher's independence, and runs of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from runs import callback
from student import fit_student, mx, student
from tiny import assert_same, weights
from torch import Tensor, nn

from lightning_qk.cli import main
from lightning_qk.events import read_scalars
from lightning_qk.gaussian_data import GaussianData, GaussianLoader, GaussianValidation, draw
from lightning_qk.routes import route_linears
from lightning_qk.student import Student, Teacher
from lightning_qk.verdict import read_verdict

CONFIGS = Path(__file__).parents[1] / "configs" / "student_teacher"
EVERY_2 = callback("lightning.pytorch.callbacks.ModelCheckpoint", every_n_train_steps=2, save_last=True)


class TestModel:
    @pytest.mark.parametrize("activation", ["gelu", "relu", "linear"])
    @pytest.mark.parametrize("layer_norm", [True, False])
    def test_the_student_is_its_equations(self, activation: str, layer_norm: bool) -> None:
        model = Student(3, 32, activation, layer_norm)
        x = torch.randn(8, 32)
        phi = {"gelu": F.gelu, "relu": F.relu, "linear": lambda h: h}[activation]
        a = x
        for block in model.blocks:
            normed = F.layer_norm(a, (32,), block.norm.weight, block.norm.bias) if layer_norm else a  # type: ignore[arg-type, union-attr]
            a = a + phi(normed @ block.up_proj.weight.T) @ block.down_proj.weight.T + block.down_proj.bias  # type: ignore[operator, union-attr]
        torch.testing.assert_close(model(x), a)

    def test_swiglu_gates_and_keeps_the_number_of_parameters(self) -> None:
        block: Any = Student(1, 48, "swiglu").blocks[0]
        assert block.up_proj.weight.shape == (256, 48) and block.down_proj.weight.shape == (48, 128)
        h = torch.randn(4, 256)
        assert torch.equal(block.activation(h), h[:, :128] * F.silu(h[:, 128:]))

    def test_the_canonical_size(self) -> None:
        module = student(depth=4, width=512)
        assert sum(p.numel() for p in module.parameters()) == 8_394_752
        assert {type(p) for p in module.teacher.buffers()} == {Tensor} and not list(module.teacher.parameters())

    @pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", "linear"])
    def test_the_teacher_is_its_equations(self, activation: str) -> None:
        teacher = Teacher(2, 32, activation)
        x = torch.randn(8, 32)
        y = x
        for layer in range(2):
            h = y @ teacher.get_buffer(f"up_{layer}").T
            a, b = h.chunk(2, -1)
            h = {"gelu": F.gelu(h), "relu": F.relu(h), "swiglu": a * F.silu(b), "linear": h}[activation]
            y = h @ teacher.get_buffer(f"down_{layer}").T
        torch.testing.assert_close(teacher(x), y)

    @pytest.mark.parametrize(("depth", "std"), [(1, 0.197), (2, 0.034), (4, 9.4e-4)])
    def test_the_released_teacher_is_next_to_zero(self, depth: int, std: float) -> None:
        torch.manual_seed(0)
        assert float(Teacher(depth, 512)(torch.randn(512, 512)).std()) == pytest.approx(std, rel=0.05)

    @pytest.mark.parametrize(("activation", "depth"), [("gelu", 4), ("relu", 4), ("swiglu", 2), ("linear", 4)])
    def test_a_rescaled_teacher_is_of_size_one(self, activation: str, depth: int) -> None:
        torch.manual_seed(0)
        teacher = Teacher(depth, 64, activation, rescaled=True)
        assert float(teacher(torch.randn(4096, 64)).std()) == pytest.approx(1.0, rel=0.1)

    def test_a_teacher_of_a_seed_is_the_same_in_runs_of_another(self) -> None:
        first, second, other = (student(seed, teacher_seed=key) for seed, key in ((0, 5), (1, 5), (0, 6)))
        assert_same(weights(first.teacher), weights(second.teacher))
        assert not torch.equal(first.teacher.get_buffer("up_0"), other.teacher.get_buffer("up_0"))
        assert not torch.equal(first.student.blocks[0].up_proj.weight, second.student.blocks[0].up_proj.weight)  # type: ignore[union-attr, arg-type]

    def test_the_loss(self) -> None:
        module = student()
        x, noise = draw(16, 32, 0.1, 0)
        expected = (module.student(x) - module.teacher(x) - noise).square().mean()
        torch.testing.assert_close(module(x, noise), expected)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"depth": 0}, "depth=0"),
            ({"width": 0}, "width=0"),
            ({"activation": "tanh"}, "activation='tanh'"),
            ({"lr": 0.0}, "lr=0.0"),
            ({"min_lr": 1.0}, "min_lr=1.0"),
            ({"schedule": "step"}, "schedule='step'"),
        ],
    )
    def test_argument_errors_name_the_argument(self, arguments: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            student(**arguments)


class TestData:
    def test_a_batch_is_a_function_of_its_index(self) -> None:
        loader = GaussianLoader(seed=3, batch_size=64, width=32, noise_std=0.1, length=4)
        again = GaussianLoader(seed=3, batch_size=64, width=32, noise_std=0.1, length=4)
        batches = list(loader)
        assert all(torch.equal(left, right) for i in range(4) for left, right in zip(batches[i], again[i], strict=True))
        again.load_state_dict({"batch": 2})
        assert torch.equal(next(iter(again))[0], batches[2][0])
        others = [
            GaussianLoader(4, 64, 32, 0.1, 4)[0],
            GaussianLoader(3, 64, 32, 0.1, 4, rank=1, world=2)[0],
            *batches[1:],
            *GaussianValidation(64, 32, 2),
        ]
        assert not any(torch.equal(other[0], batches[0][0]) for other in others)
        # two ranks go through the same micro-batches as one
        assert torch.equal(GaussianLoader(3, 64, 32, 0.1, 4, rank=1, world=2)[1][0], batches[3][0])

    def test_inputs_are_normal_and_noise_has_its_size(self) -> None:
        x, noise = draw(2048, 64, 5e-3, 0, 1)
        assert abs(float(x.mean())) < 0.01 and float(x.std()) == pytest.approx(1, rel=0.01)
        assert float(noise.std()) == pytest.approx(5e-3, rel=0.01)
        assert abs(float(np.corrcoef(x.flatten(), noise.flatten())[0, 1])) < 0.01
        assert all(not bool(noise.any()) for _, noise in GaussianValidation(8, 4, 2))

    def test_errors(self) -> None:
        for arguments, named in (({"batch_size": 0}, "batch_size=0"), ({"noise_std": -1.0}, "noise_std=-1.0")):
            with pytest.raises(ValueError, match=named):
                GaussianData(**arguments)  # type: ignore[arg-type]
        with pytest.raises(MisconfigurationException, match="width=None"):
            GaussianData().val_dataloader()
        with pytest.raises(MisconfigurationException, match=r"set trainer\.max_steps"):
            GaussianData(width=4).train_dataloader()


class TestRuns:
    def test_a_run_is_the_bare_loop(self, tmp_path: Path) -> None:
        module, recording = fit_student(tmp_path, plugin=mx("fp32"), max_steps=5)
        bare = student()
        optimizer = torch.optim.Adam(bare.student.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
        losses = []
        for step in range(5):
            x, noise = GaussianLoader(0, 64, 32, 1e-3, 5)[step]
            loss = F.mse_loss(bare.student(x), bare.teacher(x) + noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert recording.losses == losses
        assert_same(weights(module.student), weights(bare.student))

    def test_the_teacher_and_validation_are_never_under_the_policy(self, tmp_path: Path) -> None:
        module = student()
        teacher, before = weights(module.teacher), sum(1 for _ in module.teacher.modules())
        targets: list[tuple[Tensor, Tensor]] = []
        module.teacher.register_forward_hook(lambda _, inputs, target: targets.append((*inputs, target)))
        settings: dict[str, Any] = dict(max_steps=2, limit_val_batches=1.0, val_check_interval=2)
        module, recording = fit_student(tmp_path, plugin=mx(), model=module, **settings)
        assert_same(weights(module.teacher), teacher)
        assert sum(1 for _ in module.teacher.modules()) == before == 1
        optimised = {id(p) for group in module.trainer.optimizers[0].param_groups for p in group["params"]}
        assert optimised == {id(p) for p in module.student.parameters()} == {id(p) for p in module.parameters()}
        plain = student()
        plain.load_state_dict(module.state_dict())
        with torch.no_grad():
            expected = [float(plain(*batch)) for batch in GaussianValidation(64, 32, 2)]
        assert recording.logged[-1]["loss/val"] == pytest.approx(np.mean(expected), rel=1e-6)
        assert len(targets) == 2 + 2  # in training, and in validation
        assert all(torch.equal(target, plain.teacher(x)) for x, target in targets)
        x, noise = draw(64, 32, 1e-3, 0)
        assert float(module(x, noise)) == float(plain(x, noise))  # it ends with the run
        module.trainer.precision_plugin.switch.on = True
        assert float(module(x, noise)) != float(plain(x, noise))  # and is on in training

    def test_a_cosine_ends_at_min_lr(self, tmp_path: Path) -> None:
        module, _ = fit_student(tmp_path, model=student(schedule="cosine", min_lr=1e-4), plugin=mx("fp32"), max_steps=4)
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)

    def test_the_route_is_its_linears(self) -> None:
        names = set(route_linears(student(), "mlp"))
        assert names == {f"student.blocks.{i}.{name}_proj" for i in range(2) for name in ("up", "down")}
        assert set(route_linears(student(), "mlp", [1])) == {f"student.blocks.1.{name}_proj" for name in ("up", "down")}


def zeta(preset: str, **settings: Any) -> float:
    """Relative error of the gradient at initialisation, canonical proxy with 512 samples, LayerNorm biases left out."""
    module = student(depth=4, width=512)
    x, noise = draw(512, 512, 5e-3, 0)

    def gradient() -> Tensor:
        module.zero_grad()
        module(x, noise).backward()
        named = module.student.named_parameters()
        return torch.cat([p.grad.flatten() for name, p in named if p.grad is not None and "norm.bias" not in name])

    exact = gradient()
    mx(preset, **settings).convert_module(module)
    return float((gradient() - exact).norm() / exact.norm())


ERRORS = {  # of the released code, measured at the same weights
    "bf16": 0.006,
    "mxfp8_e4m3": 0.049,
    "mxfp8_mix": 0.063,
    "mxfp6_e2m3": 0.054,
    "mxfp8_e5m2": 0.095,
    "mxfp6_e3m2": 0.095,
    "mxfp4": 0.20,
    "weights_only": 0.034,
    "forward_only": 0.038,
    "bf16_activations": 0.040,
}


@pytest.mark.parametrize("preset", ERRORS)
def test_the_gradients_error_is_that_of_the_released_code(preset: str) -> None:
    """Its ties go away from zero and its GELU is never rounded, and so it is here."""
    ties = {} if preset == "bf16" else {"rounding": "away"}
    assert zeta(preset, activation="fp32", **ties) == pytest.approx(ERRORS[preset], rel=0.10)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ERRORS)
def test_so_is_that_of_the_presets_as_they_are(preset: str) -> None:
    """In this order, with ties to even and GELU in bfloat16: 0.0062, 0.0504, 0.0646, 0.0486 (9.95 % less, the most),
    0.0945, 0.0947, 0.2016, 0.0331, 0.0380, 0.0393.
    """
    assert zeta(preset) == pytest.approx(ERRORS[preset], rel=0.10)


class TestCommandLine:
    def args(self, root: Path, *arms: str, steps: int = 4) -> list[str]:
        files = [CONFIGS / "base.yaml", CONFIGS / "small.yaml", *(CONFIGS / arm for arm in arms)]
        return [
            *(part for file in files for part in ("-c", str(file))),
            *(f"--trainer.max_steps={steps}", "--trainer.log_every_n_steps=1", "--run.root", str(root)),
            *("--trainer.val_check_interval=2", "--trainer.callbacks=[]", f"--trainer.callbacks=[{EVERY_2}]"),
            *("--model.init_args.width=32", "--data.init_args.batch_size=32", "--data.init_args.val_batches=1"),
        ]

    def test_fit_validate_and_resume(self, tmp_path: Path) -> None:
        args = self.args(tmp_path, "arms/mxfp8_e4m3.yaml")
        assert main(["fit", *args]) == 0
        run = tmp_path / "default" / "mxfp8_e4m3" / "seed_0"
        verdict = read_verdict(run)
        assert verdict is not None and verdict["status"] == "completed" and math.isfinite(verdict["val_loss"])
        assert verdict["mx_products"] == "emulated (the device is cpu, not cuda)"
        assert set(read_scalars(run)) >= {"loss/train", "loss/val", "grad/norm", "collapse/excess"}
        assert main(["validate", *args]) == 0
        assert main(["fit", *args, "--ckpt_path", "last"]) == 0  # nothing to do
        longer = self.args(tmp_path, "arms/mxfp8_e4m3.yaml", steps=6)
        assert main(["fit", *longer, "--ckpt_path", "last"]) == 0
        assert read_scalars(run)["loss/train"].steps.tolist() == list(range(6))

    def test_a_wrong_argument_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for extra, named in (
            (["--model.init_args.widht=3"], "widht"),
            (["--model.init_args.depth=0"], "depth=0"),
            (["--trainer.plugins.init_args.preset=mxfp5"], "preset 'mxfp5'"),
            (["--trainer.plugins.init_args.route=all"], "nothing to watch"),
            (["--trainer.plugins.init_args.head=true"], "set head to false"),
            (["--model", "Student"], "Student"),
        ):
            try:
                code: Any = main(["fit", *self.args(tmp_path / named), *extra])
            except SystemExit as error:
                code = error.code
            message = capsys.readouterr().err
            assert code == 2 and named in message, (extra, message)

    def test_a_gpt_can_be_named_too(self, tmp_path: Path) -> None:
        model = {"class_path": "GPTModule", "init_args": {"overrides": {"d_model": 16, "context": 16}, "lr": 0.01}}
        args = ["--run.root", str(tmp_path), f"--model={json.dumps(model)}", "--data=StdlibCorpus"]
        args += ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
        assert main(["fit", *args, "--trainer.enable_progress_bar=false"]) == 0


def test_layer_norm_may_be_left_out_with_any_policy(tmp_path: Path) -> None:
    module, _ = fit_student(tmp_path, plugin=mx("mxfp8_e4m3"), model=student(layer_norm=False), max_steps=1)
    assert isinstance(module.student.blocks[0].norm, nn.Identity)
