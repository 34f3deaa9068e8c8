"""Judge a compressed model: weights, layers, logits, loss and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import storage_bytes
from meshmark.compression.contract import CompressionAdapter
from meshmark.compression.network import WAYS, Layer, network
from meshmark.compression.specification import HALF_ULP, ROUNDINGS, ExactLayer, linears
from meshmark.judge.pristine import pristine
from meshmark.records.judged_case import CaseVerdict
from meshmark.reference.objective import cross_entropy

FACTOR = 3.0
"""A compressed model may round this many times as much as the noisiest correct order of the same sums."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that a compressed model is judged on, [rows, tokens] each."""

    tokens: Tensor
    targets: Tensor


@torch.no_grad()
def judge(
    original: nn.Module, compressed: nn.Module, adapter: CompressionAdapter, batch: Batch
) -> Iterator[CaseVerdict]:
    """Yield every verdict on `compressed`, which `adapter` made of a copy of `original`."""
    specification = adapter.specification
    with pristine():  # a library may have replaced functions that the truth uses too
        exact = specification.layers(original)
    found = linears(compressed)
    yield _rest(original, compressed, exact) or _weights(adapter, exact, found)
    stored, full = dict[str, Layer](), dict[str, Layer]()
    rounds = specification.rounds_inputs
    for name, layer in exact.items():
        weight = adapter.weight(found[name]).detach()
        same = weight.shape == layer.stored.values.shape
        followed = layer.stored.following(weight) if same else layer.stored.values
        stored[name] = Layer(weight=followed, bias=layer.bias, rounds_inputs=rounds)
        if layer.full is None:
            full[name] = stored[name]
        else:
            full[name] = Layer(weight=layer.full, bias=layer.full_bias, rounds_inputs=rounds)
    yield _layers(compressed, stored, _parts_of(batch.tokens))
    with pristine():
        truth = network(original, full, torch.float64)(batch.tokens)
        twins = [network(original, full, torch.float32, way)(batch.tokens) for way in WAYS]
    logits = compressed(batch.tokens)
    yield compare("logits", logits, truth, twins)
    yield _loss(logits, truth, twins, batch)
    yield _bytes(adapter, found, exact)


def _rest(original: nn.Module, compressed: nn.Module, exact: Mapping[str, ExactLayer]) -> CaseVerdict | None:
    """Return a verdict if something besides the compressed layers, such as an embedding, is not as it was."""
    own = compressed.state_dict()
    for name, value in original.state_dict().items():
        if name.rpartition(".")[0] in exact:
            continue
        kept = own.get(name)
        if kept is None or kept.shape != value.shape or not torch.equal(kept, value):
            text = f"{name}, which is not compressed, is not as it was"
            return CaseVerdict(name="weights", passed=False, text=text)
    return None


def _weights(
    adapter: CompressionAdapter, exact: Mapping[str, ExactLayer], found: Mapping[str, nn.Linear]
) -> CaseVerdict:
    """Compare the weights that layers stand for with their specification, to the roundings of float32."""
    off, ties, total, worst = 0.0, 0, 0, ""
    for name, layer in exact.items():
        weight = adapter.weight(found[name]).detach()
        if weight.shape != layer.stored.values.shape:
            text = f"{name}: {tuple(weight.shape)}, expected {tuple(layer.stored.values.shape)}"
            return CaseVerdict(name="weights", passed=False, text=text)
        right = layer.stored.following(weight)
        ties += int((right != layer.stored.values).sum())
        total += weight.numel()
        size = right.abs().max()
        error = float(((weight.double() - right).abs() / size).nan_to_num(torch.inf).max())
        if error > off:
            off, worst = error, name
    allowed = FACTOR * ROUNDINGS * HALF_ULP
    text = f"off by {off:.1e} of a layer's largest weight{f' in {worst}' if worst else ''}, {ties} of {total} at ties"
    numbers = {"largest": off, "detects": allowed, "ties": float(ties)}
    return CaseVerdict(name="weights", passed=off <= allowed, text=text, numbers=numbers)


def _parts_of(tokens: Tensor) -> list[Tensor]:
    """Return the batch and parts of it: one row, a few, and one token. Libraries have other kernels for few rows."""
    return [tokens, tokens[:1], tokens[:3, :5], tokens[:1, :1]]


def _layers(compressed: nn.Module, stored: Mapping[str, Layer], batches: Sequence[Tensor]) -> CaseVerdict:
    """Compare each layer's outputs with float64 at the inputs that the layer itself was given."""
    worst = CaseVerdict(name="layers", passed=True, text="", numbers={"largest": 0.0, "detects": 1.0})
    for tokens in batches:
        for verdict in _layers_on(compressed, stored, tokens):
            if not verdict.passed:
                return verdict
            if ratio(verdict) > ratio(worst):
                worst = verdict
    return worst


def _layers_on(compressed: nn.Module, stored: Mapping[str, Layer], tokens: Tensor) -> Iterator[CaseVerdict]:
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _layer, inputs, output, name=name: seen.update({name: (inputs[0].detach(), output.detach())})
        )
        for name, layer in linears(compressed).items()
    ]
    compressed(tokens)
    for hook in hooks:
        hook.remove()
    for name, layer in stored.items():
        x, y = seen[name]
        if x.shape[-1] != layer.weight.shape[1] or y.shape[-1] != layer.weight.shape[0]:
            yield CaseVerdict(name="layers", passed=False, text=f"{name} has other channels than specified")
            return
        with pristine():
            truth, room, twins = layer(x.double()), layer.tie_room(x), [layer(x, way) for way in WAYS]
        found = compare(name, y, truth, twins, room)
        text = f"{name}, of [{', '.join(map(str, tokens.shape))}] tokens: {found.text}"
        yield CaseVerdict(name="layers", passed=found.passed, text=text, numbers=found.numbers)


def ratio(verdict: CaseVerdict) -> float:
    """Return the largest error as a share of the smallest that fails."""
    return verdict.numbers["largest"] / verdict.numbers["detects"]


def compare(name: str, found: Tensor, truth: Tensor, twins: list[Tensor], room: Tensor | float = 0.0) -> CaseVerdict:
    """Compare with the truth, largest and root mean square, relative to the truth's largest value."""
    size = float(truth.abs().max())

    def off(values: Tensor) -> tuple[float, float]:
        error = ((values.double() - truth).abs() - room).clamp(min=0) / size
        error = torch.where(error.isfinite(), error, torch.inf)
        return float(error.max()), float(error.square().mean().sqrt())

    (largest, rms), noise = off(found), [off(twin) for twin in twins]
    # Outputs that are exact in every order of sums have no noise: one rounding of the largest is allowed then.
    most = FACTOR * max([HALF_ULP, *(first for first, _ in noise)])
    most_rms = FACTOR * max([HALF_ULP / 3, *(second for _, second in noise)])
    text = f"off by {largest:.1e}, root mean square {rms:.1e}; at most {most:.1e} and {most_rms:.1e}"
    numbers = {"largest": largest, "rms": rms, "noise": most / FACTOR, "detects": most, "detects_rms": most_rms}
    return CaseVerdict(name=name, passed=largest <= most and rms <= most_rms, text=text, numbers=numbers)


def _loss(logits: Tensor, truth: Tensor, twins: list[Tensor], batch: Batch) -> CaseVerdict:
    exact = mean_loss(truth, batch.targets)
    noise = max(abs(mean_loss(twin.double(), batch.targets) - exact) for twin in twins)
    found = mean_loss(logits.double(), batch.targets)
    allowed = FACTOR * max(noise, HALF_ULP * exact)
    off = abs(found - exact)
    text = f"{found:.6f}, specified {exact:.6f}: off by {off:.1e}, at most {allowed:.1e}"
    numbers = {"loss": found, "largest": off, "detects": allowed}
    return CaseVerdict(name="loss", passed=off <= allowed, text=text, numbers=numbers)


def mean_loss(logits: Tensor, targets: Tensor) -> float:
    """Return the mean cross-entropy over targets that are not ignored."""
    return float(cross_entropy(logits, targets)) / int((targets >= 0).sum())


def _bytes(adapter: CompressionAdapter, found: Mapping[str, nn.Linear], exact: Mapping[str, ExactLayer]) -> CaseVerdict:
    held = sum(stored_bytes(layer) for layer in found.values())
    specified = sum(adapter.specification.num_bytes(tuple(layer.stored.values.shape)) for layer in exact.values())
    before = sum(4 * (layer.stored.values if layer.full is None else layer.full).numel() for layer in exact.values())
    text = f"{held:,}, closed form {specified:,}; {before:,} before: {held / before:.3f}"
    numbers = {"bytes": float(held), "specified": float(specified), "before": float(before)}
    return CaseVerdict(name="bytes", passed=held == specified, text=text, numbers=numbers)


def stored_bytes(layer: nn.Module) -> int:
    """Return the bytes of the storages that keep a layer's weight, each once; its bias is left out."""
    kept: list[Tensor] = []
    waiting: list[object] = [getattr(layer, "weight", None)]  # a masked one is neither parameter nor buffer
    for tensors in (layer.named_parameters(), layer.named_buffers()):
        waiting += [tensor for name, tensor in tensors if name != "bias"]
    while waiting:
        value = waiting.pop()
        if (
            isinstance(value, Tensor)
            and type(value) not in (Tensor, nn.Parameter)
            and hasattr(value, "__tensor_flatten__")
        ):
            names, _ = value.__tensor_flatten__()
            waiting += [getattr(value, name) for name in names]
        elif isinstance(value, Tensor):
            kept.append(value)
            waiting += [getattr(value, "quant_state", None)]
        elif value is not None and hasattr(value, "absmax"):  # bitsandbytes' QuantState
            waiting += [part for part in vars(value).values() if isinstance(part, Tensor) or hasattr(part, "absmax")]
    return sum(storage_bytes(kept).values())
