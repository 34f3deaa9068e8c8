"""torch-pruning: channels of feed-forward networks are removed, with everything that depends on them."""

from __future__ import annotations

from torch import Tensor, nn

from meshmark.adapter.contract import Requirement
from meshmark.compression.contract import CompressionAdapter
from meshmark.compression.specification import ChannelsRemoved, linears


class TorchPruning(CompressionAdapter):
    """`MagnitudeImportance` of the first layer of each group, and `DependencyGraph`."""

    requirement = Requirement(module="torch_pruning", distribution="torch-pruning")
    specification = ChannelsRemoved()

    def compress(self, model: nn.Module, example: Tensor) -> nn.Module:
        import torch_pruning

        importance = torch_pruning.importance.MagnitudeImportance(p=1, group_reduction="first", normalizer=None)
        model.requires_grad_(True)  # dependencies are read off the graph of the backward pass
        graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)
        for name, layer in linears(model).items():
            if name.endswith(".up"):
                prune, channels = torch_pruning.prune_linear_out_channels, list(range(layer.out_features))
                order = importance(graph.get_pruning_group(layer, prune, idxs=channels)).argsort()
                removed = order[: round(self.specification.share * len(order))].tolist()
                graph.get_pruning_group(layer, prune, idxs=removed).prune()
        return model.requires_grad_(False)

    def weight(self, layer: nn.Linear) -> Tensor:
        return layer.weight
