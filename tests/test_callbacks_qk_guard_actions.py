"""What the guard does: each action's effect, its release, and that a resumed run goes on as the uninterrupted one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_callbacks_qk_guard import Watch, checkpointed
from tiny import Recording, assert_same, fault, fit, module, weights
from torch import nn

from callbacks import QKGuard, RandomState
from callbacks.qk_guard import ACTIONS
from lightning_qk.model import MLP
from lightning_qk.module import GPTModule
from lightning_qk.routes import attention_sites

SDPA: dict[str, Any] = dict(sites="fp32", carry=None, core="sdpa")
# action, its arguments, the plugin that it needs; all bite at this size
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qk_norm": ({}, {}),
    "qk_clip": ({"tau": 0.5}, SDPA),
    "softcap": ({"cap": 0.5}, SDPA),
    "fp32_carry": ({}, {}),
    "v_norm": ({}, {}),
    "mlp_norm": ({}, {}),
    "lr_cut": ({"factor": 0.5}, {}),
    "tighter_clip": ({"max_norm": 0.01}, {}),
    "optimizer_reset": ({}, {}),
    "spam": ({"threshold": 0.5, "interval": 3, "warmup": 2, "grace": 1}, {}),
    "zclip": ({"z": 0.1, "warmup": 2}, {}),
    "adagc": ({"relative": 0.9, "warmup": 1}, {}),
}
EVERY_ACTION = pytest.mark.parametrize("action", CASES)


def at_step(action: str, step: int, **settings: Any) -> QKGuard:
    return QKGuard(mode="fire_at_step", fire_step=step, action=action, action_args=CASES[action][0], **settings)


def model(**arguments: Any) -> GPTModule:
    """Weights so large that softmax, QK-clip and soft cap have something to do."""
    made = module({"dropout": 0.1}, **arguments)
    for site in attention_sites(made):
        for linear in (site.q_proj, site.k_proj):
            nn.init.normal_(linear.weight, std=0.4)
    return made


def train(root: Path, action: str, callbacks: list[Callback], steps: int = 6, **settings: Any) -> Any:
    return fit(
        root, callbacks, fault(**CASES[action][1]), settings.pop("model", None) or model(), max_steps=steps, **settings
    )


def test_every_action_has_a_case() -> None:
    assert list(CASES) == list(ACTIONS)


@EVERY_ACTION
def test_it_acts_from_the_step_after_firing_and_not_before(tmp_path: Path, action: str) -> None:
    alone, plain = train(tmp_path, action, [])
    guard = at_step(action, 2)
    guarded, recording = train(tmp_path, action, [guard])
    assert guard.history == [{"step": 2, "layers": [0, 1], "logit": None}]
    assert recording.losses[:2] == plain.losses[:2]
    assert recording.losses[2:] != plain.losses[2:]
    assert not torch.equal(
        torch.cat([p.flatten() for p in alone.parameters()]), torch.cat([p.flatten() for p in guarded.parameters()])
    )


@EVERY_ACTION
def test_always_on_acts_from_the_first_step(tmp_path: Path, action: str) -> None:
    _, plain = train(tmp_path, action, [], 5)
    guard = QKGuard(mode="always_on", action=action, action_args=CASES[action][0])
    _, recording = train(tmp_path, action, [guard], 5)
    assert guard.history == [{"step": 0, "layers": [0, 1], "logit": None}]
    assert guard.verdict_fields() == {"guard": "always on", "guard_step": None}
    if action == "optimizer_reset":  # once, when there is nothing yet
        assert recording.losses == plain.losses
        return
    in_the_function = ACTIONS[action].switch is not None
    assert (recording.losses[0] != plain.losses[0]) == in_the_function
    assert recording.losses[1:] != plain.losses[1:]


@EVERY_ACTION
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, action: str) -> None:
    """From a checkpoint at the firing step and after it."""

    def callbacks() -> list[Callback]:
        return [at_step(action, 4), RandomState()]

    whole = callbacks()
    expected, recording = train(tmp_path, action, whole, 8)
    plugin = fault(**CASES[action][1])
    checkpointed(tmp_path, callbacks(), model=model(), steps=6, plugin=plugin)
    for step in (4, 6):
        again = callbacks()
        resumed, rest = train(tmp_path, action, again, 8, ckpt_path=tmp_path / f"at_{step}.ckpt")
        assert rest.losses == recording.losses[step:], step
        assert_same(weights(resumed), weights(expected))
        assert again[0].state_dict() == whole[0].state_dict()
        torch.load(tmp_path / f"at_{step}.ckpt", weights_only=True)


@EVERY_ACTION
def test_a_released_action_is_over_for_good(tmp_path: Path, action: str) -> None:
    """The release is recorded, resumed, and not followed by another firing."""

    def callbacks() -> list[Callback]:
        arguments: dict[str, Any] = dict(action=action, action_args=CASES[action][0], disarm_after=2)
        return [QKGuard(1e-9, **arguments), RandomState()]

    whole = callbacks()
    expected, recording = train(tmp_path, action, whole, 6)
    guard: Any = whole[0]
    assert (guard.fired, guard.fired_step, guard.released_step) == (True, 1, 3)
    assert [set(event) for event in guard.history] == [{"step", "layers", "logit"}, {"step", "released"}]
    assert guard.history[1] == {"step": 3, "released": [0, 1]}
    assert guard.verdict_fields()["guard_released_step"] == 3
    assert [row["guard/fired"] for row in recording.logged] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert not any(part.switches_on() for part in expected.modules() if hasattr(part, "switches_on"))
    if action not in ("qk_norm", "lr_cut", "spam"):  # the rest is the guard's doing
        return
    checkpointed(tmp_path, callbacks(), model=model(), plugin=fault(**CASES[action][1]))
    for step in (2, 4):
        again = callbacks()
        resumed, rest = train(tmp_path, action, again, 6, ckpt_path=tmp_path / f"at_{step}.ckpt")
        assert rest.losses == recording.losses[step:]
        assert_same(weights(resumed), weights(expected))
        assert again[0].state_dict() == guard.state_dict()


def test_a_released_qk_norm_leaves_the_plain_function(tmp_path: Path) -> None:
    guarded, _ = fit(tmp_path, [at_step("qk_norm", 1, disarm_after=1)], fault(**SDPA), model(), max_steps=3)
    plain = model()
    plain.load_state_dict(dict(guarded.named_parameters()), strict=False)
    tokens = torch.randint(0, 32, (2, 16))
    torch.testing.assert_close(guarded.eval().model(tokens), plain.eval().model(tokens), rtol=0, atol=0)


# switches of the model


class ByHand(Callback):
    """Does to every layer at a step what the guard should."""

    def __init__(self, step: int, change: Callable[[Any, Any], None]) -> None:
        self.step, self.change = step, change

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            mlps = [part for part in pl_module.modules() if isinstance(part, MLP)]
            for site, mlp in zip(attention_sites(pl_module), mlps, strict=True):
                self.change(site, mlp)


@pytest.mark.parametrize(
    ("action", "change"),
    [
        ("qk_norm", lambda site, mlp: site.set_qk_norm(True)),
        ("v_norm", lambda site, mlp: site.set_switch("v_norm", True)),
        ("fp32_carry", lambda site, mlp: setattr(site.core, "sites", site.core.clean_sites)),
        ("softcap", lambda site, mlp: site.set_softcap(0.5)),
        ("mlp_norm", lambda site, mlp: mlp.set_mlp_norm(True)),
    ],
)
def test_switches_are_those_set_by_hand(tmp_path: Path, action: str, change: Any) -> None:
    guarded, recording = train(tmp_path, action, [at_step(action, 2)])
    by_hand, expected = train(tmp_path, action, [ByHand(2, change)])
    assert recording.losses == expected.losses
    assert_same(*(dict(each.named_parameters()) for each in (guarded, by_hand)))


def test_fp32_carry_from_the_first_step_is_the_healthy_run(tmp_path: Path) -> None:
    guarded, recording = fit(tmp_path, [QKGuard(mode="always_on", action="fp32_carry")], fault(), model(), max_steps=4)
    healthy, expected = fit(tmp_path, [], fault("fp32", None), model(), max_steps=4)
    assert recording.losses == expected.losses
    assert_same(*(dict(each.named_parameters()) for each in (guarded, healthy)))


@pytest.mark.parametrize("action", ["qk_norm", "v_norm", "fp32_carry", "softcap", "qk_clip"])
def test_the_firing_head_alone_is_acted_on(tmp_path: Path, action: str) -> None:
    made = model()
    with torch.no_grad():
        attention_sites(made)[1].q_proj.weight[:8] *= 30  # layer 1, head 0 fires
    guard = QKGuard(40.0, scope="head", action=action, action_args=CASES[action][0])
    recorder = Recording()
    before = {}

    class Before(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            before.update(weights(pl_module))

    fitted, _ = fit(
        tmp_path, [guard, recorder, Before()], fault(**CASES[action][1]), made, max_steps=1, limit_train_batches=1
    )
    assert [(event["layers"], event["heads"]) for event in guard.history] == [([1], [[0]])]
    sites = attention_sites(fitted)
    if action == "qk_clip":
        gone = sites[1].q_weight.norm(dim=1) / before["model.blocks.1.attention.q_proj.weight"].norm(dim=1)
        assert float(gone[:8].max()) < 0.5 < float(gone[8:].min())
        return
    assert [site.switches_on() for site in sites] == [{}, {action: (0,)}]
    if action == "fp32_carry":
        assert [site.core.clean_heads for site in sites] == [(), (0,)]


@pytest.mark.parametrize("switch", ["v_norm", "mlp_norm", "qk_norm", "softcap", "fp32_carry"])
def test_a_switch_that_the_history_does_not_know_is_refused(tmp_path: Path, switch: str) -> None:
    made = model()
    site, mlp = attention_sites(made)[0], made.model.blocks[0].mlp
    if switch == "mlp_norm":
        mlp.set_mlp_norm(True)
    elif switch == "softcap":
        site.set_softcap(3.0)
    else:
        site.set_switch(switch, True, heads=[1])
    with pytest.raises(ValueError, match=rf"{switch} is on in layers \[0\] but the guard's history says \[\]"):
        fit(tmp_path, [QKGuard()], fault(**SDPA), made)


@pytest.mark.parametrize("action", ["v_norm", "mlp_norm", "fp32_carry"])
def test_a_model_with_any_switch_on_is_not_resumed_without_a_guard_or_with_another_action(
    tmp_path: Path, action: str
) -> None:
    path = checkpointed(tmp_path, [at_step(action, 1)], model=model()) / "at_2.ckpt"
    with pytest.raises(ValueError, match=rf"guard that fired .*{action} and 2 more.* no QKGuard"):
        fit(tmp_path, [], fault(), model(), max_steps=5, ckpt_path=path)
    with pytest.raises(ValueError, match=rf"action='qk_norm' but the checkpoint's guard had '{action}'"):
        fit(tmp_path, [QKGuard()], fault(), model(), max_steps=5, ckpt_path=path)


def test_heads_that_disagree_with_the_history_are_named(tmp_path: Path) -> None:
    path = checkpointed(tmp_path, [QKGuard(1e-9, scope="head")]) / "at_2.ckpt"
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.blocks.1.attention.qk_norm"][0] = False
    torch.save(content, tmp_path / "less.ckpt")
    with pytest.raises(
        ValueError, match=r"\{0: \(0, 1\), 1: \(1,\)\} but the guard's history says \{0: \(0, 1\), 1: \(0, 1\)\}"
    ):
        fit(tmp_path, [QKGuard(1e-9, scope="head")], fault(), max_steps=5, ckpt_path=tmp_path / "less.ckpt")


# a fired run


def test_logits_of_a_fired_run_never_exceed_sqrt_d_and_forget_the_scale_of_q_and_k(tmp_path: Path) -> None:
    watch = Watch()
    made = module(lr=0.1)
    for site in attention_sites(made):
        nn.init.normal_(site.q_proj.weight, std=5.0)
    fitted, _ = fit(tmp_path, [QKGuard(5.0), watch], fault(**SDPA), made, max_steps=12)
    assert max(watch.logits[0]) > 5.0 and max(map(max, watch.logits[1:])) <= math.sqrt(8) * (1 + 1e-5)
    outcomes = []
    tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(0))
    for factor in (1.0, 1e-3, 1e3):
        twin = module()
        twin.load_state_dict(fitted.state_dict())
        with torch.no_grad():
            for site in attention_sites(twin):
                site.q_proj.weight *= factor
                site.k_proj.weight *= factor
        loss = twin(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = {name: p.grad for name, p in twin.named_parameters()}
        for name, gradient in gradients.items():
            if "q_proj" in name or "k_proj" in name:
                gradient.mul_(factor)
        outcomes.append({"loss": loss.detach(), **gradients})
    for other in outcomes[1:]:
        for name, value in outcomes[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-6)


# arguments


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"action": "norm"}, "action='norm' is not one of qk_norm, qk_clip"),
        ({"action": "qk_clip", "action_args": {"tua": 3}}, r"action_args.tua does not exist; it takes tau, alpha"),
        ({"action_args": {"tau": 3}}, r"action='qk_norm': action_args.tau does not exist; it takes nothing"),
        ({"action": "qk_clip", "action_args": {"tau": 0}}, r"action_args.tau=0"),
        ({"action": "qk_clip", "action_args": {"tau": math.inf}}, r"action_args.tau=inf must be finite"),
        ({"action": "zclip", "action_args": {"z": math.nan}}, r"action_args.z=nan must be finite"),
        ({"action": "qk_clip", "action_args": {"alpha": 2}}, r"alpha=2"),
        ({"action": "softcap", "action_args": {"cap": -1}}, r"action_args.cap=-1"),
        ({"action": "lr_cut", "action_args": {"factor": 1.5}}, r"action_args.factor=1.5"),
        ({"action": "tighter_clip", "action_args": {"max_norm": 0}}, r"action_args.max_norm=0"),
        ({"action": "spam", "action_args": {"interval": 0}}, r"interval=0"),
        ({"action": "zclip", "action_args": {"warmup": 1}}, r"warmup=1"),
        ({"action": "adagc", "action_args": {"decay": 1.0}}, r"decay=1.0"),
        (
            {"action": "lr_cut", "scope": "layer"},
            r"action='lr_cut' cannot be confined to the firing layer; use scope='all'",
        ),
        ({"action": "mlp_norm", "scope": "head"}, r"firing head; use scope='all' or 'layer'"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        QKGuard(**settings)


@pytest.mark.parametrize(
    ("action", "plugin", "named"),
    [
        ("fp32_carry", SDPA, "action='fp32_carry' needs an attention fault"),
        ("fp32_carry", {"sites": "fp32", "carry": None}, "action='fp32_carry' needs an attention fault"),
        ("softcap", {}, "action='softcap' needs a core that can cap logits"),
    ],
)
def test_an_action_that_the_plugin_rules_out_is_refused_before_training(
    tmp_path: Path, action: str, plugin: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        fit(tmp_path, [QKGuard(action=action)], fault(**plugin))


class Observe(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for site in attention_sites(pl_module):
            site.core.observed = True


@pytest.mark.parametrize("core", ["streaming", "sdpa"])
def test_a_compiled_model_follows_the_guard(tmp_path: Path, core: str) -> None:
    """Firing in the middle of a run changes what a compiled block computes."""
    torch._dynamo.reset()
    plugin: dict[str, Any] = SDPA if core == "sdpa" else {}
    results = []
    for compiled in (False, True):
        made = module()
        if compiled:
            for block in made.model.blocks:
                block.compile(backend="eager")
        fitted, recording = fit(tmp_path, [at_step("qk_norm", 2), Observe()], fault(**plugin), made, max_steps=4)
        results.append((weights(fitted), recording.losses))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    _, plain = fit(tmp_path, [], fault(**plugin), module(), max_steps=4)
    assert results[1][1][:2] == pytest.approx(plain.losses[:2], rel=1e-5)
    assert results[1][1][2] != pytest.approx(plain.losses[2], rel=1e-5)
