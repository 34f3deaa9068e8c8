"""The pytest plugin: options, the session's cases and runner, progress, and the summary in the terminal.

May import: models, spec, reference, adapter, judge, records, inference, passes, launch, run, conformance, report, regression, cli.
"""  # noqa: E501
