"""Fine-tune and distil the models behind triple-based, iterative RAG.

The sub-packages are the folders at the root of the repository, under one import name: `tripletune.models` is `models/`.
"""
