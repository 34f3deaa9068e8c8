"""Data and objective, which are the same for every framework.

A batch is a function of seed and step. Any rank can therefore make its part of it without the whole, and no layout can
see other data than another. Frameworks differ in what they do with the same batches and initial values. Runs are
comparable because these are the same for all. A user's own model is loaded, and tried out, here.

May import: models, spec.
"""
