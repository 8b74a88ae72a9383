"""Two processes over gloo train as one does, and decide the same things at the same step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import ddp, on_two_ranks
from runs import callback, finish, outcome, run_args, run_dir, start, write_tokens
from tiny import assert_same, data, fault, fit, gradients, module, weights

from callbacks import CollapseStop, QKGuard, RandomState, RouteSplice, RunRecorder, SpectralMonitor
from lightning_qk.routes import attention_sites
from lightning_qk.verdict import read_verdict

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


class Report(Callback):
    """What one rank saw."""

    def __init__(self, guard: QKGuard | None = None) -> None:
        self.guard = guard
        self.result: dict[str, Any] = {}
        self.logits: list[float] = []
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logits.append(max(float(site.core.max_logit_H.max()) for site in attention_sites(pl_module)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.result = {
            "weights": weights(pl_module),
            "gradients": self.gradients,
            "losses": self.losses,
            "logits": self.logits,
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "guard": None if self.guard is None else self.guard.state_dict(),
            "on": [site.qk_norm_on for site in attention_sites(pl_module)],
        }


def run(root: Path, callbacks: list[Callback], guard: QKGuard | None, batch_size: int, **settings: Any) -> Any:
    report, plugin = Report(guard), settings.pop("plugin", fault())
    fit(root, [*callbacks, report], plugin, datamodule=data(batch_size=batch_size), **settings)
    return report.result


def two_ranks(root: Path, callbacks: list[Callback], guard: QKGuard | None = None, **settings: Any) -> Any:
    """Two ranks with half of the batch each: together they see what one process sees."""
    rank = partial(run, root, callbacks, guard, 4, devices=2, strategy=ddp(), **settings)
    return on_two_ranks(root, {"found": rank})["found"]


def one_rank(root: Path, callbacks: list[Callback], guard: QKGuard | None = None, **settings: Any) -> Any:
    return run(root, callbacks, guard, 8, **settings)


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=atol, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_with_a_splice_are_one_process(tmp_path: Path, accumulate: int) -> None:
    """Gradients of the first step, spliced and not, and the run after it; every callback on."""

    def callbacks() -> list[Callback]:
        return [
            *(RandomState(), RunRecorder(), RouteSplice("qk"), SpectralMonitor(1), CollapseStop(window=2)),
            QKGuard(threshold=1e9),
        ]

    settings: dict[str, Any] = dict(max_steps=3, accumulate_grad_batches=accumulate)
    first, second = two_ranks(tmp_path / "two", callbacks(), **settings)
    single = one_rank(tmp_path / "one", callbacks(), **settings)
    assert_same(first["weights"], second["weights"])
    for left, right in zip(first["gradients"], second["gradients"], strict=True):
        assert_same(left, right)
    assert first["losses"] != second["losses"]
    # the same windows in another order, so the sums differ by rounding
    assert_close(first["gradients"][0], single["gradients"][0], atol=1e-6)
    spliced = {name: g for name, g in first["gradients"][0].items() if "q_proj" in name or "k_proj" in name}
    faulty = one_rank(tmp_path / "faulty", [], **settings)["gradients"][0]
    assert any(not torch.allclose(g, faulty[name], rtol=1e-2, atol=1e-6) for name, g in spliced.items())
    for name in ("grad/norm", "grad/norm_clean", "sigma/q", "tokens"):
        assert first["logged"][name] == pytest.approx(single["logged"][name], rel=1e-3), name
    verdict = read_verdict(tmp_path / "two")
    assert verdict is not None and verdict["status"] == "completed" and verdict["step"] == 3
    mean = (sum(first["losses"]) + sum(second["losses"])) / 2 / 3
    assert verdict["loss"] == pytest.approx(mean, rel=1e-5)


def test_the_guard_fires_on_every_rank_though_one_alone_is_over(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path / "plain", [], max_steps=6)
    ahead = [
        (step, max(a, b), min(a, b)) for step, (a, b) in enumerate(zip(first["logits"], second["logits"], strict=True))
    ]
    before = [max(a, b) for a, b in zip(first["logits"], second["logits"], strict=True)]
    step, high, low = next(row for row in ahead if row[1] > row[2] and row[1] > max(before[: row[0]], default=0))
    threshold = (high + max(low, max(before[:step], default=0.0))) / 2
    assert low < threshold < high
    guard = QKGuard(threshold=threshold)
    ranks = two_ranks(tmp_path / "guarded", [guard], guard, max_steps=6)
    for rank in ranks:
        assert rank["guard"] == {
            "fired_step": step + 1,
            "history": [{"step": step + 1, "layers": [0, 1], "logit": pytest.approx(high)}],
        }
        assert rank["on"] == [True, True]
    assert_same(ranks[0]["weights"], ranks[1]["weights"])


def test_stochastic_rounding_and_dropout_keep_the_ranks_together(tmp_path: Path) -> None:
    plugin = fault("bf16_carry", overrides={"l_carry": "2:sr"})
    model = module({"dropout": 0.2})
    first, second = two_ranks(tmp_path, [RouteSplice("all")], plugin=plugin, model=model, max_steps=2)
    assert_same(first["weights"], second["weights"])


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                outputs["loss"] = outputs["loss"] * float("nan")

    ranks = two_ranks(tmp_path, [Poison(), CollapseStop()], max_steps=5)
    assert [len(rank["losses"]) for rank in ranks] == [2, 2]


@pytest.mark.slow
def test_the_command_line_starts_replaces_and_resumes_two_processes(tmp_path: Path) -> None:
    """Every process parses the command line itself, while another is already at work in the run's directory."""
    tokens = write_tokens(tmp_path / "tokens")
    watch = callback("SpectralMonitor", every_n_steps=1), callback("QKGuard", threshold=1e-6)
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu"]

    def fit_args(steps: int, *extra: str) -> list[str]:
        return ["fit", *run_args(tmp_path, tokens, *watch, callback("RouteSplice"), steps=steps), *ranks, *extra]

    finish(start(fit_args(6), tmp_path))
    first = outcome(run_dir(tmp_path))
    assert first["verdict"]["step"] == 6 and first["verdict"]["guard_step"] == 1
    assert first["curves"]["tokens"][1] == [repr(128.0 * step) for step in range(1, 7)]
    finish(start(fit_args(3, "--run.overwrite=true"), tmp_path))
    assert outcome(run_dir(tmp_path))["verdict"]["step"] == 3
    finish(start(fit_args(6, "--ckpt_path=last"), tmp_path))
    resumed = outcome(run_dir(tmp_path))
    assert resumed["verdict"]["status"] == "completed"
    for found in (first, resumed):
        del found["curves"]["epoch"]  # the run of three steps had come to the end of its epoch
    assert resumed["curves"] == first["curves"]
