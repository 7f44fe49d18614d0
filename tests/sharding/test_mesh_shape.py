"""Mesh shapes: what is read, what is refused, and what is proposed in its place."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.sharding.mesh import check_divides, device_mesh, parse, resolve, whole_sequences
from tunix.sharding.table import Equation, axis_names

DIMS = {"D": 64, "F": 128, "N": 8, "K": 2, "V": 256, "H": 8, "T": 36, "n": 8}


@pytest.mark.parametrize(
    ("shape", "devices", "sizes"),
    [
        ("auto", 8, (1, 8, 1)),
        (((8,), ("fsdp",)), 8, (1, 8, 1)),
        (((4, 2), ("fsdp", "tp")), 8, (1, 4, 2)),
        (((2, 4), ("tp", "fsdp")), 8, (1, 4, 2)),  # any order, same mesh
        (((2, 2, 2), ("tp", "dp", "fsdp")), 8, (2, 2, 2)),
        (((-1, 2), ("fsdp", "tp")), 8, (1, 4, 2)),
        (((2, -1), ("dp", "fsdp")), 8, (2, 4, 1)),
        (((1, 8), ("fsdp", "tp")), 8, (1, 1, 8)),  # 2 key/value heads on tp=8: replicated
        ("auto", 1, (1, 1, 1)),
    ],
)
def test_resolve(shape, devices, sizes):
    assert tuple(resolve(shape, devices, DIMS, allow_idle=False)[axis] for axis in ("dp", "fsdp", "tp")) == sizes


@pytest.mark.parametrize(
    ("shape", "devices", "message"),
    [
        (
            ((3, 2), ("fsdp", "tp")),
            8,
            'fsdp=3 x tp=2 needs 6 devices, 8 are visible; legal here: [[4,2],["fsdp","tp"]]',
        ),
        (((3, 2), ("fsdp", "tp")), 8, "distributed.allow_idle_devices=true"),
        (
            ((8, 2), ("fsdp", "tp")),
            4,
            'needs 16 devices, 4 are visible; legal here: [[2,2],["fsdp","tp"]], [[4,1],["fsdp","tp"]]',
        ),
        (((8, 2), ("fsdp", "tp")), 4, "or start 4 times as many processes, as with --nnodes=4"),
        (((-1, 3), ("fsdp", "tp")), 8, "3 does not divide the 8 devices that are visible"),
        (
            ((1, 16), ("fsdp", "tp")),
            16,
            "model.num_heads=8 is not divisible by mesh axis tp=16 (nearest tp: 2, 4 or 8)",
        ),
        (
            ((128,), ("fsdp",)),
            128,
            "model.embed_dim=64 is not divisible by mesh axis fsdp=128 (nearest fsdp: 16, 32 or 64)",
        ),
        (  # both axes split the width of weights at rest
            ((32, 4), ("fsdp", "cp")),
            128,
            "model.embed_dim=64 is not divisible by mesh axes fsdp=32 x cp=4 = 128 (nearest fsdp x cp: 16, 32 or 64)",
        ),
        (((8,), ("cp",)), 8, "training.seq_len=36 is not divisible by mesh axis cp=8 (nearest cp: 1, 2 or 4)"),
        (((8,), ("cp",)), 8, 'legal here: [[4,2],["cp","tp"]], [[4,2],["cp","fsdp"]]'),
    ],
)
def test_resolve_refuses(shape, devices, message):
    with pytest.raises(ValueError) as error:
        resolve(shape, devices, DIMS, allow_idle=False)
    assert message in str(error.value)


def test_proposed_shapes_are_legal():
    with pytest.raises(ValueError) as error:
        resolve(((5, 1), ("fsdp", "tp")), 8, DIMS, allow_idle=False)
    proposed = str(error.value).split("legal here: ")[1].split(", or distributed")[0].replace(" or ", ", ").split(", ")
    for shape in proposed:
        assert resolve(parse(json.loads(shape)), 8, DIMS, allow_idle=False)


def test_idle_devices_only_when_asked_for():
    assert resolve(((3,), ("dp",)), 8, DIMS, allow_idle=True)["dp"] == 3
    with pytest.raises(UserError, match=r"dp=12 needs 12 devices, 8 are visible; legal here: [^;]*\]\]$"):
        resolve(((12,), ("dp",)), 8, DIMS, allow_idle=False)  # none would be idle


def test_weights_stay_on_their_devices_where_each_device_takes_whole_sequences():
    mesh = device_mesh(((2, 4), ("fsdp", "cp")), DIMS, allow_idle=False)
    whole = whole_sequences(mesh)
    assert (whole.shape["fsdp"], whole.shape["cp"]) == (8, 1)
    assert [*whole.devices.flat] == [*mesh.devices.flat]


def test_no_process_is_idle():
    """All processes take part in collectives, and wait for one another at barriers."""
    devices: list[Any] = [SimpleNamespace(process_index=n // 4) for n in range(8)]
    with pytest.raises(UserError, match=r"leaves processes \[1\] without a device; start fewer processes"):
        device_mesh(((4,), ("fsdp",)), DIMS, allow_idle=True, devices=devices)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[4, 2], ["fsdp", "foo"]], f"unknown axis 'foo'; axes are {', '.join(axis_names())}"),
        ([[4, 2], ["fsdp", "tpp"]], "did you mean tp?"),
        ([[4, 2], ["fsdp", "fsdp"]], "axis fsdp is named twice"),
        ([[4], ["fsdp", "tp"]], "1 sizes for 2 axes"),
        ([[0], ["fsdp"]], "size fsdp=0"),
        ([[True], ["fsdp"]], "size fsdp=True"),
        ([[-1, -1], ["fsdp", "tp"]], "only one axis can take the devices that are left"),
        ([[], []], "0 sizes for 0 axes"),
        ("all", "expected [[sizes], [axis names]]"),
        (8, "expected [[sizes], [axis names]]"),
    ],
)
def test_parse_refuses(value, message):
    with pytest.raises(ValueError) as error:
        parse(value)
    assert message in str(error.value)


def test_key_value_heads_that_neither_divide_nor_are_divided():
    with pytest.raises(ValueError, match="model.num_kv_heads=6"):
        check_divides(DIMS | {"N": 12, "K": 6}, dict.fromkeys(axis_names(), 1) | {"tp": 4})


@pytest.mark.parametrize(
    ("dims", "sizes", "message"),
    [
        (
            {"F": 64, "N": 12, "K": 6},
            {"tp": 8},
            r"num_heads=12 is not .* tp=8 \(nearest tp: 1 or 2\)",
        ),  # 4, 6: not K, F
        ({"L": 60, "s": 10}, {"pp": 7}, r"num_layers=60 is not .* pp=7 \(nearest pp: 2, 5 or 10\)"),
        ({"L": 64, "s": 64}, {"pp": 12}, r"num_layers=64 is not .* pp=12 \(nearest pp: 8, 16 or 32\)"),  # by ratio
        ({"L": 35, "s": 1}, {"pp": 4}, r"num_layers=35 is not .* pp=4 \(nearest pp: 1\)"),
        # Numbers up to it are not tried one after the other, which took minutes.
        ({"T": 10**9 + 1}, {"cp": 8}, r"seq_len=1000000001 is not .* cp=8 \(nearest cp: 1\)"),
    ],
)
def test_no_size_is_near_that_is_refused_next(dims, sizes, message):
    with pytest.raises(UserError, match=message):
        check_divides(DIMS | dims, dict.fromkeys(axis_names(), 1) | sizes)


def test_only_ulysses_splits_heads_over_the_devices_that_split_tokens():
    sizes = dict.fromkeys(axis_names(), 1) | {"cp": 8, "tp": 2}
    check_divides(compose(["model.cp_exchange=auto", "model.embed_dim=64", "model.num_heads=4"]).config.dims, sizes)
    with pytest.raises(
        UserError, match=r"num_heads=4 is not divisible by mesh axes tp=2 x cp=8 = 16 \(nearest tp x cp"
    ):
        check_divides(compose(["model.cp_exchange=ulysses", "model.num_heads=4"]).config.dims, sizes)


def test_equation():
    product = Equation("BTNH,NHD->BTD")
    assert (product.w, product.summed, product.batch, product.is_vector) == ("NHD", "NH", "BT", False)
    assert (product.stacked().w, product.stacked().summed, product.stacked().batch) == ("LNHD", "NH", "BT")
    assert (product.stacked().copies, product.stacked().one_layer()) == ("L", product)
    assert (product.transposed(), product.transposed().summed) == (Equation("BTD,NHD->BTNH"), "D")
    leaving = Equation("BTNH,NHD->BtD")
    assert (leaving.leaves_branch, leaving.einsum_text, product.leaves_branch) == (True, product.text, False)
    assert leaving.low_rank() == (Equation("BTNH,NHr->Btr"), Equation("Btr,rD->BtD"))
    experts = Equation("BTED,EDF->BTEF").stacked()
    assert (experts.copies, experts.summed) == ("LE", "D")
    norm = Equation("BTNH,H->BTNH")
    assert (norm.summed, norm.batch, norm.is_vector, norm.stacked().is_vector) == ("", "BTN", True, True)
