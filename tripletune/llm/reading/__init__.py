"""One reading of replies for all loops: what a model meant, behind the form in which chat models write it.

A prompt asks for one line, a list or a marker. Strong models wrap it in bold type, code fences, bullets, numbers,
labels, quotation marks, and sentences before or after. `lines` takes these off, in one way for all roles; the readers
of plans, rows, verdicts, questions, answers and labels only look for what their role asks for. What is ambiguous is
refused with an `UnusableReply`, never guessed.

`tests/llm/test_reading.py` has the table of forms, one row per form and role.
"""
