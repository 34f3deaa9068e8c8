"""The product: one file a question (does it train correctly, hold what it should, send what it should, how fast, does
it keep every clause), one test a case. Tests are a line each: the plugin's fixtures bring the record, and its verdict
decides."""
