"""The chains from public files to a paper's table: shell scripts, command by command (`docs/guide/tables.md`)."""
