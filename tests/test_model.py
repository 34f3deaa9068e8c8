"""The transformer: its parts make the whole, and it computes what the papers say."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import Family, ModelSpec
from meshmark.models.transformer.module import Attention, RMSNorm, Transformer, rotate
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.workload import Loss
from tests.factories import make_model, make_workload

GPT = make_model(num_layers=5)
LLAMA = make_model(family=Family.LLAMA, num_layers=5, num_kv_heads=2)
BOTH = pytest.mark.parametrize("spec", [GPT, LLAMA], ids=["gpt", "llama"])


def build(spec: ModelSpec, layers: list[int] | None = None, seed: int = 0) -> Transformer:
    """In float64, with the biases off zero so that they count."""
    model = Transformer(spec, layers)
    model.initialize(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.01 * (len(name) % 7 - 3))
    return model.double()


def some_tokens(spec: ModelSpec, rows: int = 3) -> torch.Tensor:
    return make_batch(make_workload(model=spec, global_batch=rows), 0).inputs


@BOTH
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_one_after_the_other_are_the_whole(spec: ModelSpec, tied: bool, num_stages: int) -> None:
    spec = ModelSpec(**{**vars(spec), "tied_embeddings": tied})
    x = whole = some_tokens(spec)
    whole = build(spec)(whole)
    for stage in range(num_stages):
        x = build(spec, spec.stage_layers(num_stages, stage))(x)
    assert torch.equal(x, whole)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
def test_stages_partition_the_layers_evenly_and_in_order(num_stages: int) -> None:
    stages = [GPT.stage_layers(num_stages, stage) for stage in range(num_stages)]
    assert sum(stages, []) == list(range(7))
    blocks = [len(set(stage) & set(range(1, 6))) for stage in stages]
    assert max(blocks) - min(blocks) <= 1
    assert blocks == sorted(blocks, reverse=True), "the first stages take the rest"


@BOTH
def test_names_and_values_of_a_part_are_those_of_the_whole(spec: ModelSpec) -> None:
    whole = build(spec).state_dict()
    for stage in range(3):
        for name, value in build(spec, spec.stage_layers(3, stage)).state_dict().items():
            assert torch.equal(value, whole[name]), name


@BOTH
def test_every_parameter_gets_a_gradient_that_descends(spec: ModelSpec) -> None:
    """One small step against the gradient takes the loss down by what the gradient promises."""
    model, batch = build(spec), make_batch(make_workload(model=spec), 0)
    loss = loss_share(model(batch.inputs), batch, Loss.CROSS_ENTROPY)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    # A bias of the keys moves all scores of a query alike, which softmax ignores.
    assert all(g.norm() > 1e-6 for name, g in gradients.items() if not name.endswith("attention.k.bias"))
    squared = sum(float(g.square().sum()) for g in gradients.values())
    step = 1e-6 / squared
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= step * parameter.grad
        after = loss_share(model(batch.inputs), batch, Loss.CROSS_ENTROPY)
    assert (loss - after).item() == pytest.approx(step * squared, rel=1e-3)


def test_an_untrained_model_with_small_weights_knows_nothing() -> None:
    spec = make_model(init_std=0.001)
    batch = make_batch(make_workload(model=spec), 0)
    loss = loss_share(build(spec)(batch.inputs), batch, Loss.CROSS_ENTROPY)
    assert loss.item() == pytest.approx(math.log(256), rel=0.01)


@BOTH
def test_no_token_sees_a_later_one(spec: ModelSpec) -> None:
    model, tokens = build(spec), some_tokens(spec)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :6], two[:, :6])
    assert not torch.isclose(one[:, 6:], two[:, 6:]).all(-1).any()


@pytest.mark.parametrize("spec", [GPT, LLAMA, make_model(num_kv_heads=2)], ids=["gpt", "llama", "gpt grouped"])
def test_attention_is_softmax_of_scaled_scores(spec: ModelSpec) -> None:
    """Head by head in plain sums, without SDPA: query head h reads key-value head h // (heads a group)."""
    torch.manual_seed(0)
    attention = Attention(spec).double()
    x_BTC = torch.randn(2, 9, spec.hidden, dtype=torch.float64)
    q, k, v = attention.q(x_BTC), attention.k(x_BTC), attention.v(x_BTC)
    D, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
    heads = []
    for h in range(spec.num_heads):
        mine, shared = slice(h * D, (h + 1) * D), slice(h // group * D, (h // group + 1) * D)
        q_BTD, k_BTD, v_BTD = q[..., mine], k[..., shared], v[..., shared]
        if spec.family is Family.LLAMA:
            q_BTD, k_BTD = (rotate(t[:, None]).squeeze(1) for t in (q_BTD, k_BTD))
        scores_BTT = q_BTD @ k_BTD.transpose(1, 2) / math.sqrt(D)
        scores_BTT = scores_BTT.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
        heads.append(scores_BTT.softmax(-1) @ v_BTD)
    torch.testing.assert_close(attention(x_BTC), attention.out(torch.cat(heads, -1)), rtol=1e-12, atol=1e-12)


def test_the_feed_forward_networks_are_gelu_and_swiglu() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    gpt = build(GPT).blocks["0"].feed_forward
    up = gpt.up(x)
    gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    torch.testing.assert_close(gpt(x), gpt.down(gelu))
    llama = build(LLAMA).blocks["0"].feed_forward
    gate = llama.gate(x)
    torch.testing.assert_close(llama(x), llama.down(gate * torch.sigmoid(gate) * llama.up(x)))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    norm = RMSNorm(2, eps=0.0).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    expected = torch.tensor([[3.0, -8.0]], dtype=torch.float64) / math.sqrt(12.5)
    torch.testing.assert_close(norm(x).detach(), expected)


def test_rms_norm_computes_in_float32_for_bf16() -> None:
    """Squares of 300 elements summed in bf16 would stop growing."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = RMSNorm(4096).bfloat16()
    torch.nn.init.ones_(norm.weight)
    assert norm(x).dtype is torch.bfloat16
    assert torch.equal(norm(x), torch.ones_like(x))


def test_rotary_scores_depend_on_relative_positions_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = (rotate(q.expand(1, 1, 10, 8)) @ rotate(k.expand(1, 1, 10, 8)).transpose(-1, -2))[0, 0]
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].unique().numel() == 10, "and they do depend on them"


def test_rotary_positions_rotate() -> None:
    """Position 0 stays, lengths stay, and the first pair of position 1 turns by one radian."""
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    turned = rotate(x)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    (a, b), (c, d) = x[0, 0, 1, [0, 4]], turned[0, 0, 1, [0, 4]]
    angle = torch.atan2(d, c) - torch.atan2(b, a)
    assert float(angle) % (2 * math.pi) == pytest.approx(1.0)


def test_learned_positions_tell_equal_tokens_apart() -> None:
    same_BT = torch.full((1, 12), 65)
    logits = build(GPT)(same_BT)[0]
    assert not torch.isclose(logits[0], logits[1]).all()


def test_a_tied_head_shares_the_embedding_and_collects_both_gradients() -> None:
    spec = make_model(tied_embeddings=True)
    model = build(spec)
    assert model.head.output.weight is model.embedding.tokens.weight
    assert "head.output.weight" not in parameter_shapes(spec)
    assert parameter_shapes(spec).keys() == parameter_shapes(make_model()).keys() - {"head.output.weight"}
    untied = build(make_model())
    untied.load_state_dict(model.state_dict())
    batch = make_batch(make_workload(model=spec), 0)
    for m in (model, untied):
        loss_share(m(batch.inputs), batch, Loss.CROSS_ENTROPY).backward()
    both = untied.embedding.tokens.weight.grad + untied.head.output.weight.grad
    torch.testing.assert_close(model.embedding.tokens.weight.grad, both)


def test_a_tied_head_in_a_stage_of_its_own_starts_as_the_embedding() -> None:
    spec = make_model(tied_embeddings=True)
    first, last = (build(spec, spec.stage_layers(2, stage)) for stage in (0, 1))
    assert torch.equal(last.head.output.weight, first.embedding.tokens.weight)


def test_dropout_is_off_in_evaluation_and_on_in_training() -> None:
    spec = make_model(dropout=0.5)
    model, tokens = build(spec), some_tokens(spec)
    model.eval()
    plain = build(make_model())
    assert torch.equal(model(tokens), plain(tokens))
    model.train()
    torch.manual_seed(0)
    one = model(tokens)
    assert not torch.isclose(one, plain(tokens)).any(-1).all()
    assert not torch.equal(one, model(tokens))


@pytest.mark.parametrize("part", ["embedding", "attention", "residual"])
def test_dropout_is_applied_where_the_spec_says(part: str) -> None:
    """Training mode in one place only must already change the outcome."""
    spec = make_model(dropout=0.5)
    model, tokens = build(spec).eval(), some_tokens(spec)
    plain = model(tokens)
    places = {
        "embedding": model.embedding.dropout,
        "attention": model.blocks["0"].attention,
        "residual": model.blocks["0"].dropout,
    }
    places[part].train()
    assert not torch.equal(model(tokens), plain)


def test_shares_of_parts_add_up_to_the_loss_of_the_whole() -> None:
    """Parts with unequal numbers of tokens; a mean of means misses by far."""
    spec = make_model()
    model, batch = build(spec), make_batch(make_workload(model=spec), 0)
    whole = loss_share(model(batch.inputs), batch, Loss.CROSS_ENTROPY)
    parts = [loss_share(model(part.inputs), part, Loss.CROSS_ENTROPY) for part in batch.micro_batches(4)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    logits = model(batch.inputs)
    torch.testing.assert_close(whole, F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
    means = [F.cross_entropy(model(p.inputs).flatten(0, 1), p.targets.flatten()) for p in batch.micro_batches(4)]
    assert abs(torch.stack(means).mean() - whole) > 1e-3


@pytest.mark.parametrize(
    "dtype, wide",
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_the_loss_is_computed_wide(dtype: torch.dtype, wide: torch.dtype) -> None:
    batch = Batch(
        inputs=torch.zeros(1, 2),
        targets=torch.zeros(1, 2, dtype=torch.long),
        weights=torch.ones(1, 2),
        total_weight=2.0,
    )
    assert loss_share(torch.zeros(1, 2, 256, dtype=dtype), batch, Loss.CROSS_ENTROPY).dtype is wide


def test_shapes_are_known_without_allocating() -> None:
    from meshmark.models.transformer import MODELS

    shapes = parameter_shapes(MODELS["llama-7b"])
    assert shapes["blocks.31.feed_forward.gate.weight"] == (11008, 4096)
    assert shapes["embedding.tokens.weight"] == (32000, 4096)
