"""The guard and the monitor in a user's own LightningModule, around a model that knows nothing of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_adapters import language_model
from tiny import assert_same, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import QKGuard, SpectralMonitor
from lightning_qk.routes import attention_sites

STEPS = 6


class Encoder(nn.Module):
    """A language model made of ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
        return self.head(self.layers(self.embedding(tokens_BT), mask=mask, is_causal=True))


class Seq2Seq(Encoder):
    """A language model made of ``nn.Transformer``: three attentions, of which one looks from decoder to encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(32, 4, 1, 1, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask))


class Mine(LightningModule):
    """A LightningModule as anyone would write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, tokens_BT: Tensor) -> Tensor:
        if isinstance(self.model, Encoder):
            return F.cross_entropy(self.model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
        return self.model(tokens_BT, labels=tokens_BT).loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


class Watch(Callback):
    def __init__(self) -> None:
        self.logits: list[float] = []
        self.losses: list[float] = []
        self.sigma: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for site in attention_sites(pl_module):
            site.core.observed = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sites = attention_sites(pl_module)
        self.logits.append(max(float(site.core.max_logit_H.max()) for site in sites))
        self.losses.append(float(outputs["loss"]))
        self.sigma.append(max(float(torch.linalg.svdvals(site.q_weight.detach())[0]) for site in sites))


def model(name: str) -> nn.Module:
    family, _, attention = name.partition("-")
    own = {"encoder": Encoder, "transformer": Seq2Seq}
    return own[family]() if family in own else language_model(family, attention, 8.0)


def batches() -> DataLoader[Tensor]:
    """One batch an epoch, always the same: a resumed run goes on with it."""
    tokens = torch.randint(0, 32, (4, 13), generator=torch.Generator().manual_seed(1))
    return DataLoader([tokens], batch_size=None)  # type: ignore[arg-type]


def run(
    root: Path, name: str, callbacks: list[Callback], steps: int = STEPS, ckpt: Path | None = None, **settings: Any
) -> tuple[Mine, Watch]:
    watch, mine = Watch(), Mine(model(name))
    trainer(root, [*callbacks, watch], max_steps=steps, **settings).fit(mine, batches(), ckpt_path=ckpt)
    return mine, watch


def threshold(watch: Watch) -> tuple[int, float]:
    """A step whose logits are larger than all before, and a threshold between."""
    logits = watch.logits
    step = next(i for i in range(2, len(logits)) if logits[i] > 1.01 * max(logits[:i]))
    return step + 1, (max(logits[:step]) + logits[step]) / 2


MODELS = ["gpt2-eager", "gpt2-sdpa", "llama-eager", "llama-sdpa", "qwen2-eager", "qwen2-sdpa", "encoder", "transformer"]


@pytest.mark.parametrize("name", MODELS)
def test_guard_and_monitor_work_on_a_model_of_another_library(tmp_path: Path, name: str) -> None:
    _, plain = run(tmp_path, name, [])
    step, limit = threshold(plain)
    guard, monitor = QKGuard(limit), SpectralMonitor(1)
    mine, guarded = run(tmp_path, name, [guard, monitor])
    layers = [0, 1, 2] if name == "transformer" else [0, 1]
    assert guard.history == [{"step": step, "layers": layers, "logit": pytest.approx(plain.logits[step - 1])}]
    assert guarded.losses[:step] == plain.losses[:step] and guarded.losses[step] != plain.losses[step]
    assert max(guarded.logits[step:]) <= math.sqrt(8) * (1 + 1e-5) < limit
    assert all(site.heads_on("qk_norm") == (0, 1, 2, 3) for site in attention_sites(mine))
    fields = monitor.verdict_fields()
    assert fields["sigma_q"] == pytest.approx(guarded.sigma[-1], rel=1e-4)
    assert fields["max_logit"] == pytest.approx(guarded.logits[-1])


@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama-eager", "encoder"])
def test_what_the_guard_did_survives_resume_and_validation(tmp_path: Path, name: str) -> None:
    limit = threshold(run(tmp_path, name, [])[1])[1]
    expected, whole = run(tmp_path, name, [QKGuard(limit)])
    checkpoint = ModelCheckpoint(tmp_path / name, filename="last", every_n_train_steps=1)
    guard = QKGuard(limit)
    run(tmp_path, name, [guard, checkpoint], steps=STEPS - 1, enable_checkpointing=True)
    path = tmp_path / name / "last.ckpt"
    assert guard.fired
    torch.load(path, weights_only=True)
    again = QKGuard(limit)
    resumed, rest = run(tmp_path, name, [again], ckpt=path)
    assert rest.losses == whole.losses[STEPS - 1 :]
    assert_same(weights(resumed), weights(expected))
    assert again.history == guard.history

    with pytest.raises(RuntimeError, match=r"Unexpected key.*lightning_qk_site\.qk_norm"):
        run(tmp_path, name, [], ckpt=path)
    fresh = Mine(model(name))
    runner = trainer(tmp_path, [QKGuard(limit)], limit_val_batches=1.0)
    (with_norm,) = runner.validate(fresh, batches(), ckpt_path=str(path), verbose=False)
    for site in attention_sites(fresh):
        assert site.qk_norm_on
        site.set_qk_norm(False)
    (without,) = runner.validate(fresh, batches(), verbose=False)
    assert with_norm["val"] != without["val"]


@pytest.mark.parametrize(
    ("action", "arguments", "scope"),
    [
        ("v_norm", {}, "head"),
        ("mlp_norm", {}, "layer"),
        ("softcap", {"cap": 2.0}, "layer"),
        ("qk_clip", {"tau": 0.5}, "layer"),
        ("lr_cut", {"factor": 0.5}, "all"),
        ("tighter_clip", {"max_norm": 1e-3}, "all"),
    ],
)
@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager"])
def test_other_actions_work_there_too(
    tmp_path: Path, name: str, action: str, arguments: dict[str, Any], scope: Any
) -> None:
    _, plain = run(tmp_path, name, [], steps=4)
    guard = QKGuard(1e-6, action=action, action_args=arguments, scope=scope, disarm_after=2)
    mine, guarded = run(tmp_path, name, [guard], steps=4)
    assert guarded.losses[0] == plain.losses[0] and guarded.losses[1:] != plain.losses[1:]
    assert (guard.fired_step, guard.released_step) == (1, 3)
    assert not any(site.switches_on() for site in attention_sites(mine))


def test_the_switch_of_an_mlp_is_there_before_weights_are_restored(tmp_path: Path) -> None:
    def guard() -> QKGuard:
        return QKGuard(1e-6, action="mlp_norm")

    expected, whole = run(tmp_path, "llama-sdpa", [guard()], steps=4)
    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    run(tmp_path, "llama-sdpa", [guard(), checkpoint], steps=2, enable_checkpointing=True)
    resumed, rest = run(tmp_path, "llama-sdpa", [guard()], steps=4, ckpt=tmp_path / "last.ckpt")
    assert rest.losses == whole.losses[2:]
    assert_same(weights(resumed), weights(expected))


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    class Plain(Mine):
        def loss(self, tokens_BT: Tensor) -> Tensor:
            return self.model(tokens_BT.float()).mean()

    with pytest.raises(ValueError, match="nothing to watch or to guard"):
        trainer(tmp_path, [QKGuard()]).fit(Plain(nn.Linear(13, 1)), batches())


@pytest.mark.parametrize("action", ["qk_norm", "tighter_clip"])
def test_a_fired_run_does_not_go_on_under_a_monitor_alone(tmp_path: Path, action: str) -> None:
    checkpoint = ModelCheckpoint(tmp_path / action, filename="last", every_n_train_steps=1)
    guard = QKGuard(1e-6, action=action)
    run(tmp_path, "llama-sdpa", [guard, checkpoint], steps=2, enable_checkpointing=True)
    assert guard.fired
    with pytest.raises(ValueError, match=r"guard that fired .* but no QKGuard"):
        run(tmp_path, "llama-sdpa", [SpectralMonitor(1)], steps=3, ckpt=tmp_path / action / "last.ckpt")


def test_a_model_that_comes_after_the_callbacks_is_refused(tmp_path: Path) -> None:
    class Late(Mine):
        def __init__(self) -> None:
            LightningModule.__init__(self)

        def configure_model(self) -> None:
            self.model = model("llama-sdpa")

    with pytest.raises(ValueError, match="its model from __init__ on"):
        trainer(tmp_path, [QKGuard(1.0)], max_steps=1).fit(Late(), batches())
