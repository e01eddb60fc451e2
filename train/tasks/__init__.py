"""Things to train, one file each: a module is found by its name, and its `TASK` is a `train.task.TrainingTask`."""
