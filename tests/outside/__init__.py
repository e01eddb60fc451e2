"""Run the documents' commands and every program from a wheel, in an empty folder: `python -m tests.outside`.

`inputs.py` writes the small files that the pages name, `commands.py` makes the pages' commands small and says which
ones are left out, and `environment.py` installs the wheel. The quick commands of README are a test, too
(`tests/test_package.py`).
"""
