"""Graph builders whose files `tripletune data adapt --from NAME` reads, one file each.

To add one, put a file into this folder that defines `read(files, counts) -> ReadGraph`; the file's name is the name of
the builder. The module imports libraries that are no dependency of ours inside functions (`optional_library`).
"""
