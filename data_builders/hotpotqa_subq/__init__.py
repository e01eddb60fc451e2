"""HotpotQA-SUBQ: planning and answering records from questions and a teacher (RAS, Algorithm 1)."""
