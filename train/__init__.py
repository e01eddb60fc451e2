"""From records to optimiser steps: configuration, collation, the one training engine, and evaluation while training."""
