"""Forward error correction: the field, each of its kernels, the code's exactness, and plans of groups."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from math import comb
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from atoll.ltp import fec, gf

Bytes = npt.NDArray[np.uint8]
ALL_KERNELS = ("avx2", "ssse3", "plain", "numpy")


def absent(kernel: str) -> str:
    """Why a kernel does not run here; empty if it does."""
    if kernel in gf.KERNELS:
        return ""
    return f"the C kernels are not built: {gf.MISSING}" if gf.MISSING else f"this processor has no {kernel}"


KERNELS = [
    pytest.param(kernel, marks=pytest.mark.skipif(bool(absent(kernel)), reason=absent(kernel) or "runs"))
    for kernel in ALL_KERNELS
]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def times(a: int, b: int) -> int:
    """The definition: carry-less, modulo the polynomial."""
    product = 0
    for bit in range(8):
        product ^= a << bit if b >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= gf.POLYNOMIAL << bit - 8 if product >> bit & 1 else 0
    return product


PRODUCTS = np.array([[times(a, b) for b in range(256)] for a in range(256)], np.uint8)


def product_of(coefficients: Bytes, inputs: Bytes) -> Bytes:
    products = PRODUCTS[coefficients[:, :, None], inputs[None]]
    return np.bitwise_xor.reduce(products, axis=1)


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# -- the field ---------------------------------------------------------------------------------------------


def test_all_quotients_are_the_fields() -> None:
    b = np.arange(1, 256, dtype=np.uint8)
    quotients = gf.divide(b[:, None], b[None, :])
    np.testing.assert_array_equal(PRODUCTS[quotients, b[None, :]], b[:, None] + 0 * b)


@each_kernel
def test_a_kernel_multiplies_every_pair_of_bytes(kernel: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    output = np.empty((256, 256), np.uint8)
    gf.matmul(every[:, None], every[None, :], output, kernel)
    np.testing.assert_array_equal(output, PRODUCTS)


@each_kernel
@pytest.mark.parametrize("length", [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 200, 1336])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (2, 3), (3, 32), (4, 5), (5, 32), (8, 2), (11, 7)])
def test_a_kernels_product_is_the_definitions(kernel: str, rows: int, inner: int, length: int) -> None:
    coefficients, inputs = random_bytes(1, rows, inner), random_bytes(2, inner, length)
    output = np.full((rows, length), 0xAA, np.uint8)
    gf.matmul(coefficients, inputs, output, kernel)
    np.testing.assert_array_equal(output, product_of(coefficients, inputs))


@each_kernel
def test_rows_may_lie_apart_and_nothing_beside_them_is_touched(kernel: str) -> None:
    frames = random_bytes(3, 40, 200)
    before = frames.copy()
    coefficients = random_bytes(4, 3, 5)
    inputs, output = frames[2:22:4, 30:131], frames[39:33:-2, 50:151]
    gf.matmul(coefficients, inputs, output, kernel)
    expected = before.copy()
    expected[39:33:-2, 50:151] = product_of(coefficients, before[2:22:4, 30:131])
    np.testing.assert_array_equal(frames, expected)


@each_kernel
def test_a_product_of_nothing_is_zero(kernel: str) -> None:
    output = np.full((3, 70), 9, np.uint8)
    gf.matmul(np.empty((3, 0), np.uint8), np.empty((0, 70), np.uint8), output, kernel)
    assert not output.any()
    gf.matmul(np.empty((0, 2), np.uint8), random_bytes(0, 2, 70), output[:0], kernel)


@each_kernel
@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((2, 3), (4, 9), (2, 9)), np.uint8),
        (((2, 3), (3, 9), (3, 9)), np.uint8),
        (((2, 3), (3, 9), (2, 8)), np.uint8),
        (((2, 3), (3, 9), (2, 9)), np.int8),
        (((2, 3), (3, 9), (2, 9)), np.uint16),
        (((6,), (3, 9), (2, 9)), np.uint8),
    ],
)
def test_what_does_not_fit_is_refused(kernel: str, shapes: tuple[tuple[int, ...], ...], dtype: type) -> None:
    coefficients, inputs, output = (np.zeros(shape, dtype) for shape in shapes)
    with pytest.raises(ValueError, match="not"):
        gf.matmul(coefficients, inputs, output, kernel)


@each_kernel
def test_an_output_that_must_not_be_written_is_refused(kernel: str) -> None:
    output = np.zeros((1, 100), np.uint8)
    output.flags.writeable = False
    with pytest.raises(ValueError, match=r"not to be written|read-only"):
        gf.matmul(np.ones((1, 1), np.uint8), np.ones((1, 100), np.uint8), output, kernel)
    assert not output.any()


@pytest.mark.skipif(bool(gf.MISSING), reason=f"the C kernels are not built: {gf.MISSING}")
def test_c_refuses_what_is_no_such_array_and_kernels_that_are_not_there() -> None:
    good = np.zeros((1, 1), np.uint8)
    apart = np.zeros((1, 20), np.uint8)[:, ::2]
    with pytest.raises(ValueError, match="side by side"):
        gf.matmul(good, apart, np.zeros((1, 10), np.uint8))
    with pytest.raises(AttributeError, match="__array_struct__"):
        gf.matmul([[1]], good, good.copy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no kernel altivec"):
        gf.matmul(good, good, good.copy(), "altivec")


@pytest.mark.skipif(bool(gf.MISSING), reason=f"the C kernels are not built: {gf.MISSING}")
def test_threads_may_multiply_large_matrices_at_once() -> None:
    inputs, coefficients = random_bytes(5, 32, 100_000), random_bytes(6, 4, 32)
    expected = np.empty((4, 100_000), np.uint8)
    gf.matmul(coefficients, inputs, expected, "plain")
    outputs = [np.empty_like(expected) for _ in range(4)]
    threads = [threading.Thread(target=gf.matmul, args=(coefficients, inputs, output)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for output in outputs:
        np.testing.assert_array_equal(output, expected)


def test_without_the_extension_numpy_runs_and_says_why() -> None:
    code = (
        "import sys; sys.modules['atoll.ltp._gf'] = None\n"
        "import numpy as np; from atoll.ltp import fec, gf\n"
        "data = np.arange(64, dtype=np.uint8).reshape(4, 16); parity = fec.encode(data, 2)\n"
        "assert (fec.restore(np.vstack([data[2:], parity]), [2, 3, 4, 5], 4) == data[:2]).all()\n"
        "print(fec.KERNEL, gf.KERNELS, fec.kernel_line())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("numpy ('numpy',) forward error correction runs in NumPy")
    assert "_gf" in said.stdout
    assert "gcc" in said.stdout


def test_what_runs_is_said() -> None:
    assert gf.KERNELS[0] == fec.KERNEL
    assert (fec.KERNEL if fec.KERNEL != "numpy" else "NumPy") in fec.kernel_line()


# -- the code ----------------------------------------------------------------------------------------------


def test_the_coefficients_are_those_of_the_definition() -> None:
    """What a second implementation must compute; docs/ltp.md."""
    for data, parity in ((1, 1), (3, 2), (32, 16), (200, 56)):
        identity = np.eye(data, dtype=np.uint8)
        code = fec.encode(identity, parity)
        for p, d in itertools.product(range(parity), range(data)):
            assert times(int(code[p, d]), (data + p) ^ d) == data ^ d
        assert (code[0] == 1).all()


@each_kernel
def test_a_vector_for_other_implementations(kernel: str) -> None:
    data = np.arange(24, dtype=np.uint8).reshape(3, 8) * np.uint8(11)
    with patch.object(gf, "KERNEL", kernel):
        parity = fec.encode(data, 3)
    assert [row.tobytes().hex() for row in parity] == [
        "e8d3be89745f2a15",
        "41c43f1b6f05ccee",
        "c2c98b86570e5579",
    ]


@each_kernel
def test_every_pattern_of_losses_is_restored(kernel: str) -> None:
    """All subsets of up to `parity` losses of small groups, whatever came of the parity."""
    data, parity = 5, 3
    values = random_bytes(7, data, 40)
    with patch.object(gf, "KERNEL", kernel):
        whole = np.vstack([values, fec.encode(values, parity)])
        for lost in range(parity + 1):
            for gone in itertools.combinations(range(data + parity), lost):
                places = np.setdiff1d(np.arange(data + parity), gone)
                missing = [place for place in gone if place < data]
                np.testing.assert_array_equal(fec.lost_places(places, data), missing)
                restored = fec.restore(whole[places], places, data)
                np.testing.assert_array_equal(restored, values[missing])


def test_the_largest_code_is_exact() -> None:
    values = random_bytes(8, 128, 50)
    whole = np.vstack([values, fec.encode(values, 128)])
    np.testing.assert_array_equal(fec.restore(whole[128:], np.arange(128, 256), 128), values)


def test_parity_is_written_where_it_is_to_go() -> None:
    frames = random_bytes(9, 12, 300)
    expected = fec.encode(frames[:9:3, 40:], 2)
    out = frames[10:, 40:]
    assert fec.encode(frames[:9:3, 40:], 2, out) is out
    np.testing.assert_array_equal(frames[10:, 40:], expected)


@pytest.mark.parametrize(
    ("places", "data", "said"),
    [
        ([0, 1], 3, "2 datagrams cannot restore a group of 3"),
        ([0, 1, 1], 3, "given twice"),
        ([0, 1, 256], 3, "from 0 to 255"),
        ([-1, 1, 2], 3, "from 0 to 255"),
        ([0, 1], 2, "3 datagrams at places of shape"),
        ([0, 1, 2], 0, "cannot restore a group of 0"),
    ],
)
def test_what_cannot_be_restored_is_refused(places: list[int], data: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fec.restore(
            np.zeros((3 if len(places) == 3 or data == 2 else len(places), 8), np.uint8), places, data
        )


@pytest.mark.parametrize(("data", "parity"), [(0, 1), (250, 7), (3, -1)])
def test_impossible_groups_are_refused(data: int, parity: int) -> None:
    with pytest.raises(ValueError, match="at most 256 in all"):
        fec.encode(np.zeros((data, 8), np.uint8), parity)


# -- planning ----------------------------------------------------------------------------------------------


def test_the_parity_is_the_least_that_restores_all_groups() -> None:
    """For independent losses: by the binomial tail, computed here by itself."""
    for loss, highs in itertools.product((0.003, 0.01, 0.03, 0.1), (20, 30, 320, 3200)):
        groups = fec.plan_groups(highs, loss, 1.0)

        def chance(parity: int, data: int = groups.data, p: float = loss) -> float:
            n = data + parity
            return sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(parity + 1))

        wanted = 1.0 - (1.0 - fec.RESTORED) / groups.count
        assert chance(groups.parity) >= wanted > chance(groups.parity - 1), groups


def test_of_low_datagrams_no_more_stay_lost_than_may() -> None:
    """In draws of whole transfers, with far less parity than would restore all."""
    rng = np.random.default_rng(1)
    cases = ((0.03, 60, 0.02), (0.03, 12_000, 0.03), (0.1, 606, 0.03), (0.1, 12_000, 0.03), (0.1, 2545, 0.07))
    for loss, lows, share in cases:
        groups = fec.plan_borne(lows, loss, 1.0, share * lows)
        data = groups.data_of(np.arange(groups.count))
        assert 0 < groups.parity <= fec.plan_groups(lows, loss, 1.0).parity
        too_many = 0
        for _ in range(300):
            lost = rng.binomial(data, loss)
            restored = lost + rng.binomial(groups.parity, loss, groups.count) <= groups.parity
            too_many += lost[~restored].sum() > share * lows
        assert too_many <= 6, groups  # of 300
    assert fec.plan_borne(12_000, 0.1, 1.0, 360).parity < fec.plan_groups(12_000, 0.1, 1.0).parity - 4


def test_no_parity_without_loss_and_some_with_any_that_matters() -> None:
    for highs in (1, 30, 3000):
        none = fec.plan_groups(highs, 0.0, 1.0)
        assert (none.parity, none.reason) == (0, "no loss was measured lately")
    assert fec.plan_groups(30, 0.0005, 1.0).parity == 1
    assert fec.plan_groups(3000, 0.0005, 1.0).parity == 2  # of so many groups one would lack a second
    assert fec.plan_groups(30, 1e-6, 1.0).parity == 0  # whole with the wanted chance as it is


def test_bursts_cost_parity_until_interleaving_has_spread_them() -> None:
    alone = fec.plan_groups(3200, 0.01, 1.0)
    assert fec.plan_groups(3200, 0.01, 10.0).parity == alone.parity  # 100 groups apart
    assert fec.plan_groups(300, 0.01, 10.0).parity > alone.parity
    assert fec.plan_groups(300, 0.01, 10.0, apart=5.0).parity < fec.plan_groups(300, 0.01, 10.0).parity


def test_groups_deal_out_all_datagrams() -> None:
    for highs in (0, 1, 31, 32, 33, 64, 65, 1000, 3001):
        groups = fec.plan_groups(highs, 0.01, 2.0)
        index = np.arange(highs)
        sizes = np.bincount(index % max(groups.count, 1), minlength=groups.count)[: groups.count]
        np.testing.assert_array_equal(groups.data_of(np.arange(groups.count)), sizes)
        assert groups.data == sizes.max(initial=0) <= fec.MOST_DATA
        assert sizes.min(initial=groups.data) >= groups.data - 1
        assert groups.reason


def test_a_group_never_has_more_parity_than_is_of_use() -> None:
    assert fec.plan_groups(1, 0.5, 20.0).parity == 2
    assert fec.plan_groups(64, 0.9, 50.0).parity == fec.MOST_PARITY
    assert "only" in fec.plan_groups(64, 0.9, 50.0).reason
    none = fec.plan_groups(fec.MOST_DATA * (fec.MOST_GROUPS + 1), 0.01, 1.0)
    assert none.parity == 0
    assert "a header names at most" in none.reason


def test_chances_are_those_of_a_simulated_link() -> None:
    """A Gilbert chain step by step, of which a group sees every fourth datagram."""
    rng = np.random.default_rng(10)
    data, loss, burst, distance, trials = 8, 0.1, 5.0, 4, 20_000
    chances = fec.restore_chances(data, loss, burst, distance)
    lost = rng.random(trials) < loss
    leave, enter = 1 / burst, loss / (burst * (1 - loss))
    losses = np.zeros((data + 3, trials), bool)
    for step in range((data + 2) * distance + 1):
        if step % distance == 0:
            losses[step // distance] = lost
        draw = rng.random(trials)
        lost = np.where(lost, draw >= leave, draw < enter)
    for parity in range(4):
        seen = (losses[: data + parity].sum(axis=0) <= parity).mean()
        assert abs(seen - chances[parity]) < 5 * np.sqrt(0.25 / trials), parity
