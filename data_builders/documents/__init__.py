"""Documents of one's own, and the passages they are cut into."""
