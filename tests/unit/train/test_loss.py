import pytest
import torch

from agentrl.train.worker.loss import dis_loss, keep, ratios, token_logprobs

LOW, HIGH = 0.5, 1.0  # band (0.5, 2.0): its edges are exact in binary


def test_the_band_is_open_at_both_edges() -> None:
    ratio = torch.tensor([0.0, 0.5, 0.5000001, 1.0, 1.9999999, 2.0, 1e30, float("inf"), float("nan")])
    assert keep(ratio, LOW, HIGH).tolist() == [False, False, True, True, True, False, False, False, False]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 1.75, 2.0, 4.0])
def test_gradient_is_that_of_ratio_times_advantage_in_the_band_and_zero_outside(ratio: float, advantage: float) -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    value = torch.tensor([ratio])
    dis_loss(logp, value, torch.tensor([advantage]), low=LOW, high=HIGH, total=4).backward()
    inside = 0.5 < ratio < 2.0
    assert logp.grad is not None
    # d/dlogp of -(r A)/4 with r = exp(logp - rollout) is -(r A)/4
    assert logp.grad.item() == pytest.approx(-ratio * advantage / 4 if inside else 0.0)


def test_gradient_through_the_whole_distribution_equals_the_reference() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 11, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 11, (64,))
    advantage = torch.randn(64, dtype=torch.float64)
    temperature = 0.7
    rollout = torch.log_softmax(logits.detach() / temperature, -1).gather(1, target[:, None])[:, 0]
    rollout = rollout + 0.6 * torch.randn(64, dtype=torch.float64)

    logp, _ = token_logprobs(logits, target, temperature)
    ratio = ratios(logp, rollout)
    dis_loss(logp, ratio, advantage, low=LOW, high=HIGH, total=64).backward()
    mine = logits.grad
    assert 0 < keep(ratio, LOW, HIGH).sum() < 64

    again = logits.detach().clone().requires_grad_()
    reference_logp = torch.log_softmax(again / temperature, -1)[torch.arange(64), target]
    r = torch.exp(reference_logp - rollout)
    inside = ((r > 1 - LOW) & (r < 1 + HIGH)).detach()
    (-(r * advantage)[inside].sum() / 64).backward()
    torch.testing.assert_close(mine, again.grad, rtol=1e-4, atol=1e-7)


def test_temperature_is_that_of_the_sampler_and_entropy_that_of_the_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    logp, entropy = token_logprobs(logits, torch.tensor([0]), 2.0)
    p = torch.softmax(logits / 2.0, -1)[0]
    assert logp.item() == pytest.approx(p[0].log().item())
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item())
