"""The interface that every framework is put behind: contract, capabilities, registry, and `single`.

May import: spec, reference, theory.
"""
