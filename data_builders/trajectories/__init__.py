"""A teacher's trajectories in a loop."""
