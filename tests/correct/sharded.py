"""ZeRO's stage 1 by hand: one flat tensor of all parameters, of which every rank updates its share."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.capabilities import Capabilities
from meshmark.adapter.data_parallel import DataParallelEngine, initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.adapters.ddp import DDP
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
