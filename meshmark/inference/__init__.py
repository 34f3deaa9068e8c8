"""Judge engines that generate text: log probabilities, tokens, the KV cache, clauses and speed.

An `InferenceAdapter` builds an `Engine` from a model's folder. The engine runs in a process of its own, in which
`serving` drives it: requests arrive, steps are timed, and blocks of the cache are counted. `judge` holds what came back
against the same model in float64. `run` serves the requests of a case, also under other conditions, and records it.
`speed` times engines in turn.
docs/inference.md says what is judged.

May import: spec, adapter, reference, measure, records, launch.
"""
