"""Codecs: exactness of the linear one, what training does to the MLP one, and the query encoder."""

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from protofed.client.codec import (
    Codec,
    CodecTraining,
    LinearCodec,
    MlpCodec,
    QueryEncoder,
    cycle_error,
    fit_linear_query,
    pca_codec,
    random_linear_codec,
    train_codec,
    train_query_encoder,
    unit,
)
from protofed.errors import ConfigError


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def clustered_prompts(n: int = 96, clusters: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts (n, 4, 8) around cluster centres, and who belongs where."""
    centres = torch.randn(clusters, 4, 8, generator=rng(seed))
    who = torch.arange(n) % clusters
    return centres[who] + 0.1 * torch.randn(n, 4, 8, generator=rng(seed + 1)), who


def test_unit_gives_length_one_and_leaves_zero_alone():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(unit(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("make", ["random", "pca", "pca of few"])
def test_the_linear_codec_gives_a_unit_vector_back_exactly(make):
    prompts, _ = clustered_prompts(n=96 if make == "pca" else 5)
    codec = random_linear_codec(4, 8, rng(), d_z=16) if make == "random" else pca_codec(prompts, rng(), d_z=16)
    torch.testing.assert_close(codec.rows @ codec.rows.T, torch.eye(16), atol=1e-6, rtol=0)
    v = unit(torch.randn(7, 16, generator=rng(3)))
    torch.testing.assert_close(codec.encode(codec.decode(v)), v, atol=1e-6, rtol=0)
    assert cycle_error(codec, v) < 1e-6


def test_without_normalising_every_vector_comes_back():
    codec = LinearCodec(random_linear_codec(4, 8, rng(), d_z=16).rows, 4, normalise=False)
    v = 5 * torch.randn(7, 16, generator=rng(3))
    torch.testing.assert_close(codec.encode(codec.decode(v)), v, atol=1e-5, rtol=0)


def test_pca_rows_span_what_the_prompts_differ_in():
    prompts, _ = clustered_prompts(clusters=4)
    codec = pca_codec(prompts, rng(), d_z=8)
    flat = prompts.flatten(1) - prompts.flatten(1).mean(0)
    kept = (flat @ codec.rows.T).square().sum() / flat.square().sum()
    best = torch.linalg.svdvals(flat).square()
    assert kept == pytest.approx(float(best[:8].sum() / best.sum()), abs=1e-5)


def test_equal_prompts_have_no_direction_and_fall_back_to_random_rows():
    codec = pca_codec(torch.ones(5, 4, 8), rng(), d_z=8)
    torch.testing.assert_close(codec.rows @ codec.rows.T, torch.eye(8), atol=1e-6, rtol=0)


def test_a_linear_codec_wider_than_its_prompt_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="prompt_length \\* width >= d_z, got 8 < 64") as problem:
        random_linear_codec(2, 4, rng())
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_codec_encodes_to_the_sphere_and_a_stack_as_each_client_alone(kind):
    codec: Codec = random_linear_codec(4, 8, rng(), d_z=16) if kind == "linear" else MlpCodec(4, 8, rng(), d_z=16)
    assert isinstance(codec, Codec)
    prompts, _ = clustered_prompts(6)
    z = codec.encode(prompts)
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(6))
    torch.testing.assert_close(z, torch.cat([codec.encode(p[None]) for p in prompts]), atol=1e-6, rtol=0)
    torch.testing.assert_close(codec.decode(z), torch.cat([codec.decode(one[None]) for one in z]), atol=1e-6, rtol=0)


def test_pooling_gives_every_token_the_same_alignment_gradient():
    prompts = clustered_prompts(3)[0].requires_grad_(True)
    MlpCodec(4, 8, rng(), d_z=16).encode(prompts)[:, 0].sum().backward()
    torch.testing.assert_close(prompts.grad, prompts.grad[:, :1].expand_as(prompts.grad))


def test_training_lowers_reconstruction_and_cycle_errors_and_leaves_the_given_codec_alone():
    prompts, _ = clustered_prompts()
    before = MlpCodec(4, 8, rng(), d_z=16, decoder_width=64)
    weights = {name: value.clone() for name, value in before.state_dict().items()}
    after, fit = train_codec(before, prompts, rng(1), how=CodecTraining(steps=200, batch_size=32, learning_rate=3e-3))
    before.requires_grad_(False)
    z = before.encode(prompts)
    untrained = float(((before.decode(z) - prompts).square().sum((1, 2)) / prompts.square().sum((1, 2))).mean())
    assert fit.reconstruction < 0.1 < 0.9 < untrained
    assert fit.cycle < 0.1 < float(cycle_error(before, z))
    assert fit.cycle == pytest.approx(float(cycle_error(after, after.encode(prompts))))
    assert all(torch.equal(value, weights[name]) for name, value in before.state_dict().items())
    assert not any(p.requires_grad for p in after.parameters())


def test_a_trained_codec_keeps_the_clusters_apart():
    prompts, who = clustered_prompts()
    codec, _ = train_codec(
        MlpCodec(4, 8, rng(), d_z=16, decoder_width=64),
        prompts,
        rng(1),
        how=CodecTraining(steps=150, batch_size=32, learning_rate=3e-3),
    )
    z = codec.encode(prompts)
    same = who[:, None] == who
    assert (z @ z.T)[same].min() > (z @ z.T)[~same].max()


def test_the_recommendation_loss_reaches_the_decoder_through_the_encoded_prompt():
    prompts, _ = clustered_prompts()
    target = torch.zeros(4, 8)
    seen = []

    def to_zero(decoded: Tensor, which: Tensor) -> Tensor:
        seen.append(which)
        return (decoded - target).square().mean()

    how = CodecTraining(steps=100, batch_size=32, learning_rate=3e-3, rec_weight=100.0)
    start = MlpCodec(4, 8, rng(), d_z=16, decoder_width=64)
    plain, _ = train_codec(start, prompts, rng(1), how=how)
    pulled, _ = train_codec(start, prompts, rng(1), how=how, rec_loss=to_zero)
    assert len(seen) == 100
    assert all(len(which) == 32 for which in seen)
    sizes = [codec.decode(codec.encode(prompts)).norm() for codec in (plain, pulled)]
    assert sizes[1] < 0.2 * sizes[0]


def test_training_with_the_same_streams_gives_the_same_bits_whatever_the_global_generator():
    prompts, _ = clustered_prompts()
    how = CodecTraining(steps=5, batch_size=16)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        codec, _ = train_codec(MlpCodec(4, 8, rng(), d_z=16), prompts, rng(1), how=how)
        results.append(codec.encode(prompts))
    assert torch.equal(*results)


@pytest.mark.parametrize("width", [0, 32])
def test_the_query_encoder_ends_on_the_sphere(width):
    g = QueryEncoder(8, rng(), d_z=16, width=width)
    h = g(5 * torch.randn(9, 8, generator=rng(1)))
    assert h.shape == (9, 16)
    torch.testing.assert_close(h.norm(dim=-1), torch.ones(9))


def test_a_trained_query_encoder_finds_each_users_own_vector():
    hidden = torch.randn(64, 8, generator=rng(1))
    z = unit(torch.tanh(hidden @ torch.randn(8, 16, generator=rng(2))))
    before = QueryEncoder(8, rng(), d_z=16)
    g, trace = train_query_encoder(before, hidden, z, rng(3), how=CodecTraining(steps=150, batch_size=64))
    own = (g(hidden) @ z.T).argmax(-1) == torch.arange(64)
    assert own.float().mean() > 0.9 > 0.2 > ((before(hidden) @ z.T).argmax(-1) == torch.arange(64)).float().mean()
    assert trace[-1] < 0.5 * trace[0]
    assert trace[0] > 1 - 1 / math.sqrt(16)


def test_the_linear_query_encoder_is_ridge_regression():
    hidden, z = torch.randn(40, 6, generator=rng(1)), unit(torch.randn(40, 5, generator=rng(2)))
    g = fit_linear_query(hidden, z, ridge=3.0)
    layer = g.layers[0]
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.double().requires_grad_(True), layer.bias.double().requires_grad_(True)
    fitted = hidden.double() @ weight.T + bias
    loss = (fitted - z).square().sum() + 3.0 * weight.square().sum()  # its gradient vanishes at the solution
    assert max(g.abs().max() for g in torch.autograd.grad(loss, [weight, bias])) < 1e-4
    torch.testing.assert_close(g(hidden), unit(fitted.detach().float()), atol=1e-5, rtol=0)
