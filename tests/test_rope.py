import math

import pytest
import torch

from sparsemla import (
    Yarn,
    cos_sin_table,
    from_freqs_cis,
    mla_softmax_scale,
    rope_frequencies,
    yarn_mscale,
)
from sparsemla.reference.quant import rotate

V3 = Yarn(factor=40, original_max_position_embeddings=4096)
V4 = Yarn(factor=16, original_max_position_embeddings=65536)


@pytest.mark.parametrize(
    ("theta", "yarn", "expected"),
    [
        (
            1e4,
            V3,
            {
                0: 1.0,
                9: 7.498942e-2,
                10: 5.623413e-2,
                11: 3.9006927e-2,
                16: 5.5e-3,
                22: 1.7782794e-4,
                23: 3.3338036e-5,
                24: 2.5e-5,
                31: 3.3338036e-6,
            },
        ),
        (
            160000,
            V4,
            {
                15: 3.6355386e-3,
                16: 2.265625e-3,
                20: 2.9697778e-4,
                25: 5.3723127e-6,
                31: 5.6805290e-7,
            },
        ),
        (8e6, None, {0: 1.0, 16: 8e6**-0.5, 31: 8e6 ** (-62 / 64)}),
    ],
    ids=["deepseek-v3", "deepseek-v4", "glm-5"],
)
def test_frequencies_of_models(theta, yarn, expected):
    freqs = rope_frequencies(64, theta, yarn)
    assert freqs.dtype == torch.float32
    assert freqs.shape == (32,)
    for pair, value in expected.items():
        assert freqs[pair].item() == pytest.approx(value, rel=1e-6)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones():
    plain, stretched = rope_frequencies(64, 1e4), rope_frequencies(64, 1e4, V3)
    torch.testing.assert_close(stretched[:11], plain[:11])
    torch.testing.assert_close(stretched[23:], plain[23:] / 40)
    assert ((stretched <= plain) & (stretched >= plain / 40 * 0.9999)).all()


def test_the_last_pair_that_yarn_mixes_is_below_the_dims():
    # By its formula beta_slow would be pair 66 and beta_fast 17; DeepSeek's code cuts at dim - 1.
    last = rope_frequencies(64, 1e4, Yarn(8, 10**9, beta_fast=1e6))[31].item()
    share = (31 - 17) / (63 - 17)
    assert last == pytest.approx(1e4 ** (-62 / 64) * (1 - share + share / 8), rel=1e-6)


def test_yarn_with_equal_limits_is_a_step():
    yarn = Yarn(8, 4096, beta_fast=1.0, beta_slow=1.0)
    freqs = rope_frequencies(64, 1e4, yarn)
    assert freqs.isfinite().all()


def test_softmax_scales_of_models():
    assert yarn_mscale(40, 1.0) == pytest.approx(1.3688879454, rel=1e-9)
    assert mla_softmax_scale(192, V3) == pytest.approx(0.1352337789, rel=1e-9)
    assert mla_softmax_scale(192) == 192**-0.5
    assert mla_softmax_scale(512) == pytest.approx(0.0441941738, rel=1e-9)
    assert yarn_mscale(1.0, 1.0) == yarn_mscale(0.5, 1.0) == 1.0


def test_table_is_cosines_then_sines():
    freqs = rope_frequencies(64, 1e4, V3)
    table = cos_sin_table(freqs, 100)
    assert table.shape == (100, 64)
    assert table.dtype == torch.float32
    for position in (0, 1, 99):
        for pair in (0, 10, 31):
            angle = position * freqs[pair].item()
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[position, 32 + pair].item() == pytest.approx(math.sin(angle), abs=1e-7)
    assert torch.equal(cos_sin_table(freqs, 100, factor=0.5), table * 0.5)


def test_table_is_exact_at_far_positions():
    # 163839 has 18 bits: an angle computed in float32 would be off in the third digit.
    freqs = rope_frequencies(64, 1e4, V3)
    table = cos_sin_table(freqs, 163840)
    angle = 163839 * freqs[1].double()
    torch.testing.assert_close(table[-1, 1].double(), angle.cos(), rtol=0, atol=1e-7)


def test_interleaved_tables_are_converted():
    freqs = rope_frequencies(8, 1e4)
    table = cos_sin_table(freqs, 5)
    freqs_cis = torch.stack([table[:, :4], table[:, 4:]], dim=-1).flatten(1)
    assert freqs_cis[3, :2].tolist() == [table[3, 0].item(), table[3, 4].item()]
    assert torch.equal(from_freqs_cis(freqs_cis), table)


def test_complex_tables_are_converted():
    freqs = rope_frequencies(8, 1e4)
    angles = torch.arange(5)[:, None] * freqs
    freqs_cis = torch.polar(torch.ones_like(angles), angles)  # as DeepSeek's inference code does
    with pytest.raises(TypeError, match="complex"):
        from_freqs_cis(freqs_cis)
    table = from_freqs_cis(torch.view_as_real(freqs_cis).flatten(-2))
    torch.testing.assert_close(table, cos_sin_table(freqs, 5))


def test_odd_dims_are_refused():
    with pytest.raises(ValueError, match="dim must be even, got 63"):
        rope_frequencies(63, 1e4)
    with pytest.raises(ValueError, match="even last dimension"):
        from_freqs_cis(torch.ones(5, 7))


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
def test_rotation_turns_each_pair(interleaved):
    freqs = rope_frequencies(8, 100.0)
    table = cos_sin_table(freqs, 10)
    x = torch.randn(8)
    y = rotate(x, table[7], interleaved)
    for pair in range(4):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        turned = complex(x[a], x[b]) * complex(math.cos(7 * freqs[pair]), math.sin(7 * freqs[pair]))
        assert y[a].item() == pytest.approx(turned.real, abs=1e-6)
        assert y[b].item() == pytest.approx(turned.imag, abs=1e-6)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
def test_products_of_rotated_vectors_depend_on_the_distance(interleaved):
    table = cos_sin_table(rope_frequencies(64, 1e4), 200)
    q, k = torch.randn(64), torch.randn(64)

    def score(q_position, k_position):
        return rotate(q, table[q_position], interleaved) @ rotate(k, table[k_position], interleaved)

    torch.testing.assert_close(score(5, 3), score(190, 188), rtol=1e-4, atol=1e-4)
