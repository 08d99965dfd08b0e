"""Token, segment and position embeddings: equal to BERT's, RoBERTa's, ALBERT's, GPT-2's sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from regard.layers import Embeddings, LayerNorm, Learned, Sinusoidal, TokenEmbedding

VOCAB, WIDTH, MAX_LEN = 30, 12, 16
IDS = torch.tensor([[3, 4, 5, 1, 1], [7, 8, 9, 10, 29]])
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])


def bert_like(theirs: nn.Module, width: int = WIDTH, projection: nn.Linear | None = None) -> Embeddings:
    """Our composition with the weights of a BertEmbeddings-shaped module."""
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = Embeddings(
        TokenEmbedding(VOCAB, width),
        segment=TokenEmbedding(2, width),
        position=Learned(MAX_LEN, width),
        norm=LayerNorm(width, 1e-3),
        projection=projection,
    )
    names = {
        "token": "word_embeddings",
        "segment": "token_type_embeddings",
        "position": "position_embeddings",
        "norm": "LayerNorm",
    }
    for mine, other in names.items():
        getattr(ours, mine).load_state_dict(getattr(theirs, other).state_dict())
    return ours


def test_bert() -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    config = BertConfig(vocab_size=VOCAB, hidden_size=WIDTH, max_position_embeddings=MAX_LEN, layer_norm_eps=1e-3)
    theirs = BertEmbeddings(config).eval()
    ours = bert_like(theirs)
    torch.testing.assert_close(ours(IDS), theirs(IDS), atol=1e-6, rtol=0)
    torch.testing.assert_close(ours(IDS, segments=SEGMENTS), theirs(IDS, token_type_ids=SEGMENTS), atol=1e-6, rtol=0)
    positions = torch.tensor([[0, 0, 0, 1, 2], [11, 12, 13, 14, 15]])
    torch.testing.assert_close(
        ours(IDS, positions, SEGMENTS),
        theirs(IDS, token_type_ids=SEGMENTS, position_ids=positions),
        atol=1e-6,
        rtol=0,
    )


def test_roberta_positions_are_just_positions() -> None:
    from transformers import RobertaConfig
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    config = RobertaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, max_position_embeddings=MAX_LEN, type_vocab_size=2, layer_norm_eps=1e-3
    )
    theirs = RobertaEmbeddings(config).eval()
    ours = bert_like(theirs)
    with torch.no_grad():  # theirs has a padding_idx, whose rows our copy holds like any other
        kept = (IDS != 1).long()
        positions = kept.cumsum(1) * kept + 1
        torch.testing.assert_close(ours(IDS, positions), theirs(IDS), atol=1e-6, rtol=0)


def test_albert_factorised() -> None:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=VOCAB,
        embedding_size=WIDTH,
        hidden_size=20,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=MAX_LEN,
        layer_norm_eps=1e-3,
    )
    model = AlbertModel(config).eval()
    projection = model.encoder.embedding_hidden_mapping_in
    nn.init.normal_(projection.bias)
    ours = bert_like(model.embeddings, projection=nn.Linear(WIDTH, 20))
    ours.projection.load_state_dict(projection.state_dict())  # type: ignore[union-attr]
    expected = projection(model.embeddings(IDS, token_type_ids=SEGMENTS))
    torch.testing.assert_close(ours(IDS, segments=SEGMENTS), expected, atol=1e-6, rtol=1e-6)


def test_gpt2_and_t5_shapes_of_the_sum() -> None:
    token, position = TokenEmbedding(VOCAB, WIDTH), Learned(MAX_LEN, WIDTH)
    gpt2 = Embeddings(token, position=position)
    torch.testing.assert_close(gpt2(IDS), token.weight[IDS] + position.weight[:5], atol=0, rtol=0)
    t5 = Embeddings(token)
    assert torch.equal(t5(IDS), token.weight[IDS])
    assert torch.equal(t5(IDS, torch.arange(100, 105)), token.weight[IDS])  # attention may know them; the sum does not


def test_the_papers_scale_and_sinusoids() -> None:
    paper = Embeddings(TokenEmbedding(VOCAB, WIDTH, math.sqrt(WIDTH)), position=Sinusoidal(WIDTH))
    sines = Sinusoidal(WIDTH)(torch.arange(5))
    expected = paper.token.weight[IDS] * math.sqrt(WIDTH) + sines
    torch.testing.assert_close(paper(IDS), expected, atol=1e-6, rtol=0)


def test_marian_scaled_halves() -> None:
    from transformers import MarianConfig
    from transformers.models.marian.modeling_marian import MarianEncoder

    config = MarianConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=0,
        max_position_embeddings=MAX_LEN,
        scale_embedding=True,
        pad_token_id=0,
        encoder_attention_heads=2,
        encoder_ffn_dim=8,
    )
    theirs = MarianEncoder(config).eval()
    with torch.no_grad():
        theirs.embed_positions.weight.copy_(theirs.embed_positions.create_weight())
    ours = Embeddings(
        TokenEmbedding(VOCAB, WIDTH, math.sqrt(WIDTH)), position=Sinusoidal(WIDTH, MAX_LEN, layout="halves")
    )
    ours.token.load_state_dict(theirs.embed_tokens.state_dict())
    torch.testing.assert_close(ours(IDS), theirs(IDS).last_hidden_state, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("position", [Learned(MAX_LEN, WIDTH), Sinusoidal(WIDTH)])
def test_padding_positions_leave_the_token_alone(position: Learned | Sinusoidal) -> None:
    embeddings = Embeddings(TokenEmbedding(VOCAB, WIDTH), position=position)
    out = embeddings(IDS, torch.tensor([[-1, -1, 0, 1, 2]] * 2))
    assert torch.equal(out[:, :2], embeddings.token.weight[IDS[:, :2]])


def test_half_precision_models_stay_half_precision() -> None:
    embeddings = Embeddings(TokenEmbedding(VOCAB, WIDTH), position=Sinusoidal(WIDTH)).bfloat16()
    assert embeddings(IDS).dtype == torch.bfloat16
    wide = Embeddings(TokenEmbedding(VOCAB, WIDTH), position=Sinusoidal(WIDTH)).double()
    torch.testing.assert_close(
        wide(IDS) - wide.token.weight[IDS], Sinusoidal(WIDTH)(torch.arange(5), torch.float64).expand(2, 5, WIDTH)
    )


def test_dropout_is_on_the_sum() -> None:
    embeddings = Embeddings(TokenEmbedding(VOCAB, WIDTH), position=Learned(MAX_LEN, WIDTH), dropout=0.5)
    kept = embeddings(IDS)
    full = Embeddings(embeddings.token, position=embeddings.position)(IDS)
    assert ((kept == 0) | torch.isclose(kept, 2 * full)).all()
    assert 0.2 < (kept == 0).float().mean() < 0.8
    assert torch.equal(embeddings.eval()(IDS), full)


def test_bad_input_is_said_clearly() -> None:
    token = TokenEmbedding(VOCAB, WIDTH)
    with pytest.raises(ValueError, match="token ids go up to 30, but vocab_size=30 allows at most 29"):
        token(torch.tensor([[0, 30]]))
    with pytest.raises(ValueError, match="token ids go down to -1"):
        token(torch.tensor([[-1]]))
    with pytest.raises(TypeError, match=r"token ids must be int64 or int32, not torch\.float32"):
        token(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="the sequence has length 17, but positions end at max_len=16"):
        Embeddings(token, position=Learned(MAX_LEN, WIDTH))(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="segments were given, but"):
        Embeddings(token)(IDS, segments=SEGMENTS)
    with pytest.raises(ValueError, match="position has d_model=8, but token has d_model=12"):
        Embeddings(token, position=Sinusoidal(8))
    with pytest.raises(ValueError, match="projection expects width 8, but token has d_model=12"):
        Embeddings(token, projection=nn.Linear(8, 20))
    with pytest.raises(ValueError, match="vocab_size=0 must be at least 1"):
        TokenEmbedding(0, 4)


def test_empty_text_is_empty() -> None:
    assert TokenEmbedding(VOCAB, WIDTH)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, WIDTH)
