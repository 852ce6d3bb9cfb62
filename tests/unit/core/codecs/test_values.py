"""Rounding of values: error bounds of every format, and its levels against computations in numpy."""

import numpy as np
import pytest
import torch

from ray_lowcomm.core.codecs import values as v
from ray_lowcomm.core.codecs.formats import Units, ValueFormat
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.errors import PayloadError, SettingError

FORMATS = [ValueFormat(32), ValueFormat(16), ValueFormat(8), ValueFormat(4), ValueFormat(4, "e3m0")]
FORMATS += [ValueFormat(2), ValueFormat(1)]
STOCHASTIC = [ValueFormat(f.bits, f.kind, "stochastic") for f in FORMATS[1:]]
DTYPES = [torch.float32, torch.float64]


def _id(value: object) -> str:
    return f"{value.bits}-{value.kind}-{value.rounding}" if isinstance(value, ValueFormat) else str(value)


every_format = pytest.mark.parametrize("form", FORMATS, ids=_id)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=_id)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)).to(dtype)


def one_unit(*parts: torch.Tensor) -> Units:
    return Units(1, tuple(torch.zeros(len(part), dtype=torch.int64) for part in parts))


def coded(form: ValueFormat, *parts: torch.Tensor, units: Units | None = None, key: str = "k") -> v.Values:
    return v.encode(parts, units or one_unit(*parts), form, key, parts[0].dtype)


def decoded(form: ValueFormat, part: torch.Tensor, key: str = "k") -> torch.Tensor:
    return coded(form, part, key=key).decode(0)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(x, dtype=np.float64)).to(torch.bfloat16).double().numpy()


# ---- to the nearest -----------------------------------------------------------------------------------------------


def _bound(form: ValueFormat, x: torch.Tensor) -> torch.Tensor:
    """Largest error of rounding to the nearest value, for each of x."""
    top = x.abs().max()
    if form.bits == 32:
        return torch.zeros_like(x)
    if form.bits == 16:
        return x.abs() * 2.0**-8
    if form.kind == "e3m0":  # half-way between 2^-j and 2^(-j-1) it is a third
        return torch.maximum(x.abs() / 3, top * 2.0**-7)
    steps = {8: 127, 4: 7}
    return torch.full_like(x, float(top) / steps[form.bits] / 2)


@every_dtype
@pytest.mark.parametrize("form", FORMATS[:5], ids=_id)
def test_errors_are_within_half_a_step(form: ValueFormat, dtype: torch.dtype) -> None:
    x = normal(50, 64, dtype=dtype) * 3
    error = (decoded(form, x) - x).abs()
    assert bool((error <= _bound(form, x) * (1 + 1e-5) + 1e-30).all())


@every_dtype
def test_32_bits_are_exact(dtype: torch.dtype) -> None:
    x = normal(3, 5, dtype=dtype)
    assert torch.equal(decoded(ValueFormat(32), x), x)


def test_4_bits_of_sign_and_exponent_are_powers_of_two_of_the_largest() -> None:
    x = torch.tensor([[3.0, 1.5, -0.75, 3 * 2.0**-6, 3 * 2.0**-8, 0.0, -2.3, 2.2]])
    expected = [3.0, 1.5, -0.75, 3 * 2.0**-6, 0.0, 0.0, -3.0, 1.5]
    assert decoded(ValueFormat(4, "e3m0"), x).tolist() == [expected]


def _lloyd(x: np.ndarray) -> tuple[float, float]:
    split = x.mean()
    for _ in range(3):
        low, high = x[x <= split].mean(), x[x > split].mean()
        split = (low + high) / 2
    return low, high


@every_dtype
def test_two_bits_are_a_sign_and_the_nearer_of_two_means(dtype: torch.dtype) -> None:
    x = normal(40, 64, dtype=dtype)
    low, high = (float(bfloat16(level)) for level in _lloyd(np.abs(x.double().numpy())))
    magnitude = torch.where(x.abs() > (low + high) / 2, high, low)
    torch.testing.assert_close(decoded(ValueFormat(2), x), (x.sign() * magnitude).to(dtype), rtol=0, atol=0)


@every_dtype
def test_one_bit_is_a_sign_and_the_mean(dtype: torch.dtype) -> None:
    x = normal(40, 64, dtype=dtype)
    level = float(bfloat16(x.abs().double().mean().numpy()))
    assert torch.equal(decoded(ValueFormat(1), x), x.sign() * level)


def test_two_bits_lose_less_than_one_and_four_less_than_two() -> None:
    x = normal(40, 64)
    errors = [float((decoded(ValueFormat(bits), x) - x).norm() / x.norm()) for bits in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.61  # of a normal distribution 0.6028 with its best level, 0.3426 with its best two
    assert errors[1] < 0.35


# ---- awkward values -----------------------------------------------------------------------------------------------

every_coded = pytest.mark.parametrize("form", [*FORMATS, *STOCHASTIC], ids=_id)


@every_coded
@every_dtype
def test_zeros_come_back_as_zeros(form: ValueFormat, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    assert torch.equal(decoded(form, x), x)


@every_coded
@pytest.mark.parametrize("value", [0.1, -3.7, 1e-30, 5e30, -1e-38])
def test_a_single_element_comes_back(form: ValueFormat, value: float) -> None:
    x = torch.tensor([[value]])
    torch.testing.assert_close(decoded(form, x), x, rtol=2.0**-7, atol=0)


@every_format
def test_an_outlier_among_zeros_comes_back(form: ValueFormat) -> None:
    """Mean plus or minus six standard deviations would make 6 of it (CASES)."""
    x = torch.zeros(64, 64)
    x[3, 4] = -100.0
    back = decoded(form, x)
    if form.bits == 1:  # has only one level for all: what error feedback is for
        assert float(back[3, 4]) < 0
        return
    assert float(back[3, 4]) == pytest.approx(-100.0, rel=2.0**-8)
    back[3, 4] = 0
    assert not back.any()


@every_coded
@pytest.mark.parametrize("value", [1e-45, -1e-42, 3e-39])
def test_values_below_the_smallest_normal_number_do_no_harm(form: ValueFormat, value: float) -> None:
    x = torch.tensor([[value, value / 2, 0.0, -value]])
    back = decoded(form, x)
    assert bool(torch.isfinite(back).all())
    assert float((back - x).abs().max()) <= 2 * abs(value) + 1e-40


@every_coded
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(form: ValueFormat, value: float) -> None:
    x = normal(3, 5)
    x[1, 2] = value
    with pytest.raises(PayloadError, match="overflow"):
        decoded(form, x)


def test_float64_values_beyond_float32_are_refused_or_vanish_where_tables_are_float32() -> None:
    for bits in (16, 8, 4, 2, 1):
        with pytest.raises(PayloadError, match="overflow"):
            decoded(ValueFormat(bits), torch.tensor([[1e300]], dtype=torch.float64))
        assert decoded(ValueFormat(bits), torch.tensor([[1e-300]], dtype=torch.float64)).item() == 0.0
    assert decoded(ValueFormat(32), torch.tensor([[1e300]], dtype=torch.float64)).item() == 1e300


def test_each_unit_has_levels_of_its_own_across_groups() -> None:
    parts = [normal(4, 8, seed=1), normal(2, 3, seed=2)]
    parts[0][2:] *= 1e6
    units = Units(3, (torch.tensor([0, 0, 2, 2]), torch.tensor([0, 2])))  # unit 1 has no chunk
    parts[1][1] *= 1e6
    both = coded(ValueFormat(1), *parts, units=units)
    small = torch.cat([parts[0][:2].abs().view(-1), parts[1][0].abs()]).double().mean()
    large = torch.cat([parts[0][2:].abs().view(-1), parts[1][1].abs()]).double().mean()
    expected = bfloat16(np.array([small, 0.0, large]))
    assert both.table.view(-1).tolist() == expected.tolist()
    assert both.decode(0)[0].abs().tolist() == [expected[0]] * 8
    assert both.decode(1)[1].abs().tolist() == pytest.approx([expected[2]] * 3)


# ---- stochastic ---------------------------------------------------------------------------------------------------


def _step(form: ValueFormat, x: torch.Tensor) -> torch.Tensor:
    """At least the distance between the neighbours of each of x."""
    top = float(x.abs().max()) * (1 + 2.0**-6)
    if form.bits == 16:
        return x.abs() * 2.0**-7
    if form.kind == "e3m0":
        return torch.maximum(x.abs(), torch.tensor(top * 2.0**-6))
    return torch.full_like(x, top * {8: 1 / 127, 4: 1 / 7, 2: 2 / 3, 1: 2.0}[form.bits])


@pytest.mark.parametrize("form", STOCHASTIC, ids=_id)
@every_dtype
def test_stochastic_rounding_is_right_in_the_mean(form: ValueFormat, dtype: torch.dtype) -> None:
    x, number = normal(4, 16, dtype=dtype), 300
    draws = torch.stack([decoded(form, x, key=f"op{i}") for i in range(number)]).double()
    # what is rounded away from its neighbour once in a thousand times may not show in the spread
    tolerance = 5 * draws.std(0) / number**0.5 + 8 * _step(form, x) / number
    assert bool(((draws.mean(0) - x).abs() <= tolerance).all())
    assert len(draws.unique(dim=0)) > 1


@pytest.mark.parametrize("form", STOCHASTIC, ids=_id)
def test_stochastic_rounding_goes_to_a_neighbour(form: ValueFormat) -> None:
    x = normal(50, 64)
    assert bool(((decoded(form, x) - x).abs() <= _step(form, x)).all())


@pytest.mark.parametrize("form", STOCHASTIC, ids=_id)
def test_what_is_rounded_again_is_the_same_and_with_another_key_not(form: ValueFormat) -> None:
    x = normal(50, 64)
    once, again, other = (decoded(form, x, key) - x for key in ("0/params@8", "0/params@8", "1/params@8"))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    if form.bits > 2:  # with so few levels the errors follow the values
        assert abs(float(torch.corrcoef(torch.stack([once.view(-1), other.view(-1)]))[0, 1])) < 0.1


# ---- as streams ---------------------------------------------------------------------------------------------------


@every_coded
@every_dtype
def test_streams_hold_all_that_a_receiver_needs(form: ValueFormat, dtype: torch.dtype) -> None:
    parts = [normal(4, 8, dtype=dtype), normal(2, 3, seed=1, dtype=dtype)]
    units = Units(2, (torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1])))
    mine = coded(form, *parts, units=units)
    data = torch.cat(mine.streams())
    assert len(data) == form.nbytes(38, 2, dtype)
    reader = Reader(data)
    theirs = v.read(reader, [(4, 8), (2, 3)], units, form, dtype)
    reader.end()
    for i in range(2):
        assert torch.equal(theirs.decode(i), mine.decode(i))
        assert theirs.decode(i).dtype == dtype


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_tables_and_numbers_that_no_sender_makes_are_refused(bad: float) -> None:
    part = normal(2, 4)
    for form in FORMATS:
        streams = [stream.clone() for stream in coded(form, part).streams()]
        if form.coded:
            streams[0][:] = torch.full((form.table_width,), bad).to(form.table_dtype).view(torch.uint8)
        elif bad == -1.0:  # a good number
            continue
        else:
            number = torch.tensor([bad]).to(form.number_dtype(torch.float32)).view(torch.uint8)
            streams[0][: len(number)] = number
        with pytest.raises(PayloadError, match="finite"):
            v.read(Reader(torch.cat(streams)), [(2, 4)], one_unit(part), form, torch.float32)


@pytest.mark.parametrize("bits", [0, 3, 5, 64])
def test_bits_that_no_value_has_are_refused(bits: int) -> None:
    with pytest.raises(SettingError, match=rf"strategy\.value_bits = {bits}: must be one of 32, 16, 8, 4, 2, 1"):
        ValueFormat(bits)


def test_e3m0_has_four_bits() -> None:
    with pytest.raises(SettingError, match=r"strategy\.value_format = 'e3m0': needs strategy\.value_bits: 4"):
        ValueFormat(8, "e3m0")
