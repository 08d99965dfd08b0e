"""Any causal mixer writes texts: one without a cache reads the whole text again at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from models.small import small
from regard.config import MIXERS, Mixer
from regard.export.onnx_export import export_onnx
from regard.generation import generate
from regard.serving.scheduler import Scheduler
from serving.test_batching import Asked


class CausalConvolution(nn.Module):
    """A reader's own mixer: each channel's weighted sum over the last three tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 1, 3))

    @classmethod
    def for_model(cls, config: Any, n_heads: int, d_head: int) -> CausalConvolution:
        return cls(config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x.transpose(1, 2), (2, 0))
        return nn.functional.conv1d(padded, self.weight, groups=x.shape[-1]).transpose(1, 2)


@pytest.fixture(autouse=True)
def _own_mixer() -> Iterator[None]:
    MIXERS["convolution"] = Mixer(f"{__name__}:CausalConvolution", weights=False, flops=lambda work: 6.0 * work.n_heads)
    yield
    MIXERS.pop("convolution")


@torch.no_grad()
def test_no_token_sees_the_future_and_padding_is_left_out() -> None:
    model = small("gpt2", mixer="convolution", positions="sinusoidal")
    tokens = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 6:] = 5
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(tokens)[:, 6:], model(changed)[:, 6:])


@pytest.mark.parametrize("beam", [1, 3])
def test_the_scheduler_serves_the_same_texts(beam: int) -> None:
    model = small("gpt2", mixer="convolution", positions="sinusoidal")
    prompts = [[5, 9, 3, 17], [4, 8], [11, 6, 7, 3]]
    scheduler = Scheduler(model)
    try:
        requests = [Asked(scheduler, prompt, max_new_tokens=6, beam=beam) for prompt in prompts]
        assert [request.tokens() for request in requests] == generate(
            model, prompts, max_new_tokens=6, beam=beam
        ).tokens
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    ("preset", "beam"), [("gpt2", 1), ("gpt2", 3), ("transformer-tiny", 1), ("transformer-tiny", 3)]
)
@torch.no_grad()
def test_texts_of_any_lengths_are_those_of_each_alone(preset: str, beam: int) -> None:
    model = small(preset, mixer="convolution", positions="sinusoidal")
    prompts = [[5, 9, 3, 17], [4, 8], [11, 6, 7, 3]]
    options: dict[str, Any] = {"max_new_tokens": 6, "beam": beam}
    together = generate(model, prompts, **options)
    for number, prompt in enumerate(prompts):
        alone = generate(model, [prompt], **options)
        assert [x.tokens for x in together.hypotheses[number]] == [x.tokens for x in alone.hypotheses[0]]
    if beam > 1 or preset != "gpt2":
        return
    written, text = together.tokens[1], list(prompts[1])
    for token in written:
        assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


@pytest.mark.parametrize("preset", ["gpt2", "transformer-tiny"])
def test_it_may_be_a_draft(preset: str) -> None:
    model, draft = small(preset), small(preset, mixer="convolution", positions="sinusoidal")
    for one, other in ((model, draft), (draft, model), (draft, draft)):
        drafted = generate(one, [5, 9, 3], max_new_tokens=8, draft=other)
        assert drafted.tokens == generate(one, [5, 9, 3], max_new_tokens=8).tokens


def test_what_sees_the_future_is_refused_in_a_sentence() -> None:
    model = small("gpt2", mixer="fourier", positions="sinusoidal", causal=False)
    with pytest.raises(
        ValueError, match=r"^mixer='fourier' mixes all tokens of a text, including later ones, so it cannot"
    ):
        generate(model, [[5, 9]], max_new_tokens=2)


def test_nothing_is_kept_and_its_work_is_counted(tmp_path: Any) -> None:
    model = small("gpt2", mixer="convolution", positions="sinusoidal")
    cost = regard.cost(model.config, batch=1, length=8)
    assert cost.parameters.total == model.n_parameters
    assert cost.kv_cache.total == 0
    with pytest.raises(ValueError, match="mixer='convolution' has no cache"):
        export_onnx(model, tmp_path)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="has no mask that keeps packed texts apart"):
        model.hidden(tokens, documents=torch.zeros_like(tokens))
