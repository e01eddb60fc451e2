"""What the command line prints for an error."""

import pytest


@pytest.fixture
def error_of(capsys):
    """`error_of()`: the one line of an error."""

    def read():
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return read
