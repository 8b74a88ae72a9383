"""Optimizers by name: which weights each takes, and Muon with AdamW as one optimizer that resumes exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import assert_same, fit, module, weights
from torch import nn

from callbacks import DirectionProbe, QKGuard
from lightning_qk.optimizers import MuonWithAdamW, make_optimizer
from lightning_qk.precision import MXGradient
from lightning_qk.routes import route_parameters

SETTINGS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, momentum=0.95, weight_decay=0.1)


def muon(model: nn.Module) -> MuonWithAdamW:
    optimizer = make_optimizer("muon", model.parameters(), route_parameters(model, "all").values(), SETTINGS)
    assert isinstance(optimizer, MuonWithAdamW)
    return optimizer


def backward(model: Any, seed: int) -> None:
    tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(tokens, tokens).backward()


def test_muon_takes_the_hidden_matrices_only() -> None:
    model = module({"bias": True})
    hidden, embeddings, vectors = muon(model).param_groups
    assert {id(p) for p in hidden["params"]} == {id(p) for p in route_parameters(model, "all").values()}
    assert {id(p) for p in embeddings["params"]} == {
        id(p) for name, p in model.named_parameters() if p.ndim == 2 and "blocks" not in name
    }
    assert sum(len(group["params"]) for group in (hidden, embeddings, vectors)) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in (hidden, embeddings, vectors)] == [0.1, 0.1, 0.0]


def test_the_pair_does_what_its_parts_do_apart() -> None:
    together, apart = module(), module()
    pair = muon(together)
    hidden = list(route_parameters(apart, "all").values())
    rest = [p for p in apart.parameters() if not any(p is h for h in hidden)]
    parts = [
        torch.optim.Muon(hidden, lr=1e-2, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
            betas=(0.9, 0.95),
        ),
    ]
    for seed in range(4):
        for group in (*pair.param_groups, *(group for part in parts for group in part.param_groups)):
            group["lr"] = 1e-2 / (1 + seed)  # as a scheduler does
        for model, optimizers in ((together, [pair]), (apart, parts)):
            backward(model, seed)
            for optimizer in optimizers:
                optimizer.step()
    assert_same(weights(together), weights(apart))


def test_a_closure_runs_once_and_its_loss_comes_back() -> None:
    model, calls = module(), []
    pair = muon(model)

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        backward(model, 0)
        return 1.5

    assert pair.step(closure) == 1.5 and calls == [True]


def test_state_goes_through_a_checkpoint() -> None:
    model, twin = module(), module()
    before, after = muon(model), muon(twin)
    for seed in range(2):
        backward(model, seed)
        before.step()
    twin.load_state_dict(model.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))  # torch would share the tensors
    for m, optimizer in ((model, before), (twin, after)):
        backward(m, 7)
        optimizer.step()
    assert_same(weights(model), weights(twin))
    assert len(after.state_dict()["state"]) == len(list(twin.parameters()))


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    def run(name: str, **settings: Any) -> Any:
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        callbacks = [DirectionProbe(k=1), QKGuard(threshold=1e-3), saver]
        settings = {"enable_checkpointing": True, "max_steps": 6, **settings}
        plugin = MXGradient(route="mlp", base="fp32")
        return fit(tmp_path / name, callbacks, plugin, model=module(optimizer=optimizer), **settings)[0]

    whole = run("whole")
    resumed = run("resumed", ckpt_path=tmp_path / "whole" / "step=3.ckpt")
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize("optimizer, momentum", [("muon", 0.95), ("sgd", 0.9)])
def test_momentum_has_a_default_for_each(optimizer: Any, momentum: float) -> None:
    assert module(optimizer=optimizer).hparams["momentum"] == momentum
    assert module(optimizer=optimizer, momentum=0.5).hparams["momentum"] == 0.5


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="optimizer='adam' is not one of adamw, sgd, muon"):
        make_optimizer("adam", [], [], SETTINGS)
