"""Export, verify and merge what a run has trained. Run outputs themselves live in runs/, which git ignores."""
