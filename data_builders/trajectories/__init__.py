"""Trajectories of a teacher in a loop, for distillation (`build.py`)."""
