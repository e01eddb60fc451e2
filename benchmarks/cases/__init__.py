"""The benchmarks. A public function here that takes an `Options` dataclass is a case; it is found by its place."""
