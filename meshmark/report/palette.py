"""Colours of every plot: Okabe and Ito's palette, which colour-blind readers can tell apart."""

CATEGORIES = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer_states": "#009E73",
    "activations": "#E69F00",
    "communication": "#CC79A7",
    "other": "#999999",
}
"""One colour per category of memory, in the order of the stack."""
ADAPTERS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
"""Colours of adapters. There are more adapters than colours, so each also has a marker of its own."""
