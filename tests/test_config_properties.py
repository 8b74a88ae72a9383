"""Any small configuration either resolves, to what its parts say in their order, or is refused by name.

Nothing is trained and no process started: what is drawn goes through the parsers and constructors that a run uses.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from runs import run_args, write_tokens

import callbacks
from callbacks.qk_guard import ACTIONS, QKGuard
from kernels.sites import PRESETS, SITE_NAMES, RoundingSites
from lightning_qk import GaussianData, GPTModule, StudentTeacher
from lightning_qk.cli import resolve_run
from lightning_qk.experiment import Experiment, parse_sweep
from lightning_qk.experiment_arms import SweepError
from lightning_qk.model import GPTConfig
from lightning_qk.mx_policy import OPERANDS, MXPolicy
from lightning_qk.operand_format import OperandFormat
from lightning_qk.precision import AttentionFault, BF16CarryAttention, GradientFault, MXGradient, MXTraining

few, some, many = (settings(max_examples=n, derandomize=True, deadline=None) for n in (8, 40, 150))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(["", "x", "2", "fp32", "a.yaml", "1,2"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["fp32", "fault", "model.lr", "base", "steps", "x"]), inner, max_size=2),
    ),
    max_leaves=4,
)


# constructors, with arguments of the types that the parser lets through

WORDS = ["qk", "mlp", "fp32", "bf16", "mxfp4", "mxfp4_e2m1", "nvfp4", "floor", "rne", "sr", "bump", "x", ""]
CONSTRUCTORS: list[Callable[..., Any]] = [
    *(getattr(callbacks, name) for name in callbacks.__all__ if name not in ("EarlyWarning", "RunRecorder", "Limit")),
    *(AttentionFault, BF16CarryAttention, GradientFault, MXGradient, MXTraining, MXPolicy, OperandFormat),
    *(GPTModule, StudentTeacher, GaussianData),
]


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type; numbers that are none, and words that mean nothing, too."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([values_of(part) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is list:
        return st.lists(values_of(parts[0]), max_size=2)
    if origin is tuple:
        return st.tuples(*(values_of(part) for part in parts))
    if origin is dict:  # of a key that decides what is in it, so that the parser does not know
        keys = st.sampled_from(
            [*OPERANDS, "s", "sfa_beta", "tau", "cap", "n_layers", "n_heads", "bias", "softcap", "y"]
        )
        return st.dictionaries(keys, SCALARS | st.fixed_dictionaries({"block": SCALARS}), max_size=2)
    plain = {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.sampled_from([-1, 0, 1, 2, 3, 8]),
        float: st.sampled_from([math.nan, math.inf, -1.0, 0.0, 0.5, 30.0]),
        str: st.sampled_from(WORDS),
    }
    formats = st.builds(OperandFormat, st.sampled_from(["mxfp4_e2m1", "nvfp4"]))
    return plain.get(hint, formats if hint is OperandFormat else st.none())


@st.composite
def calls(draw: st.DrawFn) -> tuple[Callable[..., Any], dict[str, Any]]:
    constructor = draw(st.sampled_from(CONSTRUCTORS))
    hints, parameters = get_type_hints(constructor.__init__), inspect.signature(constructor).parameters  # type: ignore[misc]
    needed = [name for name, one in parameters.items() if one.default is one.empty]
    chosen = draw(st.lists(st.sampled_from(list(parameters)), max_size=3)) if parameters else []
    return constructor, {name: draw(values_of(hints[name])) for name in dict.fromkeys([*needed, *chosen])}


def names_of(given: Any) -> set[str]:
    """Keys at any depth, and the values as they are quoted."""
    if isinstance(given, Mapping):
        return {str(key) for key in given} | {name for value in given.values() for name in names_of(value)}
    return {repr(given)}


def has_nan(given: Any) -> bool:
    if isinstance(given, Mapping | list | tuple):
        return any(map(has_nan, given.values() if isinstance(given, Mapping) else given))
    return isinstance(given, float) and math.isnan(given)


def build_or_name(constructor: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Nothing but a documented error that names an argument or a value; NaN is wrong everywhere."""
    try:
        constructor(**arguments)
    except (ValueError, MisconfigurationException) as error:
        assert any(name in str(error) for name in (*names_of(arguments), *inspect.signature(constructor).parameters))
    else:
        assert not has_nan(arguments), f"{constructor.__name__} takes {arguments}"


@many
@given(calls())
def test_arguments_build_or_are_named(call: tuple[Callable[..., Any], dict[str, Any]]) -> None:
    build_or_name(*call)


@many
@given(st.sampled_from(list(ACTIONS)), st.data())
def test_arguments_of_actions_build_or_are_named(action: str, data: st.DataObject) -> None:
    names = [*inspect.signature(ACTIONS[action]).parameters, "tua"]
    arguments = data.draw(st.dictionaries(st.sampled_from(names), SCALARS, min_size=1, max_size=2))
    build_or_name(QKGuard, {"action": action, "action_args": arguments})
    if "tua" in arguments:
        with pytest.raises(ValueError, match=r"action_args\."):
            QKGuard(action=action, action_args=arguments)


@many
@given(st.dictionaries(st.sampled_from([*get_type_hints(GPTConfig), "n_layer"]), SCALARS, min_size=1, max_size=2))
def test_a_models_overrides_are_of_their_types_or_named(overrides: dict[str, Any]) -> None:
    try:
        config = GPTConfig.preset("proxy", **overrides)
    except ValueError as error:
        assert any(key in str(error) for key in overrides), error
    else:
        for key, value in overrides.items():
            assert getattr(config, key) is value
            hint = str(GPTConfig.__annotations__[key])
            assert type(value).__name__.replace("NoneType", "None") in hint or (type(value), hint[:5]) == (int, "float")


@many
@given(st.sampled_from(list(PRESETS)), st.dictionaries(st.sampled_from([*SITE_NAMES, "sfa_beta", "kv_order"]), SCALARS))
def test_sites_survive_text_and_yaml_or_are_named(preset: str, overrides: dict[str, Any]) -> None:
    try:
        sites = RoundingSites.build(preset, overrides)
    except ValueError as error:
        assert any(f"site {key}" in str(error) for key in overrides), error
        return
    assert RoundingSites.decode(sites.encode()) == sites
    names = [*SITE_NAMES, "sum_rounded_p", "reciprocal", "delta_from", "kv_order", "sfa_beta", "sfa_tolerance"]
    mapping = {name: getattr(sites, name) for name in names}
    mapping = {name: str(value) if name in SITE_NAMES else value for name, value in mapping.items()}
    assert RoundingSites.build(overrides=yaml.safe_load(yaml.safe_dump(mapping))) == sites


# experiments

EXPERIMENT: dict[str, Any] = {"name": "e", "base": "base.yaml", "arms": {"fp32": "a.yaml", "fault": ["b.yaml"]}}
PARTS: dict[str, Any] = {
    "seeds": [3, 4],
    "sizes": {"s": {"base": "size.yaml", "overrides": {"model.lr": 1}, "arm_overrides": {"fault": {"model.lr": 2}}}},
    "overrides": {"model.lr": 3, "trainer.max_steps": 3},
    "arm_overrides": {"fault": {"model.lr": 4}},
    "grid": {"model.eps": [1, 2]},
    "forks": {"from": "fp32", "steps": [5], "arms": {"bump": "c.yaml"}},
    "report": {"reference": "fp32", "extrapolate": {"key": "model.eps", "to": 9.0}},
    "only": ["fault"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    for name in ("base", "size", "a", "b", "c"):
        (folder / f"{name}.yaml").write_text("{}")
    return folder


def parsed(folder: Path, content: Any, *args: str) -> tuple[Any, Experiment]:
    (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
    return parse_sweep(["-c", str(folder / "experiment.yaml"), *args], "")


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    """Experiments without a mistake."""
    keys = draw(st.sets(st.sampled_from(list(PARTS))))
    if "grid" in keys:
        keys.discard("forks")
    content = {**EXPERIMENT, **{key: PARTS[key] for key in sorted(keys)}}
    if "report" in keys and "grid" not in keys:
        content["report"] = {"reference": "fp32"}
    return json.loads(json.dumps(content))


@some
@given(experiments())
def test_an_experiment_is_its_parts_in_their_order(folder: Path, content: dict[str, Any]) -> None:
    options, experiment = parsed(folder, content)
    runs = experiment.runs(Path("runs"), options.only)
    points = 2 if "grid" in content else 1
    arms = ["fault"] if "only" in content else ["fp32", "fault", *(["bump"] if "forks" in content else [])]
    assert len({run.path for run in runs}) == len(runs) == len(arms) * points * len(content.get("seeds", [0]))
    size = content.get("sizes", {}).get("s", {})
    rates = [size.get("overrides"), content.get("overrides"), size.get("arm_overrides", {}).get("fault")]
    rates.append(content.get("arm_overrides", {}).get("fault"))
    for run in runs:
        if not run.arm.startswith("fault"):
            continue
        files = [Path(arg).name for arg in run.fit_args if arg.endswith(".yaml")]
        assert files == ["base.yaml", *(["size.yaml"] if size else []), "b.yaml"]
        given = [arg for arg in run.fit_args if arg.startswith("--model.lr=")]
        assert given == [f"--model.lr={part['model.lr']}" for part in rates if part][-1:]


WHERE = [(), ("sizes", "s"), ("forks",), ("report",), ("report", "extrapolate")]


@some
@given(st.sampled_from(WHERE), st.sampled_from(["armz", "bases", "to_", "Arms", "step"]), SCALARS)
def test_an_unknown_key_is_never_taken(folder: Path, where: tuple[str, ...], key: str, value: Any) -> None:
    content = json.loads(json.dumps({**EXPERIMENT, **{name: PARTS[name] for name in where[:1]}}))
    holder = content
    for name in where:
        holder = holder[name]
    holder[key] = value
    with pytest.raises(SweepError, match=key):
        parsed(folder, content)


INSIDE = [(key,) for key in (*PARTS, *EXPERIMENT)] + [
    *(("sizes", "s"), ("sizes", "s", "base"), ("sizes", "s", "arms"), ("sizes", "s", "arm_overrides")),
    *(("sizes", "s", "forks"), ("sizes", "s", "overrides"), ("arms", "fault"), ("arm_overrides", "fault")),
    *(("forks", "from"), ("forks", "steps"), ("forks", "before"), ("forks", "arms"), ("forks", "arms", "bump")),
    *(("grid", "model.eps"), ("report", "reference"), ("report", "extrapolate"), ("jobs",), ("slurm",), ("size",)),
]


@many
@given(st.sampled_from(INSIDE), ANYTHING)
def test_any_value_resolves_or_its_key_is_named(folder: Path, where: tuple[str, ...], value: Any) -> None:
    content = json.loads(json.dumps({**EXPERIMENT, **{name: PARTS[name] for name in where[:1] if name in PARTS}}))
    holder = content
    for name in where[:-1]:
        holder = holder.setdefault(name, {})
    holder[where[-1]] = value
    try:
        options, experiment = parsed(folder, content)
        experiment.runs(folder, options.only)
    except SweepError as error:
        # `arm fault: no such file` is of arms, base or size; a wrong name is told where it was looked up
        assert any(name.rstrip("s") in str(error) for name in (*where, *names_of(value), "no such file")), error


# configurations of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("run")
    return run_args(root, write_tokens(root / "tokens"))


CHOICES: dict[str, list[Any]] = {
    "model.lr": [0.5, 1e-3, 2],
    "model.betas": [[0.5, 0.75], [0.0, 0.25]],
    "model.schedule": ["constant", "cosine"],
    "model.overrides.context": [8, 16],
    "model.overrides.bias": [True, False],
    "model.overrides.z_loss": [0.0, 1.0e-4],
    "trainer.max_steps": [3, 4],
    "trainer.gradient_clip_val": [None, 0.5],
    "trainer.plugins.init_args.carry": [1, 3, "bf16:sr"],
    "trainer.plugins.init_args.overrides": [{"s": "fp32"}, None],
    "run.arm": ["b", "c"],
}
OVERLAYS = st.lists(
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}),
    min_size=1,
    max_size=3,
)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        holder = tree
        for name in path:
            holder = holder.setdefault(name, {})
        holder[last] = value
    return tree


@few
@given(OVERLAYS)
def test_the_last_overlay_has_the_last_word(
    run: list[str], tmp_path_factory: pytest.TempPathFactory, overlays: list[dict[str, Any]]
) -> None:
    folder, args = tmp_path_factory.mktemp("overlays"), list(run)
    for n, overlay in enumerate(overlays):
        content = nested(overlay)
        if "plugins" in content.get("trainer", {}):
            content["trainer"]["plugins"]["class_path"] = "BF16CarryAttention"
        (folder / f"{n}.yaml").write_text(yaml.safe_dump(content))
        args += ["-c", str(folder / f"{n}.yaml")]
    resolved = resolve_run(args)
    decided = yaml.safe_load(resolved.named)
    for key, value in {key: value for overlay in overlays for key, value in overlay.items()}.items():
        found = decided
        for name in key.split("."):
            found = found[name]
        assert found == value, key
    (folder / "all.yaml").write_text(resolved.named)  # what decides a run, as its one configuration, is that run
    assert resolve_run(["-c", str(folder / "all.yaml")]).config_hash == resolved.config_hash


KEYS = [key for key in CHOICES if not key.startswith("model.overrides")] + [
    "data.init_args.batch_size",
    "seed_everything",
]


@few
@given(st.sampled_from(KEYS), st.integers(1, 40), st.sampled_from("xz_"), st.booleans())
def test_a_misspelt_key_is_named(
    run: list[str], tmp_path_factory: pytest.TempPathFactory, key: str, place: int, letter: str, in_file: bool
) -> None:
    path, _, last = key.rpartition(".")
    place = 1 + place % len(last)
    wrong = last[:place] + letter + last[place:]
    full = f"{path}.{wrong}".lstrip(".")
    extra = [f"--{full}=1"]
    if in_file:
        file = tmp_path_factory.mktemp("misspelt") / "wrong.yaml"
        content = nested({full: 1})
        for part, name in (("plugins", "BF16CarryAttention"), ("data", "TokenFile")):
            for holder in (content, content.get("trainer", {})):
                if part in holder:
                    holder[part]["class_path"] = name
        file.write_text(yaml.safe_dump(content))
        extra = ["-c", str(file)]
    with pytest.raises(ValueError, match=wrong):
        resolve_run([*run, *extra])
