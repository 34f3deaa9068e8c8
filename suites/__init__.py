"""The suites: one file per question, one test per case.

The questions are: does it train correctly, does it hold and send what it should, how fast is it, does it keep every
clause. Each test is one line: the plugin's fixtures make the record, and its verdict decides.
"""
