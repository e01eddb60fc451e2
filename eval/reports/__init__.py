"""Reports of finished evaluations: Markdown tables, plots and one JSON file, all from the files that runs leave."""
