"""Kinds of rows: one module each, with an object `KIND` (`data_builders.datasets.rows.RowKind`)."""
