"""Config of a user's own model: its location and the sizes of its parameters. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshmark.models.config import Dataset, ModelConfig
from meshmark.models.transformer import Family
from meshmark.spec.layout import Recompute

if TYPE_CHECKING:
    from meshmark.spec.case import Case

HUGGING_FACE = "hf:"
"""Start of a target that names a config.json of Hugging Face Transformers."""


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """A layer between which a user's model is cut. A pipeline runs the layers one after another."""

    num_parameters: int
    num_tensors: int
    row_shape: tuple[int, ...]
    """Shape of one row of the layer's output, which a stage sends on."""
    buffer_bytes: int = 0

    @property
    def outputs(self) -> int:
        return math.prod(self.row_shape)


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """Parameters that a workload's tensor-parallel plan splits, as `parallelize_module` does."""

    sizes: tuple[int, ...]
    """Sizes of the dimensions that are split, each once: what the degree must divide."""
    by_rows: tuple[int, ...]
    """Elements of every parameter that is split along its first dimension."""
    by_columns: tuple[int, ...]
    """Elements of every parameter that is split along its second dimension."""
    looked_up: int = 0
    """Elements of the embeddings that are split by their vocabulary."""
    num_looked_up: int = 0
    """In how many tensors these are."""
    refusal: str = ""
    """Why a model cannot be split by it; empty where it can."""
    is_planned: bool = True
    """Whether theory knows what each style of the plan sends and keeps."""

    @property
    def num_parameters(self) -> int:
        return sum(self.by_rows) + sum(self.by_columns)

    @property
    def num_tensors(self) -> int:
        return len(self.by_rows) + len(self.by_columns)


@dataclass(frozen=True, kw_only=True)
class OwnModelConfig(ModelConfig):
    """Any `torch.nn.Module`, as built by the workload at `target`.

    Its parameters and buffers are counted. What its autograd graph saves is unknown.
    `meshmark.reference.own_model.describe` makes an instance.
    """

    kind: ClassVar[str] = "module"
    module: ClassVar[str] = "meshmark.reference.own_model:OwnModel"
    theory: ClassVar[str] = "meshmark.theory.model_theory:CountedTheory"
    initial_values: ClassVar[str] = "meshmark.reference.own_model:initial_value"
    dry_run: ClassVar[str] = "meshmark.reference.dry_run:activation_bytes"
    """Function that counts what autograd saves in one process, as "package.module:function"."""
    kept: ClassVar[str] = "meshmark.reference.dry_run:kept_bytes"
    """Function that counts what its modules keep as attributes after a step."""
    brings_plan: ClassVar[bool] = True
    sends: ClassVar[str] = "meshmark.reference.dry_run:tensor_parallel_sends"
    """Function that counts what a plan's modules send over tensor-parallel ranks, as "package.module:function"."""
    recomputed: ClassVar[str] = "meshmark.reference.dry_run:recomputed_gathers"
    """Function that counts what modules gather besides where blocks are recomputed, as "package.module:function"."""
    unit: ClassVar[str] = "rows"
    family: ClassVar[Family] = Family.OWN
    seq_len: ClassVar[int] = 1
    causal: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0
    target: str
    """The workload's class, as "path/to/file.py:Class" or "package.module:Class"."""
    digest: str
    """Hash of the class's source file, so that two versions of it count as two models."""
    num_parameters: int
    num_tensors: int
    block_sizes: tuple[int, ...]
    """Parameters of each block. Frameworks wrap blocks one by one."""
    shares_weights: bool = False
    """True if two modules share one parameter."""
    buffer_bytes: int = 0
    """Bytes of the modules' buffers (tables and statistics) when the model is built."""
    saves_buffers: bool = False
    """If True, some of these buffers are persistent: they are in the state dict."""
    unused: tuple[str, ...] = ()
    """Names of parameters that do not affect the loss."""
    gathers: tuple[tuple[int, int], ...] = ()
    indexed: int = 0
    indexed_in_blocks: int = 0
    runs: int = 1
    has_scalars: bool = False
    has_float_inputs: bool = False
    computes_weights: bool = False
    reads_elsewhere: bool = False
    repeats_arguments: bool = False
    chooses: bool = False
    """True if it selects the largest of computed values, as a router picks experts. Rounding may decide these."""
    repeats: bool = False
    """True if a block, or the whole module, runs more than once in a forward pass."""
    couples_rows: bool = False
    has_batch_norms: bool = False
    layers: tuple[LayerCount, ...] = ()
    """Layers between which a pipeline is cut; empty if the workload does not name them."""
    layers_share: bool = False
    """Whether two of the layers share a parameter."""
    shared_layers: tuple[tuple[int, int], ...] = ()
    """Pairs of layers that share a parameter, such as a block that runs twice. It counts in the first of them."""
    split: TensorSplit | None = None
    """None where the workload has no tensor-parallel plan."""
    narrow_error: str = ""
    """Error that its modules raise where weights and batch are in bf16 and buffers are not; empty if they run."""
    has_frozen: bool = False
    """Whether the model's code freezes some parameters."""
    num_frozen: int = 0
    """Elements of these parameters."""

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("transformers.modeling_utils",) if self.target.startswith(HUGGING_FACE) else ()

    @property
    def tied_embeddings(self) -> bool:
        return self.shares_weights

    @property
    def ties_ends(self) -> bool:
        return False

    @property
    def leaves_unused(self) -> bool:
        return bool(self.unused)

    @property
    def datasets(self) -> frozenset[Dataset]:
        return frozenset({Dataset.OWN})

    @property
    def num_layers(self) -> int:
        return len(self.block_sizes)

    @property
    def block_parameters(self) -> int:
        return max(self.block_sizes, default=0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside all blocks."""
        return self.num_parameters - sum(self.block_sizes)

    @property
    def head_parameters(self) -> int:
        """Always 0: parameters outside all blocks count as the embedding's."""
        return 0

    @property
    def outputs_per_row(self) -> int:
        """None that are known: a dry run counts what is kept of them."""
        return 0

    @property
    def widest(self) -> int:
        return max(self.block_parameters, 1)

    @property
    def stage_refusal(self) -> str:
        return "" if self.layers else "a stage takes and makes one tensor, and the workload has no layers(model)"

    def row_shape(self, layer: int) -> tuple[int, ...]:
        return self.layers[layer].row_shape

    def stage_layers(self, num_stages: int, stage: int) -> range:
        """As evenly as they go, the first stages taking the rest."""
        share, rest = divmod(len(self.layers), num_stages)
        first = stage * share + min(stage, rest)
        return range(first, first + share + (stage < rest))

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        found = []
        if tp > 1 and self.split is None:
            found.append(f"tp {tp}: the workload has no tensor_parallel_plan(), which says how its modules are split")
        elif tp > 1 and self.split is not None and self.split.refusal:
            found.append(f"tp {tp}: {self.split.refusal}")
        elif tp > 1 and self.split is not None and (uneven := [n for n in self.split.sizes if n % tp]):
            sizes = ", ".join(map(str, uneven))
            found.append(f"tp {tp}: the plan splits dimensions of {sizes}, which it does not divide")
        if num_stages > 1 and not self.layers:
            found.append(f"pp {num_stages}: the workload has no layers(model) to be cut into stages")
        elif num_stages > len(self.layers) and num_stages > 1:
            found.append(f"pp {num_stages}: more stages than the {len(self.layers)} layers of layers(model)")
        elif num_stages > 1 and self._shares_over_stages(num_stages):
            found.append(f"pp {num_stages}: two of its layers share a weight, which would be two on two stages")
        if cp > 1:
            found.append(f"cp {cp}: the rows of a model of your own have no sequence")
        return found

    def _shares_over_stages(self, num_stages: int) -> bool:
        stage_of = self.stage_of_layers(num_stages)
        return any(stage_of[first] != stage_of[second] for first, second in self.shared_layers)

    def refusals(self, case: Case) -> list[str]:
        layout = case.layout
        asked = {
            f"precision {case.precision} (rounding would decide what the model picks by topk or argmax, as a router "
            "picks experts)": self.chooses and case.precision.is_mixed,
            f"batch norms in {case.precision} (PyTorch's takes no weights in {case.precision.compute} beside "
            "statistics in float32)": self.has_batch_norms and case.precision.is_mixed,
            f"precision {case.precision} (with 16-bit weights its modules raise {self.narrow_error!r}; let them cast "
            "what they compute of buffers to the dtype of their weights)": bool(self.narrow_error)
            and case.precision.is_mixed,
            "sequence parallelism (it shards activations between modules, where a model has code of its own)": (
                layout.sequence_parallel
            ),
            "selective recomputation (which operations of a block to recompute is not known)": (
                layout.recompute is Recompute.SELECTIVE
            ),
            "recomputation of a block with a batch norm (its statistics would be updated twice)": (
                self.has_batch_norms and layout.recompute is not Recompute.NONE
            ),
            "a pipeline where rows enter each other's loss (not tried)": self.couples_rows and layout.pp > 1,
            "tuning (not supported for a model of your own)": bool(case.tuning.knobs),
        }
        return [reason for reason, refused in asked.items() if refused]
