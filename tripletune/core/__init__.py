"""What every program stands on: options, files, tables, stored rows, and the types of data and of model calls."""
