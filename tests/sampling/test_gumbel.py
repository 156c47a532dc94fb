"""The Gumbel noise: its generator, compared with published vectors, and its distribution.

The noise depends only on seed, sample, position and token id.
"""

import pytest
import torch

from lp_runtime.sampling.gumbel import GumbelNoise, philox, sample_successors, uniforms

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known-answer vectors of philox4x32-10
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_known_answers(counter, key, expected):
    words = philox(torch.tensor(counter, dtype=torch.int64)[:, None], key)
    assert " ".join(f"{word:08x}" for word in words[:, 0].tolist()) == expected


def test_uniforms_are_uniform_and_uncorrelated():
    numbers = uniforms(5, 0, range(100), 4099, CPU)
    assert numbers.shape == (100, 4099)
    assert numbers.min() > 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.002)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.0005)
    # Adjacent token ids share a counter or have adjacent ones, as have adjacent positions: all must look independent.
    for shifted in (numbers[:, 1:], numbers[1:]):
        rows, columns = shifted.shape
        pairs = torch.stack([numbers[:rows, :columns].flatten(), shifted.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01


@pytest.mark.parametrize("other", [(6, 0, [3]), (5 + 2**32, 0, [3]), (5, 1, [3]), (5, 0, [4])])
def test_noise_depends_on_seed_sample_and_position(other):
    assert not torch.equal(uniforms(5, 0, [3], 64, CPU), uniforms(*other, 64, CPU))


def test_noise_is_independent_of_vocabulary_size_and_other_positions():
    alone = uniforms(5, 2, [9], 33, CPU)
    assert torch.equal(uniforms(5, 2, [7, 9, 1], 64, CPU)[1, :33], alone[0])


def test_cached_and_recomputed_noise_are_equal():
    noise = GumbelNoise(1, 0, 16, CPU)
    first = noise.at([5, 6, 7, 6])
    assert torch.equal(first[1], first[3])
    assert torch.equal(noise.at([6, 7, 8])[:2], first[1:3])
    assert torch.equal(noise.at([100])[0], GumbelNoise(1, 0, 16, CPU).at([99, 100])[1])
    assert torch.equal(noise.at([5])[0], first[0])  # dropped before, so computed again
    assert noise.at([5]).mean().isfinite()


def test_sampling_returns_the_argmax_of_scores_plus_noise():
    scores = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert sample_successors(scores, [7, 9], None).tolist() == [1, 0]
    noise = GumbelNoise(1, 0, 3, CPU)
    assert sample_successors(scores, [7, 9], noise).tolist() == (scores + noise.at([7, 9])).argmax(-1).tolist()
    assert sample_successors(scores[:0], [], noise).shape == (0,)


def test_token_with_minus_infinity_score_is_never_sampled():
    scores = torch.full((1, 50), float("-inf"))
    scores[0, 17] = -1e4
    for seed in range(50):
        assert sample_successors(scores, [seed], GumbelNoise(seed, 0, 50, CPU)).item() == 17
