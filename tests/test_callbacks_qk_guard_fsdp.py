"""Actions on parameters that FSDP2 has sharded do what they do on whole ones."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_two_ranks
from tiny import gpt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from callbacks.guard_actions import GuardAction, QKClip, Scene
from callbacks.guard_controls import SPAM, AdaGC, OptimizerReset, TighterClip, ZClip
from callbacks.guard_triggers import SigmaQ
from lightning_qk.module import full
from lightning_qk.routes import attention_sites

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
ACTIONS: dict[str, Any] = {
    "qk_clip": lambda: QKClip(tau=1e-3),
    "tighter_clip": lambda: TighterClip(0.01),
    "zclip": lambda: ZClip(z=0.1, warmup=2),
    "adagc": lambda: AdaGC(relative=0.9, warmup=1),
    "spam": lambda: SPAM(threshold=0.5, interval=3, warmup=1, grace=1),
    "optimizer_reset": OptimizerReset,
}


def outcome(action: GuardAction, shard: bool) -> dict[str, Any]:
    """Weights and sigma_q after some steps, each on the same tokens on every rank."""
    model: Any = gpt(bias=True)
    if shard:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    sites = attention_sites(model)
    for site in sites:
        site.core.observed = True
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer: Any = SimpleNamespace(global_step=1, world_size=2, optimizers=[optimizer])
    scene = Scene(trainer, model, sites, {0: (0, 1), 1: (0, 1)})
    for step in range(5):
        tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model.loss(tokens, tokens).backward()
        action.before_optimizer_step(scene, optimizer)
        optimizer.step()
        action.apply(scene)
    sigma = SigmaQ().read(sites, 1.0)
    return {"sigma": sigma, **{name: full(p.detach()) for name, p in model.named_parameters()}}


def on_this_rank(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    return outcome(ACTIONS[name](), shard=False), outcome(ACTIONS[name](), shard=True)


@pytest.mark.parametrize("name", ACTIONS)
def test_sharded_parameters_are_acted_on_as_whole_ones(tmp_path: Path, name: str) -> None:
    whole, sharded = on_two_ranks(tmp_path, {"outcomes": partial(on_this_rank, name)})["outcomes"][0]
    plain = outcome(GuardAction(), shard=False)
    assert any(not torch.allclose(plain[key], value, rtol=1e-3) for key, value in whole.items())
    for key in (key for key in whole if "k_proj.bias" not in key):  # whose gradient is 0: Adam makes noise of it
        value = whole[key]
        torch.testing.assert_close(sharded[key], value, rtol=2e-3, atol=1e-5, msg=f"{key}")


def test_the_optimizers_own_states_are_cleared() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones(3)
    optimizer.step()
    scene = Scene(SimpleNamespace(optimizers=[optimizer]), nn.Module(), [], {})  # type: ignore[arg-type]
    OptimizerReset().apply(scene)
    assert not optimizer.state[p]["momentum_buffer"].any()
