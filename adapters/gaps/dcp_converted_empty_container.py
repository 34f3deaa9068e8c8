# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "`dcp_to_torch_save` drops what is empty"
# framework = "torch"
# symptom = """
# A dictionary that is empty when it is saved, such as the state of plain SGD, is not in the converted file, and the
# optimizer cannot load it."""
# cause = """
# `flatten_state_dict` (torch/distributed/checkpoint/_nested_dict.py) visits the leaves of dictionaries and lists,
# and an empty one has none; `dcp_to_torch_save` builds the file from these leaves."""
# processes = 1
# ///
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
    file = Path(folder, "whole.pt")
    dcp_to_torch_save(folder, file)
    state = torch.load(file)["optimizer"]
try:
    optimizer.load_state_dict(state)
except KeyError as error:
    sys.exit(f"expected: the state that was saved is loaded; got: KeyError: {error}")
