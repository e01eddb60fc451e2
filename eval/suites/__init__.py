"""What can be evaluated: questions, records, extraction, decisions."""
