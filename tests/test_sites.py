import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels.sites
from kernels.rounding import Rounding
from kernels.sites import CARRY_SITES, PRESETS, SITE_NAMES, RoundingSites

ROUNDINGS = st.one_of(
    st.sampled_from(["fp32", "bf16", "fp16", "fp16:sr", "bf16:rz"]),
    st.builds(lambda bits, mode: f"{bits}:{mode}", st.integers(1, 23), st.sampled_from(["rne", "rz", "sr"])),
)
SITES = st.builds(
    lambda roundings, rounded_sum: RoundingSites(**roundings, sum_rounded_p=rounded_sum),
    st.dictionaries(st.sampled_from(SITE_NAMES), ROUNDINGS),
    st.booleans(),
)


def documented_presets() -> dict[str, dict[str, str]]:
    """{preset: {site: "F" or "B"}} as the module's docstring tables them."""
    assert kernels.sites.__doc__ is not None
    _, table = kernels.sites.__doc__.split("Which implementation rounds where")
    lines = [re.split(r"\s{2,}", line) for line in table.splitlines() if line.count("  ") >= 4]
    header, *rows = [line for line in lines if not line[0].startswith("=")]
    documented: dict[str, dict[str, str]] = {preset: {} for preset in header[1:]}
    for names, *cells in rows:
        sites = [site.replace("*", letter) for site in names.split(", ") for letter in ("qkv" if "*" in site else "*")]
        for preset, cell in zip(header[1:], cells, strict=True):
            values = cell.split(", ")
            values = values * len(sites) if len(values) == 1 else values
            for site, value in zip(sites, values, strict=True):
                assert site not in documented[preset], f"{site} is listed twice"
                documented[preset][site] = value
    return documented


def test_the_table_in_the_docstring_is_the_presets():
    table = documented_presets()
    assert set(table) == set(PRESETS)
    letters = {Rounding.parse("fp32"): "F", Rounding.parse("bf16"): "B", True: "yes", False: "no"}
    for preset, documented in table.items():
        listed = (*SITE_NAMES, "sum_rounded_p", "reciprocal")
        assert documented == {name: letters[getattr(PRESETS[preset], name)] for name in listed}, preset


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_encoding(preset: str):
    sites = RoundingSites.preset(preset)
    assert RoundingSites.decode(sites.encode()) == sites
    assert sites.is_exact == (preset == "fp32")
    assert not sites.is_stochastic


@pytest.mark.parametrize("name", ["o_carry_only", "l_only", "pv_only"])
def test_single_site_presets_add_one_site_to_fa2_with_narrow_scores(name: str):
    site = {"o_carry_only": "o_carry", "l_only": "l_carry", "pv_only": "pv"}[name]
    expected = RoundingSites.build("fa2", {"s": "bf16", "s_scaled": "bf16", "s_bwd": "bf16", site: "bf16"})
    assert RoundingSites.preset(name) == expected


@given(SITES)
def test_any_sites_survive_encoding(sites: RoundingSites):
    assert RoundingSites.decode(sites.encode()) == sites
    assert sites.is_exact == (sites == dataclasses.replace(RoundingSites(), sum_rounded_p=sites.sum_rounded_p))
    assert sites.is_stochastic == (":sr" in sites.encode())


def test_carry_goes_to_the_carries_and_nowhere_else():
    sites, base = RoundingSites.build("bf16_carry", carry="2"), RoundingSites.preset("bf16_carry")
    for site in SITE_NAMES:
        assert getattr(sites, site) == (Rounding(2) if site in CARRY_SITES else getattr(base, site)), site


def test_carry_leaves_alone_what_does_not_round():
    assert RoundingSites.build("fp32", carry=2) == RoundingSites.preset("fp32")
    assert (
        RoundingSites.build("l_only", carry=2).encode()
        == "s=2,s_scaled=2,p_pv=bf16,l_carry=2,o_out=bf16,s_bwd=2,ds=bf16,reciprocal=True"
    )


def test_single_sites_override_carry_and_preset():
    sites = RoundingSites.build("bf16_carry", {"lse": "fp32", "dk": "4:rz", "sum_rounded_p": True}, carry=3)
    assert (str(sites.lse), str(sites.dk), str(sites.o_carry), sites.sum_rounded_p) == ("fp32", "4:rz", "3", True)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="site o_carry: rounding 'bf17'"):
        RoundingSites(o_carry="bf17")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="site lse: mantissa_bits=0"):
        RoundingSites.build(overrides={"lse": 0})
    with pytest.raises(ValueError, match=r"overrides.o_cary is not one of the sites.*o_carry"):
        RoundingSites.build(overrides={"o_cary": "bf16"})
    with pytest.raises(ValueError, match=r"preset 'fa3'.*fa2"):
        RoundingSites.preset("fa3")
    with pytest.raises(ValueError, match="rounding 'x'"):
        RoundingSites().at_carries("x")
    with pytest.raises(ValueError, match="sum_rounded_p='no'"):
        RoundingSites.build(overrides={"sum_rounded_p": "no"})
