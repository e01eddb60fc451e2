"""Data sets on disk: shards, cards, statistics and their inspection."""
