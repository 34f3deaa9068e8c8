"""Config of a user's own model: its location and the sizes of its parameters. No torch, like `model_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshmark.spec.layout import Recompute
from meshmark.spec.model_config import Dataset, ModelConfig
from meshmark.spec.model_spec import Family

if TYPE_CHECKING:
    from meshmark.spec.case import Case

HUGGING_FACE = "hf:"
"""Start of a target that names a config.json of Hugging Face Transformers."""


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
    unused: tuple[str, ...] = ()
    """Names of parameters that do not affect the loss."""
    gathers: tuple[tuple[int, int], ...] = ()
    indexed: int = 0
    has_scalars: bool = False
    has_float_inputs: bool = False
    chooses: bool = False
    """True if it selects the largest of computed values, as a router picks experts. Rounding may decide these."""
    repeats: bool = False
    """True if a block, or the whole module, runs more than once in a forward pass."""
    couples_rows: bool = False
    has_batch_norms: bool = False

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("transformers.modeling_utils",) if self.target.startswith(HUGGING_FACE) else ()

    @property
    def tied_embeddings(self) -> bool:
        return self.shares_weights

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
        return 1

    @property
    def widest(self) -> int:
        return max(self.block_parameters, 1)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        asked = {
            f"tp {tp}: a model of your own is not split yet": tp > 1,
            f"pp {num_stages}: a model of your own is not cut into stages yet": num_stages > 1,
            f"cp {cp}: the rows of a model of your own have no sequence": cp > 1,
        }
        return [problem for problem, there in asked.items() if there]

    def refusals(self, case: Case) -> list[str]:
        asked = {
            f"precision {case.precision} (rounding would decide what the model picks by topk or argmax, as a router "
            "picks experts)": self.chooses and case.precision.is_mixed,
            f"batch norms in {case.precision} (PyTorch's takes no weights in {case.precision.compute} beside "
            "statistics in float32)": self.has_batch_norms and case.precision.is_mixed,
            "recomputation (which of a model of your own is not yet asked for)": case.layout.recompute
            is not Recompute.NONE,
            "tuning (which of a model of your own is not yet asked for)": bool(case.tuning.knobs),
        }
        return [reason for reason, refused in asked.items() if refused]
