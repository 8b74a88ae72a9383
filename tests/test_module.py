"""The LightningModule: schedule, optimizer, clipping, hyper-parameters, and parity with a loop without Lightning."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import SIZE, Recording, TinyData, assert_same, data, fit, module, trainer, weights
from torch import Tensor, nn

from lightning_qk.data import window_starts
from lightning_qk.model import GPT, GPTConfig
from lightning_qk.module import GPTModule, full, logging_is_due


def configured(tmp_path: Path, max_steps: int = 100, **arguments: Any) -> tuple[torch.optim.Optimizer, Any]:
    model = module(**arguments)
    model.trainer = trainer(tmp_path, max_steps=max_steps)
    setup = model.configure_optimizers()
    return setup["optimizer"], setup["lr_scheduler"]


def learning_rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_constant_schedule_warms_up_and_stays(tmp_path: Path) -> None:
    optimizer, setup = configured(tmp_path, lr=0.8, warmup_steps=4)
    assert setup["interval"] == "step"
    assert learning_rates(optimizer, setup["scheduler"], 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_cosine_schedule_ends_at_its_minimum(tmp_path: Path) -> None:
    optimizer, setup = configured(tmp_path, max_steps=10, lr=1.0, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1)
    rates = learning_rates(optimizer, setup["scheduler"], 13)
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[6] == pytest.approx(0.55)
    assert rates[10:] == pytest.approx([0.1, 0.1, 0.1])
    assert all(a > b for a, b in pairwise(rates[2:11]))


def test_no_warmup_starts_at_the_peak(tmp_path: Path) -> None:
    optimizer, _ = configured(tmp_path, lr=0.3, warmup_steps=0)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_cosine_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.schedule=cosine needs trainer\.max_steps"):
        configured(tmp_path, max_steps=-1, schedule="cosine")


@pytest.mark.parametrize(
    ("optimizer", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)], ids=["adamw", "sgd"]
)
def test_only_matrices_decay(tmp_path: Path, optimizer: str, kind: type) -> None:
    built, _ = configured(
        tmp_path, optimizer=optimizer, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-5, momentum=0.7, fields={"bias": True}
    )
    assert type(built) is kind
    decayed, plain = built.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in plain["params"]} == {1}
    assert len(decayed["params"]) == 2 + 2 * 6 and len(plain["params"]) == 2 * (6 + 4) + 2
    if kind is torch.optim.AdamW:
        assert (decayed["betas"], decayed["eps"]) == ((0.8, 0.9), 1e-5)
    else:
        assert decayed["momentum"] == 0.7


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"warmup_steps": -1}, {"min_lr_ratio": 1.5}])
def test_argument_errors_name_the_argument(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        module(**wrong)


def test_a_wrong_override_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"overrides\.width does not exist"):
        GPTModule(overrides={"width": 3})


# parity with PyTorch alone


def bare_loop(
    arguments: dict[str, Any], steps: int, accumulate: int, batch_size: int, dropout: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same training in plain PyTorch: losses of the micro-batches, gradient norms, weights."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZE, "dropout": dropout}))
    split = data()
    split.load()
    torch.manual_seed(1234)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": arguments["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    tokens = torch.from_numpy(split.train_tokens.astype("int64"))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        for micro in range(accumulate):
            starts = window_starts(0, step * accumulate + micro, 0, 1, batch_size, len(tokens) - 16)
            windows = torch.stack([tokens[s : s + 17] for s in starts.tolist()])
            logits = model(windows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return losses, norms, weights(model)


@pytest.mark.parametrize(("accumulate", "dropout"), [(1, 0.0), (2, 0.0), (2, 0.25)])
def test_lightning_trains_as_a_bare_loop_does(tmp_path: Path, accumulate: int, dropout: float) -> None:
    model, recording = fit(
        tmp_path,
        model=module({"dropout": dropout}, weight_decay=0.1),
        max_steps=6,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    losses, norms, expected = bare_loop({"weight_decay": 0.1}, 6, accumulate, 4, dropout)
    assert recording.losses == losses
    assert_same(weights(model.model), expected)
    assert losses[-1] < losses[0]
    logged = recording.logged[accumulate - 1 :: accumulate]
    assert [row["grad/norm"] for row in logged] == norms
    assert [row["grad/clip_coef"] for row in logged] == pytest.approx([min(1.0, 0.5 / (n + 1e-6)) for n in norms])
    assert [row["loss/train"] for row in recording.logged] == losses
    assert [row["tokens"] for row in recording.logged] == [64.0 * (i + 1) for i in range(6 * accumulate)]


# clipping


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_no_limit_is_no_clipping_but_the_norm_is_logged(tmp_path: Path, limit: float | None) -> None:
    _, unclipped = fit(tmp_path, max_steps=2, gradient_clip_val=1e9)
    _, recording = fit(tmp_path, max_steps=2, gradient_clip_val=limit)
    assert recording.losses == unclipped.losses and recording.losses[0] != recording.losses[1]
    assert recording.logged[-1]["grad/norm"] == unclipped.logged[-1]["grad/norm"] > 0
    assert recording.logged[-1]["grad/clip_coef"] == 1.0


def test_clipping_by_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_algorithm: only 'norm'"):
        fit(tmp_path, max_steps=1, gradient_clip_algorithm="value")


def test_full_passes_ordinary_tensors_through() -> None:
    x = torch.ones(2)
    assert full(x) is x


# hyper-parameters and checkpoints


def saved(tmp_path: Path, **arguments: Any) -> Path:
    checkpoint = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=2)
    fit(tmp_path, [checkpoint], model=module(**arguments), max_steps=2, enable_checkpointing=True)
    return tmp_path / "saved.ckpt"


def test_checkpoints_load_with_weights_only(tmp_path: Path) -> None:
    path = saved(tmp_path, schedule="cosine")
    hyper_parameters = torch.load(path, weights_only=True)["hyper_parameters"]
    assert hyper_parameters["overrides"] == SIZE and hyper_parameters["schedule"] == "cosine"
    loaded = GPTModule.load_from_checkpoint(path)
    assert loaded.config == GPTConfig(**SIZE) and loaded.context == 16
    assert_same(weights(loaded), torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 2e-2}, r"model\.lr=0\.02 but the checkpoint was trained with 0\.01"),
        ({"betas": (0.9, 0.99)}, r"model\.betas=\(0\.9, 0\.99\)"),
        ({"fields": {"dropout": 0.1}}, r"model\.overrides="),
        ({"schedule": "cosine"}, r"model\.schedule='cosine'"),
    ],
)
def test_resuming_with_another_hyperparameter_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = saved(tmp_path)
    with pytest.raises(ValueError, match=named):
        fit(tmp_path, model=module(**change), max_steps=4, ckpt_path=path)
    _, recording = fit(tmp_path, model=module(), max_steps=4, ckpt_path=path)
    assert len(recording.losses) == 2


def test_data_that_does_not_fit_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"up to 31 .* 16: set model\.overrides\.vocab_size to at least 32"):
        fit(tmp_path, model=module({"vocab_size": 16}), max_steps=1)


def test_tokens_count_on_after_an_epoch(tmp_path: Path) -> None:
    """A run that is resumed with more steps than its loader was made for begins a second epoch."""
    path = saved(tmp_path)
    _, recording = fit(tmp_path, model=module(), max_steps=5, ckpt_path=path)
    assert [row["tokens"] for row in recording.logged] == [192.0, 256.0, 320.0]


# evaluation


class OneBatch(TinyData):
    """Training and validation on the same windows, so that the two losses can be compared."""

    def load(self) -> None:
        super().load()
        self.train_tokens = self.val_tokens


def test_validation_is_the_mean_over_all_batches(tmp_path: Path) -> None:
    model = module()
    split = data(val_batches=3)
    runner = trainer(tmp_path, limit_val_batches=1.0, limit_test_batches=2)
    (result,) = runner.validate(model, split, verbose=False)
    with torch.no_grad():
        losses = [float(model.eval()(x, y)) for x, y in split.val_dataloader()]
    assert len(losses) == 3 and len(set(losses)) == 3
    assert result == {"loss/val": pytest.approx(sum(losses) / 3)}
    (tested,) = runner.test(model, split, verbose=False)
    assert tested == {"loss/test": pytest.approx(sum(losses[:2]) / 2)}


def test_validation_during_training_changes_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(max_steps=4, val_check_interval=2, limit_val_batches=1.0)
    with_validation, recording = fit(tmp_path, model=module({"dropout": 0.2}), **settings)
    without, plain = fit(tmp_path, model=module({"dropout": 0.2}), max_steps=4)
    assert "loss/val" in recording.logged[-1] and "loss/val" not in plain.logged[-1]
    assert recording.losses == plain.losses
    assert_same(weights(with_validation), weights(without))


def test_activation_checkpointing_is_passed_on(tmp_path: Path) -> None:
    model, recording = fit(tmp_path, model=module({"dropout": 0.2}, activation_checkpointing=True))
    other, plain = fit(tmp_path, model=module({"dropout": 0.2}))
    assert model.model.activation_checkpointing and not other.model.activation_checkpointing
    assert recording.losses == plain.losses
    assert_same(weights(model), weights(other))


def test_compile_compiles_the_blocks_in_place() -> None:
    plain, compiled = module(), module(compile=True)
    assert all(block._compiled_call_impl is not None for block in compiled.model.blocks)
    assert all(block._compiled_call_impl is None for block in plain.model.blocks)
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_recording_sees_the_gradients_before_clipping(tmp_path: Path) -> None:
    """What other tests rely on: the recorded gradients have the norm that is logged, above the limit."""
    _, recording = fit(tmp_path, [], max_steps=1, gradient_clip_val=1e-3)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in recording.gradients[0].values()))
    assert isinstance(recording, Recording)
    assert recording.logged[0]["grad/norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1e-3


def test_an_epoch_that_ends_within_an_accumulation_does_not_shift_the_log(tmp_path: Path) -> None:
    """Five batches an epoch, two to a step: three steps an epoch, the last of one batch."""

    class Steps(Callback):
        def __init__(self) -> None:
            self.due: list[int] = []

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            if logging_is_due(trainer):
                self.due.append(trainer.global_step + 1)

    steps = Steps()
    settings: dict[str, Any] = dict(accumulate_grad_batches=2, limit_train_batches=5, log_every_n_steps=4)
    fit(tmp_path, [steps], max_steps=13, **settings)
    assert steps.due == [4, 8, 12]
